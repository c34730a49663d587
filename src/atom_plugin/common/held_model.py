"""How a framework's model class holds a model of the core: with its modules, under the names that checkpoints have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from atom_core.layers.parameters import ParameterLayer


class HoldsModel(nn.Module):
    """A framework's model class around a model of the core.

    The framework and its users look modules and parameters up by name ("model.layers.0.self_attn.o_proj.weight").
    So the core's ``model`` and ``lm_head`` are modules of this class, and the core itself is none.

    Its ``state_dict`` has the parameters in the form in which they are loaded. They are the parameters themselves as
    long as they have it, so that a loader can write to them (``sharded_state``). What kernels have in forms of their
    own is copied to the CPU.
    """

    _core: tuple[Any]

    def hold(self, core: nn.Module) -> None:
        """Called once, with the model that was built; a child registers its modules."""
        self._core = (core,)  # in a tuple: torch registers no module that stands in one
        self.register_state_dict_post_hook(_as_loaded)  # type: ignore[no-untyped-call]

    @property
    def core(self) -> Any:
        """The core's model."""
        return self._core[0]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The parameters have the form in which they are loaded, to be looked at or written over; no step may run."""
        closed = [it for it in self.modules() if isinstance(it, ParameterLayer) and it.closed and it.changes_form]
        for layer in closed:
            layer.open_weights(whole=False)
        try:
            yield
        finally:
            for layer in closed:
                layer.close_weights()

    def read_parameter(self, name: str) -> torch.Tensor | None:
        """This rank's parameter of a name in :meth:`state_dict`, on the CPU as it is loaded; None: there is no such."""
        path, _, own = name.rpartition(".")
        layer = dict(self.named_modules(remove_duplicate=False)).get(path)
        return layer.as_loaded().get(own) if isinstance(layer, ParameterLayer) else None


def _as_loaded(model: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParameterLayer) and layer.closed and layer.changes_form:
            state.update({f"{prefix}{path}.{name}": tensor for name, tensor in layer.as_loaded().items()})
