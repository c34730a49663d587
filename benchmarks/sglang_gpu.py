"""Native SGLang and atom on a GPU, offline, in turns: decoding, prefill, start and cache, beside the memory's floor.

    python -m benchmarks.sglang_gpu --model qwen3-8b --json qwen3-8b.json    # also writes qwen3-8b.png

Run it with the Python that has SGLang and atom-plugin installed. Both get the same flags; native's attention is
SGLang's choice unless `--native-attention-backend` names another. Where SGLang's kernels come without FlashAttention 3,
its default on Hopper, `--flash-attention-3 _vllm_fa3_C.abi3.so` gives both that of a vLLM for the same torch. See
`benchmarks._gpu`.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

from benchmarks import _flash_attention_3
from benchmarks._gpu import Started, compare, load_format
from benchmarks._runs import Generated


def start(arguments: argparse.Namespace) -> Started:
    """One engine, in this process."""
    os.environ.pop("SGLANG_EXTERNAL_MODEL_PACKAGE", None)
    own = {}
    if arguments.serve == "atom":
        os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "atom_plugin.sglang.models"
        own = {"attention_backend": "atom"}
    elif arguments.native_attention_backend:
        own = {"attention_backend": arguments.native_attention_backend}
    # The engine's processes have it at their start; in this one nothing calls it.
    os.environ |= _flash_attention_3.variables(arguments.flash_attention_3)
    import sglang

    options = {
        "model_path": arguments.model,
        "load_format": load_format(arguments),
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "context_length": arguments.max_model_len,
        "max_running_requests": arguments.max_num_seqs,
        "mem_fraction_static": arguments.gpu_memory_utilization,
        "tp_size": arguments.tensor_parallel_size,
        "disable_radix_cache": True,
        # It tells when each request's prompt and answer ended.
        "enable_metrics": True,
        # At this level it names its kernels.
        "log_level": "info",
        **own,
        **arguments.extra_engine_json,
    }
    engine = sglang.Engine(**options)

    def generate(prompts: list[list[int]], tokens: int, temperature: float = arguments.temperature) -> Generated:
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=sampling)
        times = [it["meta_info"] for it in found]
        decoding = max(it["request_finished_ts"] for it in times) - max(it["prefill_finished_time"] for it in times)
        return Generated([it["output_ids"] for it in found], decoding)

    # SGLang takes a request's seed only with --enable-deterministic-inference, which other kernels serve.
    greedy = partial(generate, temperature=0.0)
    return Started(generate, greedy, engine.get_server_info()["max_total_num_tokens"], stop=engine.shutdown)


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--native-attention-backend", help="for native alone, as --attention-backend of SGLang")
    _flash_attention_3.add_option(parser)


if __name__ == "__main__":
    compare("sglang_gpu", __doc__, start, _own_options)
