"""A tokenizer for models of random weights, so that servers and clients of the frameworks need no hub.

Random models answer with any token of their vocabulary, and a client sees only tokens that have a text. So each token
is a word of its own: texts of random tokens have the length that was asked for, and no token is lost on the way.
"""

from __future__ import annotations

import json
from pathlib import Path


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of the vocabulary in `folder`'s configuration, each token a word of its own."""
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    unknown = "<unk>"
    model = {
        "type": "WordLevel",
        "vocab": {unknown: 0, **{f"w{index}": index for index in range(1, size)}},
        "unk_token": unknown,
    }
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(parts),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    # No token is special: a special one would have no text in an answer.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
