"""Which kernels SGLang's pools have no pages for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atom_plugin.common.settings import Settings


def unfit_pages(page_size: int) -> Mapping[tuple[str, str], str]:
    """Why aiter's attention is passed over on pools of ``page_size`` tokens a page; SGLang's default is 1."""
    if page_size < 16:
        reason = f"It takes pages of 16 tokens or more (--page-size 16); here they have {page_size}."
    elif page_size & (page_size - 1):
        reason = f"It takes pages of a power of two (--page-size 16, 32, 64); here they have {page_size} tokens."
    else:
        return {}
    return {("attention", "aiter"): reason}


def check_order(settings: Settings) -> None:
    """Refuse pages in aiter's order, asked for by a setting of its own or as a kernel.

    Raises:
        ValueError: they are asked for.
    """
    asked = "ATOM_SHUFFLED_CACHE=1" if settings.shuffled_cache else "ATOM_KERNELS=attention=aiter_shuffled"
    if settings.shuffled_cache or settings.kernels.get("attention") == "aiter_shuffled":
        raise ValueError(
            f"{asked} is for vLLM: SGLang moves single tokens about in its pools, and cannot in aiter's order. "
            "Unset it."
        )
