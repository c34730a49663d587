"""Which kernels SGLang's pools are too finely cut for."""

from __future__ import annotations

from collections.abc import Mapping


def too_small_pages(page_size: int) -> Mapping[tuple[str, str], str]:
    """Why aiter's attention is passed over on pools of ``page_size`` tokens a page; SGLang's default is 1."""
    if page_size >= 16:
        return {}
    return {
        ("attention", "aiter"): f"It takes pages of 16 tokens or more (--page-size 16); here they have {page_size}."
    }
