"""Gated DeltaNet's states under load: slots are used again, drafts verified, and states copied for cached prefixes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from atom_core.batch import Snapshots
from atom_core.kernels.gated_delta_net.reference import causal_conv, gated_delta_rule, gated_rms_norm, gates
from tests.unit.core.mixers.test_gated_delta_net import DRAFTS, KEYS, NAN, SPEC, VALUES, K, Layer, V

REQUESTS = 10_000
#: Tokens of the longest request.
LONGEST = 9
#: Requests that run at a time, each with a slot of its own and one for each draft; and states that are kept.
AT_ONCE, KEPT = 6, 8
COLUMNS = 1 + DRAFTS


def side_by_side(layer: Layer, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
    """The outputs ``[T, R, Hv V]`` of ``R`` requests, by the definition: ``R`` times as many heads."""
    weights, many = layer.weights, qkvz.shape[1]
    inputs, z = qkvz[..., : SPEC.channels], qkvz[..., SPEC.channels :].unflatten(-1, (VALUES, V))
    mixed, _ = causal_conv(
        inputs.flatten(1),
        weights.conv.repeat(many, 1),
        torch.zeros(SPEC.conv_width - 1, many * SPEC.channels),
    )
    q, k, v = mixed.unflatten(1, (many, -1)).split((KEYS * K, KEYS * K, VALUES * V), -1)
    b, a = (it.flatten(1) for it in ba.split(VALUES, -1))
    g, beta = gates(a, b, weights.a_log.repeat(many), weights.dt_bias.repeat(many))
    keys, queries = (it.reshape(len(it), many * KEYS, K) for it in (k, q))
    values = v.reshape(len(v), many * VALUES, V)
    out, _ = gated_delta_rule(queries, keys, values, g, beta, torch.zeros(many * VALUES, V, K))
    return gated_rms_norm(out.unflatten(1, (many, VALUES)), z, weights.norm, weights.eps).flatten(2)


@dataclass
class Request:
    """One that runs: ``done`` of its ``total`` tokens are computed and accepted."""

    seed: int
    total: int
    done: int
    slots: list[int]
    accepted: int = 1


@dataclass
class Row:
    """What a request has in a step: ``count`` tokens of its own, then drafts that are wrong."""

    request: Request
    count: int
    wrong: int = 0
    verifies: bool = False
    copy_to: int = 0
    copy_after: int = 0


@dataclass
class Load:
    """A scheduler of requests that come in order, and its prefix cache of states."""

    chance: random.Random
    layer: Layer
    free: list[int]
    running: list[Request] = field(default_factory=list)
    #: Slots of states that are kept, by request and number of tokens.
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("ended", "stopped", "verified", "hits"), 0))

    def take(self) -> int:
        """A slot that nobody has."""
        return self.free.pop(self.chance.randrange(len(self.free)))

    def give(self, slots: list[int]) -> None:
        """Free slots; nobody finds in them what they had."""
        for tensor in self.layer.pool.tensors:
            tensor[slots] = NAN
        self.free += slots

    def begin(self, seed: int) -> None:
        """A request with slots of its own, behind tokens whose state is kept, if there is one."""
        request = Request(seed, self.chance.randint(1, LONGEST), 0, [self.take() for _ in range(COLUMNS)])
        found = [(tokens, slot) for (of, tokens), slot in self.kept.items() if of == seed and tokens < request.total]
        if found:
            request.done, slot = max(found)
            self.counts["hits"] += 1
            for tensor in self.layer.pool.tensors:
                tensor[request.slots[0]] = tensor[slot]
        self.running.append(request)

    def end(self, request: Request) -> None:
        """Of one that has all its tokens, or is stopped."""
        self.running.remove(request)
        self.give(request.slots)

    def row(self, request: Request) -> Row:
        """A part of the request's prompt, maybe with a copy of a state inside it, or drafts to be verified."""
        left = request.total - request.done
        if request.done and self.chance.random() < 0.5:
            count = min(left, self.chance.randint(1, COLUMNS))
            return Row(request, count, self.chance.randint(0, COLUMNS - count), verifies=True)
        row = Row(request, min(left, self.chance.randint(1, 5)))
        if self.chance.random() < 0.2:
            if len(self.kept) == KEPT:
                self.give([self.kept.pop(next(iter(self.kept)))])
            after = self.chance.randint(1, row.count)
            key = request.seed, request.done + after
            if key not in self.kept:
                row.copy_after, row.copy_to = after, self.take()
                self.kept[key] = row.copy_to
        return row


@torch.inference_mode()
def test_slots_are_freed_and_used_again_under_load():
    """Requests come and go in chunks of any size, with drafts of which some are right, ahead of states that are kept.

    What a slot had before is NaN, and so is slot 0.
    """
    chance, layer = random.Random(0), Layer(slots=AT_ONCE * COLUMNS + KEPT, drafts=DRAFTS)
    load = Load(chance, layer, list(range(1, AT_ONCE * COLUMNS + KEPT + 1)))
    generator = torch.Generator().manual_seed(0)
    qkvz = torch.randn(LONGEST, REQUESTS, SPEC.channels + VALUES * V, generator=generator)
    ba = torch.randn(LONGEST, REQUESTS, 2 * VALUES, generator=generator)
    truth, wrong = side_by_side(layer, qkvz, ba), (qkvz[:, 0].flip(1), ba[:, 0].flip(1))
    waiting = iter(range(REQUESTS))
    while True:
        while len(load.running) < AT_ONCE and (seed := next(waiting, None)) is not None:
            asked_before = load.kept and chance.random() < 0.3
            load.begin(chance.choice([of for of, _ in load.kept]) if asked_before else seed)
        if not load.running:
            break
        chosen = chance.sample(load.running, chance.randint(1, len(load.running)))
        rows = [load.row(request) for request in chosen]
        inputs = [
            tuple(
                torch.cat((all_of[row.request.done : row.request.done + row.count, row.request.seed], bad[: row.wrong]))
                for all_of, bad in zip((qkvz, ba), wrong, strict=True)
            )
            for row in rows
        ]
        # A padded row, with a padded token or none, as in captured graphs.
        padded = chance.randint(0, 1)
        outputs = layer.step(
            [*inputs, tuple(it[:padded] for it in wrong)],
            [*(row.request.slots for row in rows), [0] * COLUMNS],
            [*(row.request.done > 0 for row in rows), False],
            num_accepted=torch.tensor([*(row.request.accepted for row in rows), 1], dtype=torch.int32),
            verifies=torch.tensor([*(row.verifies for row in rows), False]),
            snapshots=Snapshots(
                torch.tensor([*(row.copy_to for row in rows), 0], dtype=torch.int32),
                torch.tensor([*(row.copy_after for row in rows), 0], dtype=torch.int32),
            ),
        )
        found = torch.cat([out[: row.count] for row, out in zip(rows, outputs, strict=False)])
        expected = [truth[it.request.done : it.request.done + it.count, it.request.seed] for it in rows]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
        for row in rows:
            request = row.request
            request.done += row.count
            request.accepted = row.count if row.verifies else 1
            load.counts["verified"] += row.verifies
            if request.done == request.total or chance.random() < 0.05:
                load.counts["ended" if request.done == request.total else "stopped"] += 1
                load.end(request)
        assert all(tensor[[0, *load.free]].isnan().all() for tensor in layer.pool.tensors)
    assert load.counts["ended"] > 0.8 * REQUESTS
    assert load.counts["stopped"] > 0.03 * REQUESTS
    assert load.counts["verified"] > 0.5 * REQUESTS
    assert load.counts["hits"] > 0.1 * REQUESTS
