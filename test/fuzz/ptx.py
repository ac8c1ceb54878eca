# SPDX-License-Identifier: Apache-2.0
"""What NVRTC makes of a generated text, as PTX: which accesses of global memory stay between barriers."""

import re

from torch_tile.compiler.context import PassOptions
from torch_tile.hardware import Target
from torch_tile.runtime.nvrtc import _Nvrtc, flags_for, headers_of


class _Ptx(_Nvrtc):
    """Gives PTX in the cubin's place."""

    def _bytes(self, program, what):
        return super()._bytes(program, "PTX" if what == "CUBIN" else what)


def ptx_of(text, arch):
    """What NVRTC makes of a text, before the assembler."""
    found, _ = _Ptx().compile(text, headers_of(text), flags_for(Target.of(arch), PassOptions()))
    return found.rstrip(b"\0").decode()


def accesses(text, arch):
    """The accesses of global memory between barriers, in the order of the text: "ld", "ld.nc", "st", "atom"."""
    found = [[]]
    for line in ptx_of(text, arch).splitlines():
        if re.search(r"\b(bar|barrier)(\.cta)?\.sync\b", line):
            found.append([])
        elif kind := re.search(r"\b(ld|st|atom|red)\.(?:volatile\.|relaxed\.\w+\.)?global(\.nc)?", line):
            found[-1].append({"red": "atom"}.get(kind[1], kind[1]) + (kind[2] or ""))
    return found
