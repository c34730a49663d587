"""Lengths and page tables on a GPU, also within a captured graph, which each replay reads anew."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.request_pages import REQUEST_PAGES, RequestPagesSpec
from atom_core.kernels.select import Target
from tests.request_pages_cases import CASES, Requests

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_each_request_gets_its_pages(case):
    kernel = kernel_set(Target.of(DEVICE), with_aiter=False).select(REQUEST_PAGES, RequestPagesSpec(case.page_size))
    requests = Requests(case, DEVICE)
    requests.run(kernel)
    requests.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        requests.run(kernel)
    later = Requests(case, DEVICE, seed=1)
    for name in ("slots", "rows", "seq_lens", "mapping"):
        getattr(requests, name).copy_(getattr(later, name))
    requests.pages, requests.moved = later.pages, later.moved
    requests.table.fill_(-7)
    if requests.windowed is not None:
        requests.windowed.fill_(-7)
    graph.replay()
    requests.check()
