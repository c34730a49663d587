"""Hugging Face's model of a local checkpoint, as the reference for ours.

Transformers and what it imports raise whatever their parts do. Where they cannot load a checkpoint, a user gets one
line with the file and what they said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from atom_core.checkpoint import INDEX, SINGLE_FILE, Checkpoint, config_of
from atom_core.language_model import of_text
from atom_core.models.read_config import read_model_config
from atom_core.quant import Mxfp4Config, read_quantization

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def require_transformers() -> None:
    """Raise a ValueError unless Hugging Face's models can be imported."""
    try:
        import transformers  # noqa: F401 - only needed here, so no dependency of the package
    except ImportError as error:
        raise ValueError(
            "Comparing with Hugging Face's model needs the package transformers: pip install transformers."
        ) from error


def check_reference(directory: Path, hf: Mapping[str, Any]) -> None:
    """Check that Hugging Face's model of the checkpoint computes what ours does, but for the order of sums.

    Our quantised layers round their inputs, too. Transformers has packages of its own for most quantisations, and takes
    raw FP8 values of ModelOpt's for weights. Inputs of GPT-OSS's experts are not rounded, and Transformers unpacks
    their weights.

    Args:
        directory: the checkpoint.
        hf: its ``config.json``, as :func:`atom_core.checkpoint.config_of` reads it.

    Raises:
        ValueError: the checkpoint has another quantisation, or one that we cannot run.
    """
    quant = read_quantization(hf)
    if quant.name == "none" or isinstance(quant, Mxfp4Config):
        return
    raise ValueError(
        f"{directory / 'config.json'} names a quantisation ({_quant_method(hf)}), and Hugging Face's model cannot be "
        "the reference for it: our quantised layers round their inputs, too, and Transformers reads such weights "
        "otherwise or not at all. Supported: unquantised checkpoints, and GPT-OSS in MXFP4. Check the checkpoint that "
        "it was quantised from."
    )


def _quant_method(hf: Mapping[str, Any]) -> str:
    text = of_text(hf)
    config = text.get("quantization_config") or text.get("compression_config") or {}
    return f"quant_method={config.get('quant_method')!r}"


def load_reference(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Hugging Face's model of a local checkpoint, with eager attention.

    Raises:
        ValueError: see :func:`check_reference`, or Transformers cannot load the checkpoint.
    """
    hf = config_of(directory)
    check_reference(directory, hf)
    tied = read_model_config(hf).tie_word_embeddings
    unpacked = isinstance(read_quantization(hf), Mxfp4Config)
    with one_line(directory / "config.json"):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory, **_LOCAL)
        # Of a multimodal checkpoint, this class asks the text's configuration, where the whole one counts.
        config.get_text_config().tie_word_embeddings = tied
    with _indexed(directory) as folder, one_line(directory):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            quantization_config=_unpacking() if unpacked else None,
            **_LOCAL,
        )
        if unpacked:
            _convert_experts(model, dtype)
        return model.to(device).eval()


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's tokenizer; a ValueError if Transformers cannot load it."""
    with one_line(directory):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, **_LOCAL)


@contextmanager
def one_line(path: Path, doing: str = "load") -> Iterator[None]:
    """Turn whatever Transformers raises while ``doing`` something with ``path`` into a ValueError of one line.

    Raises:
        ValueError: the version of Transformers, ``path``, and the start of what it said.
    """
    try:
        yield
    except Exception as error:  # Transformers, huggingface_hub and safetensors have no common class of errors
        from transformers import __version__

        raise ValueError(
            f"Transformers {__version__} cannot {doing} {path}, so there is no model to compare with: "
            + ": ".join(filter(None, (type(error).__name__, _start(str(error)))))
        ) from error


def _start(message: str) -> str:
    """The first line of ``message``, and the next while the line before it only announces one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count])


def _unpacking() -> Any:
    """Have Transformers unpack MXFP4; else it asks for accelerate, or multiplies by kernels that sum in bfloat16."""
    from transformers import Mxfp4Config as Loading

    return Loading(dequantize=True)


def _convert_experts(model: Any, dtype: torch.dtype) -> None:
    """Convert unpacked experts to ``dtype``: Transformers leaves them in bfloat16, which has every number of MXFP4."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data = parameter.data.to(dtype)


@contextmanager
def _indexed(directory: Path) -> Iterator[Path]:
    """``directory``; without an index and a single file, a folder of links to the same files with an index.

    Transformers looks for those two only, where we and the frameworks read the shards that are there. It also reads
    other JSON files of the folder.
    """
    if any((directory / name).exists() for name in (SINGLE_FILE, INDEX)):
        yield directory
        return
    tensors = Checkpoint.open(directory).tensors
    with TemporaryDirectory() as made:
        folder = Path(made)
        for file in {*directory.glob("*.json"), *(info.file for info in tensors.values())}:
            # Links of a cache to files that an interrupted download lacks are left out: an index may be one.
            if file.name != INDEX and file.exists():
                (folder / file.name).symlink_to(file.resolve())
        index = {"metadata": {}, "weight_map": {name: info.file.name for name, info in tensors.items()}}
        (folder / INDEX).write_text(dumps(index))
        yield folder
