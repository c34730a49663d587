"""Time one decoding step with several source trees in turns, each in its own process, on one GPU at its power limit.

    git worktree add ../before HEAD~1
    python -m benchmarks.steps_of_trees deepseek-v2-lite --layers 9 --shape 256x640 --shape 8x640 ../before/src src

A shape is the number of requests and the cached tokens of each. Each process has the model of `atom-plugin bench step`
and several captured graphs per shape with different buffers: graphs of one step differ by up to 0.3%. A time is the
mean over `--seconds` of replays without pauses, while the other processes wait. Giving the same tree twice shows the
method's own scatter. All processes have their models in the GPU's memory at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atom_core.models.read_config import read_model_config
from benchmarks import ROOT
from benchmarks._runs import Shape
from benchmarks._served import Message, Served, answer


def source_tree(text: str) -> Path:
    """A folder that Python finds this package in."""
    tree = Path(text)
    if not (tree / "atom_core" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{tree}: there is no atom_core in it; a folder such as src is needed")
    return tree


def turns(count: int, graphs: int, trees: int) -> list[tuple[int, int]]:
    """(graph, tree) in the order in which they are timed: who goes first alternates."""
    order = []
    for turn in range(count):
        for graph in range(graphs):
            each = range(trees) if (turn + graph) % 2 == 0 else reversed(range(trees))
            order += [(graph, tree) for tree in each]
    return order


def lines(shape: Shape, trees: Sequence[Path], milliseconds: Mapping[int, Sequence[float]]) -> list[str]:
    """What was found of one shape: of each tree the mean, the least and the most, and its change from the first."""
    first = statistics.mean(milliseconds[0])
    return [
        f"{shape!s:>10}  {statistics.mean(found):8.4f} ms ({min(found):.4f} to {max(found):.4f})  "
        f"{statistics.mean(found) / first - 1:+7.2%}  {trees[tree]}"
        for tree, found in milliseconds.items()
    ]


def serve(arguments: argparse.Namespace) -> None:
    """Build the model with the source that this process has, capture its steps, and time what is asked for.

    What is called of it is what older trees have too, as far back as `bench step --seconds`.
    """
    import torch

    from atom_core.quant import read_quantization
    from atom_core.standalone import build_runtime, random_model
    from atom_plugin.bench.device import capture, require_gpu, warm
    from atom_plugin.bench.models import read_config
    from atom_plugin.bench.routing import send_to_given_experts
    from atom_plugin.bench.step import MAX_MODEL_LEN, decoding
    from atom_plugin.common.kernels import forced_kernels
    from atom_plugin.common.settings import load_settings

    settings = load_settings()
    hf = read_config(arguments.model, arguments.layers)
    config = read_model_config(hf)
    quant = read_quantization(hf, arguments.quantization)
    with torch.inference_mode():
        # Older trees have contexts of up to MAX_MODEL_LEN alone.
        longest = max(shape.input_len for shape in arguments.shapes) + 1
        runtime = build_runtime(
            require_gpu(),
            torch.bfloat16,
            max(MAX_MODEL_LEN, longest),
            forced_kernels(settings),
            cache_dtype=torch.bfloat16,
            quant=quant,
            with_aiter=settings.aiter,
        )
        torch.manual_seed(0)
        model = random_model(config, runtime)
        replays: dict[str, list[Callable[[], object]]] = {}
        kept: list[object] = []
        # Each step's experts are those that `bench step` gives it, in front of those given for as many tokens or more.
        for shape in sorted(arguments.shapes, key=lambda it: it.batch, reverse=True):
            send_to_given_experts(model, config, shape.batch)
            replays[str(shape)] = []
            for index in range(arguments.graphs):
                run = decoding(model, config, runtime, shape.batch, shape.input_len)
                kept += [run, torch.empty(2**18 << index, device=runtime.device)]
                replays[str(shape)].append(capture(run).replay)

        def respond(asked: Message) -> Message:
            return {"seconds": warm(replays[asked["shape"]][asked["graph"]], arguments.seconds)}

        answer(arguments.replies, {}, respond)


def compare(arguments: argparse.Namespace) -> None:
    """Start the processes one after the other, then time all shapes in turns."""
    workers = []
    for tree in arguments.trees:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree.resolve()), str(ROOT)])}
        command = [sys.executable, "-m", "benchmarks.steps_of_trees", *sys.argv[1:]]
        workers.append(Served(str(tree), command, environment))
        workers[-1].next()
    for shape in arguments.shapes:
        found: dict[int, list[float]] = {tree: [] for tree in range(len(workers))}
        for graph, tree in turns(arguments.turns, arguments.graphs, len(workers)):
            seconds = workers[tree].ask({"shape": str(shape), "graph": graph})["seconds"]
            found[tree].append(seconds * 1e3)
        sys.stdout.write("\n".join(lines(shape, arguments.trees, found)) + "\n")
        sys.stdout.flush()
    for worker in workers:
        worker.end()
        worker.process.wait()


def main(given: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps_of_trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="as `atom-plugin bench step` takes it")
    parser.add_argument("trees", type=source_tree, nargs="+", help="folders with atom_core and atom_plugin in them")
    parser.add_argument(
        "--shape", dest="shapes", type=Shape.read, action="append", required=True, help="more than one, as 8x640"
    )
    parser.add_argument("--layers", type=int, help="keep so many layers")
    parser.add_argument("--quantization", help="fp8: quantise the layers, as an engine would")
    parser.add_argument("--graphs", type=int, default=3, help="of each shape (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="of all graphs (default 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of replays that a time is the mean of (default 1)")
    parser.add_argument("--replies", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    compare(arguments) if arguments.replies is None else serve(arguments)


if __name__ == "__main__":
    main()
