"""A checkpoint of random values on disk, in the format that a model's `config.json` names.

    python -m benchmarks.random_checkpoint qwen3-30b-a3b-fp8 FOLDER
    python -m benchmarks.vllm_gpu --model qwen3-30b-a3b-fp8 --load-format random      # writes one, and removes it

Engines that make their own random weights (`--load-format dummy`) have different ones for each format and layout. MoE
routing then differs, and so does the number of experts that are read. With a checkpoint all have the same weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from atom_core.layers.norm import NormWeight
from atom_core.layers.parameters import Placement
from atom_core.loading import build_on_meta_device
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import DRAFTS, load_draft_class
from atom_core.quant import read_quantization
from atom_core.standalone import RANDOM_SPREAD, random_codes
from atom_core.weights import expected_tensors
from atom_plugin.bench.models import HfValues, read_config

#: The standard deviation of FP8 values, whose maximum is 448.
_FP8_SPREAD = 100.0
_FILE_BYTES = 4 << 30


def write_random(hf: HfValues, folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
    """Write `config.json` and its weights, including those of draft layers.

    Args:
        hf: the content of `config.json`.
        folder: an existing folder.
        dtype: of unquantised tensors.
        device: where values are generated; a GPU is faster.

    Raises:
        ValueError: an unsupported architecture or format.
    """
    config, quant = read_model_config(hf), read_quantization(hf, None)
    wanted = expected_tensors(build_on_meta_device(config, dtype, quant=quant))
    if config.architecture in DRAFTS:
        draft_class = load_draft_class(config.architecture)
        draft = draft_class.of_layers(draft_class.family().schema.read(hf))
        wanted |= expected_tensors(build_on_meta_device(draft, dtype, quant=quant)) if draft.layers else {}
    generator = torch.Generator(device).manual_seed(0)
    held: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    total = waiting = 0
    for name, slot in sorted(wanted.items()):
        if waiting >= _FILE_BYTES:
            files |= _save(held, folder)
            held, waiting = {}, 0
        centre = 0.0 if isinstance(slot.layer, NormWeight) and slot.layer.zero_centered else 1.0
        held[name] = numbers(name, slot.placement, dtype, generator, centre).cpu()
        total, waiting = total + held[name].nbytes, waiting + held[name].nbytes
    files |= _save(held, folder)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(hf))


def numbers(
    name: str, placement: Placement, dtype: torch.dtype, generator: torch.Generator, centre: float
) -> torch.Tensor:
    """A tensor of the checkpoint: matrices around 0, norms around ``centre``, scales for weights of usual magnitude."""
    shape, device, leaf = placement.shape, generator.device, name.rpartition(".")[2]
    if "U8" in placement.dtypes:
        return torch.empty(shape, dtype=torch.uint8, device=device).random_(*random_codes(leaf), generator=generator)
    found = torch.empty(shape, dtype=torch.float32, device=device)
    if "F8_E4M3" in placement.dtypes:
        return found.normal_(0.0, _FP8_SPREAD, generator=generator).clamp_(-448, 448).to(torch.float8_e4m3fn)
    if leaf == "input_scale":
        return found.fill_(0.05)
    if "scale" in leaf:
        return found.uniform_(0.5, 1.5, generator=generator).mul_(RANDOM_SPREAD / _FP8_SPREAD)
    norm = len(shape) == 1 and leaf == "weight"
    found.normal_(centre if norm else 0.0, RANDOM_SPREAD, generator=generator)
    return found if leaf == "e_score_correction_bias" else found.to(dtype)


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> dict[str, str]:
    """Write another file; returns the names of its tensors."""
    file = f"model-{len(list(folder.glob('*.safetensors'))):05}.safetensors"
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return dict.fromkeys(tensors, file)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name or a config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="keep so many layers")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_random(read_config(given.model, given.layers), given.folder, device=device)


if __name__ == "__main__":
    main()
