"""The base of a framework's model class: it wraps a model of the core, under the parameter names of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from atom_core.layers.parameters import ParameterLayer


class WrappedModel(nn.Module):
    """A framework's model class around a model of the core.

    Frameworks and users look up modules and parameters by name ("model.layers.0.self_attn.o_proj.weight"). So the
    core's ``model`` and ``lm_head`` are registered as modules of this class, and the core itself is not.

    ``state_dict`` has the parameters in the form in which they are loaded. Parameters that still have this form are
    returned themselves, so that a loader can write to them (``sharded_state``). Others, whose kernels have changed
    their form, are copied to the CPU.
    """

    _core: tuple[Any]

    def wrap(self, core: nn.Module) -> None:
        """Set the core's model; called once. A subclass registers its modules."""
        self._core = (core,)  # a tuple, because torch registers a module that is an attribute
        self.register_state_dict_post_hook(_as_loaded)  # type: ignore[no-untyped-call]

    @property
    def core(self) -> Any:
        """The core's model."""
        return self._core[0]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Give the parameters their loaded form, to be read or overwritten. No step may run meanwhile."""
        closed = [it for it in self.modules() if isinstance(it, ParameterLayer) and it.closed and it.changes_form]
        for layer in closed:
            layer.open_weights(whole=False)
        try:
            yield
        finally:
            for layer in closed:
                layer.close_weights()

    def read_parameter(self, name: str) -> torch.Tensor | None:
        """This rank's parameter of a name in :meth:`state_dict`, in its loaded form on the CPU; None if unknown."""
        path, _, own = name.rpartition(".")
        layer = dict(self.named_modules(remove_duplicate=False)).get(path)
        return layer.as_loaded().get(own) if isinstance(layer, ParameterLayer) else None


def _as_loaded(model: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ParameterLayer) and layer.closed and layer.changes_form:
            state.update({f"{prefix}{path}.{name}": tensor for name, tensor in layer.as_loaded().items()})
