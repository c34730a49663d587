"""Gated DeltaNet on a CPU: requests with one new token together, all others in chunks."""

from __future__ import annotations

from functools import partial

from atom_core.kernels.gated_delta_net.reference import chunked_gated_delta_rule
from atom_core.kernels.gated_delta_net.reference import gated_delta_net as one_by_one

#: See :mod:`atom_core.kernels.gated_delta_net`.
gated_delta_net = partial(one_by_one, rule=chunked_gated_delta_rule)
