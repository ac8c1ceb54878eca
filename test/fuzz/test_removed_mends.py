# SPDX-License-Identifier: Apache-2.0
"""Random programs of the grammar find each mended kind of fault again, where its mend is taken out.

Each kind has an executor and seeds whose programs go wrong without the mend, and right with it; kinds without a seed
are yet to be looked for. After a change of the grammar, `python test/fuzz/test_removed_mends.py` looks for seeds anew
and prints them.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from grammar import generated
from grammar_run import outcomes

import torch_tile.codegen.c_text as c_text
import torch_tile.codegen.cuda_stmt as cuda_stmt
import torch_tile.codegen.cuda_text as cuda_text
import torch_tile.ir.expr as expr
import torch_tile.language.loops as loops
import torch_tile.language.math as language_math
import torch_tile.language.recorder as recorder
import torch_tile.language.rewrite as rewrite
import torch_tile.lowering.common.part_overlaps as part_overlaps
import torch_tile.lowering.sync.insert_barriers as insert_barriers
import torch_tile.lowering.threads.bind_loop as bind_loop
import torch_tile.simulator.simt.values as simt_values
import torch_tile.simulator.values as tile_values
import torch_tile.tileop.fill as fill


def yes(*_, **__):
    return True


def no(*_, **__):
    return False


def nothing(*_, **__):
    return []


def upwards(self, name):
    """A negative step counts upwards."""
    yield from replace(self, step=-self.step).iterate(name)


def too_deep(code, *_, **__):
    raise SyntaxError(code)


def truths(word, a, b):
    """0 or 1 for `a or b`."""
    return expr.cast(expr.binary(word, a, b), a.dtype)


def plain_extremum(op, a, b):
    return {"min": min, "max": max}[op](a, b)


def plain_remainder(a, b):
    with np.errstate(all="ignore"):
        return a - np.floor(a / b) * b


@dataclass(frozen=True)
class Mend:
    """Where a mend is, what stands there without it, the executor that notices, and seeds whose programs do."""

    place: object
    name: str
    without: object
    way: str
    seeds: tuple[int, ...] = ()


KINDS = {
    "partial nests": Mend(bind_loop._Binder, "_stays_in_padding", yes, "sm_80", (72,)),
    "continue of a nest": Mend(bind_loop, "_goes_on", no, "sm_80", (8,)),
    "heads that read shared memory": Mend(insert_barriers.Walk, "_head", nothing, "sm_80", (2,)),
    "bounds that the body changes": Mend(cuda_stmt, "reads_memory", no, "text"),
    "ceildiv at the end of a type": Mend(language_math, "_has_room", yes, "tiles"),
    "numbers outside a type": Mend(expr, "_outside", lambda *_: None, "tiles", (12,)),
    "extrema of folded floats": Mend(expr, "extremum", plain_extremum, "tiles"),
    "uint64 as signed": Mend(tile_values, "_ORDERED", {}, "tiles", (17,)),
    "unsigned extrema of threads": Mend(simt_values, "_UNSIGNED", {}, "sm_80", (0,)),
    "overlapping copies": Mend(part_overlaps, "may_overlap", no, "sm_80", (19,)),
    "chains of elif": Mend(rewrite, "error", too_deep, "tiles", (80,)),
    "negative steps": Mend(loops.Loop, "_downwards", upwards, "tiles", (22,)),
    "else of a loop": Mend(rewrite, "_breaks", no, "tiles"),
    "operands of or": Mend(recorder, "_operand", truths, "tiles", (3,)),
    "shifted literals": Mend(c_text.Text, "shifted", lambda *_: None, "text", (83,)),
    "operands of atomics": Mend(cuda_text.CudaText, "_operand", lambda self, node, _: self.value(node), "text", (12,)),
    "remainders of floats": Mend(tile_values, "remainder", plain_remainder, "tiles", (33,)),
    "copies of an element that meet": Mend(bind_loop, "_told_apart", nothing, "sm_80", (37,)),
    "fills by the tile itself": Mend(fill, "find", nothing, "cpu"),
}


def faults(mend: Mend, seeds, folder) -> list[int]:
    """The seeds whose programs go wrong."""
    found = outcomes([generated(seed) for seed in seeds], [mend.way], folder)
    return sorted({o.seed for o in found if o.is_fault})


@pytest.mark.parametrize("kind", [kind for kind, mend in KINDS.items() if mend.seeds])
def test_without_its_mend_a_kind_is_found(kind, tmp_path, monkeypatch):
    mend = KINDS[kind]
    assert not faults(mend, mend.seeds, tmp_path)
    monkeypatch.setattr(mend.place, mend.name, mend.without)
    assert faults(mend, mend.seeds, tmp_path)


def search(kind: str, most: int = 1200) -> list[int]:
    """The first seed whose program goes wrong without a mend, and right with it."""
    mend, given = KINDS[kind], None
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, most, 20):
            given = getattr(mend.place, mend.name)
            setattr(mend.place, mend.name, mend.without)
            try:
                found = faults(mend, range(start, start + 20), folder)
            finally:
                setattr(mend.place, mend.name, given)
            if found := [seed for seed in found if not faults(mend, [seed], folder)]:
                return found[:1]
    return []


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[1:] or KINDS:
        print(f"{each!r}: {search(each)}", flush=True)
