"""Native vLLM and atom on a GPU, offline, in turns: decoding, prefill, start and cache, beside the memory's floor.

    python -m benchmarks.vllm_gpu --model qwen3-8b --json qwen3-8b.json      # also writes qwen3-8b.png
    python -m benchmarks.vllm_gpu --model qwen3-8b --quantization fp8 --kv-cache-dtype fp8 --rounds 5
    python -m benchmarks.vllm_gpu --together --gpu-memory-utilization 0.3 --cache-gib 24 --repetitions 7

Run it with the Python that has vLLM and atom-plugin installed. Both get the same flags. "tpot" is the time of each
token after the first, "ttft" the time until all requests have theirs; see `benchmarks._gpu`.
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks import IMPLEMENTATIONS
from benchmarks._gpu import Started, compare, load_format
from benchmarks._runs import Generated


def start(arguments: argparse.Namespace) -> Started:
    """One engine, in this process."""
    from vllm import LLM, SamplingParams

    options = {
        "model": arguments.model,
        "model_impl": IMPLEMENTATIONS[arguments.serve],
        "load_format": load_format(arguments),
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "max_model_len": arguments.max_model_len,
        "max_num_seqs": arguments.max_num_seqs,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "enable_prefix_caching": False,
        # What a server does by default, and where a request's own times come from.
        "disable_log_stats": False,
        "kv_cache_memory_bytes": None if arguments.cache_gib is None else int(arguments.cache_gib * 2**30),
        **arguments.extra_engine_json,
    }
    llm = LLM(**options)

    def generate(prompts: list[list[int]], tokens: int, seeded: bool = False) -> Generated:
        # No `min_tokens`: for those native copies all logits to float32, and the end of the text is ignored anyway.
        sampling = [
            SamplingParams(
                temperature=arguments.temperature,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                seed=index if seeded else None,
            )
            for index in range(len(prompts))
        ]
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        times = [it.metrics for it in found]
        decoding = max(it.last_token_ts for it in times) - max(it.first_token_ts for it in times)
        return Generated([list(it.outputs[0].token_ids) for it in found], decoding)

    cache = llm.llm_engine.vllm_config.cache_config
    capacity = cache.num_gpu_blocks * cache.block_size
    return Started(generate, partial(generate, seeded=True), capacity, stop=llm.llm_engine.engine_core.shutdown)


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-gib",
        type=float,
        help="of each engine's cache; without, it is what an engine finds free, which --together moves",
    )


if __name__ == "__main__":
    compare("vllm_gpu", __doc__, start, _own_options)
