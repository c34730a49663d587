"""Checkpoint tensors that contain one matrix of all experts of a layer, as GPT-OSS has them.

With ``E`` experts, hidden size ``H`` and intermediate size ``I``, matrices are transposed, and gate and up alternate:
``gate_up [E, H, 2I]`` with bias ``[E, 2I]``, ``down [E, I, H]``. Ours: ``[E, 2I, H]``, gate first, and ``[E, H, I]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.layers.parameters import Placement


@dataclass(frozen=True, kw_only=True)
class _Share(Placement):
    """A fused tensor, and this rank's shard of it."""

    share: tuple[range, range]
    """This rank's experts, and its range of the intermediate size of each."""

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`; one expert at a time, so that a device has no second copy of all."""
        with torch.no_grad():
            for index, expert in enumerate(self.share[0]):
                self.load_expert(self.parameter[index], tensor[expert])

    def store(self, out: torch.Tensor) -> None:
        """See :class:`Placement`."""
        for index, expert in enumerate(self.share[0]):
            self.store_expert(self.parameter[index], out[expert])

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """Load an expert from the checkpoint's tensor ``whole`` to the parameter ``mine``."""
        raise NotImplementedError

    def store_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """Undo :meth:`load_expert`."""
        raise NotImplementedError


class GateUpPlacement(_Share):
    """Gate and up of all experts, or their biases."""

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[H, 2I]`` or ``[2I]`` to ``[2I, H]`` or ``[2I]``."""
        intermediate = self.share[1]
        rows = whole if whole.dim() == 1 else whole.transpose(0, 1)
        for half, start in enumerate((0, len(intermediate))):
            mine[start : start + len(intermediate)].copy_(rows[half::2][intermediate.start : intermediate.stop])

    def store_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[2I, H]`` or ``[2I]`` to ``[H, 2I]`` or ``[2I]``."""
        intermediate = self.share[1]
        rows = whole if whole.dim() == 1 else whole.transpose(0, 1)
        for half, start in enumerate((0, len(intermediate))):
            rows[half::2][intermediate.start : intermediate.stop].copy_(mine[start : start + len(intermediate)])


class DownPlacement(_Share):
    """Down of all experts."""

    def load_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[I, H]`` to ``[H, I]``."""
        intermediate = self.share[1]
        mine.copy_(whole[intermediate.start : intermediate.stop].transpose(0, 1))

    def store_expert(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """``[H, I]`` to ``[I, H]``."""
        intermediate = self.share[1]
        whole[intermediate.start : intermediate.stop].copy_(mine.transpose(0, 1))
