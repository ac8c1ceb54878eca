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


def stale(text, arch):
    """The loads through the cache of constants whose address may be one of memory that their kernel writes."""
    kernels = re.split(r"\.(?:entry|func)\b", ptx_of(text, arch))  # each has registers of its own
    return [place for kernel in kernels for place in _stale(kernel)]


def _stale(kernel):
    """The loads that `stale` looks for in one kernel."""
    lines = [line.strip().rstrip(";") for line in kernel.splitlines()]
    sources, known = {}, {}
    for line in lines:
        line = re.sub(r"^@!?%p\d+ ", "", line)
        operation, _, operands = line.partition(" ")
        first, *others = re.findall(r"%rd\d+|\w+_param_\d+", operands) or [""]
        if operation.startswith("ld.param"):
            known.setdefault(first, set()).update(others)
        elif first and not operation.startswith(("ld", "st", "atom", "red")):
            sources.setdefault(first, set()).update(others)

    changed = True
    while changed:
        changed = False
        for register, others in sources.items():
            found = set().union(*(known.get(other, set()) for other in others), known.get(register, set()))
            changed |= found != known.get(register, set())
            known[register] = found

    def tensors(pattern):
        places = [m[1] for line in lines if (m := re.search(pattern + r".*?\[(%rd\d+)", line))]
        return [(place, known.get(place, set())) for place in places]

    written = set().union(*(of for _, of in tensors(r"\b(?:st|atom|red)\.(?:\w+\.)*?global")))
    return [place for place, of in tensors(r"\bld\.global\.nc") if of & written]
