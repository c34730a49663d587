"""How far native SGLang and atom are from the truth: Hugging Face's model in float32.

    nox -s bench -- sglang_parity                     # the trained test checkpoints in float32

The real engine answers every held-out prompt greedily, and tells the log-probabilities of each prompt's and each
answer's tokens and of the most likely ones there; for some prompts, those of the whole vocabulary. Distances are
absolute differences divided by the spread of the true logits. An answer is greedy where each of its tokens is the
truth's most likely one after all before it. On a CPU native SGLang's rope wants one op of vLLM, and gets the one that
the tests have, in torch.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import CHECKPOINTS, FAMILIES, HYBRIDS, IMPLEMENTATIONS, SGLANG_STAND_INS
from tests.integration.questions import read_rows
from tests.integration.sglang.hugging_face import HuggingFace
from tests.integration.sglang.offline import Answer, Ask, Engine, run

NUM_TOP = 5


def engine_answers(
    checkpoint: Path, impl: str, dtype: str, prompts: Sequence[str], num_whole: int
) -> tuple[list[Answer], list[Answer]]:
    """One engine's answers to all prompts, and those to the first `num_whole` with the whole vocabulary's scores."""
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    asks = [
        Ask(some, options={"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": num_top})
        for some, num_top in ((prompts, NUM_TOP), (prompts[:num_whole], vocabulary))
    ]
    path = os.pathsep.join([str(SGLANG_STAND_INS), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path} if impl == "native" else {}
    options: dict[str, Any] = {"dtype": dtype, "mem_fraction_static": 0.2}
    if checkpoint.name in HYBRIDS:
        # Else what convolutions keep is bfloat16; and SGLang's default keeps states for prefixes on accelerators only.
        environ["SGLANG_MAMBA_CONV_DTYPE"] = dtype
        options["disable_overlap_schedule"] = True
    (ran,) = run([Engine(str(checkpoint), impl == "atom", asks, options)], environ=environ, deadline=1800)
    of_all, of_some = ran.answers
    return of_all, of_some


def distance(answer: Answer, reference: HuggingFace, prompt: str) -> tuple[float, bool]:
    """The largest distance of a log-probability, and whether the answer is the truth's greedy one."""
    tokens = reference.tokenizer(prompt).input_ids
    scores = reference.scores([*tokens, *answer.tokens])
    # Nothing comes before the first token.
    own = [*answer.meta["input_token_logprobs"], *answer.meta["output_token_logprobs"]][1:]
    best = [*answer.meta["input_top_logprobs"], *answer.meta["output_top_logprobs"]][1:]
    given = [[of_token, *of_best] for of_token, of_best in zip(own, best, strict=True)]
    found = torch.tensor([[logprob for logprob, _, _ in row] for row in given])
    true = scores.logprobs[:-1].gather(1, torch.tensor([[token for _, token, _ in row] for row in given]))
    greedy = scores.logprobs[len(tokens) - 1 : -1].argmax(-1).tolist()
    return (found - true).abs().max().item() / scores.spread, greedy == answer.tokens


def measure(checkpoint: Path, impl: str, dtype: str, num_prompts: int, num_whole: int) -> dict[str, Any]:
    """Distances and greedy answers of one engine."""
    prompts = [row.prompt for row in read_rows()][:num_prompts]
    reference = HuggingFace(str(checkpoint))
    of_tokens, of_vocabulary = (
        [distance(answer, reference, prompt) for answer, prompt in zip(answers, prompts, strict=False)]
        for answers in engine_answers(checkpoint, impl, dtype, prompts, num_whole)
    )
    return {
        "tokens": max(largest for largest, _ in of_tokens),
        "vocabulary": max(largest for largest, _ in of_vocabulary),
        "greedy": sum(greedy for _, greedy in of_tokens),
        "prompts": len(prompts),
    }


def main() -> None:
    """One line a checkpoint, dtype and implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoints", type=Path, nargs="+", default=[CHECKPOINTS / name for name in (*FAMILIES, *HYBRIDS)]
    )
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--num-prompts", type=int, help="held-out prompts; left out: all")
    parser.add_argument("--num-whole", type=int, default=8, help="prompts compared over the whole vocabulary")
    parser.add_argument("--json", type=Path, help="write all figures there")
    arguments = parser.parse_args()
    table = []
    print(f"{'checkpoint':<12}{'dtype':<10}{'':<8}{'tokens, best':>14}{'vocabulary':>14}{'greedy':>12}")
    for checkpoint in arguments.checkpoints:
        for dtype in arguments.dtypes:
            for impl in arguments.implementations:
                try:
                    row = measure(checkpoint, impl, dtype, arguments.num_prompts, arguments.num_whole)
                except AssertionError as error:  # the engine failed, and this is the end of its log
                    if impl == "atom":
                        raise
                    said = [line for line in str(error).splitlines() if "Error: " in line]
                    print(f"{checkpoint.name:<12}{dtype:<10}{impl:<8} fails with {said[-1] if said else error}")
                    continue
                table.append({"checkpoint": checkpoint.name, "dtype": dtype, "implementation": impl, **row})
                print(
                    f"{checkpoint.name:<12}{dtype:<10}{impl:<8}{row['tokens']:>14.2e}{row['vocabulary']:>14.2e}"
                    f"{row['greedy']:>6} of {row['prompts']}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
