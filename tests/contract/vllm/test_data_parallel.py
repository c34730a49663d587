"""Exchanges of data-parallel ranks over vLLM's group, with ranks that are threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import DPMetadata, override_forward_context

from atom_plugin.vllm.data_parallel import VllmDataParallelGroup
from tests.unit.core.ranks import OnGpu, on_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

COUNTS = [[3, 3], [5, 2, 1], [1, 4]]
WIDTH, CHOSEN = 8, 2


class Group:
    """What is used of vLLM's group; on GPUs without a library of NCCL's it has an all-gather and an all-reduce."""

    device_communicator = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=True))

    def __init__(self, ranks):
        self.ranks, self.rank_in_group, self.world_size = ranks, ranks.rank, ranks.world_size
        self.all_reduce = ranks.all_reduce

    def all_gather(self, rows, dim):
        return self.ranks.all_gather(rows.as_subclass(torch.Tensor), dim)


class Nccl(Group):
    """The same with NCCL's exchanges of different numbers of rows."""

    device_communicator = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=False))

    def all_gather(self, rows, dim):
        raise AssertionError("rows are not padded where that is not needed")

    def all_gatherv(self, rows, dim, sizes):
        assert all(len(each) == sizes[self.rank_in_group] for each in rows)
        return [self.ranks.all_gather(each.as_subclass(torch.Tensor), dim) for each in rows]

    def reduce_scatterv(self, x, dim, sizes):
        return self.ranks.all_reduce(x).split(sizes)[self.rank_in_group]


class NoCommunicator(Group):
    """vLLM's CPU communicator has nothing of NCCL's."""

    device_communicator = SimpleNamespace()


def rows_of(rank, count, kind):
    """A data-parallel rank's hidden states, and the weights and numbers of the experts that it has chosen."""
    made = torch.Generator().manual_seed(rank)
    hidden, weights = (torch.randn(count, width, generator=made) for width in (WIDTH, CHOSEN))
    return [each.as_subclass(kind) for each in (hidden, weights, torch.randint(99, (count, CHOSEN), generator=made))]


@pytest.mark.parametrize(("group", "kind"), [(Group, OnGpu), (Nccl, OnGpu), (NoCommunicator, torch.Tensor)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_all_see_the_rows_of_all_and_have_their_own_of_the_sum(counts, group, kind):
    parts = torch.randint(9, (len(counts), sum(counts), WIDTH)).float()

    def work(ranks):
        dp = VllmDataParallelGroup(group(ranks))
        gathered = dp.gather(*rows_of(ranks.rank, counts[ranks.rank], kind))
        return gathered, dp.reduce(parts[ranks.rank].clone().as_subclass(kind))

    made = [rows_of(rank, count, torch.Tensor) for rank, count in enumerate(counts)]
    everyone = [torch.cat(each) for each in zip(*made, strict=True)]
    with override_forward_context(SimpleNamespace(dp_metadata=DPMetadata(torch.tensor(counts)))):
        found = on_ranks(len(counts), work)
    for (gathered, reduced), expected in zip(found, parts.sum(0).split(counts), strict=True):
        for one, other in zip(gathered, everyone, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(reduced, expected)


def test_rows_that_were_not_announced_are_our_mistake():
    dp = VllmDataParallelGroup(Group(SimpleNamespace(rank=0, world_size=2, all_reduce=None)))
    context = SimpleNamespace(dp_metadata=DPMetadata(torch.tensor([2, 2])))
    with override_forward_context(context), pytest.raises(AssertionError, match="2, 2"):
        dp.gather(torch.ones(3, WIDTH))
