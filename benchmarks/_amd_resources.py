"""The resources of a compiled kernel on an AMD compute unit, and its occupancy in waves.

A compute unit (CU) of gfx942 and gfx950 has four SIMDs. Each SIMD runs up to eight waves, and has 800 scalar registers
and 512 vector registers per lane, which VGPRs and AGPRs share and which are allocated in groups of eight. LDS belongs
to the CU and is allocated to workgroups in steps. So

    waves by VGPRs = min(8, 512 // (VGPRs and AGPRs, rounded up to 8)), and 7 with more than 100 SGPRs
    groups on a CU = min(4 * waves by VGPRs // waves a group, LDS of a CU // LDS a group, 16 of several waves)
    waves on a SIMD = groups on a CU * waves a group / 4

Sources: AMD's ISA guides of CDNA 3 and CDNA 4 (registers, LDS, barriers), and LLVM's AMDGPUBaseInfo.cpp and
GCNSubtarget.cpp (granules; SGPR counts). The occupancy by registers is what LLVM prints as a kernel's "Occupancy".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SIMDS, _REGISTERS, _GRANULE, _MOST_WAVES, _MOST_GROUPS = 4, 512, 8, 8, 16
_KIB = 1024
#: LDS of a CU, which one workgroup may have all of, and the steps that it is handed out in, in bytes.
LDS = {"gfx942": (64 * _KIB, 512), "gfx950": (160 * _KIB, 1280)}


def _rounded(number: int, granule: int) -> int:
    return -(-number // granule) * granule


@dataclass(frozen=True)
class Resources:
    """Of one kernel, compiled for ``arch``."""

    arch: str
    warps: int
    """Waves a workgroup."""
    vgprs: int
    """Vector registers of both files."""
    agprs: int
    sgprs: int
    lanes: int
    """Scalars beyond the SGPRs, which are kept in lanes of vector registers."""
    spilled: int
    """Vector registers that went to memory."""
    scratch: int
    """Bytes of memory a lane, for what has no register."""
    lds: int
    """Bytes a workgroup."""
    multiplies: bool
    """Whether it multiplies matrices (``tt.dot``)."""
    mfma: bool
    """Whether by instructions of the matrix cores."""

    @classmethod
    def of(cls, arch: str, metadata: Any, asm: Mapping[str, Any]) -> Resources:
        """What Triton's compiler says: ``CompiledKernel.metadata`` and ``.asm``."""
        code = asm["amdgcn"]

        def number(name: str) -> int:
            found = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)$", code, re.MULTILINE)
            assert found is not None, f"the compiler says no {name}"
            return int(found[1])

        return cls(
            arch=arch,
            warps=metadata.num_warps,
            vgprs=number("vgpr_count"),
            agprs=number("agpr_count"),
            sgprs=number("sgpr_count"),
            lanes=number("sgpr_spill_count"),
            spilled=number("vgpr_spill_count"),
            scratch=number("private_segment_fixed_size"),
            lds=metadata.shared,
            multiplies="tt.dot" in asm["ttgir"],
            mfma=re.search(r"^\s+v_mfma_", code, re.MULTILINE) is not None,
        )

    @property
    def waves_by_registers(self) -> int:
        """How many waves the registers of a SIMD are enough for."""
        by_vectors = _REGISTERS // max(_GRANULE, _rounded(self.vgprs, _GRANULE))
        return min(_MOST_WAVES, by_vectors, 7 if self.sgprs > 100 else _MOST_WAVES)

    @property
    def waves(self) -> float:
        """How many waves a SIMD has room for, with a share of the CU's LDS; zero: no workgroup fits."""
        size, step = LDS[self.arch]
        groups = _SIMDS * self.waves_by_registers // self.warps
        if self.lds:
            groups = min(groups, size // _rounded(self.lds, step))
        if self.warps > 1:
            groups = min(groups, _MOST_GROUPS)
        return groups * self.warps / _SIMDS

    def faults(self) -> list[str]:
        """Why it should not run there, in words."""
        found = []
        if self.spilled or self.scratch:
            found.append(f"{self.spilled} vector registers and {self.scratch} bytes a lane go to memory")
        if self.lds > LDS[self.arch][0]:
            found.append(f"{self.lds} bytes of LDS are more than the {LDS[self.arch][0]} that there are")
        elif not self.waves:
            found.append("a CU has no room for one workgroup")
        if self.multiplies and not self.mfma:
            found.append("it multiplies matrices without the matrix cores")
        return found
