"""A model of the core with SGLang's model interface."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.model_loader.weight_utils import kv_cache_scales_loader
from sglang.srt.runtime_context import attention_backends, get_model, get_parallel, get_spec
from torch import nn

from atom_core.layers.embedding import LMHead
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.weights import cache_scales
from atom_plugin.common.load_formats import SHARDED_STATE
from atom_plugin.common.report import startup_table
from atom_plugin.common.settings import load_settings
from atom_plugin.common.shards import PATTERN, check_shards
from atom_plugin.common.versions import framework_line
from atom_plugin.sglang import ENTRY_POINT, is_registered, our_backends
from atom_plugin.sglang.attention import SglangRadixAttention, binder
from atom_plugin.sglang.body import Body
from atom_plugin.sglang.checkpoint_config import values_of
from atom_plugin.sglang.framework_attention import FrameworkAttention
from atom_plugin.sglang.padding import padded
from atom_plugin.sglang.routed_experts import expert_location, routed_experts
from atom_plugin.sglang.runtime import build_runtime
from atom_plugin.sglang.updates import AtomModel

logger = logging.getLogger("sglang.atom_plugin")


class HeadMethod:
    """The ``quant_method`` of the head, by which SGLang's logits processor calls the head itself.

    The head gathers its logits over ranks.
    """

    def apply(self, layer: LMHead, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``hidden [T, hidden]`` to ``[T, vocabulary]``."""
        if not len(hidden):  # no rank of this attention group has requests
            return hidden.new_empty(0, layer.vocab_size, dtype=layer.dtype)
        logits: torch.Tensor = layer(hidden)
        return logits

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: the core finalizes its weights itself."""


def check_entry_point() -> None:
    """Check that SGLang has run our entry point, which registers our attention and the refusals; else log a warning.

    Raises:
        ValueError: SGLANG_PLUGINS leaves it out.
    """
    given = envs.SGLANG_PLUGINS.get()
    named = [name.strip() for name in given.split(",") if name.strip()]
    if given and ENTRY_POINT not in named:
        raise ValueError(
            f"SGLANG_PLUGINS={given} leaves out {ENTRY_POINT!r}, while SGLANG_EXTERNAL_MODEL_PACKAGE asks "
            f"for our models: set SGLANG_PLUGINS={','.join([*named, ENTRY_POINT])}, or unset one of the two variables."
        )
    if not is_registered():
        logger.warning(
            "SGLang has not run the entry point %r of atom-plugin: the model runs on SGLang's attention, and settings "
            "that it does not support are not refused.",
            ENTRY_POINT,
        )


class AtomForCausalLM(AtomModel):
    """The base of the classes that SGLang finds. Their names are their architectures."""

    architecture: ClassVar[str] = ""
    """The architecture, if the class has another name."""

    def __init__(self, config: Any, quant_config: object = None, prefix: str = "") -> None:
        super().__init__()
        check_entry_point()
        settings = load_settings()
        self.config = config
        self.quant_config = quant_config
        architecture = self.architecture or type(self).__name__
        model_config = read_model_config(values_of(config, architecture))
        ours = set(attention_backends()) <= set(our_backends())
        attention = SglangRadixAttention if ours else FrameworkAttention
        self.runtime = build_runtime(
            config, quant_config, model_config.num_layers, binder(attention), settings, routed_experts()
        )
        model_config = padded(model_config, config, self.runtime)
        core: DecoderForCausalLM = load_model_class(architecture)(model_config, self.runtime, prefix)
        self.wrap(core)
        head: Any = core.lm_head
        if core.model.is_last:
            head.quant_method = HeadMethod()
        self.model, self.lm_head = Body(core.model), head
        self.set_up_weights()
        stage = self.runtime.pipeline.layers(model_config.num_layers)
        self.start_layer, self.end_layer = stage.start, stage.stop
        self.is_last = self.runtime.pipeline.is_last(model_config.num_layers)
        self.logits_processor = LogitsProcessor(config.get_text_config(), skip_all_gather=True)
        self.checkpoint = str(getattr(config, "_name_or_path", "") or architecture)
        if get_model().load_format == SHARDED_STATE and Path(self.checkpoint).is_dir():
            check_shards(self, Path(self.checkpoint), _files_of_rank())
        if self.runtime.tensor_parallel.rank == self.runtime.data_parallel.rank == 0:
            table = startup_table(framework_line("sglang"), type(core).__name__, attention.__name__, self.runtime)
            logger.info("atom-plugin serves %s\n%s", self.checkpoint, table)

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> ModelConfigForExpertLocation | None:
        """See :func:`expert_location`."""
        return expert_location(config)

    def get_attention_sliding_window_size(self) -> int | None:
        """The largest sliding window of the layers, without the query's own token; None if no layer has one."""
        windows = [window for layer in self.core.config.layers if (window := layer.mixer.window) is not None]
        return max(windows) - 1 if windows else None

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> LogitsProcessorOutput | PPProxyTensors:
        """One step; see SGLang's models."""
        self.weights.check_ready()
        assert not get_embedding, "embedding models are refused when arguments are resolved"
        assert self.start_layer == 0 or pp_proxy_tensors is not None, (
            "a later stage gets the hidden states of the previous one"
        )
        result = self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        if isinstance(result, PPProxyTensors):
            return result
        output: LogitsProcessorOutput = self.logits_processor(input_ids, result, self.lm_head, forward_batch)
        return output

    def load_kv_cache_scales(self, quantization_param_path: str) -> None:
        """Set the scales of an FP8 cache from a file (``--quantization-param-path``), one for each layer.

        Raises:
            ValueError: SGLang cannot read the file, or a scale is not valid. SGLang's own models would use 1.
        """
        group, count = self.runtime.tensor_parallel, self.core.config.num_layers
        model_type = type(self.config).model_type
        given = dict(kv_cache_scales_loader(quantization_param_path, group.rank, group.world_size, count, model_type))
        flag = f"--quantization-param-path {quantization_param_path}"
        if not given and get_spec().speculative_algorithm is not None:
            return  # this may be the draft; SGLang has just logged that the scales are 1
        if not given:
            raise ValueError(
                f"{flag} has no scales for the {count} layers of a {model_type!r} model on {group.world_size} ranks; "
                'it must be JSON, {"model_type": ..., "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": '
                "{rank: {layer: scale}}}}."
            )
        for scales in dict.fromkeys(cache_scales(self.core).values()):
            scales.adopt_one(given[scales.layer_index], f"{flag}, layer {scales.layer_index},")

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return cast(nn.Module, self.core.model.embed_tokens)

    def get_embed_and_head(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The weights that a draft shares."""
        embed, head = self.core.model.embed_tokens.weight, self.core.lm_head.weight
        return cast(nn.Parameter, embed), cast(nn.Parameter, head)

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Use another model's embedding and head."""
        self.core.model.embed_tokens.weight = embed
        self.core.lm_head.weight = head


def _files_of_rank() -> str:
    """The file name pattern of this rank in SGLang's ``sharded_state`` loader."""
    others = get_model().model_loader_extra_config or {}
    pattern: str = (json.loads(others) if isinstance(others, str) else others).get("pattern", PATTERN)
    return pattern.format(rank=get_parallel().tp_rank, part="*")
