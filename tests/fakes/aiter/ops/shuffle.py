"""Weights in the order in which matrix cores read them: tiles of 16 rows, 16 bytes at a time."""

import torch
from aiter._recorded import real


@real("aiter.ops.shuffle.shuffle_weight")
def shuffle_weight(x, layout=(16, 16), use_int4=False, is_guinterleave=False, gate_up=False, pad_k_to=0):
    assert layout == (16, 16)
    assert (use_int4, is_guinterleave, gate_up, pad_k_to) == (False, False, False, 0), "the plain order alone"
    moved = _moved(x.view(torch.uint8) if x.itemsize == 1 else x, forth=True).view(x.dtype)
    moved.is_shuffled = True
    return moved


def unshuffled(x):
    """What was moved, back in rows and columns."""
    return _moved(x.view(torch.uint8) if x.itemsize == 1 else x, forth=False).view(x.dtype)


def _moved(x, *, forth):
    *_, rows, columns = x.shape
    assert rows % 16 == 0, "rows in tiles of 16"
    assert columns % 32 == 0, "columns in tiles of 32"
    count = 16 // x.element_size()
    sizes = (-1, rows // 16, 16, columns // 32, 32 // count, count)
    if forth:
        return x.reshape(sizes).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)
    tiled = x.reshape(-1, rows // 16, columns // 32, 32 // count, 16, count)
    return tiled.permute(0, 1, 4, 2, 3, 5).reshape(x.shape)
