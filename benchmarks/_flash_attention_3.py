"""FlashAttention 3 for SGLang, native and ours, whose kernels come without: see `benchmarks/flash_attention_3`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

#: What it has replaces SGLang's `sgl_kernel.flash_attn` in processes that have it in PYTHONPATH at their start.
FOLDER = Path(__file__).with_name("flash_attention_3")
#: Ours refuses variables that begin with ATOM_ and that it does not know, and has this one in its processes, too.
LIBRARY = "BENCH_FLASH_ATTENTION_3"


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--flash-attention-3`."""
    parser.add_argument(
        "--flash-attention-3", type=Path, help="vLLM's library of it, for kernels of SGLang that come without"
    )


def variables(library: Path | None) -> dict[str, str]:
    """What a process needs at its start to run on `library`; None: SGLang's own, and so nothing.

    Raises:
        SystemExit: there is no such file.
    """
    if library is None:
        return {}
    if not library.is_file():
        raise SystemExit(f"--flash-attention-3 {library}: there is no such file.")
    path = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {LIBRARY: str(library.resolve()), "PYTHONPATH": os.pathsep.join(path)}
