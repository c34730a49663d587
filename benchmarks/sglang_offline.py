"""Native SGLang and atom side by side, offline, on one machine in one run.

    python -m benchmarks.sglang_offline                                   # a 190M random Qwen3, as on a CPU
    python -m benchmarks.sglang_offline --model DIR --batches 1 8 64      # any local checkpoint

As `benchmarks.vllm_offline`: engines take turns run by run, and only ratios within one run mean anything. Native runs
on torch's attention, which is SGLang's on a CPU without its CPU engine; there its rope wants one op of vLLM, and gets
the one that the tests have, in torch.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks import SGLANG_STAND_INS
from benchmarks._turns import Generate, answer_runs, compare


def serve(arguments: argparse.Namespace) -> None:
    """One engine, in this process."""
    import sglang

    ours = arguments.serve == "atom"
    if ours:
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "atom_plugin.sglang.models"
    else:
        # The engine's processes get this one's path.
        sys.path.insert(0, str(SGLANG_STAND_INS))

    def start() -> Generate:
        engine = sglang.Engine(
            model_path=arguments.model,
            load_format=arguments.load_format,
            skip_tokenizer_init=True,
            device="cpu",
            dtype=arguments.dtype,
            context_length=arguments.max_model_len,
            max_running_requests=max(arguments.batches),
            max_total_tokens=arguments.max_model_len * max(arguments.batches),
            disable_radix_cache=True,
            sleep_on_idle=True,  # or the engine whose turn it is not would keep a core busy
            log_level="warning",
            **({} if ours else {"attention_backend": "torch_native"}),
        )

        def generate(prompts: list[list[int]], tokens: int) -> object:
            sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
            return engine.generate(input_ids=prompts, sampling_params=sampling)

        return generate

    answer_runs(arguments, start)


if __name__ == "__main__":
    compare(__doc__, serve)
