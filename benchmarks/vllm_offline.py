"""Native vLLM and atom side by side, offline, on one machine in one run.

    python -m benchmarks.vllm_offline                                   # a 190M random Qwen3, as on a CPU
    python -m benchmarks.vllm_offline --model DIR --batches 1 8 64      # any local checkpoint

Each engine has processes of its own; a round starts one of each kind, one after the other, then both live side by side
and take turns run by run, the idle one asleep: what else the machine does meets both alike. Only ratios within one run
mean anything. For each batch size: seconds to the first token (prefill), seconds a token after that (decode). For each
engine: seconds to start, and the largest resident memory of its processes.
"""

from __future__ import annotations

import argparse

from benchmarks import IMPLEMENTATIONS
from benchmarks._turns import Generate, answer_runs, compare


def serve(arguments: argparse.Namespace) -> None:
    """One engine, in this process."""
    from vllm import LLM, SamplingParams

    def start() -> Generate:
        llm = LLM(
            arguments.model,
            model_impl=IMPLEMENTATIONS[arguments.serve],
            load_format=arguments.load_format,
            skip_tokenizer_init=True,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=max(arguments.batches),
            enable_prefix_caching=False,
            enforce_eager=arguments.enforce_eager,
            disable_log_stats=True,
        )

        def generate(prompts: list[list[int]], tokens: int) -> object:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

        return generate

    answer_runs(arguments, start)


if __name__ == "__main__":
    compare(__doc__, serve)
