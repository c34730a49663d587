"""What a captured graph begins with, on SGLang's real pools: the batch of an eager step, at each replay anew.

A graph is what is called again: with the tensors that it was captured with, and whatever they hold by then.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atom_core.cache import KeyValueSpec
from atom_core.updates import IncompleteWeights, ModelWeights

pytestmark = pytest.mark.sglang

CONTEXT, REQUESTS, SIZE = 96, 8, 1024
CPU = "cpu"


@pytest.fixture(params=["one pool", "two pools"])
def runner(request):
    """As much of SGLang's runner as the backend looks at."""
    return lambda page_size: make_runner(page_size, request.param == "two pools")


def make_runner(page_size, hybrid):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common = {"page_size": page_size, "dtype": torch.float32, "head_num": 1, "head_dim": 16, "device": CPU}
    if hybrid:
        kv = SWAKVPool(
            size=SIZE,
            size_swa=SIZE,
            swa_attention_layer_ids=[0],
            full_attention_layer_ids=[1],
            **common,
        )
        pages = torch.randperm(SIZE // page_size + 1)
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        kv.register_mapping(torch.cat([slots, torch.tensor([-1])]))
    else:
        kv = MHATokenToKVPool(size=SIZE, layer_num=2, enable_memory_saver=False, **common)
    return SimpleNamespace(
        model=None,  # not one of ours, whose weights are to be complete
        page_size=page_size,
        req_to_token_pool=ReqToTokenPool(REQUESTS, CONTEXT, CPU, False),
        token_to_kv_pool=kv,
        kv_index_translator=SimpleNamespace(is_translating=False),
        model_config=SimpleNamespace(context_len=CONTEXT),
        dtype=torch.float32,
    )


class Batch:
    """Static tensors of a graph for ``count`` requests, and the batch that SGLang hands over with them."""

    def __init__(self, runner, count, mode, new):
        self.runner, self.new = runner, new
        self.fields = {
            "req_pool_indices": torch.zeros(count, dtype=torch.int64),
            "seq_lens": torch.ones(count, dtype=torch.int64),
            "out_cache_loc": torch.zeros(count * new, dtype=torch.int64),
        }
        self.mode, self.count = mode, count

    def fill(self, seed):
        """Other requests, somewhere else."""
        generator = torch.Generator().manual_seed(seed)
        table, page = self.runner.req_to_token_pool.req_to_token, self.runner.page_size
        each = CONTEXT // page
        pages = 1 + torch.randperm(SIZE // page, generator=generator)[: REQUESTS * each].view(REQUESTS, each)
        table[1:] = (pages[..., None] * page + torch.arange(page)).flatten(1).int()
        self.fields["req_pool_indices"].copy_(1 + torch.randperm(REQUESTS, generator=generator)[: self.count])
        self.fields["seq_lens"].copy_(torch.randint(1, CONTEXT - 8, (self.count,), generator=generator))
        slots = torch.randperm(SIZE, generator=generator)[: self.count * self.new]
        self.fields["out_cache_loc"].copy_(slots)

    def forward_batch(self, **others):
        spec = SimpleNamespace(draft_token_num=self.new)
        return SimpleNamespace(
            forward_mode=self.mode, batch_size=self.count, spec_info=spec, seq_lens_cpu=None, **self.fields, **others
        )


def same(found, expected, page_size):
    assert found.query_start_loc.tolist() == expected.query_start_loc.tolist()
    assert found.seq_lens.tolist() == expected.seq_lens.tolist()
    assert found.pages.slots.tolist() == expected.pages.slots.tolist()
    for name in ("num_requests", "num_tokens", "max_query_len", "num_decode_requests", "num_decode_tokens"):
        assert getattr(found, name) == getattr(expected, name), name
    assert int(found.seq_lens.max()) <= found.max_seq_len
    for row, length in enumerate(expected.seq_lens.tolist()):
        pages = -(-length // page_size)
        assert found.pages.table[row, :pages].tolist() == expected.pages.table[row, :pages].tolist()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("mode", "step"), [("DECODE", 0), ("TARGET_VERIFY", 0), ("DECODE", 2)])
def test_each_replay_begins_with_the_metadata_of_an_eager_step(runner, page_size, mode, step):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    made = runner(page_size)
    backend, eager = (AtomAttentionBackend(made, step) for _ in range(2))
    assert not backend.needs_cpu_seq_lens
    new = 1 if mode == "DECODE" else 4
    backend.init_cuda_graph_state(REQUESTS, REQUESTS * new)
    graphs = {count: Batch(made, count, ForwardMode[mode], new) for count in (REQUESTS, 3, 1)}
    for forward_batch in graphs.values():
        backend.init_forward_metadata_out_graph(forward_batch.forward_batch(), in_capture=True)
        backend.init_forward_metadata_in_graph(forward_batch.forward_batch())
    for seed, count in enumerate((3, 1, REQUESTS, 3)):
        forward_batch = graphs[count]
        forward_batch.fill(seed)
        backend.init_forward_metadata_out_graph(forward_batch.forward_batch())
        backend.init_forward_metadata_in_graph(forward_batch.forward_batch())
        eager.init_forward_metadata(forward_batch.forward_batch())
        same(backend.forward_metadata, eager.forward_metadata, page_size)
        same(backend.windowed_metadata, eager.windowed_metadata, page_size)
        assert (backend.windowed_metadata is backend.forward_metadata) == (not backend.pools.hybrid)


def test_behind_drafts_nothing_is_asked_of_the_device(runner):
    """SGLang hands over no lengths on the host then, but how many tokens each request has."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    made = runner(16)
    backend, forward_batch = AtomAttentionBackend(made), Batch(made, 3, ForwardMode.DRAFT_EXTEND_V2, 4)
    forward_batch.fill(0)
    lengths = torch.full((3,), 4, dtype=torch.int32)
    backend.init_forward_metadata(
        forward_batch.forward_batch(extend_seq_lens=lengths, extend_seq_lens_cpu=lengths.tolist())
    )
    found = backend.forward_metadata
    assert (found.num_tokens, found.max_query_len, found.max_seq_len, found.host) == (12, 4, CONTEXT, None)
    assert found.query_start_loc.tolist() == [0, 4, 8, 12]
    assert found.seq_lens.tolist() == forward_batch.fields["seq_lens"].tolist()
    slots = made.req_to_token_pool.req_to_token[forward_batch.fields["req_pool_indices"]]
    pages = slots[:, ::16] // 16
    assert found.pages.table[:, : pages.shape[1]].tolist() == pages.tolist()


def test_padded_requests_have_the_page_of_nobody(runner):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    made = runner(1)
    backend, forward_batch = AtomAttentionBackend(made), Batch(made, 4, ForwardMode.DECODE, 1)
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(forward_batch.forward_batch(), in_capture=True)
    forward_batch.fill(0)
    forward_batch.fields["req_pool_indices"][2:] = 0
    forward_batch.fields["seq_lens"][2:] = backend.get_cuda_graph_seq_len_fill_value()
    backend.init_forward_metadata_in_graph(forward_batch.forward_batch())
    assert backend.forward_metadata.seq_lens[2:].tolist() == [1, 1]
    assert backend.forward_metadata.pages.table[2:, 0].tolist() == [0, 0]


def captured_chain(steps, count):
    """The backends of a chain of drafts whose graph for so many requests is captured, and the graph's batch."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.drafts import ChainDraftBackend

    made = make_runner(1, False)
    made.spec_algorithm = None
    chain = ChainDraftBackend(made, steps)
    chain.init_cuda_graph_state(REQUESTS, REQUESTS)
    forward_batch = Batch(made, count, ForwardMode.DECODE, steps)
    chain.init_forward_metadata_out_graph(forward_batch.forward_batch(), in_capture=True)
    return chain, forward_batch


def test_a_rank_without_requests_replays_what_others_decode():
    """With attention of each rank's own requests SGLang pads such a rank's batch, and leaves its mode as it is."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    count = 3
    chain, forward_batch = captured_chain(4, count)
    captured = [backend.forward_metadata for backend in chain.attn_backends]
    idle = SimpleNamespace(
        **{**vars(forward_batch.forward_batch()), "forward_mode": ForwardMode.IDLE}, num_padding=count
    )
    chain.init_forward_metadata_out_graph(idle)
    chain.init_forward_metadata_in_graph(forward_batch.forward_batch())
    for step, (backend, batch) in enumerate(zip(chain.attn_backends, captured, strict=True)):
        assert backend.forward_metadata.seq_lens.data_ptr() == batch.seq_lens.data_ptr()
        assert backend.forward_metadata.seq_lens.tolist() == [step + 2] * count
        assert backend.forward_metadata.pages.slots.tolist() == [0] * count


def test_no_graph_is_replayed_whose_weights_are_incomplete():
    """A replay runs no code of the model, so that the backend asks in its place."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    class Weights(ModelWeights):
        def check_ready(self):
            if self.missing:
                raise IncompleteWeights("The weights are incomplete")

    weights = Weights(nn.Linear(2, 2))
    weights.missing = False
    made = make_runner(1, False)
    made.model = SimpleNamespace(weights=weights)
    backend = AtomAttentionBackend(made)
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    forward_batch = Batch(made, 1, ForwardMode.DECODE, 1)
    backend.init_forward_metadata_out_graph(forward_batch.forward_batch(), in_capture=True)
    forward_batch.fill(0)
    backend.init_forward_metadata_out_graph(forward_batch.forward_batch())
    weights.missing = True
    with pytest.raises(IncompleteWeights):
        backend.init_forward_metadata_out_graph(forward_batch.forward_batch())


def test_steps_of_a_chain_begin_with_slots_of_their_own():
    steps = 4
    chain, forward_batch = captured_chain(steps, 3)
    assert not chain.needs_cpu_seq_lens
    for seed in (1, 2):
        forward_batch.fill(seed)
        chain.init_forward_metadata_out_graph(forward_batch.forward_batch())
        chain.init_forward_metadata_in_graph(forward_batch.forward_batch())
        # A request's slots lie together, one for each step.
        slots = forward_batch.fields["out_cache_loc"].view(3, steps)
        for step, backend in enumerate(chain.attn_backends):
            assert backend.forward_metadata.pages.slots.tolist() == slots[:, step].tolist()
            lengths = forward_batch.fields["seq_lens"] + step + 1
            assert backend.forward_metadata.seq_lens.tolist() == lengths.tolist()


def test_pages_are_of_what_the_pool_hands_out(runner, monkeypatch):
    from atom_plugin.sglang.attention_backend.kv_view import Pools

    pools = Pools(runner(4))
    for layer in range(2):
        view, again = pools.view(layer), pools.view(layer)
        assert again.key is view.key, "they are not viewed anew in each step"
        keys, values = pools.kv.get_kv_buffer(layer)
        keys[8:12], values[8:12] = 1 + layer, 3 + layer
        assert (view.key[2] == 1 + layer).all()
        assert (view.value[2] == 3 + layer).all()
    moved = torch.full_like(pools.kv.get_key_buffer(1), 7)
    monkeypatch.setattr(pools.kv, "get_key_buffer", lambda layer: moved)
    assert (pools.view(1).key == 7).all()
    assert (pools.view(1).value[2] == 4).all()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("longest", [1, 5, CONTEXT])
def test_tables_of_steps_outside_graphs_are_of_widths_that_kernels_are_compiled_for_once(runner, page_size, longest):
    from atom_plugin.sglang.attention_backend.kv_view import Pools

    pools, requests = Pools(runner(page_size)), torch.tensor([2, 1])
    slots = torch.arange(pools.req_to_token.numel(), dtype=torch.int32).view_as(pools.req_to_token) * page_size
    pools.req_to_token.copy_(slots)
    table = pools.page_table(requests, longest)
    pages = pools.num_pages(longest)
    assert table.is_contiguous()
    assert table.shape[1] % 16 == 0
    assert torch.equal(table[:, :pages], slots[requests][:, ::page_size][:, :pages] // page_size)


def decoding():
    """A backend over a pool of random numbers that has planned a step of three decodes, and this step."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    made = make_runner(1, hybrid=False)
    backend, forward_batch = AtomAttentionBackend(made), Batch(made, 3, ForwardMode.DECODE, 1)
    forward_batch.fill(0)
    for layer in range(2):
        for rows in made.token_to_kv_pool.get_kv_buffer(layer):
            rows.normal_()
    backend.init_forward_metadata(forward_batch.forward_batch())
    return backend, forward_batch


@pytest.mark.parametrize("ours", [True, False], ids=["our layer", "sglang's layer"])
def test_answers_go_where_sglang_wants_them(monkeypatch, ours):
    """What a captured piece of a prompt reads, in front of padded rows."""
    from sglang.srt.layers.radix_attention import RadixAttention as HostAttention

    from atom_plugin.sglang.attention import SglangRadixAttention

    def run(inputs, positions, batch, cache, out):
        out.copy_(2 * inputs[0].view_as(out))

    backend, forward_batch = decoding()
    q = torch.randn(3, 16)
    host = HostAttention(1, 16, 0.25, 1, layer_id=1)
    given = {}
    if ours:
        layer = SglangRadixAttention.__new__(SglangRadixAttention)
        spec = KeyValueSpec(1, 16, torch.float32)
        mixer = SimpleNamespace(
            layer_index=1,
            heads=(1, 16),
            cache_spec=spec,
            plan_key=lambda: None,
            run=run,
            empty_output=lambda inputs: inputs[0].new_empty(len(inputs[0]), 1, 16),
        )
        torch.nn.Module.__init__(layer)
        layer.mixer = mixer
        given = {"atom_layer": layer, "atom_inputs": (q, torch.zeros(3))}

    def attend(**others):
        return backend.forward_extend(
            q, None, None, host, forward_batch.forward_batch(**others), save_kv_cache=False, **given
        )

    wanted = attend()
    padded = torch.full((5, 16), 7.0)
    found = attend(_attn_output=padded[:3])
    assert found.data_ptr() == padded.data_ptr(), "SGLang copies what lies elsewhere"
    assert torch.equal(padded[:3], wanted)
    assert (padded[3:] == 7).all()


@pytest.fixture
def native_layer():
    """How a layer of SGLang's own attends on our backend: `attend(scale, **changes of the batch)`."""
    from sglang.srt.layers.radix_attention import RadixAttention as HostAttention

    backend, batch = decoding()
    q, k, v = torch.randn(3, 3, 16)

    def attend(scale=None, **changes):
        host = HostAttention(1, 16, 0.25, 1, layer_id=1)
        if scale is not None:
            host.k_scale, host.k_scale_float = torch.tensor(scale), scale
            host.v_scale, host.v_scale_float = torch.tensor(scale), scale
        step = SimpleNamespace(**{**vars(batch.forward_batch(out_cache_loc_is_physical=False)), **changes})
        return backend.forward_extend(q, k.clone().unsqueeze(1), v.clone().unsqueeze(1), host, step)

    return attend


def test_scales_of_a_checkpoint_count_in_fp8_caches_alone(native_layer):
    """SGLang's pool divides by them where it stores another dtype."""
    assert torch.equal(native_layer(scale=0.5), native_layer())


def test_a_prompt_that_only_other_ranks_have_reads_no_page(native_layer):
    """SGLang may make it longer than any sequence."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    step = {"forward_mode": ForwardMode.EXTEND, "global_num_token_non_padded_cpu": 0}
    assert not native_layer(**step).any()


def test_the_first_layer_of_a_kind_plans_a_step_for_all_of_them(runner):
    """Each replay anew, and once for each pool, whose pages are others."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention_backend.backend import AtomAttentionBackend

    made, plans = runner(1), []

    def layer(index, key="kind"):
        spec = KeyValueSpec(1, 16, torch.float32)
        return SimpleNamespace(layer_index=index, cache_spec=spec, plan_key=lambda: key, plan=planned)

    def planned(batch):
        plans.append(batch.pages)
        return len(plans)

    backend = AtomAttentionBackend(made)
    backend.init_cuda_graph_state(REQUESTS, REQUESTS)
    forward_batch = Batch(made, 3, ForwardMode.DECODE, 1).forward_batch()
    pools = 1 + backend.pools.hybrid
    for step in range(3):
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=step == 0)
        found = [backend.lookup(layer(index))[0] for index in (0, 1, 0, 1)]
        assert [batch.plans["kind"] for batch in found[2:]] == [batch.plans["kind"] for batch in found[:2]]
        assert len(plans) == (step + 1) * pools
        assert all(plans[batch.plans["kind"] - 1] is batch.pages for batch in found)
        assert backend.lookup(layer(1, key=None))[0] is backend.forward_metadata
