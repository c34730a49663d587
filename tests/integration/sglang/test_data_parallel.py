"""Exchanges of attention groups over one group of all ranks, with ranks that are threads; and steps without a token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.unit.core.ranks import OnGpu, on_ranks

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

#: Ranks of an attention group, and the rows that each attention group has.
CASES = [
    (1, [3, 3]),
    (1, [5, 2, 1]),
    (1, [4, 0]),
    (1, [0, 1, 0]),
    (2, [4, 4]),
    (2, [6, 2]),
    (2, [0, 4]),
    (2, [1, 3]),
    (4, [2, 5]),
]
WIDTH, CHOSEN = 8, 2
#: A rank that no other one answers.
ALONE = SimpleNamespace(rank=1, world_size=2, all_reduce=None, all_gather=None)


class Group:
    """What is used of SGLang's group, of ranks without a GPU."""

    pynccl_comm = None

    def __init__(self, ranks):
        self.rank_in_group, self.world_size = ranks.rank, ranks.world_size
        self.all_reduce, self.all_gather = ranks.all_reduce, ranks.all_gather


class Nccl(Group):
    """The same with NCCL's exchanges of different numbers of rows."""

    pynccl_comm = "there is one"

    def __init__(self, ranks):
        super().__init__(ranks)
        self.ranks = ranks

    def all_gatherv(self, rows, sizes):
        assert all(each.is_contiguous() and len(each) == sizes[self.rank_in_group] for each in rows)
        return [self.ranks.all_gather(each, 0) for each in rows]

    def reduce_scatterv(self, x, sizes):
        return self.ranks.all_reduce(x).split(sizes)[self.rank_in_group]


def group_of(ranks, kind, width, counts, monkeypatch):
    from atom_plugin.sglang.data_parallel import SglangDataParallelGroup

    dp = SglangDataParallelGroup(kind(ranks), width, lambda: counts)
    monkeypatch.setattr(SglangDataParallelGroup, "_has_nccl", lambda self, x: kind is Nccl)
    return dp


def rows_of(rank, count):
    """What a model has: all ranks of an attention group the same; a row in the place of none."""
    made = torch.Generator().manual_seed(rank)
    count = count or 1
    hidden, weights = (torch.randn(count, width, generator=made) for width in (WIDTH, CHOSEN))
    return hidden, weights, torch.randint(99, (count, CHOSEN), generator=made)


@pytest.mark.parametrize("kind", [Group, Nccl])
@pytest.mark.parametrize(("width", "counts"), CASES)
def test_all_see_the_rows_of_all_in_order(width, counts, kind, monkeypatch):
    def work(ranks):
        dp = group_of(ranks, kind, width, counts, monkeypatch)
        assert (dp.rank, dp.world_size) == (ranks.rank // width, len(counts))
        return dp.gather(*rows_of(dp.rank, counts[dp.rank]))

    made = [[each[:count] for each in rows_of(rank, count)] for rank, count in enumerate(counts)]
    expected = [torch.cat(each) for each in zip(*made, strict=True)]
    for found in on_ranks(width * len(counts), work):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Group, Nccl])
@pytest.mark.parametrize(("width", "counts"), CASES)
def test_each_group_sums_up_to_its_rows_of_the_sum(width, counts, kind, monkeypatch):
    parts = torch.randint(9, (width * len(counts), sum(counts), WIDTH)).float()

    def work(ranks):
        dp = group_of(ranks, kind, width, counts, monkeypatch)
        return dp.reduce(parts[ranks.rank].clone())

    found = on_ranks(width * len(counts), work)
    for rank, (count, expected) in enumerate(zip(counts, parts.sum(0).split(counts), strict=True)):
        own = torch.stack(found[rank * width : (rank + 1) * width]).sum(0)
        assert torch.equal(own, expected if count else torch.zeros(1, WIDTH))


class Equal(Group):
    """On GPUs where SGLang has found no library of NCCL's: equal numbers of rows are exchanged through torch."""

    pynccl_comm = SimpleNamespace(available=False)

    def __init__(self, ranks):
        super().__init__(ranks)
        self.ranks = ranks

    def reduce_scatter_tensor(self, output, x):
        output.copy_(self.ranks.reduce_scatter(x.as_subclass(torch.Tensor), 0))


@pytest.mark.parametrize("counts", [[3, 3], [5, 2]], ids=str)
def test_on_gpus_without_a_library_of_nccls(counts):
    from atom_plugin.sglang.data_parallel import SglangDataParallelGroup

    parts = torch.randint(9, (2, sum(counts), WIDTH)).float()

    def work(ranks):
        dp = SglangDataParallelGroup(Equal(ranks), 1, lambda: counts)
        rows = parts[ranks.rank][: counts[ranks.rank]].as_subclass(OnGpu)
        return *dp.gather(rows), dp.reduce(parts[ranks.rank].clone().as_subclass(OnGpu))

    for rank, (gathered, reduced) in enumerate(on_ranks(2, work)):
        assert torch.equal(gathered, torch.cat([parts[each][:count] for each, count in enumerate(counts)]))
        assert torch.equal(reduced, parts.sum(0).split(counts)[rank])


@pytest.mark.parametrize(
    ("communicator", "has"),
    [(None, False), (SimpleNamespace(available=False), False), (SimpleNamespace(available=True), True)],
)
def test_whose_exchanges_are_used_on_gpus(communicator, has):
    from atom_plugin.sglang.data_parallel import SglangDataParallelGroup

    group = Group(ALONE)
    group.pynccl_comm = communicator
    dp = SglangDataParallelGroup(group, 1)
    assert dp._has_nccl(torch.empty(0).as_subclass(OnGpu)) is has
    assert not dp._has_nccl(torch.empty(0))


def test_what_nobody_sees_reaches_nobody(monkeypatch):
    counts = [2, 0]

    def work(ranks):
        dp = group_of(ranks, Group, 1, counts, monkeypatch)
        hidden = torch.full((counts[ranks.rank] or 1, WIDTH), 1.0 if counts[ranks.rank] else torch.nan)
        (everyone,) = dp.gather(hidden)
        return dp.reduce(everyone)

    first, second = on_ranks(2, work)
    assert torch.equal(first, torch.full((2, WIDTH), 2.0))
    assert torch.equal(second, torch.zeros(1, WIDTH))


def test_where_none_has_a_token_nothing_is_exchanged(monkeypatch):
    dp = group_of(ALONE, Group, 1, [0, 0], monkeypatch)
    row = torch.ones(1, WIDTH)
    assert dp.gather(row)[0] is row
    assert dp.reduce(row) is row


def test_rows_that_were_not_announced_are_our_mistake(monkeypatch):
    dp = group_of(
        SimpleNamespace(rank=0, world_size=2, all_reduce=None, all_gather=None), Group, 1, [2, 2], monkeypatch
    )
    with pytest.raises(AssertionError, match="2, 2"):
        dp.gather(torch.ones(3, WIDTH))


class Decoder:
    """What notes how many rows it is given, and answers with as many."""

    def __init__(self, answer, is_first=True):
        self.answer, self.is_first, self.given = answer, is_first, []

    def named_children(self):
        return ()

    def __call__(self, input_ids, positions, step, embeds, carried):
        self.given.append([len(each) for each in (input_ids, positions, embeds) if each is not None])
        if carried is not None:
            self.given[-1] += [len(carried.hidden), len(carried.residual)]
        return self.answer(len(positions))


def none(*shape):
    return torch.empty(0, *shape)


def test_a_step_without_tokens_runs_one_that_nobody_sees():
    from atom_plugin.sglang.body import Body

    core = Decoder(lambda count: torch.ones(count, WIDTH))
    body = Body(core)
    assert body.forward(none().long(), none().long(), None).shape == (0, WIDTH)
    assert body.forward(None, none().long(), None, none(WIDTH)).shape == (0, WIDTH)
    assert body.forward(torch.zeros(3).long(), torch.zeros(3).long(), None).shape == (3, WIDTH)
    assert core.given == [[1, 1], [1, 1], [3, 3]]


def test_so_do_pipeline_stages():
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    from atom_core.models.decoder import Carried
    from atom_plugin.sglang.body import Body

    core = Decoder(lambda count: Carried(torch.ones(count, WIDTH), torch.ones(count, WIDTH)), is_first=False)
    given = PPProxyTensors({"hidden_states": none(WIDTH), "residual": none(WIDTH)})
    passed = Body(core).forward(None, none().long(), None, pp_proxy_tensors=given)
    assert [passed[name].shape for name in ("hidden_states", "residual")] == [(0, WIDTH)] * 2
    assert core.given == [[1, 1, 1]]


def test_the_first_pipeline_stage_embeds_tokens_whatever_it_is_given():
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    from atom_core.models.decoder import Carried
    from atom_plugin.sglang.body import Body

    core = Decoder(lambda count: Carried(torch.ones(count, WIDTH), torch.ones(count, WIDTH)))
    captured_with = PPProxyTensors({"hidden_states": torch.zeros(3, WIDTH), "residual": torch.zeros(3, WIDTH)})
    Body(core).forward(torch.zeros(3).long(), torch.zeros(3).long(), None, pp_proxy_tensors=captured_with)
    assert core.given == [[3, 3]]  # ids and positions, nothing carried


def test_the_head_is_not_asked_about_nothing():
    from atom_plugin.sglang.causal_lm import HeadMethod

    class Head:
        vocab_size, dtype = 11, torch.float32

        def __call__(self, hidden):
            assert len(hidden)
            return hidden @ torch.ones(WIDTH, 11)

    empty = HeadMethod().apply(Head(), none(WIDTH).bfloat16())
    assert (empty.shape, empty.dtype) == ((0, 11), torch.float32)
    assert HeadMethod().apply(Head(), torch.ones(2, WIDTH)).shape == (2, 11)


@pytest.mark.parametrize(
    ("mode", "tokens", "expected"),
    [
        ("IDLE", None, True),
        ("EXTEND", 0, True),
        ("EXTEND", 3, False),
        ("EXTEND", None, False),
        ("DECODE", 0, False),
        ("TARGET_VERIFY", 0, False),
        ("DRAFT_EXTEND_V2", 0, False),
    ],
)
def test_attention_is_left_out_where_no_row_is_a_token(mode, tokens, expected):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from atom_plugin.sglang.attention import has_no_token

    step = SimpleNamespace(forward_mode=ForwardMode[mode], global_num_token_non_padded_cpu=tokens)
    assert has_no_token(step) == expected
