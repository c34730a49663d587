"""Kernels that SGLang's KV pools cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atom_plugin.common.settings import Settings


def unfit_pages(page_size: int) -> Mapping[tuple[str, str], str]:
    """Why aiter's attention cannot run with ``page_size`` tokens a page; SGLang's default is 1."""
    if page_size < 16:
        reason = f"It takes pages of 16 tokens or more (--page-size 16); here they have {page_size}."
    elif page_size & (page_size - 1):
        reason = f"It takes pages of a power of two (--page-size 16, 32, 64); here they have {page_size} tokens."
    else:
        return {}
    return {("attention", "aiter"): reason}


def check_order(settings: Settings) -> None:
    """Refuse a cache in aiter's shuffled order, which ``ATOM_SHUFFLED_CACHE`` or ``ATOM_KERNELS`` asks for.

    Raises:
        ValueError: one of them asks for it.
    """
    asked = "ATOM_SHUFFLED_CACHE=1" if settings.shuffled_cache else "ATOM_KERNELS=attention=aiter_shuffled"
    if settings.shuffled_cache or settings.kernels.get("attention") == "aiter_shuffled":
        raise ValueError(
            f"{asked} is for vLLM only: SGLang moves single tokens in its pools, which aiter's order does not allow. "
            "Unset it."
        )
