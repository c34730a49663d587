"""Stands in for torchvision, which vLLM and Transformers import with Qwen3.5 and call for images alone.

PyPI's wheel does not run beside the torch for CPUs that the tests install.
"""

from __future__ import annotations

__version__ = "0.0"  # Transformers leaves images alone


class _WithAnyMember(type):
    def __getattr__(cls, name: str) -> str:
        return _ordinary(name)


def of_any_name(name: str) -> type:
    """A class of that name, for ``from torchvision.... import name``."""
    return _WithAnyMember(_ordinary(name), (), {})


def _ordinary(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name
