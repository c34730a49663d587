"""Tiles tuned on this GPU, and those of one row, against float64: with all that can be around, eager, in a graph."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import tuned
from atom_core.kernels.linear.tiles import TORCH, Tile, on_hopper, tile_for
from atom_core.kernels.linear.triton_kernel import Norm, product
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps
from atom_plugin.bench.device import capture
from atom_plugin.bench.tune import OP_FOLDER

GPU = torch.device("cuda")
ENTRIES = tuned.load(OP_FOLDER, torch.cuda.get_device_name(GPU))
TILES = {shape: Tile(**tile) for shape, tile in ENTRIES.items() if tile != TORCH}
#: One row by large weights has a tile by rule there.
SIZES = [(6144, 4096), (24576, 4096), (19456, 2560), (2560, 9728), (4096, 4096)] if on_hopper(GPU) else []
TILES |= {
    tuned.Shape(1, *size, dtype): tile_for(1, *size, 2, nvidia=True, hopper=True)
    for size in SIZES
    for dtype in ("bfloat16", "float16")
}
#: None on another GPU on which nothing was tuned; some products are torch's, some have no norm within.
CASES = [
    (shape, tile, around)
    for shape, tile in TILES.items()
    for around in ("nothing", "norm", "residual")
    if around != "norm" or tile.norms
]
#: Rows of a weight beyond which it is a head's, of which fewer do as well.
MANY = 20_001
TOLERANCE = 2**-7


@pytest.mark.parametrize(("shape", "tile", "around"), CASES, ids=str)
def test_a_tuned_tile_multiplies_right(shape, tile, around):
    dtype = getattr(torch, shape.dtype)
    out_features = min(shape.out_features, MANY)
    x = torch.randn(shape.rows, shape.in_features, device=GPU).to(dtype)
    weight = (torch.randn(out_features, shape.in_features, device=GPU) / shape.in_features**0.5).to(dtype)
    expected, norm, added = x.double(), None, None
    if around == "norm":
        norm = Norm(torch.rand(shape.in_features, device=GPU).to(dtype), 1e-6)
        expected = rms_norm(expected, norm.weight.double(), norm.eps, None)[0]
    expected = expected @ weight.double().T
    if around == "residual":
        added = torch.randn(shape.rows, out_features, device=GPU).to(dtype)
        expected += added.double()
    stream = torch.empty_like(expected, dtype=dtype)
    answers: list[torch.Tensor] = []

    def run() -> None:
        residual = None if added is None else stream.copy_(added)
        options = {"tile": tile, "overlap": overlaps(Target.of(GPU)), "norm": norm, "residual": residual}
        answers[:] = [product(x, weight, None, **options)]

    run()
    torch.testing.assert_close(answers[0].double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    graph = capture(run)
    answers[0].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(answers[0].double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
