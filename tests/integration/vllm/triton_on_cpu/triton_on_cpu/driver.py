"""What Triton asks of a driver, as far as the interpreter and vLLM go."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase as _DriverBase


class Driver(_DriverBase):
    """Of a CPU that compiles nothing."""

    def __init__(self) -> None:
        """There is nothing to set up."""

    @classmethod
    def is_active(cls) -> bool:
        """It is the only one."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Nothing is compiled."""
        raise NotImplementedError(ty)

    def get_current_target(self) -> GPUTarget:
        """The CPU."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        """The CPU."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Nothing is measured."""
        raise NotImplementedError
