# SPDX-License-Identifier: Apache-2.0
import linecache
import re

import pytest
import torch
from emulate import emulate

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import alike

FOLD = {
    "add": torch.add, "max": torch.maximum, "min": torch.minimum, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}  # fmt: skip
BITWISE = ("and", "or", "xor")
DTYPES = ("float32", "int32", "float64", "int64")
CASES = [(kind, dtype) for kind in FOLD for dtype in DTYPES if "int" in dtype or kind not in BITWISE]
ORDERS = ["relaxed", "acquire", "release", "acq_rel", "seq_cst"]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_many_blocks_update_one_place(kind, dtype, launch):
    """Elements, scalars and whole regions; the numbers are small integers, so that no order of additions is special."""

    @T.prim_func
    def kernel(A: T.Tensor((12, 5), dtype), out: T.Tensor((3, 8), dtype)):
        with T.Kernel(12) as b:
            row = T.alloc_fragment((5,), dtype)
            T.copy(A[b, 0], row)
            getattr(T, f"atomic_{kind}")(out[0, 1:6], row)
            for i in T.Parallel(5):
                getattr(T, f"atomic_{kind}")(out[1, b % 4 + i], A[b, i])
            getattr(T, f"atomic_{kind}")(out[2, 3], A[b, 2], memory_order="relaxed")
            getattr(T, f"atomic_{kind}")(out[2, 6], row)  # sticks out: dropped

    a, out = (torch.randint(-9, 9, s).to(getattr(torch, dtype)) for s in ((12, 5), (3, 8)))
    expected = out.clone()
    for b in range(12):
        expected[0, 1:6] = FOLD[kind](expected[0, 1:6], a[b])
        for i in range(5):
            expected[1, b % 4 + i] = FOLD[kind](expected[1, b % 4 + i], a[b, i])
        expected[2, 3] = FOLD[kind](expected[2, 3], a[b, 2])
        expected[2, 6:8] = FOLD[kind](expected[2, 6:8], a[b, :2])
    launch(kernel, a, out)
    assert torch.equal(out, expected)


def test_a_scalar_for_a_region(launch):
    @T.prim_func
    def kernel(out: T.Tensor((4, 4), "float32")):
        with T.Kernel(6) as b:
            T.atomic_add(out[1:3, :], 2)
            T.atomic_max(out[0, 0], b)

    out = torch.zeros(4, 4)
    launch(kernel, out)
    assert out[1:3].eq(12).all() and out[3].eq(0).all() and out[0, 0] == 5


def test_extents_must_agree(complaint):
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            row = T.alloc_fragment((4,), "float32")
            T.atomic_add(out[0:5], row)  # here

    assert "the source `row` (4) and of the destination `out` (5)" in complaint(kernel, "copy_shape")


def test_the_target_is_memory():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(out: T.Tensor((8,), "float32")):
            with T.Kernel(1) as _:
                T.atomic_min(3, out[0])

    assert caught.value.code == "atomic_target"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int32"])
def test_bits_of_narrow_types(dtype, way, seed):
    """What the chip has no instruction for is changed inside its word."""

    @T.prim_func
    def kernel(A: T.Tensor((40, 3), dtype), out: T.Tensor((3, 3), dtype)):
        with T.Kernel(4, threads=32) as b:
            for i, j in T.Parallel(10, 3):
                T.atomic_and(out[0, j], A[b * 10 + i, j])
                T.atomic_or(out[1, j], A[b * 10 + i, j])
                T.atomic_xor(out[2, j], A[b * 10 + i, j])

    top = 2 if dtype == "bool" else 128
    a, out = (torch.randint(0, top, shape).to(getattr(torch, dtype)) for shape in ((40, 3), (3, 3)))
    want = out.clone()
    for row in a:
        want[0] &= row
        want[1] |= row
        want[2] ^= row
    way(kernel, a, out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("count", [2, 4])
def test_neighbours_at_once(count, dtype, way, seed):
    """Rows gathered from a tile, as gradients of gathered keys are; the last ones stick out and are dropped."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 12), dtype), to: T.Tensor((6,), "int32"), out: T.Tensor((4, 10), dtype)):
        with T.Kernel(2, threads=32) as b:
            tile = T.alloc_shared((3, 12), dtype)
            T.copy(A[b * 3, 0], tile)
            for i, j in T.Parallel(3, 12 // count):
                add = T.atomic_addx2 if count == 2 else T.atomic_addx4
                add(out[to[b * 3 + i], j * count], tile[i, j * count])

    to = torch.randint(0, 4, (6,), dtype=torch.int32)
    a, out = (torch.randint(-9, 9, shape).to(getattr(torch, dtype)) for shape in ((6, 12), (4, 10)))
    want = out.double().index_add(0, to.long(), a[:, :10].double())
    way(kernel, a, to, out)
    assert torch.equal(out.double(), want)


@pytest.mark.parametrize("order", [None, *ORDERS])
def test_what_stood_there_before(order, way, seed):
    """Places are drawn by counting up: each value gets one of its own."""

    @T.prim_func
    def kernel(A: T.Tensor((50,), "int32"), counts: T.Tensor((3,), "int32"), out: T.Tensor((3, 50), "int32")):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(25):
                bucket = A[b * 25 + i] % 3
                place = T.atomic_add(counts[bucket], 1, order, return_prev=True)
                out[bucket, place] = A[b * 25 + i]

    a = torch.randint(0, 100, (50,), dtype=torch.int32)
    counts, out = torch.zeros(3, dtype=torch.int32), torch.full((3, 50), -1, dtype=torch.int32)
    way(kernel, a, counts, out)
    for bucket in range(3):
        mine = a[a % 3 == bucket]
        assert counts[bucket] == len(mine)
        assert sorted(out[bucket, : len(mine)].tolist()) == sorted(mine.tolist())
        assert (out[bucket, len(mine) :] == -1).all()


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_one_update_tells_all_threads(dtype, way):
    """Outside of T.Parallel it is made once, and every thread learns what it found."""

    @T.prim_func
    def kernel(total: T.Tensor((4,), dtype), out: T.Tensor((5, 64), dtype)):
        with T.Kernel(5, threads=64) as b:
            before = T.atomic_add(total[1], b + 1, return_prev=True)
            top = T.atomic_max(total[2], b, return_prev=True)
            outside = T.atomic_min(total[4], 1, return_prev=True)
            if before >= 0:
                for i in T.Parallel(64):
                    out[b, i] = before * 100 + top + outside

    total, out = (torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in ((4,), (5, 64)))
    way(kernel, total, out)
    assert total.tolist() == [0, 15, 4, 0]
    assert torch.equal(out, out[:, :1].expand(5, 64))
    found = {int(value) // 100: b for b, value in enumerate(out[:, 0])}
    running = 0
    for before in sorted(found):  # blocks come in any order on a GPU
        assert before == running
        running += found[before] + 1
    assert running == 15 and all(int(value) % 100 in range(5) for value in out[:, 0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "bfloat16", "bool", "uint8"])
def test_loads_and_stores(dtype, order, way, seed):
    loaded = {"release": "consume", "acq_rel": "acquire"}.get(order, order)
    stored = {"acquire": "release", "acq_rel": "release"}.get(order, order)

    @T.prim_func
    def kernel(A: T.Tensor((7, 5), dtype), B: T.Tensor((7, 5), dtype), C: T.Tensor((4,), dtype)):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((5,), dtype)
            for i, j in T.Parallel(7, 5):
                T.atomic_store(B[i, j], T.atomic_load(A[i, j], loaded), memory_order=stored)
            T.copy(A[3, 0], tile)
            C[0] = T.atomic_load(tile[2])
            C[1] = T.atomic_load(A[7, 2])
            T.atomic_store(C[2:4], A[1, 0:2])

    make = torch.randn if "float" in dtype else lambda *s: torch.randint(0, 2, s)
    a, b, c = (make(*shape).to(getattr(torch, dtype)) for shape in ((7, 5), (7, 5), (4,)))
    way(kernel, a, b, c)
    assert torch.equal(a, b) and c.tolist() == [a[3, 2].item(), 0, *a[1, :2].tolist()]


@pytest.mark.parametrize("second", ["load", "max", "xor", "store"])
@pytest.mark.parametrize("first", ["add", "or", "store"])
@pytest.mark.parametrize("scope", ["shared", "global"])
def test_updates_come_in_the_order_of_statements(scope, first, second, way, seed):
    """Threads of several warps update memory, then update it in another way or read it by T.atomic_load."""
    n = 150

    @T.prim_func
    def kernel(A: T.Tensor((n,), "int32"), out: T.Tensor((n,), "int32"), memory: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((n,), "int32") if scope == "shared" else memory
            T.clear(s)
            for i in T.Parallel(n):
                getattr(T, f"atomic_{first}")(s[(i * 7 + 3) % n], A[i])
            for i in T.Parallel(n):
                if second == "load":
                    out[i] = T.atomic_load(s[i], memory_order="relaxed")
                else:
                    getattr(T, f"atomic_{second}")(s[i], A[i])
            for i in T.Parallel(n):
                if second != "load":
                    out[i] = s[i]

    a, out, memory = (torch.randint(-99, 99, (n,), dtype=torch.int32) for _ in range(3))
    expected = torch.empty_like(a)
    expected[(torch.arange(n) * 7 + 3) % n] = a
    expected = {"load": expected, "store": a}.get(second, FOLD.get(second, torch.add)(expected, a))
    way(kernel, a, out, memory)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("loop", ["while", "for"])
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_no_barrier_between_threads_that_wait_for_each_other(target, loop):
    """A barrier between the two branches would never be reached."""

    @T.prim_func
    def kernel(out: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            flags = T.alloc_shared((2,), "int32")
            T.clear(flags)
            for mine in range(2):
                if tx // 32 == mine:
                    if mine == 0:
                        T.atomic_store(flags[0], 1)
                    if loop == "while":
                        while T.atomic_load(flags[1 - mine], memory_order="acquire") == 0:
                            T.evaluate(0)
                    else:
                        for _ in T.serial(1 << 20):
                            if T.atomic_load(flags[1 - mine], memory_order="acquire") != 0:
                                break
                    if mine == 1:
                        T.atomic_store(flags[1], 1)
                    out[tx] = mine + 1

    made = tilelang.compile(kernel, target=target)
    assert made.get_kernel_source().count("tile::barrier()") == 1  # behind T.clear
    out = torch.zeros(64, dtype=torch.int32)
    emulate(made, out)
    assert out.tolist() == [1] * 32 + [2] * 32


def test_a_histogram_by_threads(seed):
    """Threads that count in shared memory, each what it finds, and draw places for what is large."""
    n, threads = 300, 64

    @T.prim_func
    def kernel(A: T.Tensor((n,), "int32"), hist: T.Tensor((8,), "int32"), large: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding()
            counts, found = T.alloc_shared((8,), "int32"), T.alloc_shared((1,), "int32")
            T.clear(counts)
            T.clear(found)
            T.sync_threads()
            for s in T.serial(T.ceildiv(n, threads)):
                i = s * threads + tx
                if i < n:
                    T.atomic_add(counts[A[i] % 8], 1)
                    if A[i] > 80:
                        place = T.atomic_add(found[0], 1, return_prev=True)
                        large[place] = A[i]
            T.sync_threads()
            T.copy(counts, hist)

    a = torch.randint(0, 100, (n,), dtype=torch.int32)
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        hist, large = torch.zeros(8, dtype=torch.int32), torch.full((n,), -1, dtype=torch.int32)
        findings = tilelang.compile(kernel, target=target).interpret(a, hist, large)
        assert not findings, findings.report()
        assert torch.equal(hist, torch.bincount(a % 8, minlength=8).int())
        assert sorted(large[large >= 0].tolist()) == sorted(a[a > 80].tolist())


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("memory_order", lambda A, B, tile: T.atomic_add(A[0], 1, memory_order="strong")),
        ("memory_order", lambda A, B, tile: T.atomic_load(A[0], "release")),
        ("memory_order", lambda A, B, tile: T.atomic_load(A[0], "first")),
        ("src", lambda A, B, tile: T.atomic_load(A[0:2])),
        ("src", lambda A, B, tile: T.atomic_load(tile[0])),
        ("src", lambda A, B, tile: T.atomic_load(3)),
        ("return_prev", lambda A, B, tile: T.atomic_add(A[0:2], 1, return_prev=True)),
        ("return_prev", lambda A, B, tile: T.atomic_add(A[0], tile, return_prev=True)),
        ("value", lambda A, B, tile: T.atomic_addx4(A[0], 3.0)),
        ("dst", lambda A, B, tile: T.atomic_or(A[0], 1, return_prev=True)),
    ],
)
def test_what_cannot_be_asked(name, use):
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "int32")):
            with T.Kernel(1):
                tile = T.alloc_fragment((4,), "float32")
                use(A, B, tile)

    assert caught.value.code == "bad_argument" and f"argument `{name}`" in str(caught.value)


def test_an_update_behind_and_is_refused():
    with pytest.raises(TileError) as caught:

        @T.prim_func
        def kernel(A: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(1):
                if n > 0 and T.atomic_add(A[0], 1, return_prev=True) > 2:
                    A[1] = 1

    assert caught.value.code == "bad_argument" and "return_prev" in str(caught.value)


def test_bits_of_floats(complaint):
    @T.prim_func
    def kernel(out: T.Tensor((8,), "float32")):
        with T.Kernel(1) as _:
            T.atomic_xor(out[0:5], 1)  # here

    assert "argument `dst` has dtype float32" in complaint(kernel, "bad_argument")


def test_printed_and_read_again():
    """A kernel shows what it updates, and can be read again."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            T.atomic_xor(A[0], 3, "release")
            old = T.atomic_and(A[1], 3, "acq_rel", return_prev=True)
            B[0] = old + T.atomic_load(A[2], "acquire")

    text, names = repr(kernel), {"T": T}
    assert "T.atomic_xor(A[0], 3, memory_order='release')" in text.replace('"', "'")
    assert text.count("memory_fence") == 2 and "atomic_load" in text
    linecache.cache["printed.py"] = (len(text), None, text.splitlines(True), "printed.py")
    exec(compile(text, "printed.py", "exec"), names)
    assert alike(names["kernel"].program, kernel.program)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "cuda:sm_120a"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool"])
def test_machine_code(dtype, target):
    """The assembler takes every update and load."""
    kinds = [k for k in FOLD if k not in BITWISE or "float" not in dtype]
    kinds = [k for k in kinds if dtype != "bool" or k in BITWISE]

    @T.prim_func
    def kernel(A: T.Tensor((8, 64), dtype), B: T.Tensor((8, 64), dtype)):
        with T.Kernel(4, threads=64) as b:
            tile = T.alloc_shared((64,), dtype)
            T.copy(A[b, 0], tile)
            for n, kind in enumerate(kinds):
                for i in T.Parallel(64):
                    B[b + n, i] = getattr(T, f"atomic_{kind}")(A[n, i], tile[i], ORDERS[n % 5], return_prev=True)
            for i in T.Parallel(64):
                T.atomic_store(A[7, i], T.atomic_load(tile[i], "relaxed"))
            T.atomic_store(A[6, 0], T.atomic_load(A[6, 1], "acquire"), "release")

    made = tilelang.compile(kernel, target=target)
    assert made.cubin.data[:4] == b"\x7fELF" and not made.cubin.warnings


def adds(kernel, target):
    """Return how many elements each addition of the generated text takes, and of those under a condition for each."""
    text = tilelang.compile(kernel, target=target).get_kernel_source()
    return sorted(int(n) for n in re.findall(r"atomic_add_vector<(\d)>", text)), "tile::atomic_add(" in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_neighbours_are_added_by_one_instruction(dtype, capability):
    """Whole tiles: as wide as the chip adds, and no wider than a thread holds neighbours or memory is aligned."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), dtype), out: T.Tensor((64, 64), dtype), odd: T.Tensor((64, 66), dtype)):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), dtype)
            T.copy(A, tile)
            T.atomic_add(out, tile)
            T.atomic_add(odd[0:64, 2:66], tile)
            T.atomic_max(out, tile)

    most = {"float32": (1, 4), "float16": (2, 8), "bfloat16": (1, 8)}.get(dtype, (1, 1))[capability >= 90]
    widths, _ = adds(kernel, f"cuda:sm_{capability}")
    assert set(widths) == {w for w in (most, min(most, 2)) if w > 1}


def test_an_accumulator_adds_pairs():
    """Products leave two neighbours in a thread."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float16"), B: T.Tensor((32, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            T.atomic_add(C, c)

    assert adds(kernel, "cuda:sm_90") == ([2], False)
    assert adds(kernel, "cuda:sm_80") == ([], True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows, columns, shift", [(7, 24, 0), (9, 30, 0), (5, 37, 0), (6, 32, 4), (6, 32, 3)])
def test_wide_additions_to_any_place(dtype, rows, columns, shift, way, seed):
    """Tiles that stick out, rows that are not aligned, a condition of the author's, and values of several sources."""

    @T.prim_func
    def kernel(
        A: T.Tensor((2, rows, columns), dtype), keep: T.Tensor((rows,), "int32"), out: T.Tensor((rows, columns), dtype)
    ):
        with T.Kernel(2, threads=32) as b:
            tile = T.alloc_shared((16, 48), dtype)
            T.copy(A[b, 0, 0], tile)
            T.atomic_add(out[0:16, shift : shift + 48], tile)
            for i, j in T.Parallel(rows, columns):
                if keep[i] > 0:
                    T.atomic_add(out[i, j], tile[i, j] * 2 + A[b, i, j])

    a, out = (torch.randint(-9, 9, s).to(getattr(torch, dtype)) for s in ((2, rows, columns), (rows, columns)))
    keep = torch.randint(0, 2, (rows,), dtype=torch.int32)
    want = out.clone()
    for x in a:
        want[:, shift:] += x[:, : columns - shift]
        want += x * 3 * keep[:, None].to(x.dtype)
    way(kernel, a, keep, out)
    assert torch.equal(out, want)


def test_an_addition_to_what_its_value_reads():
    """Steps that read what an earlier step adds to stay one at a time."""

    @T.prim_func
    def kernel(out: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(64):
                T.atomic_add(out[i], out[63 - i] * 0)

    assert adds(kernel, "cuda:sm_90") == ([], True)


def test_neighbours_run_along_threads():
    """Rows are gathered by an index, which must not decide how elements are spread: threads take one row together."""

    @T.prim_func
    def kernel(at: T.Tensor((16,), "int32"), A: T.Tensor((16, 512), "float32"), out: T.Tensor((64, 576), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((16, 512), "float32")
            T.copy(A, tile)
            for i, j in T.Parallel(16, 128):
                T.atomic_addx4(out[at[i], j * 4], tile[i, j * 4])
            for i, j in T.Parallel(16, 512):
                T.atomic_add(out[at[i], j], tile[i, j])

    assert adds(kernel, "cuda:sm_90") == ([4, 4], False)
    text = tilelang.compile(kernel, target="cuda:sm_90").get_kernel_source()
    lines = [line for line in text.splitlines() if "atomic_add_vector" in line]
    assert all("at[i" in line and "* 576 + thread * 4," in line for line in lines), lines
