"""Linear attention over SGLang's real pool of states: what is read and written in each kind of step.

A layer's mixer is Gated DeltaNet by itself. What it gives, however its tokens come, is what it gives for the whole
sequence at once.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atom_core.cache import StateSpec
from atom_core.kernels import kernel_set
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.weights import GatedDeltaNetWeights
from atom_core.kernels.select import Target
from atom_core.mixers.base import TokenMixer

pytestmark = pytest.mark.sglang

CPU, LAYERS, DRAFTS = "cpu", [0, 1, 3], 4
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 4, 8, 16, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
REQUESTS, SLOTS, CONTEXT = 6, 12, 512


class Mixer(TokenMixer):
    """Gated DeltaNet with random weights."""

    graph_support = "always"

    def __init__(self, index):
        super().__init__(f"model.layers.{index}.linear_attn.attn", index, (VALUE_HEADS, VALUE_DIM), KEY_DIM, 1.0)
        made = torch.Generator().manual_seed(index)

        def random(*shape):
            return torch.randn(shape, generator=made)

        self.weights = GatedDeltaNetWeights(
            random(CHANNELS, WIDTH), random(VALUE_HEADS) - 2, random(VALUE_HEADS) - 2, random(VALUE_DIM), 1e-6
        )

    @property
    def cache_spec(self):
        shapes = (WIDTH - 1, CHANNELS), (VALUE_HEADS, VALUE_DIM, KEY_DIM)
        return StateSpec(shapes, (torch.float32, torch.float32))

    def select_kernels(self, kernels):
        spec = GatedDeltaNetSpec(KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, torch.float32, torch.float32)
        self.kernel = kernels.select(GATED_DELTA_NET, spec)

    def scaled(self, cache):
        return cache

    def run(self, inputs, positions, batch, cache, out):
        qkvz, ba = inputs
        self.kernel(qkvz, ba, self.weights, cache, batch, out)


@pytest.fixture(scope="module", autouse=True)
def resolved():
    """As much of SGLang's configuration as its hybrid backend asks for."""
    from sglang.srt.runtime_context import get_context

    with get_context().override_server_args(device=CPU):
        yield


def make_runner(drafts=0):
    """As much of SGLang's runner as the backend looks at, with states that are NaN, as after a request that failed."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=VALUE_HEADS * VALUE_DIM,
        n_groups=KEY_HEADS,
        num_heads=VALUE_HEADS,
        head_dim=VALUE_DIM,
        state_size=KEY_DIM,
        conv_kernel=WIDTH,
    )
    dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    pool = HybridReqToTokenPool(
        size=REQUESTS,
        mamba_size=SLOTS,
        mamba_spec_state_size=REQUESTS,
        max_context_len=CONTEXT,
        device=CPU,
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=LAYERS, dtype=dtype),
        mamba_layer_ids=LAYERS,
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=drafts or None,
        speculative_eagle_topk=1 if drafts else None,
    )
    pool.req_index_to_mamba_index_mapping[1 : REQUESTS + 1] = torch.arange(2, REQUESTS + 2, dtype=torch.int32)
    cache = pool.mamba_pool.mamba_cache
    for each in (*cache.conv, cache.temporal):
        each.fill_(float("nan"))
    return SimpleNamespace(
        model=torch.nn.Module(),
        server_args=SimpleNamespace(enable_mis=False),
        device=CPU,
        is_draft_worker=False,
        req_to_token_pool=pool,
        token_to_kv_pool=None,
        model_config=SimpleNamespace(context_len=CONTEXT),
    )


def make_layer(index=1):
    from atom_plugin.sglang.attention import SglangLinearAttention

    return SglangLinearAttention(
        Mixer(index), SimpleNamespace(kernels=kernel_set(Target(CPU, "")), device=torch.device(CPU))
    )


def inputs(count, seed=0):
    """Of ``count`` tokens: (qkvz, ba)."""
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, CHANNELS + VALUE_HEADS * VALUE_DIM, generator=made),
        torch.randn(count, 2 * VALUE_HEADS, generator=made),
    )


def step(mode, rows, new, lengths, **fields):
    """SGLang's batch of requests at ``rows`` with ``new`` tokens each, ``lengths`` long as the mode counts."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    mode = ForwardMode[mode]
    batch = SimpleNamespace(
        forward_mode=mode,
        logical_forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=None,
        positions=torch.zeros(sum(new), dtype=torch.int64),
        out_cache_loc=torch.zeros(sum(new), dtype=torch.int64),
        spec_info=SimpleNamespace(draft_token_num=max(new, default=0)),
        global_num_tokens_cpu=None,
        mamba_track_mask=None,
        mamba_track_indices=None,
        mamba_track_aligned_lens=lambda: None,
    )
    if mode == ForwardMode.EXTEND:
        batch.extend_seq_lens = torch.tensor(new)
        batch.extend_seq_lens_cpu = list(new)
        batch.extend_prefix_lens = batch.seq_lens - batch.extend_seq_lens
    vars(batch).update(fields)
    return batch


class Attention:
    """A layer on the backend of ``runner``."""

    def __init__(self, runner, index=1):
        from atom_plugin.sglang.attention_backend.linear import AtomLinearAttention, HybridAttention

        self.layer, self.backend = make_layer(index), AtomLinearAttention(runner)
        full = SimpleNamespace(
            token_to_kv_pool=None,
            req_to_token_pool=runner.req_to_token_pool,
            kv_index_translator=None,
            needs_cpu_seq_lens=False,
            use_captured_forward_metadata_for_breakable_cuda_graph=False,
        )
        self.hybrid = HybridAttention(full, self.backend, [2])

    def __call__(self, batch, tokens):
        """An eager step: ``[T, Hv, V]`` of all its tokens."""
        self.backend.init_forward_metadata(batch)
        return self.run(batch, tokens)

    def run(self, batch, tokens):
        first, second = (torch.cat(side) for side in zip(*tokens, strict=True))
        out = self.hybrid.forward(
            layer=self.layer._sglang_layer[0], forward_batch=batch, mixed_qkv=first, a=second, b=second
        )
        return out[0]


def part(tokens, begin, end):
    return tuple(each[begin:end] for each in tokens)


def whole(tokens, index=1):
    """All tokens of one request at once."""
    runner = make_runner()
    return Attention(runner, index)(step("EXTEND", [1], [len(tokens[0])], [len(tokens[0])]), [tokens])


def same(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_chunks_and_decodes_go_on_from_the_request_s_own_slot():
    a, b = inputs(70, 1), inputs(9, 2)
    wanted = whole(a), whole(b)
    attention = Attention(make_runner())
    first = attention(step("EXTEND", [3], [66], [66]), [part(a, 0, 66)])
    both = attention(step("EXTEND", [5, 3], [8, 2], [8, 68]), [part(b, 0, 8), part(a, 66, 68)])
    last = attention(step("DECODE", [3, 5], [1, 1], [69, 9]), [part(a, 68, 69), part(b, 8, 9)])
    same(first, wanted[0][:66])
    same(both, torch.cat((wanted[1][:8], wanted[0][66:68])))
    same(last, torch.cat((wanted[0][68:69], wanted[1][8:9])))


def test_padded_requests_read_and_write_nothing():
    tokens = inputs(5)
    runner = make_runner()
    attention = Attention(runner)
    attention(step("EXTEND", [2], [4], [4]), [part(tokens, 0, 4)])
    before = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal.clone()
    padded = step("DECODE", [2, 0, 0], [1, 1, 1], [5, 1, 1], global_num_tokens_cpu=[3, 3])
    out = attention(padded, [part(tokens, 4, 5), inputs(2, 7)])
    same(out[:1], whole(tokens)[4:])
    assert out[1:].count_nonzero() == 0
    after = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
    changed = (before.nan_to_num(7.0) != after.nan_to_num(7.0)).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[1, 3]], "layer 1's slot of the request, and no other"


def test_an_idle_step_runs_nothing():
    attention = Attention(make_runner())
    batch = step("IDLE", [], [], [])
    attention.backend.init_forward_metadata(batch)
    assert attention.layer(inputs(0), None, batch).shape == (0, VALUE_HEADS * VALUE_DIM)


@pytest.mark.parametrize("graph", [False, True])
def test_a_copy_for_the_prefix_cache_is_the_state_at_that_token(graph):
    tokens = inputs(140)
    runner = make_runner()
    attention = Attention(runner)
    cache = runner.req_to_token_pool.mamba_pool.mamba_cache
    tracked = {"mamba_track_mask": torch.tensor([True, False]), "mamba_track_indices": torch.tensor([10, 11])}
    batch = step(
        "EXTEND", [1, 2], [130, 3], [130, 3], **tracked, mamba_track_aligned_lens=lambda: torch.tensor([128, 64])
    )
    attention(batch, [part(tokens, 0, 130), inputs(3, 5)])
    assert cache.temporal[1, 11].isnan().all()
    runner.req_to_token_pool.req_index_to_mamba_index_mapping[4] = 10
    resumed = attention(step("EXTEND", [4], [12], [140]), [part(tokens, 128, 140)])
    same(resumed, whole(tokens)[128:])

    decode = step("DECODE", [1, 2], [1, 1], [131, 4], **tracked)
    decoded = [part(tokens, 130, 131), inputs(1, 6)]
    if graph:
        attention.backend.init_cuda_graph_state(4, 4)
        attention.backend.init_forward_metadata_out_graph(decode, in_capture=True)
        attention.backend.init_forward_metadata_in_graph(decode)
        attention.run(decode, decoded)
    else:
        attention(decode, decoded)
    assert cache.temporal[1, 11].isnan().all()
    torch.testing.assert_close(cache.temporal[1, 10], cache.temporal[1, 2])
    torch.testing.assert_close(cache.conv[0][1, 10], cache.conv[0][1, 2])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_drafts_are_verified_beside_the_slot_and_what_was_accepted_is_kept(graph, accepted):
    tokens, other = inputs(30), inputs(20, 3)
    runner = make_runner(DRAFTS)
    attention = Attention(runner)
    attention(step("EXTEND", [2, 1], [10, 7], [10, 7]), [part(tokens, 0, 10), part(other, 0, 7)])
    cache = runner.req_to_token_pool.mamba_pool.mamba_cache
    before = cache.temporal.clone(), cache.conv[0].clone()
    batch = step("TARGET_VERIFY", [1, 2], [DRAFTS, DRAFTS], [7, 10])
    drafts = [part(other, 7, 7 + DRAFTS), part(tokens, 10, 10 + DRAFTS)]
    if graph:
        attention.backend.init_cuda_graph_state(4, 4 * DRAFTS)
        static = step("TARGET_VERIFY", [4, 5], [DRAFTS, DRAFTS], [1, 1])
        attention.backend.init_forward_metadata_out_graph(static, in_capture=True)
        attention.backend.init_forward_metadata_out_graph(batch)
        attention.backend.init_forward_metadata_in_graph(batch)
        out = attention.run(batch, drafts)
    else:
        out = attention(batch, drafts)
    same(out, torch.cat((whole(other)[7 : 7 + DRAFTS], whole(tokens)[10 : 10 + DRAFTS])))
    for old, new in zip(before, (cache.temporal, cache.conv[0]), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)), "the slots are as they were"

    last = torch.tensor([accepted, 1])
    attention.hybrid.update_mamba_state_after_mtp_verify(last, torch.tensor([10, 11]), torch.tensor([-1, 0]), None)
    places = 7 + accepted + 1, 12
    following = [part(other, places[0], places[0] + 1), part(tokens, 12, 13)]
    out = attention(step("DECODE", [1, 2], [1, 1], [places[0] + 1, 13]), following)
    same(out, torch.cat((whole(other)[places[0] : places[0] + 1], whole(tokens)[12:13])))
    runner.req_to_token_pool.req_index_to_mamba_index_mapping[4] = 11
    same(attention(step("EXTEND", [4], [3], [14]), [part(tokens, 11, 14)]), whole(tokens)[11:14])
    assert cache.temporal[1, 10].isnan().all()


def test_windows_that_overlap_in_memory_are_its_inputs():
    from atom_plugin.sglang.attention_backend.states import _inputs_of

    rows, channels = 3, 5
    memory = torch.randn(rows, channels, DRAFTS + WIDTH - 2)
    sizes = (rows, DRAFTS, channels, WIDTH - 1)
    windows = memory.as_strided(sizes, (memory.stride(0), 1, memory.stride(1), 1))
    found = _inputs_of(windows)
    assert torch.equal(found, memory.transpose(1, 2))
    assert found.data_ptr() == memory.data_ptr()
    for token in range(DRAFTS):
        assert torch.equal(found[:, token : token + WIDTH - 1], windows[:, token].transpose(1, 2))


def test_a_replay_takes_the_requests_of_its_step():
    tokens = [inputs(8, seed) for seed in range(3)]
    runner = make_runner()
    attention = Attention(runner)
    attention(step("EXTEND", [1, 2, 3], [7] * 3, [7] * 3), [part(each, 0, 7) for each in tokens])
    attention.backend.init_cuda_graph_state(4, 4)
    static = step("DECODE", [0, 0, 0], [1, 1, 1], [1, 1, 1])
    attention.backend.init_forward_metadata_out_graph(static, in_capture=True)
    static.req_pool_indices.copy_(torch.tensor([3, 1, 0]))
    static.seq_lens.copy_(torch.tensor([8, 8, 1]))
    attention.backend.init_forward_metadata_out_graph(static)
    attention.backend.init_forward_metadata_in_graph(static)
    out = attention.run(static, [part(tokens[2], 7, 8), part(tokens[0], 7, 8), inputs(1, 9)])
    same(out[:2], torch.cat((whole(tokens[2])[7:], whole(tokens[0])[7:])))
    assert out[2].count_nonzero() == 0
    assert attention.backend.batch.seq_lens.tolist() == [8, 8, 1]


def test_a_pool_for_other_layers_is_refused():
    runner = make_runner()
    runner.model = torch.nn.ModuleList([make_layer(2)])
    with pytest.raises(ValueError, match=r"Layer 2 .* no room for it \(it has layers \[0, 1, 3\]\): layer_types"):
        Attention(runner)


def test_a_pool_of_another_size_is_refused():
    runner = make_runner()
    layer = make_layer(1)
    layer.mixer.heads = (VALUE_HEADS, 2 * VALUE_DIM)
    spec = StateSpec(((WIDTH - 1, CHANNELS), (VALUE_HEADS, 2 * VALUE_DIM, KEY_DIM)), (torch.float32, torch.bfloat16))
    from atom_plugin.sglang.attention_backend.states import StatePool

    with pytest.raises(ValueError, match=r"SGLang's pool of states has .* in layer 1, and the model keeps"):
        StatePool(runner.req_to_token_pool).check(spec, 1)
