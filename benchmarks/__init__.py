"""Measurements beside the framework's own model, on one machine in one run: `nox -s bench -- NAME`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKPOINTS = ROOT / "tests" / "checkpoints"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Models with linear attention, which native vLLM and SGLang run on a CPU only in part.
HYBRIDS = ("qwen3_next", "qwen3_5")
#: What is compared, and the `--model-impl` of each.
IMPLEMENTATIONS = {"native": "auto", "atom": "atom"}
#: Stands in for torchvision, which inspecting vLLM's own class of Qwen3.5 imports.
VLLM_STAND_INS = ROOT / "tests" / "integration" / "vllm" / "stand_ins"
#: Holds the one function of vLLM's that native SGLang's rope imports on a CPU.
SGLANG_STAND_INS = ROOT / "tests" / "integration" / "sglang" / "stand_ins"
