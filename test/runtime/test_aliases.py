# SPDX-License-Identifier: Apache-2.0
"""Which arguments share memory, and launches of those that are the same."""

import random

import pytest
import torch
from fake_cuda import OnCpu

import torch_tile.language as T
from torch_tile.compiler.sources import CudaSource, Entry
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import const
from torch_tile.runtime.aliases import exact_aliases, may_meet, overlap

ROWS, COLUMNS = 37, 32


@T.prim_func
def turned(x: T.Tensor((ROWS, COLUMNS), "float32"), out: T.Tensor((ROWS, COLUMNS), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        tile = T.alloc_shared((COLUMNS,), "float32")
        T.copy(x[bx, 0], tile)
        for j in T.Parallel(COLUMNS):
            out[bx, j] = tile[COLUMNS - 1 - j]


def test_launches_of_exact_aliases(way, fake_cuda):
    """By both ways, in any order of calls; what overlaps in part stays an error."""
    made = []

    def launcher(program, disjoint, make):
        entry = Entry(f"kernel_{len(made)}", (0, 1), program.kernels[0].grid, 64, 0, None, "PP")
        source = CudaSource("", (entry,), (4, 4), disjoint)
        return OnCpu(program, source, b"\x7fELF and the rest", Target("cuda", 90), (), make)

    def make(program):
        made.append(program)
        return type("Kernel", (), {"launcher": launcher(program, (), None)})

    fake_cuda.number("slots").value = 2
    start = launcher(turned.program, ((0, 1),), make)
    both = torch.zeros(ROWS + 1, COLUMNS)
    x, out = torch.zeros(2, ROWS, COLUMNS)
    calls = [(x, out), (x, x), (out, out), (x, out), (x, x.view(ROWS, COLUMNS)), (out, x), (x, x)]
    for args in calls:
        start.begin(*args)
        with pytest.raises(LaunchError, match=r"`x` and `out` overlap.*pass .clone\(\)"):
            start.begin(both[1:], both[:-1])
    found = fake_cuda.launches()
    assert [list(each.slots[:2]) for each in found] == [[a.data_ptr() for a in args] for args in calls]
    assert len(made) == 1 and len(fake_cuda.modules()) == 2
    kinds = {(each.function, len({*each.slots[:2]})) for each in found}
    assert len({each.function for each in found}) == len(kinds) == 2


def parameter(x, dtype):
    """A parameter that takes this tensor."""
    return Buffer("x", tuple(const(size, dt.int32) for size in x.shape), dt.to_dtype(dtype), "global")


def view_of(draw, memory):
    """A random view of a small memory, as 32-bit or 16-bit elements."""
    x = memory if draw.random() < 0.8 else memory.view(torch.int16)
    rank = draw.randint(1, 3)
    sizes, steps = (
        [draw.randint(0 if draw.random() < 0.1 else 1, 3) for _ in range(rank)],
        draw.sample([1, 2, 3, 6], rank),
    )
    return x.as_strided(sizes, steps, draw.randint(0, 2))


def bytes_of(x):
    """The address of each element's first byte, in the order of elements."""
    index = torch.zeros(x.shape, dtype=torch.int64)
    for d, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        index += (torch.arange(size) * step).view(size, *[1] * (x.dim() - d - 1))
    return (x.data_ptr() + index * x.element_size()).flatten().tolist()


def test_exact_and_partial_aliases_are_told_apart(seed):
    draw, memory = random.Random(seed), torch.zeros(64, dtype=torch.int32)
    met = {"exact": 0, "partial": 0, "apart": 0}
    for _ in range(3000):
        one = view_of(draw, memory)
        other = one.view_as(one) if draw.random() < 0.1 else view_of(draw, memory)
        buffers = [parameter(x, str(x.dtype).removeprefix("torch.")) for x in (one, other)]
        aliases, partial = exact_aliases(((0, 1),), buffers, [one, other])
        touched = [
            {a + n for a in bytes_of(x) for n in range(x.element_size())} for x in (one, other)
        ]  # fmt: skip
        same = one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
        kind = "apart" if not touched[0] & touched[1] else "exact" if same else "partial"
        met[kind] += 1
        assert (aliases, partial) == {
            "apart": ((), []), "exact": (((0, 1),), []), "partial": ((), [(0, 1)])
        }[kind], (one.stride(), other.stride(), kind)  # fmt: skip
        assert overlap(one, other) == (kind != "apart") and may_meet(one, other) >= overlap(one, other)
    assert min(met.values()) > 20, met


def test_parameters_of_other_types_are_refused():
    """They may be one tensor, as bytes may hold two types; no variant reads one as the other."""
    x = torch.zeros(4, 4, dtype=torch.uint8)
    one, other = parameter(x, "uint8"), parameter(x, "int8")
    assert exact_aliases(((0, 1),), [one, other], [x, x]) == ((), [(0, 1)])
    assert exact_aliases(((0, 1),), [one, one], [x, x]) == (((0, 1),), [])
    assert exact_aliases(((0, 1),), [one, one], [x, None]) == ((), [])
