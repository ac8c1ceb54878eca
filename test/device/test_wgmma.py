# SPDX-License-Identifier: Apache-2.0
"""Products of a warpgroup on a GPU: every type, walk and width, exact against torch.

The host writes each operand's bytes where the rules of the hardware put them; a kernel copies them to shared memory (or
registers), multiplies, and stores accumulators by thread and register.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.intrinsics import bulk, memory, wgmma
from torch_tile.intrinsics.wgmma import PRODUCTS, Descriptor, allowed_n
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Binary, Load, Var, const
from torch_tile.ir.stmt import Alloc, Block, For, If, Kernel, LoopKind, Program, Store
from torch_tile.lowering.common.flatten import flatten
from torch_tile.lowering.hopper.init_mbarriers import init_mbarriers
from torch_tile.runtime.cuda_launch import CudaLauncher
from torch_tile.runtime.nvrtc import compile_cubin

pytestmark = pytest.mark.cuda
HOPPER = Target("cuda", 90)
M, THREADS, K_BYTES, STEP_BYTES = 64, 128, 256, 32
STEPS = K_BYTES // STEP_BYTES
SPANS = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}  # bytes of a panel, and the bits of a chunk's place that a swizzle turns
T = Var("t", dt.int32, "thread")


def swizzled(at, span):
    return at ^ ((at >> 3) & SPANS[span])


@dataclass(frozen=True)
class Placed:
    """An operand in shared memory: where the byte of (row, byte along K) lies, its walk, and its steps of K."""

    name: str
    at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    walk: Descriptor
    step: Callable[[int], int]


def along(span, rows, itemsize):
    """Memory runs along K: panels of `span` bytes; without a swizzle, groups of 8 rows of 16 bytes."""
    if span == 0:
        return Placed(
            "along K, no swizzle", lambda r, k: k // 16 * rows * 16 + r * 16 + k % 16, Descriptor(0, rows * 16, 128),
            lambda step: step * 2 * rows * 16,
        )  # fmt: skip
    return Placed(
        f"along K, {span}", lambda r, k: swizzled(k // span * rows * span + r * span + k % span, span),
        Descriptor(span, 16, 8 * span),
        lambda step: step * STEP_BYTES // span * rows * span + step * STEP_BYTES % span,
    )  # fmt: skip


def across(span, rows, itemsize):
    """Memory runs along rows of the operand (M or N); 16-bit types. Without a swizzle, groups of 8 rows by 8 of K."""
    depth = K_BYTES // 2
    if span == 0:
        group = rows // 8 * 128
        return Placed(
            "across K, no swizzle",
            lambda r, k: k // 16 * group + r // 8 * 128 + k // 2 % 8 * 16 + r % 8 * 2 + k % 2,
            Descriptor(0, group, 128, True), lambda step: step * 2 * group,
        )  # fmt: skip
    panel = span // 2
    return Placed(
        f"across K, {span}",
        lambda r, k: swizzled(r // panel * depth * span + k // 2 * span + r % panel * 2, span) + k % 2,
        Descriptor(span, depth * span, 8 * span, True), lambda step: step * 16 * span,
    )  # fmt: skip


def walks(types, rows):
    """All ways in which an operand may lie in shared memory."""
    itemsize = torch_type(types[0]).itemsize
    ways = (along, across) if itemsize == 2 else (along,)
    return [way(span, rows, itemsize) for way in ways for span in SPANS]


def torch_type(name):
    return torch.float32 if name == "tf32" else dt.to_dtype(name).as_torch()


# What the host does.


def values(rows, name):
    """An operand, exact in its type; sums are exact in float16 and in what fp8 products are summed in."""
    size = (rows, K_BYTES // torch_type(name).itemsize)
    if name in ("int8", "uint8"):
        return torch.randint(-128, 128, size).to(torch_type(name))
    return torch.randint(-2, 3, size).to(torch_type(name))


def image(operand, placed):
    """What lies in shared memory: whole rounds of the block, 16 bytes of each thread at once."""
    raw = operand.contiguous().view(torch.uint8)
    rows, columns = torch.meshgrid(*map(torch.arange, raw.shape), indexing="ij")
    at = placed.at(rows, columns).reshape(-1)
    assert at.unique().numel() == at.numel()
    size = 16 * THREADS
    found = torch.zeros(-(-int(at.max() + 1) // size) * size, dtype=torch.uint8)
    found[at] = raw.reshape(-1)
    return found.view(operand.dtype)


def registers(operand):
    """A by thread and register: for each step of K, 16 bytes of a thread."""
    itemsize = operand.itemsize
    per_word, count = 4 // itemsize, 16 // itemsize
    t, step, v = torch.meshgrid(torch.arange(THREADS), torch.arange(STEPS), torch.arange(count), indexing="ij")
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (v // per_word % 2)
    column = step * STEP_BYTES // itemsize + per_word * (t % 4) + v % per_word + 4 * per_word * (v // (2 * per_word))
    return operand[row, column].reshape(THREADS, -1)


def accumulators(d):
    """D by thread and register."""
    t, r = torch.meshgrid(torch.arange(THREADS), torch.arange(M * d.shape[1] // THREADS), indexing="ij")
    return d[16 * (t // 32) + t % 32 // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2]


# What the device does.


def loop(count, body, kind=LoopKind.UNROLLED):
    i = Var("i", dt.int32, "loop")
    return For(kind, (i,), (const(0, dt.int32),), (const(count, dt.int32),), Block((body(i),)))


def buffer(name, kind, *shape, scope="global", **fields):
    return Buffer(name, tuple(const(n, dt.int32) for n in shape), dt.to_dtype(kind), scope, **fields)


def first(of, index=0):
    return Address(of, (const(index, dt.int32),))


def product(number, case, a_given, b_given, keep):
    """A kernel and its parameters: A and B as they lie on chip, and accumulators."""
    types, n, itemsize = case.types, case.n, a_given.itemsize
    of_a, of_b = ("float32" if name == "tf32" else name for name in types[:2])
    a_param, b_param = buffer(f"a_{number}", of_a, *a_given.shape), buffer(f"b_{number}", of_b, *b_given.shape)
    out = buffer(f"d_{number}", types[2], THREADS, M * n // THREADS)
    a_bytes = a_given.numel() * itemsize if case.a else 0
    a_own = buffer("a_own", of_a, *a_given.shape[-1:], scope="shared" if case.a else "local", offset=0)
    b_own = buffer("b_own", of_b, *b_given.shape, scope="shared", offset=a_bytes)
    d = buffer("d", types[2], M * n // THREADS, scope="local")

    def fill(tile, source):
        count = tile.static_shape[0]
        if tile.scope == "local":
            return loop(count, lambda i: Store(tile, (i,), Load(source, (T, i))))
        at = lambda i: (i * THREADS + T,)  # noqa: E731
        return loop(count // THREADS, lambda i: Store(tile, at(i), Load(source, at(i))), LoopKind.SERIAL)

    steps = [
        wgmma.wgmma(
            first(d), first(a_own, 0 if case.a else step * 16 // itemsize), first(b_own), n, types,
            case.a and case.a.walk, case.b.walk, case.a.step(step) if case.a else 0, case.b.step(step),
            keep != 0 if step == 0 else True,
        )
        for step in range(STEPS)
    ]  # fmt: skip
    body = (
        Alloc(a_own), Alloc(b_own), Alloc(d), fill(a_own, a_param), fill(b_own, b_param), fill(d, out),
        bulk.fence_proxy_async(), memory.barrier(), wgmma.wgmma_fence(), *steps, wgmma.wgmma_commit(),
        wgmma.wgmma_wait(0), loop(M * n // THREADS, lambda i: Store(out, (T, i), Load(d, (i,)))),
    )  # fmt: skip
    return one_block(body, a_bytes + b_given.numel() * itemsize), (a_param, b_param, out)


def one_block(body, shared_bytes):
    grid, block = (const(1, dt.int32),), (Var("b", dt.int32, "block"),)
    return Kernel(grid, block, (THREADS,), Block(tuple(body)), thread=T, shared_bytes=shared_bytes)


@dataclass(frozen=True)
class Case:
    """A product by hand: its types and width, how operands lie, and their values."""

    types: tuple[str, str, str]
    n: int
    a: Placed | None
    b: Placed
    a_values: torch.Tensor
    b_values: torch.Tensor

    @property
    def name(self):
        return f"{self.n} columns, A {self.a.name if self.a else 'in registers'}, B {self.b.name}"


def cases(types, sizes, a_ways, b_ways):
    """All combinations; a way is a function of rows, or None for A in registers."""
    for n in sizes:
        a_values, b_values = values(M, types[0]), values(n, types[1])
        yield from (Case(types, n, a and a(M), b(n), a_values, b_values) for a in a_ways for b in b_ways)


def compiled(found):
    """One module with a kernel for each case: a launcher, and the tensors it takes but for accumulators."""
    keep = Var("keep", dt.int32, "param")
    kernels, params, tensors = [], [], []
    for number, case in enumerate(found):
        a = registers(case.a_values) if case.a is None else image(case.a_values, case.a)
        b = image(case.b_values, case.b)
        made, buffers = product(number, case, a, b, keep)
        kernels.append(made)
        params += buffers
        tensors.append((a, b))
    program = Program("products", (*params, keep), tuple(kernels), (), ())
    return launcher_of(program), tensors


def launcher_of(program):
    source = emit_cuda(flatten(program), Build(HOPPER, PassOptions()), program)
    cubin = compile_cubin(source.text, HOPPER)
    assert cubin.warnings == [] and not any(used.spills for used in cubin.resources.values())
    return CudaLauncher(program, source, cubin.data, HOPPER)


def check(found):
    """Exact, whether the accumulators' old values are kept or not."""
    found = list(found)
    launcher, tensors = compiled(found)
    given = [tuple(x.cuda() for x in pair) for pair in tensors]
    wrong = []
    for keep in (0, 1):
        before = [torch.randint(-9, 10, (M, c.n)).to(torch_type(c.types[2])) for c in found]
        got = [accumulators(d).contiguous().cuda() for d in before]
        launcher(*(x for pair, d in zip(given, got, strict=True) for x in (*pair, d)), keep)
        for case, d, had in zip(found, got, before, strict=True):
            want = case.a_values.double() @ case.b_values.double().T + keep * had.double()
            if not torch.equal(d.cpu().double(), accumulators(want)):
                wrong.append(f"{case.name}, keep {keep}")
    assert not wrong, f"{len(wrong)} of {2 * len(found)}: {'; '.join(wrong)}"


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90")


def ways(types):
    """Every way an operand lies, as functions of its rows."""
    names = [(way, span) for way in ((along, across) if PRODUCTS[types] == 16 else (along,)) for span in SPANS]
    return {f"{way.__name__} {span}": (lambda rows, way=way, span=span: way(span, rows, 0)) for way, span in names}


EACH = [(types, a) for types in PRODUCTS for a in ("registers", *ways(types))]


def walks_of(types, a, n=64):
    """A in one way, B in each."""
    found = ways(types)
    return cases(types, (n,), (None if a == "registers" else found[a],), found.values())


def widths_of(types, a):
    """Every width, A in one way, and B in panels of 128 bytes."""
    found = ways(types)
    last = "across 128" if PRODUCTS[types] == 16 else "along 128"
    return cases(types, [n for n in range(8, 257, 8) if allowed_n(n, types[0])], (found.get(a),), (found[last],))


@pytest.mark.parametrize(("types", "a"), EACH, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_walks(types, a, hopper):
    check(walks_of(types, a, 192 if a == "registers" else 64))


SWEPT = [
    ("float16", "float16", "float16"), ("bfloat16", "bfloat16", "float32"), ("tf32", "tf32", "float32"),
    ("float8_e4m3fn", "float8_e5m2", "float32"), ("int8", "uint8", "int32"),
]  # fmt: skip


@pytest.mark.parametrize("a", ["registers", "along 128"])
@pytest.mark.parametrize("types", SWEPT, ids="-".join)
def test_widths(types, a, hopper):
    check(widths_of(types, a))


# Operands that come by tensor maps.

DEPTH = K_BYTES // 2  # of 16-bit operands


def brought(name, shape, rows, placed, offset, ready):
    """A bfloat16 tensor, its tile in shared memory at `offset`, and the statements that bring its panels."""
    deep, span = placed.walk.across, placed.walk.swizzle
    outer, inner = (DEPTH, rows) if deep else (rows, DEPTH)
    stride = -(-shape[1] // 8) * 8
    numbers = tuple(const(n, dt.int32) for n in shape), tuple(const(n, dt.int32) for n in (stride, 1))
    given = Buffer(name, numbers[0], dt.bfloat16, "global", strides=numbers[1])
    tile = buffer(f"{name}_tile", "bfloat16", rows * DEPTH, scope="shared", offset=offset)
    seen = TensorMap(given, *numbers, (outer, span // 2), span)
    loads = [
        bulk.tma_load(
            first(tile, n * outer * span // 2), seen, (const(0, dt.int32), const(n * span // 2, dt.int32)), ready
        )
        for n in range(-(-inner * 2 // span))
    ]
    return given, tile, (bulk.mbarrier_expect(ready, rows * DEPTH * 2), *loads)


def tiles_by_tma(a, b, n, a_shape, b_shape):
    """D = A * B for operands that are smaller than their tiles."""
    types = ("bfloat16", "bfloat16", "float32")
    size = (M + n) * DEPTH * 2
    full = Buffer("full", (const(1, dt.int32),), dt.uint64, "barrier", offset=size, arrivals=1)
    ready = first(full)
    a_given, a_tile, a_loads = brought("a", a_shape, M, a, 0, ready)
    b_given, b_tile, b_loads = brought("b", b_shape, n, b, M * DEPTH * 2, ready)
    d, out = (
        buffer("d", "float32", M * n // THREADS, scope="local"),
        buffer("out", "float32", THREADS, M * n // THREADS),
    )
    body = (
        Alloc(a_tile), Alloc(b_tile), Alloc(full), Alloc(d),
        loop(M * n // THREADS, lambda i: Store(d, (i,), const(0.0, dt.float32))),
        If(Binary("==", T, const(0, dt.int32)), Block((*a_loads, *b_loads, bulk.mbarrier_arrive(ready))), Block(())),
        bulk.mbarrier_wait(ready, 0), wgmma.wgmma_fence(),
        *(
            wgmma.wgmma(first(d), first(a_tile), first(b_tile), n, types, a.walk, b.walk, a.step(s), b.step(s))
            for s in range(STEPS)
        ),
        wgmma.wgmma_commit(), wgmma.wgmma_wait(0), loop(M * n // THREADS, lambda i: Store(out, (T, i), Load(d, (i,)))),
    )  # fmt: skip
    params = a_given, b_given, out
    return launcher_of(init_mbarriers(Program("by_tma", params, (one_block(body, size + 8),), (), ())))


@pytest.mark.parametrize("b", [f"{way} {span}" for way in ("along", "across") for span in (32, 64, 128)])
@pytest.mark.parametrize("a", [f"{way} {span}" for way in ("along", "across") for span in (32, 64, 128)])
def test_operands_by_tma(a, b, hopper):
    n, k = 192, DEPTH - 3
    found = ways(("bfloat16", "bfloat16", "float32"))
    placed = found[a](M), found[b](n)
    shapes = [(k, r) if p.walk.across else (r, k) for p, r in zip(placed, (M - 7, n - 30), strict=True)]
    launcher = tiles_by_tma(*placed, n, *shapes)
    x, y = (
        torch.randint(-9, 10, (r, -(-c // 8) * 8), device="cuda").bfloat16()[:, :c] for r, c in shapes
    )  # fmt: skip
    out = torch.full((THREADS, M * n // THREADS), float("nan"), device="cuda")
    for _ in range(2):
        launcher(x, y, out)
    want = torch.zeros(M, n, dtype=torch.float64)
    rows, columns = (t.mT if p.walk.across else t for t, p in zip((x, y), placed, strict=True))
    want[: M - 7, : n - 30] = rows.cpu().double() @ columns.cpu().double().T
    assert torch.equal(out.cpu().double(), accumulators(want))
