"""An engine whose modules and weights are looked at by name: what runs in a process of `test_names.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.integration.scripts import run_given

PROMPT = "12 + 5 ="


def factory(config: dict[str, Any]) -> Callable[..., None]:
    """A hook that notes what it saw first: the class of its module, and the shapes of what that gave."""
    file = Path(config["file"])

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not file.exists():
            file.write_text(json.dumps([type(module).__name__, _described(output)]))

    return hook


def _described(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return list(output.shape)
    if isinstance(output, (tuple, list)):
        return [_described(it) for it in output]
    return None if output is None else type(output).__name__


def run_case(
    model: str,
    folder: str,
    options: dict[str, Any],
    hooked: Sequence[str] = (),
    named: Sequence[str] = (),
    dumps: bool = False,
    checks: bool = False,
    wipes: bool = False,
    save: bool = False,
) -> dict[str, Any]:
    """An engine, and what its calls lead to.

    Args:
        model: the checkpoint's folder.
        folder: where files go: "fired", "dumps" and "shards".
        options: further ones of the engine.
        hooked: modules to put hooks on.
        named: tensors to ask for by name.
        dumps: have tensors dumped.
        checks: have checksums made.
        wipes: have parameters wiped out, at last.
        save: have the weights saved; `shards` is then a folder to start from.
    """
    import sglang
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    fired, shards = Path(folder, "fired"), Path(folder, "shards")
    fired.mkdir(parents=True)
    hooks = [
        {
            "name": name,
            "target_modules": [name],
            "hook_factory": "tests.integration.sglang.looked_at:factory",
            "config": {"file": str(fired / name)},
        }
        for name in hooked
    ]
    pool = {"max_total_tokens": 16384, "mem_fraction_static": 0.6, "disable_cuda_graph": True}
    watched: dict[str, Any] = {"forward_hooks": hooks} if hooks else {}
    if dumps:
        watched["debug_tensor_dump_output_folder"] = str(Path(folder, "dumps"))
    engine = sglang.Engine(model_path=model, **{"device": "cpu", "log_level": "info", **pool, **watched, **options})
    found: dict[str, Any] = {}

    def check(action: str) -> tuple[Any, ...]:
        asked = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action))
        return tuple(engine.loop.run_until_complete(asked))

    def answer() -> Any:
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        it = engine.generate(PROMPT, sampling, return_logprob=True, logprob_start_len=0)
        engine.flush_cache()
        return [it["output_ids"], it["meta_info"]["input_token_logprobs"], it["meta_info"]["output_token_logprobs"]]

    try:
        found["answer"] = answer()
        found["by name"] = {name: engine.get_weights_by_name(name, 3) for name in named}
        if checks:
            success, _, ranks, _ = check("checksum")
            assert success
            found["checksums"] = [it["checksums"] for it in ranks]
            found["compared"] = [check(action)[:2] for action in ("snapshot", "compare")]
        if save:
            shutil.copytree(model, shards, ignore=shutil.ignore_patterns("*.safetensors*"))
            engine.save_sharded_model(path=str(shards), pattern=None, max_size=None)
        found["answer then"] = answer()
        if wipes:
            assert check("reset_tensors")[0]
            found["wiped"] = [it["checksums"] for it in check("checksum")[2]]
            found["wiped answer"] = answer()
    finally:
        engine.shutdown()
    found["fired"] = {file.name: json.loads(file.read_text()) for file in fired.iterdir()}
    return found


if __name__ == "__main__":
    run_given(run_case)
