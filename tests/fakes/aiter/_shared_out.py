"""What persistent kernels have in common: their compute units, and the sums of the parts of a request."""

import torch

UNITS = {"gfx942": 304, "gfx950": 256}


def join(parts, logarithms, starts, finals, places, results):
    """Add up to ``results`` the parts of each tile of rows, ``parts [rows, 1, heads, dim]``, by their `logarithms`."""
    sums = starts.tolist()
    for tile in range(len(sums) - 1):
        if sums[tile] == sums[tile + 1]:
            continue
        first, last = finals[tile].tolist()
        assert 0 <= first <= last <= len(results), "numbers that nobody has written"
        at = places[sums[tile] : sums[tile + 1]].long()[:, None] + torch.arange(last - first)
        shares = logarithms[at].softmax(0)
        results[first:last] = (parts[at, 0] * shares[..., None]).sum(0).to(results.dtype)
