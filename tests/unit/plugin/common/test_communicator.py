"""What is known of a framework's group before kernels read its ranks' memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atom_plugin.common.communicator import GroupCommunicator, why_out_of_reach


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, a and b, that read each other's memory, and c, which the others do not."""
    names = ["a", "b", "c"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=names[torch.device(device).index])
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one, other))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([("h", "a"), ("h", "b")], None),
        ([("h", "a"), ("g", "b")], "several hosts"),
        ([("h", "a"), ("h", "a")], "Ranks 0 and 1 share a GPU"),
        ([("h", "a"), ("h", "c")], "rank 0 cannot read the memory of the GPU of rank 1"),
        ([("h", "a"), ("h", "d")], "does not see the GPU of rank 1: CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_are_out_of_reach_are_told_in_words(places, reason):
    found = why_out_of_reach(0, places)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cuda:0", 1)])
def test_groups_without_gpus_ask_no_one(device, world_size):
    group = SimpleNamespace(rank_in_group=0, world_size=world_size, device=torch.device(device))
    assert "several GPUs" in GroupCommunicator(group).why_no_peer_memory()


def test_peer_memory_is_left_alone_where_the_framework_is_told_to():
    group = SimpleNamespace(rank_in_group=0, world_size=2, device=torch.device("cuda:0"))
    reason = GroupCommunicator(group, reads_peers=False).why_no_peer_memory()
    assert "--disable-custom-all-reduce" in reason
