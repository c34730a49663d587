"""Count the launches of our models in a decoding step without running them, on a machine without a GPU.

A model of its real size is built on the meta device, with the kernels that are chosen on the given GPU. Triton's
launches are recorded instead of made, aiter's functions are replaced by ones that return tensors of the right shapes,
and torch's ops are counted if they launch a kernel. The activation bytes of a launch are those of all tensors that it
reads or writes, except what persists between steps: weights, the cache and scratch memory.
"""

from __future__ import annotations

import gc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, cast
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from atom_core.config import ModelConfig
from atom_core.kernels import kernel_set
from atom_core.kernels.aiter_library import CALLED
from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM
from atom_core.kernels.attention import splits
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, empty_quantized
from atom_core.kernels.select import Implementation, Target
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import load_model_class
from atom_core.quant import read_quantization
from atom_core.runtime import Runtime, WithoutPeers
from atom_core.standalone import Step, build_runtime, empty_caches, finalize, plan
from atom_plugin.bench.batches import MAX_MODEL_LEN, PAGE_SIZE, step_batch
from atom_plugin.bench.floor import decodes
from atom_plugin.bench.models import read_config
from atom_plugin.common.aiter_all_reduce import is_one_kernel, quantizes, why_not_aiter
from benchmarks._fused_moe import Quantized, stages

META = torch.device("meta")

#: GPU kernels that one call of a function of aiter's launches, where they are not one: the parts of a long sequence are
#: attended to by one, and added up by another. For fused_moe see :mod:`benchmarks._fused_moe`.
SEVERAL = {
    "unified_attention": 2,
    "pa_decode_gluon": 2,
    "pa_persistent_fwd": 2,
    "mla_decode_fwd": 2,
    # The norms of q and k, sums of decays with products of keys, the inverses, products with them, states, outputs.
    "chunk_gated_delta_rule_opt_vk": 7,
}
#: Functions of aiter's that compute on the host.
ON_THE_HOST = {
    "get_recommended_splits",
    "get_mla_metadata_info_v1",
    "get_pa_metadata_info_v1",
    "build_gated_delta_rule_prefill_metadata",
}


@dataclass(frozen=True)
class Launch:
    """One kernel, or a call that is several."""

    name: str
    kernels: int
    activations: int
    """Activation bytes that it reads and writes."""

    def __str__(self) -> str:
        return self.name if self.kernels == 1 else f"{self.name} ({self.kernels})"


@dataclass
class Recorder:
    """The launches so far, by layer; None is before the first layer."""

    layer: int | None = None
    launches: dict[int | None, list[Launch]] = field(default_factory=dict)
    ignored: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Storages without activations, by id; they are referenced so that their ids are not reused."""
    paused: bool = False

    def hold(self, *tensors: torch.Tensor) -> None:
        """These hold no activations."""
        self.ignored.update((_storage(tensor), tensor.untyped_storage()) for tensor in tensors)

    def add(self, name: str, tensors: object, kernels: int = 1) -> None:
        """A launch that is given or makes ``tensors``, in any nesting."""
        if not self.paused:
            found = {(_storage(it), it.storage_offset()): it for it in _tensors(tensors)}
            size = sum(it.nbytes for (storage, _), it in found.items() if storage not in self.ignored)
            self._append(Launch(name, kernels, size))

    def add_stages(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        *,
        quant_type: str,
        expert_mask: torch.Tensor | None = None,
        **others: object,
    ) -> None:
        """The launches of aiter's fused_moe, whose arguments these are."""
        (tokens, hidden), (num_local_experts, _, intermediate) = x.shape, down.shape
        intermediate *= 2 if quant_type == "per_1x32" else 1  # two codes per byte
        # aiter takes blocks of weights and groups of activations for one (fused_moe.py:1310).
        quantized = cast(Quantized, "per_1x128" if quant_type == "per_128x128" else quant_type)
        share = 1.0 if expert_mask is None else num_local_experts / len(expert_mask)
        if not self.paused:
            for stage in stages(tokens, hidden, intermediate, experts.shape[1], quantized, share):
                self._append(Launch(stage.name, 1, round(tokens * stage.activations)))

    def _append(self, launch: Launch) -> None:
        self.launches.setdefault(self.layer, []).append(launch)


class _Names:
    """An enum, each of whose members is its name."""

    def __getattr__(self, name: str) -> str:
        return name


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _tensors(values: object) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class _TorchOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what launches: neither views nor memory without contents."""

    silent = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view"})

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See the class."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        given = {_storage(it) for it in _tensors((args, kwargs))}
        # Some ops give a view or a copy as it comes (`to`, `reshape`), so their schemas do not say.
        fresh = any(_storage(it) not in given for it in _tensors(result))
        written = any(it.alias_info is not None and it.alias_info.is_write for it in func._schema.arguments)
        if (fresh or written) and name not in self.silent:
            self.recorder.add(name, (args, kwargs, result))
        return result


@dataclass(frozen=True, eq=False)
class CountedGroup(WithoutPeers):
    """The first of ``world_size`` ranks, which exchanges nothing."""

    recorder: Recorder
    world_size: int
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself."""
        if self.world_size > 1:
            self.recorder.add("all_reduce", x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """An empty tensor of the gathered shape, for the embedding and the head."""
        shape = list(x.shape)
        shape[dim] *= self.world_size
        return x if self.world_size == 1 else x.new_empty(shape)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Not called in a decoding step without data parallelism."""
        raise AssertionError("not part of a decoding step")

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Not called in a decoding step without data parallelism."""
        raise AssertionError("not part of a decoding step")


class _CountedNorm:
    """aiter's fused all-reduce and norm, where vLLM's group runs it as one kernel."""

    def __init__(self, group: CountedGroup, target: Target) -> None:
        self.group, self.arch = group, target.arch

    def takes(self, x: torch.Tensor) -> bool:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        return is_one_kernel(x.shape, x.dtype, self.group.world_size)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        normed, summed = torch.empty_like(x), torch.empty_like(residual)
        self.group.recorder.add("all_reduce + add_rms_norm", (x, residual, weight, normed, summed))
        return normed, summed

    def quantizes(self, x: torch.Tensor, form: InputForm) -> bool:
        """See :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm`."""
        return quantizes(x.shape[1], form, self.arch)

    def quantized(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, form: InputForm
    ) -> tuple[QuantizedInput, torch.Tensor]:
        """See :class:`atom_core.kernels.all_reduce_norm.QuantizingAllReduceNorm`."""
        found, summed = empty_quantized(*x.shape, form, x.device), torch.empty_like(residual)
        self.group.recorder.add("all_reduce + add_rms_norm + quant", (x, residual, weight, found, summed))
        return found, summed


def _quantized(x: torch.Tensor, dtype: torch.dtype, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.new_empty(*x.shape[:-1], x.shape[-1] // group_size, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scales


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


def _attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *places: object, return_lse: bool, **kwargs: object
) -> Any:
    answer = q.new_empty(*q.shape[:-1], values.shape[-1])
    return (answer, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)) if return_lse else answer


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: object,
    conv: torch.Tensor,
    starts: torch.Tensor,
    lengths: object,
    keys: int,
    values: int,
    **kwargs: object,
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape[1], size) for size in (keys, keys, values))


def _ruled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, initial_state: torch.Tensor, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(v), torch.empty_like(initial_state)


#: What functions of aiter's return, of their arguments; the others write to one of them.
RESULTS: Mapping[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: torch.empty_like(x),
    "hipb_gemm": lambda x, weight, solidx, otype: x.new_empty(x.shape[0], weight.shape[0], dtype=otype),
    "gemm_a16w16": lambda x, weight, bias=None: x.new_empty(x.shape[0], weight.shape[0]),
    "gemm_a8w8_bpreshuffle": _product,
    "gemm_a8w8_blockscale_bpreshuffle": _product,
    "per_group_quant_hip": lambda x, quant_dtype, group_size, transpose_scale: _quantized(x, quant_dtype, group_size),
    "shuffle_weight": lambda weight, layout: weight,
    "e8m0_shuffle": lambda scales: scales.new_empty(-(-len(scales) // 256) * 256, -(-scales.shape[1] // 8) * 8),
    "quant_mxfp4_hip": lambda x, round_mode, e8m0_shuffle: (
        x.new_empty(x.shape[0], x.shape[1] // 2, dtype=torch.float4_e2m1fn_x2),
        x.new_empty(-(-x.shape[0] // 256) * 256, x.shape[1] // 32, dtype=torch.float8_e8m0fnu),
    ),
    "gemm_a4w4": _product,
    "fused_moe": lambda x, *args, **kwargs: torch.empty_like(x),
    "get_recommended_splits": lambda requests, heads: 8,
    # Room that the first layer of a step takes for all, whose sizes nothing here depends on.
    "get_pa_metadata_info_v1": lambda *args, **kwargs: ((2, torch.uint64), *5 * ((1, torch.int32),)),
    "get_mla_metadata_info_v1": lambda *args, **kwargs: ((2, torch.uint64), *5 * ((1, torch.int32),)),
    "flash_attn_varlen_func": _attended,
    "build_gated_delta_rule_prefill_metadata": lambda lengths, cu_seqlens, chunk_size: None,
    "causal_conv1d_split_qkv_triton_fn": _convolved,
    "chunk_gated_delta_rule_opt_vk": _ruled,
}
#: The functions that return nothing that our kernels read.
IN_PLACE = frozenset(
    {
        "rmsnorm2d_fwd_with_add",
        "fused_qk_rmsnorm_per_token_quant",
        "fused_qk_rmsnorm_group_quant",
        "static_per_tensor_quant",
        "dynamic_per_token_scaled_quant",
        "fused_qk_norm_rope_cache_pts_quant_shuffle",
        "mha_batch_prefill_func",
        "unified_attention",
        "pa_fwd_asm",
        "pa_decode_gluon",
        "get_pa_metadata_v1",
        "pa_persistent_fwd",
        "get_mla_metadata_v1",
        "mla_decode_fwd",
        "topk_softmax",
        "topk_gating",
        "grouped_topk",
        "biased_grouped_topk_hip",
        "silu_and_mul",
        "gelu_and_mul",
        "gelu_tanh_and_mul",
        "swiglu_and_mul",
        "silu_and_mul_quant",
        "fused_clamp_act_mul",
    }
)


def _stand_ins(recorder: Recorder) -> dict[str, ModuleType]:
    """Modules of aiter's with the functions that our kernels call."""
    modules: dict[str, ModuleType] = {}

    def module(path: str) -> ModuleType:
        if path not in modules:
            modules[path] = made = ModuleType(path)
            made.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
            if "." in path:
                parent, _, name = path.rpartition(".")
                setattr(module(parent), name, made)
        return modules[path]

    def function(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name not in RESULTS and name not in IN_PLACE:
                raise NotImplementedError(f"benchmarks/_launches.py must say what aiter's {name} returns")
            paused, recorder.paused = recorder.paused, True
            result = RESULTS[name](*args, **kwargs) if name in RESULTS else None
            recorder.paused = paused
            if name == "fused_moe":
                recorder.add_stages(*args, **kwargs)
            elif name not in ON_THE_HOST:
                recorder.add(name, (args, kwargs, result), SEVERAL.get(name, 1))
            return result

        return call

    for enum in ("QuantType", "ActivationType"):
        setattr(module("aiter"), enum, _Names())
    for path in {path for paths in CALLED.values() for path in paths}:
        parent, _, name = path.rpartition(".")
        setattr(module(parent), name, function(name))
    return modules


@contextmanager
def launching(run: Callable[..., None]) -> Iterator[None]:
    """Have ``run`` called in place of Triton's launches, and tensors without memory be on a GPU as large as an H100."""
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(splits, "multiprocessors", return_value=132),
    ):
        yield


class _Within:
    """Half a layer, whose launches are the layer's."""

    def __init__(self, recorder: Recorder, layer: int, run: Callable[..., Any]) -> None:
        self.recorder, self.layer, self.run = recorder, layer, run

    def __call__(self, *args: Any) -> Any:
        self.recorder.layer = self.layer
        try:
            return self.run(*args)
        finally:
            self.recorder.layer = None


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorder.add(self.fn.__name__.strip("_"), (args, kwargs))

    assert not any(name.partition(".")[0] == "aiter" for name in sys.modules), "the real aiter is imported"
    stand_ins = _stand_ins(recorder)
    sys.modules.update(stand_ins)
    try:
        with launching(run), _TorchOps(recorder):
            yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _build(
    model: str,
    target: Target,
    recorder: Recorder,
    ranks: int,
    num_layers: int,
    *,
    kernels: Mapping[str, str] | None = None,
    expert_parallel: bool = False,
    quantization: str | None = None,
) -> tuple[DecoderForCausalLM, Runtime, ModelConfig]:
    """A network without memory, with the kernels that are chosen for ``target``; see :func:`count`."""
    hf = read_config(model, num_layers)
    config = read_model_config(hf)
    group = CountedGroup(recorder, ranks)
    quant = read_quantization(hf, quantization)
    fused = Implementation("aiter", why_not_aiter, lambda spec, target: _CountedNorm(group, target))
    runtime = replace(
        build_runtime(META, torch.bfloat16, MAX_MODEL_LEN, target=target, quant=quant),
        kernels=kernel_set(target, kernels, {ALL_REDUCE_NORM.name: cast(Any, fused)}),
        tensor_parallel=group,
        expert_parallel=expert_parallel,
    )
    network: DecoderForCausalLM = load_model_class(config.architecture)(config, runtime)
    finalize(network)
    return network, runtime, config


def chosen(
    model: str, target: Target, ranks: int, num_layers: int, quantization: str | None = None
) -> list[tuple[str, str]]:
    """Ops and the implementations that run them, as a server's table of kernels has them; see :func:`count`.

    ``quantization``: asked for by a flag, of a checkpoint that has none.
    """
    recorder = Recorder()
    with _recording(recorder), torch.inference_mode():
        recorder.paused = True
        _, runtime, _ = _build(model, target, recorder, ranks, num_layers, quantization=quantization)
    return [(it.op, it.implementation) for it in runtime.kernels.choices()]


def count(
    model: str,
    target: Target,
    batch: int,
    ranks: int,
    num_layers: int,
    context: int,
    *,
    kernels: Mapping[str, str] | None = None,
    expert_parallel: bool = False,
) -> list[Launch]:
    """The launches of the last layer in a step of which each of ``batch`` requests decodes one token.

    Args:
        model: see :func:`atom_plugin.bench.models.read_config`.
        target: for which kernels are chosen.
        batch, context: the step.
        ranks: of the tensor-parallel group, whose first is looked at.
        num_layers: those that the model is cut to.
        kernels: forced implementations by op.
        expert_parallel: whether the ranks share out experts whole.

    Raises:
        ValueError: the model cannot be shared by so many.
    """
    recorder = Recorder()
    with _recording(recorder), torch.inference_mode():
        recorder.paused = True
        network, runtime, _ = _build(
            model, target, recorder, ranks, num_layers, kernels=kernels, expert_parallel=expert_parallel
        )
        metadata, pages = step_batch(decodes(batch, context), META)
        metadata = plan(network, metadata)
        pools = empty_caches(network, runtime, pages, PAGE_SIZE, batch)
        ids, positions = (torch.zeros(batch, dtype=torch.int64, device=META) for _ in range(2))
        fused = network.model.fused
        fused.layers = [
            (_Within(recorder, index, mixer), _Within(recorder, index, feed_forward))
            for index, (mixer, feed_forward) in enumerate(fused.layers)
        ]
        network(ids, positions, Step(metadata, pools))  # in which kernels take the memory that they keep
        # What there is now stays: weights, scales, tables, pages, the step's description, and room to work in.
        recorder.hold(*(it for it in gc.get_objects() if type(it) in (torch.Tensor, torch.nn.Parameter)))
        recorder.paused = False
        network(ids, positions, Step(metadata, pools))
    return recorder.launches[num_layers - 1]
