"""What a server ran with, from its own log: the kernels of attention, GEMM and MoE by name, and settings.

The patterns match the log lines of vLLM 0.30 to 0.33 and of SGLang 0.5.23. A kernel may have no line at all: vLLM names
none for GEMMs of unquantised weights, which torch runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

#: Distributions whose version, or absence, decides which kernels run.
DISTRIBUTIONS = (
    "atom-plugin",
    "vllm",
    "sglang",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "deep-gemm",
    "sgl-deep-gemm",
    "sgl-kernel",
    "sglang-kernel",
    "amd-aiter",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "humming-kernels",
    "tilelang",
    "nvidia-cublas",
)


#: Values that name no kernel.
UNDECIDED = ("auto", "None", "none")
SETTINGS = "settings"


@dataclass(frozen=True)
class LogLines:
    """The lines and settings of a framework's log that name kernels."""

    prefix: re.Pattern[str]
    """What the logger puts before the text."""
    kinds: Mapping[str, re.Pattern[str]]
    """How the text of a line of each kind begins, in the order in which they are tried."""
    settings: Mapping[str, str]
    """The kind of each setting that a log prints as `name=value` or `'name': value`."""

    def read(self, log: str) -> dict[str, list[str]]:
        """Each line and each setting once, in their order, by kind."""
        names = "|".join(map(re.escape, self.settings))
        setting = re.compile(rf"\b(?P<name>{names})(?:=|': )(?P<value>'[^']*'|<[^>]*>|[-\w.]+)")
        found: dict[str, dict[str, None]] = {kind: {} for kind in (*self.kinds, SETTINGS)}
        for line in log.splitlines():
            text = self.prefix.sub("", line).strip()
            for kind, pattern in self.kinds.items():
                if pattern.match(text):
                    found[kind][text] = None
                    break
            else:
                for match in setting.finditer(text):
                    value, kind = match["value"].strip("'"), self.settings[match["name"]]
                    if kind == SETTINGS or value not in UNDECIDED:
                        found[kind][f"{match['name']}={value}"] = None
        return {kind: list(lines) for kind, lines in found.items()}


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


VLLM_LINES = LogLines(
    prefix=re.compile(r"^(?:\([^)]*\) )*(?:INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[[^]]*\] "),
    kinds={
        "MoE": _any_of(
            r"Using .*(?:MoE|MOE|\bmoe\b)", r"No \S+ MoE backend supports", r"VLLM_ROCM_USE_AITER_MOE=1 was"
        ),
        "GEMM": _any_of(
            r"Selected \S+ for ",
            r"Using \S+ for (?:\S+ GEMM|mixed-precision linear|\S+LinearMethod|CompressedTensors|eligible)",
            r"Using FlashInfer \S+ for eligible unquantized",
            r"Using (?:configuration from|default) .*Block FP8 kernel",
            r"Using aiter .* GEMM",
            r"--linear-backend=|Applied linear backend override",
            r"DeepGEMM (?!warmup:)|Auto-disabled DeepGemm",  # without the lines of its progress bar
        ),
        "attention": _any_of(
            r"Using \S+ attention backend",
            r"Using \S+ (?:MLA prefill )?backend(?:\.| out of| \(selected)",
            r"Using FlashAttention version",
            r"Using (?:TRTLLM|aiter|AITER|token-major|direct symmetric-memory|b12x|the trtllm-gen)\b",
            r"Using \S+ KV cache format for \S+ backend",
            r"Using \S+ GDN prefill kernel",
            r"Using FlashInfer (?:KDA|fused|packed|Mamba)",
            r"FlashInfer resolved query dtypes",
        ),
        "sampling": _any_of(r"Using FlashInfer for top-p", r"FlashInfer top-p/top-k sampling", r"Using aiter sampler"),
    },
    settings={
        "enable_prefix_caching": SETTINGS,
        "enable_chunked_prefill": SETTINGS,
        "max_num_batched_tokens": SETTINGS,
        "cudagraph_mode": SETTINGS,
        "quantization": SETTINGS,
        "kv_cache_dtype": SETTINGS,
        "moe_backend": "MoE",
        "linear_backend": "GEMM",
    },
)
SGLANG_LINES = LogLines(
    prefix=re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^]]*\] "),
    kinds={
        "MoE": _any_of(
            r"Use \S+ as MoE runner",
            r"Us(?:e|ing) .*(?:MoE|fused moe)",
            r"Config file not found at .*MoE",
            r"Detected .*\bMOE kernel",
            r"(?:Up|Down) MoE TMA",
            r"\S+ on SM\S+: moe_runner_backend=",
        ),
        "GEMM": _any_of(
            r"Use \S+ as \S+ GEMM",
            r"Use \S+ for .* GEMMs",
            r"Block-fp8 layer stays",
            r"--fp[48]-gemm-backend",
            r"(?:Entering|Try) DeepGEMM",
            r"Using (?:configuration from|default) .*Block FP8 kernel",
        ),
        "attention": _any_of(
            r"Attention backend not specified",
            r"Us(?:e|ing) .*attention backend",
            r"Overriding --attention-backend",
            r"FlashAttention[34] ",
            r"FlashAttention 3 schedules",
            r"Linear attention kernel backend",
            r"(?:GDN|KDA) kernel dispatcher",
            r"Using (?:FlashInfer|CuTe DSL|fused) (?:GDN|KDA)",
            r"Set DSA backends",
        ),
        "sampling": _any_of(r"Sampling backend is set"),
    },
    settings={
        "disable_radix_cache": SETTINGS,
        "chunked_prefill_size": SETTINGS,
        "disable_cuda_graph": SETTINGS,
        "quantization": SETTINGS,
        "kv_cache_dtype": SETTINGS,
        "attention_backend": "attention",
        "prefill_attention_backend": "attention",
        "decode_attention_backend": "attention",
        "fp8_gemm_runner_backend": "GEMM",
        "fp4_gemm_runner_backend": "GEMM",
        "bf16_gemm_backend": "GEMM",
        "moe_runner_backend": "MoE",
        "sampling_backend": "sampling",
    },
)
#: By framework.


def lines_of(module: str) -> LogLines:
    """Those of the framework that a benchmark's name begins with, as `sglang_gpu`."""
    return SGLANG_LINES if module.startswith("sglang_") else VLLM_LINES


def versions() -> dict[str, str]:
    """Of the distributions that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """The GPUs, asked for in a process of its own that leaves nothing in their memory."""
    code = (
        "import json, torch; names = [torch.cuda.get_device_name(it) for it in range(torch.cuda.device_count())]; "
        "print(json.dumps({'gpus': names, 'cuda': torch.version.cuda, 'hip': torch.version.hip}))"
    )
    finished = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"the GPUs cannot be listed: {finished.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found
