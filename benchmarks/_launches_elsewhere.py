"""The launches of ATOM and vLLM for a decoder layer in a decoding step, read from their sources.

ATOM: https://github.com/ROCm/ATOM at ffdf3bb5d, its plug-in for vLLM. vLLM: 0.32.0 on ROCm, with VLLM_ROCM_USE_AITER=1
and otherwise its defaults. Neither was run: each launch names the source line that it was read from. Where tuned
tables or a compiler decide, the fewest launches are counted. Launches of aiter's own functions are from aiter at
e4048607.

Bytes are of activations, as in :mod:`benchmarks._launches`: each tensor that a launch reads or writes, once, and the
partial results of long sequences' splits between two launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from atom_core.config import AttentionConfig, GatedDeltaNetConfig, MixerConfig, ModelConfig
from benchmarks._fused_moe import Quantized, stages

#: Bytes up to which aiter's fused all-reduce and norm is one kernel, and not two, divided by the number of ranks
#: (aiter/dist/device_communicators/communicator_cuda.py:252). In vLLM (aiter_custom_all_reduce.py:76) it is 1 MiB over
#: that number: nothing here lies between.
ONE_STAGE = 128 * 7168 * 2
#: Bytes up to which one that quantises groups as well has two stages in one kernel (custom_all_reduce.cuh:4604).
TWO_STAGES = 512 * 1024


_VLLM_QUANT = "BlockScaledMMLinearKernel.py:119"


@dataclass(frozen=True)
class Read:
    """One launch, or a call with several, and its source line."""

    name: str
    source: str
    numbers: float
    """Activation bytes per token."""
    kernels: int = 1

    def __str__(self) -> str:
        return self.name if self.kernels == 1 else f"{self.name} ({self.kernels})"


@dataclass(frozen=True)
class Case:
    """A model's layer on one rank, and a step."""

    config: ModelConfig
    fp8: bool
    """Weights in FP8, in blocks of 128."""
    batch: int
    ranks: int
    context: int
    """Cached tokens per request."""
    expert_parallel: bool = False

    @property
    def hidden(self) -> int:
        """Of the model."""
        return self.config.hidden_size

    @property
    def mixer(self) -> MixerConfig:
        """The layer's: the last one's."""
        return self.config.layers[-1].mixer

    @property
    def is_hybrid(self) -> bool:
        """Whether other layers of the model have Gated DeltaNet, or this one."""
        return any(isinstance(it.mixer, GatedDeltaNetConfig) for it in self.config.layers)

    @property
    def queries(self) -> int:
        """Elements of a token's queries on this rank."""
        return self.mixer.num_heads * self.mixer.query_dim // self.ranks

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values, on this rank."""
        return max(1, self.mixer.num_kv_heads // self.ranks) * self.mixer.query_dim

    @property
    def in_two_stages(self) -> bool:
        """Whether ranks reduce a share each and then gather the shares, which lie in memory in between."""
        return not self.reduces_in_one(quantized=False)

    def reduces_in_one(self, quantized: bool) -> bool:
        """Whether the fused all-reduce and norm is one kernel; ``quantized``: with the quantisation after them."""
        return self.batch * self.hidden * 2 <= (TWO_STAGES if quantized else ONE_STAGE // self.ranks)


def _wide(*numbers: float) -> float:
    """Bytes of that many elements in 16 bits."""
    return 2 * sum(numbers)


def _narrow(numbers: float) -> float:
    """Bytes of that many elements in FP8, with a scale for each 128."""
    return numbers + 4 * numbers / 128


def _given(case: Case, numbers: float) -> float:
    return _narrow(numbers) if case.fp8 else _wide(numbers)


def _norm(case: Case, name: str, source: str, quantized: bool, reduces: bool) -> Iterator[Read]:
    """The residual's addition and norm, and what of its neighbours is fused into it."""
    size = case.hidden
    made = _narrow(size) if quantized else _wide(size)
    kernels = 1
    if reduces and case.ranks > 1:
        name, kernels = f"all_reduce + {name}", 1 if case.reduces_in_one(quantized) else 2
        made += _wide(size) if case.in_two_stages else 0
    yield Read(f"{name} + quant" if quantized else name, source, _wide(size, size, size) + made, kernels)


def _product(case: Case, name: str, source: str, given: float, made: float, quant: str = "") -> Iterator[Read]:
    """A linear layer; ``quant`` is where its input is quantised by a launch of its own."""
    if case.fp8 and quant:
        yield Read("quant", quant, _wide(given) + _narrow(given))
    yield Read(name, source, _given(case, given) + _wide(made))


def _experts(case: Case, source: str, shared: bool = False) -> Iterator[Read]:
    """``shared``: with the shared experts among the routed ones."""
    moe = case.config.layers[-1].moe
    assert moe is not None
    intermediate = moe.intermediate_size // (1 if case.expert_parallel else case.ranks)
    quantized: Quantized = "per_1x128" if case.fp8 else "No"
    share = 1 / case.ranks if case.expert_parallel else 1.0
    each = moe.routing.top_k + (moe.shared_size // moe.intermediate_size if shared else 0)
    for stage in stages(case.batch, case.hidden, intermediate, each, quantized, share):
        yield Read(stage.name, f"{source}, aiter/{stage.source}", stage.activations)


def _all_reduce(case: Case, source: str) -> Iterator[Read]:
    if case.ranks > 1:
        yield Read("all_reduce", source, _wide(case.hidden))


def atom(case: Case) -> list[Read]:
    """ATOM's layer, with ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION=1, without which it has three launches more."""
    if case.is_hybrid:
        return [*_atom_hybrid_mixer(case), *_atom_hybrid_mlp(case)]
    if case.config.has_mla:
        return [*_atom_mla(case), *_atom_mixture(case, "deepseek_v2.py:1167", "deepseek_v2.py:3094")]
    moe = case.config.layers[-1].moe is not None
    queries, keys, hidden = case.queries, case.keys, case.hidden
    model = "qwen3_moe.py" if moe else "qwen3.py"
    quant, norm = "linear.py:982", "layernorm.py:457"
    product = "linear.py:1053" if case.fp8 else "linear.py:960"
    first = _norm(case, "rmsnorm2d_fwd_with_add", f"{model}:{353 if moe else 252}, {norm}", False, reduces=moe)
    line = 251 if moe else 146
    attention = [
        *_product(case, "gemm qkv", f"{model}:{line}, {product}", hidden, queries + 2 * keys, quant),
        Read("fused_qk_norm_rope_cache", "layer_mha.py:312", _wide(queries + 2 * keys)),
        Read("pa_fwd_asm", "layer_mha.py:516", _wide(queries, queries)),
        *_product(case, "gemm o", f"{model}:{272 if moe else 162}, {product}", queries, hidden, quant),
    ]
    if moe:
        return [*first, *attention, *_atom_mixture(case, "qwen3_moe.py:132", "qwen3_moe.py:361")]
    intermediate = case.config.intermediate_size // case.ranks
    return [
        *first,
        *attention,
        *_all_reduce(case, "linear.py:1101"),
        *_norm(case, "rmsnorm2d_fwd_with_add", f"qwen3.py:256, {norm}", False, reduces=False),
        *_product(case, "gemm gate_up", f"qwen3.py:195, {product}", hidden, 2 * intermediate, quant),
        Read("silu_and_mul", "qwen3.py:196, activation.py:111", _wide(3 * intermediate)),
        *_product(case, "gemm down", f"qwen3.py:197, {product}", intermediate, hidden, quant),
        *_all_reduce(case, "linear.py:1101"),
    ]


def _atom_mixture(case: Case, gate: str, norm: str) -> Iterator[Read]:
    """After attention. A shared expert is one more of the routed ones (ATOM_FUSE_SHARED_EXPERT)."""
    moe = case.config.layers[-1].moe
    assert moe is not None
    experts = moe.routing.num_experts
    yield from _norm(case, "rmsnorm2d_fwd_with_add", f"{norm}, layernorm.py:389", False, reduces=True)
    yield Read("gemm gate", f"{gate}, linear.py:960", _wide(case.hidden, experts))
    grouped = moe.routing.correction
    name, line = ("biased_grouped_topk", 249) if grouped else ("topk_softmax", 185)
    yield Read(name, f"topK.py:{line}", _wide(experts) + 8 * moe.routing.top_k)
    yield from _experts(case, "moe.py:2574" if case.fp8 else "moe.py:894", shared=True)


def _atom_mla(case: Case) -> Iterator[Read]:
    latent, hidden, heads = case.mixer, case.hidden, case.mixer.num_heads // case.ranks
    assert latent is not None
    assert latent.query_rank is not None
    first, row, queries = latent.query_rank, latent.row, heads * latent.query_dim
    yield from _norm(case, "add_rmsnorm", "deepseek_v2.py:3076, layernorm.py:213, 377", case.fp8, reduces=True)
    yield from _product(case, "gemm qkv_a", "deepseek_v2.py:2738", hidden, first + row)
    made = _given(case, first) + _wide(latent.rank)
    yield Read("fused_qk_rmsnorm + quant", "deepseek_v2.py:592, 2758", _wide(first, latent.rank) + made)
    yield from _product(case, "gemm q_b", "layer_mla.py:1414", first, queries)
    yield Read("batched gemm k", "layer_mla.py:1088", _wide(heads * (latent.nope_dim + latent.rank)))
    new = _wide(heads * latent.row, heads * latent.row, row)
    yield Read("fused_qk_rope_concat_and_cache_mla", "layer_mla.py:1110", new)
    attended = _wide(heads * latent.row, heads * latent.rank)
    yield Read("mla_decode_fwd", "layer_mla.py:865, aiter/mla.py:927, 956", attended, 2)
    yield Read("batched gemm v", "layer_mla.py:400", _wide(heads * (latent.rank + latent.value_dim)))
    yield from _product(case, "gemm o", "layer_mla.py:1425", heads * latent.value_dim, hidden, "linear.py:982")


def _parts(case: Case) -> float:
    """Bytes of the partial results of each split of 256 tokens, with two float32 per head."""
    return -(-case.context // 256) * (_wide(case.queries) + 8 * case.queries / case.mixer.query_dim)


def _fused_norm(case: Case, quantized: bool) -> str:
    """The source lines of vLLM's fused norm."""
    if case.ranks > 1:
        return f"allreduce_rms_fusion.py:{1379 if quantized else 1206}"
    return "rocm_aiter_fusion.py:238" if quantized else "platforms/rocm.py:1352"


def vllm(case: Case) -> list[Read]:
    """vLLM's layer: compiled, which fuses norms and activations with the quantisation after them, and all-reduces."""
    moe = case.config.layers[-1].moe is not None
    if case.is_hybrid:
        return [*_vllm_hybrid_mixer(case), *_vllm_hybrid_mlp(case)]
    if case.config.has_mla:
        return [*_vllm_mla(case), *_vllm_mixture(case, "deepseek_v2.py:424")]
    queries, keys, hidden = case.queries, case.keys, case.hidden
    model = "qwen3_moe.py" if moe else "qwen3.py"
    lines = (422, 334, 338, 342, 344, 346) if moe else (242, 161, 165, 168, 170, 172)
    fused = _fused_norm(case, case.fp8)
    first = [
        *_norm(case, "add_rms_norm", f"{model}:{lines[0]}, {fused}", case.fp8, reduces=True),
        *_product(case, "gemm qkv", f"{model}:{lines[1]}", hidden, queries + 2 * keys),
        Read("rms_norm q", f"{model}:{lines[2]}", _wide(queries, queries)),
        Read("rms_norm k", f"{model}:{lines[3]}", _wide(keys, keys)),
        Read("rope", f"{model}:{lines[4]}, compiled", _wide(2 * queries, 2 * keys)),
        Read("reshape_and_cache", "rocm_attn.py:458", _wide(2 * keys)),
        Read("paged_attention_rocm", "chunked_prefill_paged_decode.py:393", _wide(queries, queries) + _parts(case), 2),
        *_product(case, "gemm o", f"{model}:{lines[5]}", queries, hidden, _VLLM_QUANT),
    ]
    if moe:
        return [*first, *_vllm_mixture(case, "qwen3_moe.py:230")]
    intermediate = case.config.intermediate_size // case.ranks
    activation = _wide(2 * intermediate) + _given(case, intermediate)
    return [
        *first,
        *_norm(case, "add_rms_norm", f"qwen3.py:249, {fused}", case.fp8, reduces=True),
        *_product(case, "gemm gate_up", "qwen2.py:112", hidden, 2 * intermediate),
        Read("silu_and_mul + quant", "rocm_aiter_fusion.py:700", activation)
        if case.fp8
        else Read("silu_and_mul", "qwen2.py:113, compiled", activation),
        *_product(case, "gemm down", "qwen2.py:114", intermediate, hidden),
    ]


def _vllm_mixture(case: Case, experts: str) -> Iterator[Read]:
    """After attention. The norm's result goes to the gate too, so it is quantised by launches of their own."""
    moe, hidden = case.config.layers[-1].moe, case.hidden
    assert moe is not None
    count = moe.routing.num_experts
    model = experts.partition(":")[0]
    line = 1406 if case.config.has_mla else 429
    yield from _norm(case, "add_rms_norm", f"{model}:{line}, {_fused_norm(case, False)}", False, reduces=True)
    yield Read("gemm gate", "moe_runner.py:913", _wide(hidden, count))
    yield Read("topk", f"{experts}, router", _wide(count) + 8 * moe.routing.top_k)
    yield from _experts(case, "rocm_aiter_moe.py:408")
    if moe.shared_size:
        intermediate = moe.shared_size // case.ranks
        yield from _product(case, "gemm shared gate_up", "deepseek_v2.py:285", hidden, 2 * intermediate, _VLLM_QUANT)
        yield Read("silu_and_mul + quant", "deepseek_v2.py:286", _wide(2 * intermediate) + _given(case, intermediate))
        yield from _product(case, "gemm shared down", "deepseek_v2.py:287", intermediate, hidden)
        yield Read("add", "moe_runner.py:789", _wide(3 * hidden))


def _vllm_mla(case: Case) -> Iterator[Read]:
    latent, hidden, heads = case.mixer, case.hidden, case.mixer.num_heads // case.ranks
    assert latent is not None
    assert latent.query_rank is not None
    first, row, queries = latent.query_rank, latent.row, heads * latent.query_dim
    rotated = (heads + 1) * latent.rope_dim
    yield from _norm(
        case, "add_rms_norm", f"deepseek_v2.py:1371, {_fused_norm(case, case.fp8)}", case.fp8, reduces=True
    )
    yield from _product(case, "gemm qkv_a", "layers/mla.py:183", hidden, first + row)
    made = _given(case, first) + _wide(latent.rank)
    yield Read("fused_qk_rmsnorm + quant", "rocm_aiter_fusion.py:1077", _wide(first, latent.rank) + made)
    yield from _product(case, "gemm q_b", "layers/mla.py:221", first, queries)
    yield Read("rope", "layers/mla.py:228, compiled", _wide(rotated, rotated))
    yield Read("concat_and_cache_mla", "mla_attention.py:797", _wide(row))
    yield Read("batched gemm k", "mla_attention.py:1047", _wide(heads * (latent.nope_dim + latent.rank)))
    yield Read("cat", "rocm_aiter_mla.py:2379", _wide(2 * heads * latent.row))
    attended = _wide(heads * latent.row, heads * latent.rank)
    yield Read("mla_decode_fwd", "rocm_aiter_mla.py:2468, aiter/mla.py:927, 956", attended, 2)
    yield Read("batched gemm v", "mla_attention.py:1398", _wide(heads * (latent.rank + latent.value_dim)))
    yield from _product(case, "gemm o", "layers/mla.py:255", heads * latent.value_dim, hidden, _VLLM_QUANT)


@dataclass(frozen=True)
class _States:
    """Elements of a token in a layer of Gated DeltaNet on one rank."""

    channels: int
    """Of q, k and v."""
    values: int
    """Of v, and of z."""
    gates: int
    """Of b and a together."""

    @classmethod
    def of(cls, case: Case, mixer: GatedDeltaNetConfig) -> _States:
        """Heads are shared out."""
        values = mixer.num_value_heads * mixer.value_dim
        return cls(mixer.channels // case.ranks, values // case.ranks, 2 * mixer.num_value_heads // case.ranks)


#: Compute units of the smaller GPU, an MI355X, for each of which aiter wants two programs (pa_decode_gluon.py:107).
_PROGRAMS = 2 * 256


def _gluon(case: Case, mixer: AttentionConfig) -> tuple[float, int]:
    """Bytes of a token's partial results in aiter's pa_decode_gluon (pa_decode_gluon.py:111, 5393); its launches."""
    kv_heads = max(1, mixer.num_kv_heads // case.ranks)
    splits = min(-(-_PROGRAMS // (case.batch * kv_heads)), 8)
    if splits == 1:
        return 0, 1
    return splits * (_wide(case.queries) + 8 * case.queries / mixer.head_dim), 2


def _atom_hybrid_mixer(case: Case) -> Iterator[Read]:
    """ATOM's layer of Qwen3.5 (qwen3_5.py), whose norms are fused neither with all-reduces nor with quantisers."""
    mixer, hidden, quant = case.mixer, case.hidden, "linear.py:982"
    product = "linear.py:1053" if case.fp8 else "linear.py:960"
    yield from _norm(case, "fused_qk_rmsnorm_group_quant", "qwen3_next.py:845, layernorm.py:741", False, reduces=False)
    if isinstance(mixer, GatedDeltaNetConfig):
        it = _States.of(case, mixer)
        made = it.channels + it.values
        if case.fp8:
            yield from _product(case, "gemm qkvz", f"qwen3_5.py:322, {product}", hidden, made, quant)
            yield Read("gemm ba", "qwen3_5.py:323, linear.py:960", _wide(hidden, it.gates))
        else:
            yield from _product(case, "gemm qkvzba", f"qwen3_5.py:313, {product}", hidden, made + it.gates)
        line = "layer_gdn.py:520, causal_conv1d.py:1352"
        yield Read("causal_conv1d_update", line, _wide(it.channels, it.channels))
        line = "layer_gdn.py:366, fused_sigmoid_gating.py:270"
        yield Read("fused_sigmoid_gating_delta_rule", line, _wide(it.channels, it.gates, it.values))
        if case.fp8:
            moved = _wide(2 * it.values) + _narrow(it.values)
            yield Read("gated_rmsnorm_fp8_group_quant", "qwen3_5.py:339, layernorm.py:621", moved)
        else:
            yield Read("rms_norm and silu", "qwen3_5.py:339, layernorm.py:656, compiled", _wide(3 * it.values))
        yield from _product(case, "gemm out", f"qwen3_5.py:340, {product}", it.values, hidden)
    else:
        assert isinstance(mixer, AttentionConfig)
        queries, keys = case.queries, case.keys
        yield from _product(case, "gemm gqkv", f"qwen3_next.py:416, {product}", hidden, 2 * queries + 2 * keys, quant)
        yield Read("fused_qkv_norm_rope_cache", "layer_mha.py:288", _wide(2 * queries, 3 * keys))
        parts, kernels = _gluon(case, mixer)
        yield Read("pa_decode_gluon", "layer_mha.py:264, 475", _wide(queries, queries) + parts, kernels)
        if case.fp8:
            moved = _wide(2 * queries) + _narrow(queries)
            yield Read("fused_sigmoid_mul_fp8_quant", "qwen3_next.py:458", moved)
        else:
            yield Read("sigmoid and mul", "qwen3_next.py:461, compiled", _wide(3 * queries))
        yield from _product(case, "gemm o", f"qwen3_next.py:{459 if case.fp8 else 463}, {product}", queries, hidden)
    yield from _all_reduce(case, "linear.py:1101")
    yield from _norm(case, "fused_qk_rmsnorm_group_quant", "qwen3_next.py:875, layernorm.py:741", False, reduces=False)


def _atom_hybrid_mlp(case: Case) -> Iterator[Read]:
    """The shared expert is one more of the routed ones, and its gate a row of the router's."""
    moe, hidden = case.config.layers[-1].moe, case.hidden
    if moe is None:
        assert not case.fp8
        intermediate = case.config.intermediate_size // case.ranks
        yield from _product(case, "gemm gate_up", "qwen3_next.py:153, linear.py:960", hidden, 2 * intermediate)
        yield Read("silu_and_mul", "qwen3_next.py:154, activation.py:111", _wide(3 * intermediate))
        yield from _product(case, "gemm down", "qwen3_next.py:155, linear.py:960", intermediate, hidden)
        yield from _all_reduce(case, "linear.py:1101")
        return
    scores = moe.routing.num_experts + 1
    yield Read("gemm gate", "qwen3_next.py:259, linear.py:960", _wide(hidden, scores))
    yield Read("topk_softmax", "topK.py:185", _wide(scores) + 8 * (moe.routing.top_k + 1))
    yield from _experts(case, "moe.py:2574" if case.fp8 else "moe.py:894", shared=True)
    yield from _all_reduce(case, "qwen3_next.py:278")


def _vllm_hybrid_mixer(case: Case) -> Iterator[Read]:
    """vLLM's layer of Qwen3.5, with aiter's two kernels of Gated DeltaNet (qwen_gdn_linear_attn.py:952)."""
    mixer, hidden = case.mixer, case.hidden
    linear = isinstance(mixer, GatedDeltaNetConfig)
    # What b and a are multiplied from is in 16 bits.
    quantized = case.fp8 and not linear
    fused = _fused_norm(case, quantized)
    yield from _norm(case, "add_rms_norm", f"qwen3_next.py:571, {fused}", quantized, reduces=True)
    if isinstance(mixer, GatedDeltaNetConfig):
        it, file = _States.of(case, mixer), "qwen_gdn_linear_attn.py"
        yield from _product(case, "gemm qkvz", f"{file}:954", hidden, it.channels + it.values, _VLLM_QUANT)
        yield Read("gemm ba", f"{file}:955", _wide(hidden, it.gates))
        moved = _wide(it.channels, it.values, it.gates)
        yield Read("fused_reshape_causal_conv1d_update", f"{file}:1687", 2 * moved)
        rule = _wide(it.channels, it.gates, it.values)
        yield Read("fused_rearrange_sigmoid_gated_delta_rule", f"{file}:1710", rule)
        if case.fp8:
            moved = _wide(2 * it.values) + _narrow(it.values)
            yield Read("rms_norm and silu + quant", f"{file}:942, rocm_aiter_fusion.py:452", moved)
        else:
            yield Read("rms_norm and silu", f"{file}:942, layernorm.py:411", _wide(3 * it.values))
        yield from _product(case, "gemm out", f"{file}:943", it.values, hidden)
        return
    queries, keys = case.queries, case.keys
    yield from _product(case, "gemm qkv", "qwen3_next.py:463", hidden, 2 * queries + 2 * keys)
    yield Read("rms_norm q", "qwen3_next.py:449", _wide(queries, queries))
    yield Read("rms_norm k", "qwen3_next.py:452", _wide(keys, keys))
    yield Read("rope", "qwen3_next.py:455, compiled", _wide(2 * queries, 2 * keys))
    yield Read("reshape_and_cache_flash", "rocm_attn.py:495", _wide(2 * keys))
    # Heads of 256 have no kernel in HIP (platforms/rocm.py:422).
    line = "chunked_prefill_paged_decode.py:461"
    yield Read("kernel_paged_attention_2d", line, _wide(queries, queries))
    yield Read("sigmoid and mul", "qwen3_next.py:467, compiled", _wide(3 * queries))
    yield from _product(case, "gemm o", "qwen3_next.py:468", queries, hidden, _VLLM_QUANT)


def _vllm_hybrid_mlp(case: Case) -> Iterator[Read]:
    """The shared expert is an MLP of its own (VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS is off by default)."""
    moe, hidden = case.config.layers[-1].moe, case.hidden
    yield from _norm(case, "add_rms_norm", f"qwen3_next.py:606, {_fused_norm(case, False)}", False, reduces=True)
    if moe is None:
        assert not case.fp8
        intermediate = case.config.intermediate_size // case.ranks
        yield from _product(case, "gemm gate_up", "qwen2_moe.py:116", hidden, 2 * intermediate)
        yield Read("silu_and_mul", "qwen2_moe.py:117, compiled", _wide(3 * intermediate))
        yield from _product(case, "gemm down", "qwen2_moe.py:118", intermediate, hidden)
        return
    scores, intermediate = moe.routing.num_experts, moe.shared_size // case.ranks
    yield Read("gemm gate", "moe_runner.py:913", _wide(hidden, scores))
    yield Read("topk", "qwen3_next.py:265, router", _wide(scores) + 8 * moe.routing.top_k)
    yield from _experts(case, "rocm_aiter_moe.py:408")
    yield from _product(case, "gemm shared gate_up", "qwen2_moe.py:116", hidden, 2 * intermediate, _VLLM_QUANT)
    yield Read("silu_and_mul", "qwen2_moe.py:117", _wide(3 * intermediate))
    yield from _product(case, "gemm shared down", "qwen2_moe.py:118", intermediate, hidden, _VLLM_QUANT)
    yield Read("gemm shared gate", "qwen2_moe.py:121", _wide(hidden, 1))
    # In an op of its own, which is not compiled (moe_runner.py:210).
    yield Read("sigmoid", "qwen2_moe.py:121", _wide(2))
    yield Read("mul", "qwen2_moe.py:121", _wide(1, hidden, hidden))
    yield Read("add", "moe_runner.py:789", _wide(3 * hidden))
