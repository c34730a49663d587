"""Requests that SGLang takes and our models cannot answer are refused, before they reach the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from atom_core.models.registry import supported_architectures
from atom_plugin.sglang.checkpoint_config import is_hybrid


def refuse_media(model_config: Any, request: Any) -> None:
    """Refuse a request with images, video or sound to a model of which only the text is served.

    Raises:
        ValueError: it has some; SGLang answers with the message.
    """
    hf_config = model_config.hf_config
    if hf_config.get_text_config() is hf_config or not is_hybrid(hf_config) or model_config.is_multimodal:
        return
    if isinstance(request, GenerateReqInput) and request.contains_mm_input():
        raise ValueError(
            f"atom-plugin serves only the text of {hf_config.architectures[0]}: a request cannot have images, video or "
            "sound."
        )


def refuse_empty(model_config: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """Refuse a request to one of our models whose prompt has no token, behind which there is nothing to predict.

    Args:
        model_config: SGLang's.
        request: it may continue a session, or have embeddings for tokens.
        input_ids: what its text has become; None beside embeddings.

    Raises:
        ValueError: it has none; SGLang answers with the message.
    """
    if input_ids is None or len(input_ids) > 0 or not isinstance(request, GenerateReqInput):
        return
    if request.session_params is None and model_config.hf_config.architectures[0] in supported_architectures():
        raise ValueError("The prompt has no token: atom-plugin cannot predict what follows nothing.")
