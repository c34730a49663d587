"""Token embedding and language-model head, sharded over the vocabulary.

Each rank has ``ceil(V / ranks)`` rows; rows beyond the vocabulary are zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from atom_core.kernels.embedding import EMBEDDING, EmbeddingSpec
from atom_core.kernels.linear import LINEAR, LinearSpec
from atom_core.layers.linear_methods import unpacked
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter
from atom_core.runtime import Runtime


class VocabTable(ParameterLayer):
    """This rank's rows of a ``[vocabulary, hidden]`` table, in a new parameter or in another layer's ``shared`` one."""

    def __init__(self, vocab_size: int, hidden_size: int, runtime: Runtime, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.group = runtime.tensor_parallel
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.rows = rows = -(-vocab_size // self.group.world_size)
        self.first = min(self.group.rank * rows, vocab_size)  # a small vocabulary may leave the last ranks without rows
        self.used = min(rows, vocab_size - self.first)
        if shared is None:
            shared = empty_parameter(runtime, rows, hidden_size)
            shared.data[self.used :] = 0
        self.weight = shared

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The rows of this rank."""
        shape = (self.vocab_size, self.hidden_size)
        yield "", "weight", Placement(self.weight, shape, source=self.first, count=self.used)


class TokenEmbedding(VocabTable):
    """Token ids to vectors."""

    def __init__(self, vocab_size: int, hidden_size: int, runtime: Runtime, shared: nn.Parameter | None = None) -> None:
        super().__init__(vocab_size, hidden_size, runtime, shared)
        sliced = self.group.world_size > 1
        self.kernel = runtime.kernels.select(EMBEDDING, EmbeddingSpec(hidden_size, runtime.dtype, sliced))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids [T]`` to ``[T, hidden]``."""
        if self.group.world_size == 1:
            return self.kernel(ids, self.weight, None)
        return self.group.all_reduce(self.kernel(ids, self.weight, self.first))


class LMHead(VocabTable):
    """Hidden states to logits over the full vocabulary, with its own table or the embedding's.

    ``Runtime.head_dtype`` asks for the product and the logits in float32, with weight and input in the model's dtype.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, runtime: Runtime, tied_to: TokenEmbedding | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size, runtime, None if tied_to is None else tied_to.weight)
        self.tied = tied_to is not None
        self.dtype = runtime.head_dtype or runtime.dtype
        assert self.dtype in (runtime.dtype, torch.float32), "heads compute in the model's dtype or in float32"
        spec = LinearSpec(
            hidden_size,
            self.weight.shape[0],
            False,
            runtime.dtype,
            shares_weight=self.tied,
            few_rows=True,
            float32_result=self.dtype != runtime.dtype,
        )
        self.kernel = runtime.kernels.select(LINEAR, spec)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, hidden]`` to ``[T, vocabulary]`` in :attr:`dtype`."""
        logits = self.group.all_gather(self.kernel(hidden, self.weight, None))
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """Empty if tied: the embedding loads the table."""
        if not self.tied:
            yield from super().placements()

    @property
    def changes_form(self) -> bool:
        """See :class:`ParameterLayer`; a tied table keeps its form."""
        return not self.tied

    def finalize_weights(self) -> None:
        """Hand the weight to the kernel, whose spec says whether it is tied."""
        if self.kernel.adopt(self.weight, None):
            assert not self.tied, "a kernel may not free a weight that the embedding reads"
            self.weight.data = self.weight.new_empty(0)

    def restore_weights(self, whole: bool) -> None:
        """See :class:`ParameterLayer`; rows beyond the vocabulary are set to zero again."""
        if not self.weight.numel():
            self.weight.data = unpacked(self.kernel, self.weight, (self.rows, self.hidden_size), whole)
            self.weight.data[self.used :] = 0
