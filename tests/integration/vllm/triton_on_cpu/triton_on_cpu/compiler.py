"""What Triton asks of a compiler: there is none."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend as _BaseBackend
from triton.backends.compiler import GPUTarget


class Backend(_BaseBackend):
    """Of a CPU that compiles nothing."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """The CPU alone."""
        return target.backend == "cpu"

    def hash(self) -> str:
        """Of nothing."""
        return "none"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Nothing is compiled."""
        raise NotImplementedError

    def add_stages(self, stages: dict[str, Any], options: object) -> None:
        """Nothing is compiled."""
        raise NotImplementedError

    def load_dialects(self, context: object) -> None:
        """Nothing is compiled."""
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        """Nothing is compiled."""
        raise NotImplementedError
