"""What docs/amd-kernels.md says of our Triton kernels on AMD: that none is left out, and how waves are counted.

That its numbers are what the compiler makes is for triton_compiles, which compiles them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks._amd_resources import Resources
from benchmarks.amd_kernels import FIXTURE, ROOT, TESTS, Compiled, by_kernel, handed_over, table, taken_over

KERNELS = ROOT / "src" / "atom_core" / "kernels"
#: What no launcher launches on AMD: Hopper's, what is for those, and what copies through shared memory ahead of time.
NVIDIA = {
    "attention.hopper.prompt_attention_hopper",
    "decode_attention.hopper.decode_attention_hopper",
    "experts.few_routed_tokens_hopper.few_routed_tokens_hopper",
    "experts.routed_tokens_hopper.routed_tokens_hopper",
    "experts.few_tokens_hopper.down_of_few_hopper",
    "experts.hopper.grouped_rows_hopper",
    "fp8_block_linear.few_rows_hopper.few_rows_hopper",
    "fp8_block_linear.specialized_hopper.specialized_rows_hopper",
    "fp8_experts.hopper.expert_rows_fp8_hopper",
    "gated_delta_net.hopper.gated_delta_decode_hopper",
    "mla_attention.hopper.latent_decode_hopper",
    "mla_fused_decode.hopper.mla_fused_decode_hopper",
    "mla_absorbed_values.triton_kernel._values_of_splits",
    "linear.few_rows_hopper.few_rows_hopper",
    "linear.one_row.one_row_ring",
    "mxfp4_experts.hopper.expert_rows_hopper",
    "mxfp4_experts.many_tokens._widen",
}


def launched_kernels() -> set[str]:
    """Functions in Triton and Gluon that no other one calls, or has warps run, so that somebody must launch them."""
    functions, called = set(), set()
    for path in KERNELS.rglob("*.py"):
        module = path.relative_to(KERNELS).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            if not any(ast.unparse(it).startswith(("triton.jit", "gluon.jit")) for it in node.decorator_list):
                continue
            functions.add((module, node.name))
            for call in (it for it in ast.walk(node) if isinstance(it, ast.Call)):
                handed = call.args if ast.unparse(call.func).endswith("warp_specialize") else ()
                names = (call.func, *(it for part in handed for it in ast.walk(part)))
                called.update(it.id for it in names if isinstance(it, ast.Name))
    return {f"{module}.{name}" for module, name in functions if name not in called}


WRITTEN = Compiled.read(FIXTURE.read_text(encoding="utf-8"))


def test_every_kernel_that_is_launched_on_amd_is_compiled_for_both_gpus():
    kernels = launched_kernels()
    assert len(kernels) > 30
    assert kernels >= NVIDIA
    for arch in ("gfx942", "gfx950"):
        launches = (
            (kernel, it) for kernel, tests in WRITTEN.kernels.items() for found in tests.values() for it in found
        )
        assert {kernel for kernel, it in launches if it.arch == arch} == kernels - NVIDIA


def test_the_fixture_has_the_tests_that_compile_and_no_others():
    command = [sys.executable, "-m", "pytest", str(TESTS), "--collect-only", "-q", "-k", "gfx942 or gfx950"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    tests = [line.partition("::")[2] for line in listed.splitlines() if "::" in line]
    assert len(tests) > 400
    assert len(set(tests)) == len(tests), "two files have a test of one name"
    assert WRITTEN.tests == set(tests)


SMALL = Resources(
    "gfx942",
    warps=4,
    vgprs=64,
    agprs=0,
    sgprs=40,
    lanes=0,
    spilled=0,
    scratch=0,
    lds=0,
    multiplies=False,
    mfma=False,
)


@pytest.mark.parametrize(
    ("changes", "waves"),
    [
        ({}, 8),
        ({"vgprs": 65}, 7),
        ({"vgprs": 129}, 3),
        ({"vgprs": 512, "agprs": 256}, 1),
        ({"sgprs": 102}, 7),
        ({"lds": 64 * 1024}, 1),
        ({"lds": 20 * 1024}, 3),
        ({"lds": 32 * 1024 + 1}, 1),
        ({"lds": 64 * 1024 + 1}, 0),
        ({"lds": 64 * 1024 + 1, "arch": "gfx950"}, 2),
        ({"lds": 160 * 1024, "arch": "gfx950", "warps": 8}, 2),
        ({"warps": 2}, 8),
        ({"warps": 1, "lds": 1024}, 8),
        ({"warps": 16, "vgprs": 256}, 0),
        ({"warps": 16, "vgprs": 128}, 4),
    ],
    ids=str,
)
def test_waves_are_those_that_registers_and_lds_are_enough_for(changes, waves):
    assert replace(SMALL, **changes).waves == waves


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spilled": 3, "scratch": 12}, "3 vector registers and 12 bytes a lane go to memory"),
        ({"lds": 70000}, "70000 bytes of LDS are more than the 65536 that there are"),
        ({"vgprs": 256, "warps": 16}, "a CU has no room for one workgroup"),
        ({"multiplies": True}, "it multiplies matrices without the matrix cores"),
    ],
)
def test_what_may_not_be_is_said(changes, fault):
    assert SMALL.faults() == []
    assert replace(SMALL, **changes).faults() == [fault]


def test_what_is_written_is_read_again():
    compiled = Compiled("3.9.0")
    larger = replace(SMALL, vgprs=300, agprs=44, lanes=5)
    launches = by_kernel([("a.b", SMALL), ("a.b", larger), ("c.d", SMALL)])
    assert launches == {"a.b": [SMALL, larger], "c.d": [SMALL]}
    assert taken_over(handed_over(launches)) == launches
    compiled.add("test_products[plain-gfx942]", launches)
    compiled.add("test_sums[gfx942]", by_kernel([("c.d", larger)]))
    read = Compiled.read(str(compiled))
    assert read == compiled
    assert read.of("test_products[plain-gfx942]") == launches
    assert read.tests == {"test_products[plain-gfx942]", "test_sums[gfx942]"}
    # A line for each kernel of each test.
    assert sum('"test_' in line for line in str(compiled).splitlines()) == 3


def test_the_table_has_the_most_that_an_op_takes_on_each_gpu():
    compiled = Compiled("3.9.0")
    multiplying = replace(SMALL, vgprs=300, agprs=44, lds=70 * 1024, multiplies=True, mfma=True)
    compiled.add(
        "test_sums[gfx942]", by_kernel([("sums.few._few", SMALL), ("sums.many._many", replace(SMALL, vgprs=65))])
    )
    compiled.add("test_sums[gfx950]", by_kernel([("sums.few._few", replace(multiplying, arch="gfx950"))]))
    lines = list(table(compiled))
    assert lines[0].startswith("Compiled by Triton 3.9.0")
    assert lines[-1] == "| `sums` | 2 | 2 / 1 | 65 / 300 | 0 / 70 | 7 / 1 | 0 |  / yes |"


def test_the_table_does_not_hide_products_without_the_matrix_cores():
    compiled = Compiled("3.9.0")
    for arch in ("gfx942", "gfx950"):
        slow = replace(SMALL, arch=arch, multiplies=True, spilled=3)
        compiled.add(
            f"test_sums[{arch}]", by_kernel([("sums.few._few", slow), ("sums.few._few", replace(slow, mfma=True))])
        )
    assert list(table(compiled))[-1] == "| `sums` | 1 | 2 | 64 | 0 | 8 | 3 | no |"
