"""When vLLM is asked to move the states of requests: in all steps in which it would find one to move."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from atom_plugin.vllm.hybrid_model_state import AtomHybridModelState

pytestmark = [pytest.mark.vllm, pytest.mark.smoke]

ROWS, BLOCK = 6, 32


class Theirs:
    """In place of vLLM's state: its table of columns, as its kernels keep it on the GPU, and what they do."""

    def __init__(self, monkeypatch, drafts, mode):
        self.columns = np.full(ROWS, -1)
        self.asked, self.moved, self.counted = 0, 0, 0
        config = SimpleNamespace(
            speculative_config=SimpleNamespace() if drafts else None,
            cache_config=SimpleNamespace(mamba_cache_mode=mode, mamba_block_size=BLOCK),
        )

        def init(state):
            state.vllm_config, state.max_num_reqs = config, ROWS

        for name, function in {
            "__init__": init,
            "add_request": lambda state, row, data: self.add(row, data),
            "preprocess_state": lambda state, batch, *rest: self.move(batch),
            "postprocess_state": lambda state, *rest: self.count(),
            "_get_mamba_group_info": lambda state, groups: ([1], SimpleNamespace(block_size=BLOCK)),
        }.items():
            monkeypatch.setattr(MambaHybridModelState, name, function)
        self.ours = AtomHybridModelState()

    def add(self, row, data):
        self.columns[row] = (data.num_computed_tokens - 1) // BLOCK

    def would_move(self, rows, lengths):
        """The requests whose states it moves, or begins in another column than it knows of."""
        return [row for row, length in zip(rows, lengths, strict=True) if self.columns[row] != -(-length // BLOCK) - 1]

    def move(self, batch):
        self.asked += 1
        rows, lengths = batch.idx_mapping_np, batch.seq_lens_cpu_upper_bound[: batch.num_reqs].tolist()
        self.moved += len(self.would_move(rows, lengths))
        self.columns[rows] = [-(-length // BLOCK) - 1 for length in lengths]

    def count(self):
        self.counted += 1

    def step(self, rows, lengths):
        """A step after which these requests have these lengths; behind them is a padded row."""
        bound = torch.tensor([*lengths, 0], dtype=torch.int32)
        mapping = np.array(rows, dtype=np.int32)
        batch = SimpleNamespace(num_reqs=len(rows), idx_mapping_np=mapping, seq_lens_cpu_upper_bound=bound)
        self.ours.preprocess_state(batch, (), None, None)
        self.ours.postprocess_state(None, None, None)


@pytest.mark.parametrize("seed", range(5))
def test_each_state_that_goes_on_to_another_block_is_moved(monkeypatch, seed):
    theirs, chance = Theirs(monkeypatch, False, "align"), random.Random(seed)
    lengths: dict[int, int] = {}
    must, steps = 0, 2000
    for _ in range(steps):
        for row in range(ROWS):
            if row not in lengths and chance.random() < 0.05:  # cold, or behind a cached prefix
                lengths[row] = BLOCK * chance.choice([0, 0, 1, 3])
                theirs.ours.add_request(row, SimpleNamespace(num_computed_tokens=lengths[row]))
            elif row in lengths and chance.random() < 0.01:  # ended, or preempted
                del lengths[row]
        rows = chance.sample(list(lengths), chance.randint(0, len(lengths)))
        after = [lengths[row] + (1 if chance.random() < 0.9 else chance.randint(1, 3 * BLOCK)) for row in rows]
        must += len(theirs.would_move(rows, after))
        theirs.step(rows, after)
        assert not theirs.would_move(rows, after), "it knows where the states are"
        lengths.update(zip(rows, after, strict=True))
    assert theirs.moved == must > 0
    assert theirs.asked < steps / 2
    assert theirs.counted == 0


@pytest.mark.parametrize(("drafts", "mode"), [(True, "align"), (True, "none"), (False, "none")])
def test_otherwise_vllm_does_what_it_does(monkeypatch, drafts, mode):
    theirs = Theirs(monkeypatch, drafts, mode)
    theirs.ours.add_request(2, SimpleNamespace(num_computed_tokens=0))
    for length in (5, 6, 7):
        theirs.step([2], [length])
    assert theirs.asked == 3
    assert theirs.counted == (3 if drafts else 0)
