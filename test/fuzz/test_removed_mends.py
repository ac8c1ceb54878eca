# SPDX-License-Identifier: Apache-2.0
"""Random programs of the grammar find each mended kind of fault again, where its mend is taken out.

Each kind has an executor and seeds whose programs go wrong without the mend, and right with it. No kind needs a GPU:
PTX tells which loads are dropped, the text on the host which bounds are computed again. After a change of the grammar,
`python test/fuzz/test_removed_mends.py` looks for seeds anew and prints them.
"""

import contextlib
import importlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from grammar import generated
from grammar_run import outcomes

import torch_tile.codegen.c_text as c_text
import torch_tile.codegen.cuda as cuda
import torch_tile.codegen.cuda_stmt as cuda_stmt
import torch_tile.codegen.cuda_text as cuda_text
import torch_tile.ir.arith_util as arith_util
import torch_tile.ir.bounds as bounds
import torch_tile.ir.expr as expr
import torch_tile.ir.mixed_radix as mixed_radix
import torch_tile.ir.simplify as simplify
import torch_tile.language.loops as loops
import torch_tile.language.math as language_math
import torch_tile.language.recorder as recorder
import torch_tile.language.rewrite as rewrite
import torch_tile.lowering.common.part_overlaps as part_overlaps
import torch_tile.lowering.sync.insert_barriers as insert_barriers
import torch_tile.lowering.threads.bind_loop as bind_loop
import torch_tile.runtime.host_compiler as host_compiler
import torch_tile.simulator.interpret as threads
import torch_tile.simulator.simt.values as simt_values
import torch_tile.simulator.values as tile_values
import torch_tile.tileop.atomic as atomic
import torch_tile.tileop.fill as fill
import torch_tile.tileop.parallel.index_map as index_map
from torch_tile.runtime.host_compiler import csrc_dir, find_compiler

jit = importlib.import_module("torch_tile.jit")  # torch_tile.jit itself is the decorator


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


def plain_truncation(x, to):
    with np.errstate(invalid="ignore"):
        return np.asarray(x, np.float64).astype(np.int64).astype(to.name)


def folder_without_divisors():
    """The headers of CPU kernels, which divide by what they are given."""
    folder = Path(tempfile.mkdtemp(prefix="removed_mends_"))
    shutil.copytree(csrc_dir(), folder, dirs_exist_ok=True)
    text = (folder / "cpu_math.h").read_text()
    text = re.sub(r"(inline T divisor\(T b\) \{).*?\n\}", r"\1 return b; }", text, flags=re.DOTALL)
    (folder / "cpu_math.h").write_text(text)
    return folder


def contracting():
    """The compiler with its own choice of fused products."""
    found = find_compiler()
    return replace(found, flags=tuple(flag for flag in found.flags if flag != "-ffp-contract=off"))


@dataclass(frozen=True)
class Mend:
    """Where a mend is, what stands there without it, the executor that notices, and seeds whose programs do.

    `also` are other places (module, name, what stands there). `dies` says that the process ends without the mend.
    """

    place: object
    name: str
    without: object
    way: str
    seeds: tuple[int, ...] = ()
    also: tuple[tuple[object, str, object], ...] = ()
    dies: bool = False

    @property
    def places(self):
        return (self.place, self.name, self.without), *self.also


KINDS = {
    "partial nests": Mend(bind_loop._Binder, "_stays_in_padding", yes, "sm_80", (167,)),
    "continue of a nest": Mend(bind_loop, "_goes_on", no, "sm_80", (4,)),
    "heads that read shared memory": Mend(insert_barriers.Walk, "_head", nothing, "sm_80", (12,)),
    "bounds that the body changes": Mend(cuda_stmt, "reads_memory", no, "text", (22,)),
    "ceildiv at the end of a type": Mend(language_math, "_has_room", yes, "tiles", (17,)),
    "numbers outside a type": Mend(expr, "_outside", lambda *_: None, "tiles", (12,)),
    "integers of two signs": Mend(expr, "_signed_beside_uint64", lambda *_: None, "tiles", (65,)),
    "floats outside an integer type": Mend(tile_values, "truncated", plain_truncation, "tiles", (96,)),
    "extrema of folded floats": Mend(
        language_math, "extremum", plain_extremum, "tiles", (866,),
        ((expr, "extremum", plain_extremum), (arith_util, "extremum", plain_extremum)),
    ),
    "uint64 as signed": Mend(tile_values, "_ORDERED", {}, "tiles", (33,)),
    "float arguments of threads": Mend(
        threads, "of_threads", SimpleNamespace(constant=lambda value, _: value), "sm_80", (135,)
    ),
    "unsigned extrema of threads": Mend(simt_values, "_UNSIGNED", {}, "sm_80", (0,)),
    "divisors beyond an int32": Mend(mixed_radix, "_is_short", yes, "sm_80", (9302566,)),
    "compared sums of 64 bits": Mend(
        simplify, "is_compared_exactly", yes, "cpu", (261,), ((bounds, "is_compared_exactly", yes),)
    ),
    "overlapping copies": Mend(part_overlaps, "may_overlap", no, "sm_80", (57,)),
    "chains of elif": Mend(rewrite, "error", too_deep, "tiles", (80,)),
    "negative steps": Mend(loops.Loop, "_downwards", upwards, "tiles", (22,)),
    "else of a loop": Mend(rewrite, "_breaks", no, "tiles", (0,)),
    "operands of or": Mend(recorder, "_operand", truths, "tiles", (2,)),
    "widths of literals": Mend(c_text.Text, "typed", lambda *_: None, "cpu"),  # CUDA's shifts name their type anyway
    "operands of atomics": Mend(cuda_text.CudaText, "_operand", lambda self, node, _: self.value(node), "text", (12,)),
    "remainders of floats": Mend(tile_values, "remainder", plain_remainder, "tiles", (2,)),
    "copies of an element that meet": Mend(bind_loop, "_find_copy_conflicts", nothing, "sm_80", (51,)),
    "fills by the tile itself": Mend(fill, "find", nothing, "cpu", (1271,)),
    "index that goes round a fragment": Mend(index_map, "_repeated", lambda dim, times, step: dim, "sm_80", (17,)),
    "choices of written memory and constants": Mend(cuda, "loaded_bits", lambda *_: set(), "ptx", (22,)),
    "written memory that is restricted": Mend(cuda, "is_restricted", yes, "ptx", (5,)),
    "products fused by the compiler": Mend(host_compiler, "find_compiler", contracting, "cpu"),
    "divisors at which a machine stops": Mend(
        host_compiler, "csrc_dir", folder_without_divisors, "cpu", (2,),
        ((host_compiler, "headers_digest", lambda: "no divisors"),), dies=True,
    ),
    "addition of bools": Mend(atomic.Atomic, "check", nothing, "cpu", (215,)),
    "numbers that compare equal": Mend(jit, "exact_key", lambda value: value, "keys", (628,)),
}  # fmt: skip


# g++ 12 with AVX-512 goes wrong on branches that store to tensors; it compiled 78 programs with such branches right, so
# that only test_host_compiler.py asks for the flag.
NOT_FOUND = {"products fused by the compiler", "widths of literals"}


def faults(way: str, seeds, folder) -> list[int]:
    """The seeds whose programs go wrong."""
    found = outcomes([generated(seed) for seed in seeds], [way], folder)
    return sorted({o.seed for o in found if o.is_fault})


@contextlib.contextmanager
def taken_out(mend: Mend):
    """What stood there before the mend."""
    given = [(place, name, getattr(place, name)) for place, name, _ in mend.places]
    for place, name, without in mend.places:
        setattr(place, name, without)
    rewrite._COMPILED.clear()  # what was rewritten with the mend
    try:
        yield
    finally:
        rewrite._COMPILED.clear()
        for place, name, value in given:
            setattr(place, name, value)


def finds(kind: str, seeds, folder) -> list[int]:
    """The seeds whose programs go wrong without the mend of a kind; all of them where the process dies."""
    mend = KINDS[kind]
    if not mend.dies:
        with taken_out(mend):
            return faults(mend.way, seeds, folder)
    command = [sys.executable, __file__, "--without", kind, str(folder), *map(str, seeds)]
    return list(seeds) if subprocess.run(command, capture_output=True).returncode < 0 else []


@pytest.mark.parametrize("kind", [kind for kind, mend in KINDS.items() if mend.seeds])
def test_without_its_mend_a_kind_is_found(kind, tmp_path):
    mend = KINDS[kind]
    assert not faults(mend.way, mend.seeds, tmp_path)
    assert finds(kind, mend.seeds, tmp_path)


def test_every_kind_has_a_seed():
    assert {kind for kind, mend in KINDS.items() if not mend.seeds} == NOT_FOUND


def search(kind: str, most: int = 1200) -> list[int]:
    """The first seed whose program goes wrong without a mend, and right with it."""
    mend = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, most, 20):
            found = finds(kind, range(start, start + 20), folder)
            for seed in found:
                if (not mend.dies or finds(kind, [seed], folder)) and not faults(mend.way, [seed], folder):
                    return [seed]
    return []


def main():
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--without"]:
        kind, folder, *seeds = sys.argv[2:]
        with taken_out(KINDS[kind]):
            faults(KINDS[kind].way, map(int, seeds), folder)
        return
    for each in sys.argv[1:] or KINDS:
        print(f"{each!r}: {search(each)}", flush=True)


if __name__ == "__main__":
    main()
