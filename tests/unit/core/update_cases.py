"""Checkpoints that weights are updated from: kinds of models and dtypes, in as many versions as there are seeds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atom_core.standalone import Runner
from tests.unit.core.fp8_checkpoints import BLOCK_FORMATS, FORMATS, make_fp8
from tests.unit.core.hugging_face import FAMILIES, Family, make_config, make_model
from tests.unit.core.mxfp4_checkpoints import make_gpt_oss, make_quark

LLAMA, QWEN3 = FAMILIES[0], FAMILIES[3]
MIXTURE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
)
LATENT = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    {
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
)
GPT_OSS = Family("GptOssForCausalLM", "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2})


@dataclass(frozen=True)
class Case:
    """One kind of model.

    Args:
        name: of the case.
        family: of the model.
        quantize: from a checkpoint in float32 to one as it is served; None: as it is.
        options: of the runner.
        settings: of the configuration.
    """

    name: str
    family: Family
    quantize: Callable[[Path, Path], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, directory: Path, seed: int) -> Path:
        """Write the version ``seed``."""
        if self.quantize is None:
            make_model(directory, make_config(self.family, **self.settings), seed)
            return directory
        source = directory.with_name(f"{directory.name}-source")
        make_model(source, make_config(self.family, **self.settings), seed)
        self.quantize(source, directory)
        shutil.rmtree(source)
        return directory

    def runner(self, directory: Path, **options: Any) -> Runner:
        """A fresh start from it."""
        return Runner(directory, **{"dtype": torch.bfloat16, **self.options, **options})


def as_fp8(index: int, formats: tuple[Any, ...] = FORMATS) -> Callable[[Path, Path], None]:
    """By a format of FP8; scales of inputs depend on the module, so that the largest of a layer's is not the first."""
    return lambda source, target: make_fp8(
        source, target, formats[index], input_scale=lambda module: 0.03 + 0.01 * ("k_proj" in module)
    )


#: Where parts of one weight begin with a block.
WHOLE_BLOCKS = {"head_dim": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
WHOLE_LATENT_BLOCKS = {
    "head_dim": 32,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
MADE_AT_LOAD = {"quantization": "fp8"}
CASES = (
    Case("dense, bf16", QWEN3),
    Case("dense, tied, fp32", LLAMA, options={"dtype": torch.float32}),
    Case("mixture, bf16", MIXTURE),
    Case("mixture, fp32", MIXTURE, options={"dtype": torch.float32}),
    Case("mla, bf16", LATENT),
    Case("fused experts, bf16", GPT_OSS),
    Case("dense, fp8 static", QWEN3, as_fp8(1)),
    Case("dense, fp8 by row", QWEN3, as_fp8(5)),
    Case("mixture, fp8 static", MIXTURE, as_fp8(4)),
    Case("mixture, fp8 in blocks", MIXTURE, as_fp8(0, BLOCK_FORMATS), settings=WHOLE_BLOCKS),
    Case("mla, fp8 by row", LATENT, as_fp8(2)),
    Case("mla, fp8 in blocks", LATENT, as_fp8(0, BLOCK_FORMATS), settings=WHOLE_BLOCKS | WHOLE_LATENT_BLOCKS),
    Case("dense, fp8 made at load", QWEN3, options=MADE_AT_LOAD),
    Case("mixture, fp8 made at load", MIXTURE, options=MADE_AT_LOAD),
    Case("mla, fp8 made at load", LATENT, options=MADE_AT_LOAD),
    Case("dense, mxfp4", QWEN3, make_quark, settings={"head_dim": 32}),
    Case("fused experts, mxfp4", GPT_OSS, make_gpt_oss),
)
