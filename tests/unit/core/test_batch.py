"""The parts of a batch: requests that decode, and those behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.batch import Batch, Blocks, HostLengths, Snapshots, States


def batch_of(*queries, decodes, columns=1, **fields):
    """A batch of these new tokens, whose first requests decode."""
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    return Batch(
        query_start_loc=starts,
        seq_lens=torch.tensor(queries, dtype=torch.int32),
        num_requests=len(queries),
        num_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(queries),
        num_decode_requests=decodes,
        num_decode_tokens=sum(queries[:decodes]),
        states=States(torch.arange(1, len(queries) * columns + 1, dtype=torch.int32).view(-1, columns), **fields),
    )


def test_states_go_with_their_requests():
    """Decodes keep what they verify; the others' tensors are aligned as any that are made anew, and verify nothing."""
    numbers = torch.arange(10, 15, dtype=torch.int32)
    batch = batch_of(2, 2, 9, 1, 30, decodes=2, columns=2)
    states = States(
        batch.states.slots,
        num_accepted=numbers,
        verifies=torch.tensor([True, False, False, False, False]),
        snapshots=Snapshots(numbers + 10, numbers + 20),
    )
    decodes, others = replace(batch, states=states).decodes_and_others()
    assert decodes.states.slots.tolist() == [[1, 2], [3, 4]]
    assert others.states.slots.tolist() == [[5, 6], [7, 8], [9, 10]]
    assert (decodes.states.num_accepted.tolist(), others.states.num_accepted.tolist()) == ([10, 11], [12, 13, 14])
    assert (decodes.states.verifies.tolist(), others.states.verifies) == ([True, False], None)
    assert (decodes.states.snapshots.slots.tolist(), others.states.snapshots.tokens.tolist()) == (
        [20, 21],
        [32, 33, 34],
    )
    assert others.states.slots.storage_offset() == others.states.snapshots.slots.storage_offset() == 0
    assert others.query_start_loc.tolist() == [0, 9, 10, 40]


def test_what_a_batch_does_not_say_its_parts_do_not_either():
    batch = replace(batch_of(1, 9, decodes=1), states=None)
    for part in batch.decodes_and_others():
        assert part.states is None
    states = States(torch.ones(2, 1, dtype=torch.int32))
    for part in replace(batch, states=states).decodes_and_others():
        assert (part.states.num_accepted, part.states.verifies, part.states.snapshots) == (None, None, None)


@pytest.mark.parametrize(
    ("queries", "columns", "known", "bound"),
    [
        ((1, 1, 40), 4, False, 1),
        ((3, 2, 40), 4, True, 3),
        ((3, 2, 40), 4, False, 4),  # a slot a token
        ((3, 2, 40), 1, False, 40),
    ],
)
def test_decodes_have_few_tokens_though_others_have_many(queries, columns, known, bound):
    batch = batch_of(*queries, decodes=2, columns=columns)
    host = HostLengths(batch.query_start_loc.tolist(), queries) if known else None
    decodes, others = replace(batch, host=host).decodes_and_others()
    assert decodes.max_query_len == bound
    assert others.max_query_len == 40


def test_in_a_prefix_cache_the_slots_of_a_request_begin_at_its_newest_block():
    table = torch.arange(40, dtype=torch.int32).view(5, 8)
    states = States(table, blocks=Blocks(16, num_slots=2))
    lengths = torch.tensor([1, 16, 17, 50, 0])
    assert states.num_slots == 2
    assert states.slots_of(lengths).tolist() == [[0, 1], [8, 9], [17, 18], [27, 28], [32, 33]]
    plain = States(table[:, :3])
    assert (plain.num_slots, plain.slots_of(lengths).tolist()) == (3, table[:, :3].tolist())
    batch = replace(batch_of(2, 2, 40, 3, 1, decodes=2), states=states)
    decodes, others = batch.decodes_and_others()
    assert decodes.max_query_len == 2, "as many as slots, not as columns"
    assert others.states.blocks == states.blocks


def test_a_batch_for_other_slots_differs_in_nothing_else():
    batch = batch_of(1, 1, 9, decodes=2, verifies=torch.tensor([True, False, False])).with_plans({"a": 1})
    batch.scratch["made"] = 1
    slots = torch.arange(7, 10, dtype=torch.int32)[:, None]
    other = batch.with_slots(slots)
    assert other.states.slots is slots
    assert other.scratch == {}
    assert replace(other, states=batch.states) == batch
    assert replace(other.states, slots=batch.states.slots) == batch.states
    assert batch.with_plans({"b": 2}).scratch is batch.scratch
