"""Lengths and page tables of requests."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.request_pages import REQUEST_PAGES, RequestPagesSpec
from atom_core.kernels.request_pages.triton_kernel import TritonRequestPages
from atom_core.kernels.select import Target
from tests.request_pages_cases import CASES, PagesCase, Requests

CPU = Target("cpu", "x86_64")
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def chosen(spec):
    return kernel_set(CPU).select(REQUEST_PAGES, spec)


@pytest.mark.parametrize("make", [chosen, TritonRequestPages], ids=["on a CPU", "triton"])
@every_case
def test_each_request_gets_its_pages(case, make):
    requests = Requests(case)
    requests.run(make(RequestPagesSpec(case.page_size)))
    requests.check()


@pytest.mark.parametrize("make", [chosen, TritonRequestPages], ids=["on a CPU", "triton"])
def test_rows_of_larger_tables_and_other_integers(make):
    """As in a graph for fewer requests than there is room for, of lengths in 32 bits."""
    requests = Requests(PagesCase((3, 70, 20), page_size=8))
    wide = torch.full((5, 40), -7, dtype=torch.int32)
    requests.table = wide[:3, : requests.columns]
    requests.rows, requests.seq_lens = requests.rows.int(), requests.seq_lens.int()
    requests.run(make(RequestPagesSpec(8)))
    requests.check()
    assert (wide[3:] == -7).all()
    assert (wide[:3, requests.columns :] == -7).all()


def test_the_triton_kernel_takes_no_requests():
    empty = torch.zeros(0, dtype=torch.int32)
    TritonRequestPages(RequestPagesSpec(1))(
        torch.zeros(4, 8, dtype=torch.int32), empty, empty, 0, empty, empty.view(0, 8)
    )
