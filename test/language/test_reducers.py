# SPDX-License-Identifier: Apache-2.0
"""Reducers: what nests fold into them, however they are written, against float64; and nests that do more than fold."""

import random

import numpy as np
import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError
from torch_tile.ir.node import find
from torch_tile.ir.stmt import For, Store
from torch_tile.tileop.reduce.op import Reduce


def gemv(M, N, block_m, block_n, dtype, threads=128):
    """A product of a matrix with a vector, its rows folded by a reducer."""

    @T.prim_func
    def main(A: T.Tensor((M, N), dtype), x: T.Tensor((N,), dtype), y: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block_m), threads=threads) as bm:
            a = T.alloc_fragment((block_m, block_n), dtype)
            v = T.alloc_fragment((block_n,), dtype)
            acc = T.alloc_reducer((block_m,), "float32", op="sum", replication="all")
            T.clear(acc)
            for bn in T.Pipelined(T.ceildiv(N, block_n), num_stages=2):
                T.copy(A[bm * block_m, bn * block_n], a)
                T.copy(x[bn * block_n], v)
                for i, j in T.Parallel(block_m, block_n):
                    acc[i] += T.cast(a[i, j], "float32") * T.cast(v[j], "float32")
            T.finalize_reducer(acc)
            T.copy(acc, y[bm * block_m])

    return main


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gemv(dtype, way, seed):
    rng = random.Random(seed)
    m, n = rng.randint(1, 90), rng.randint(1, 150)
    kernel = gemv(m, n, rng.choice([16, 32]), rng.choice([16, 48, 64]), dtype, rng.choice([32, 128]))
    a, x = torch.randn(m, n).to(getattr(torch, dtype)), torch.randn(n).to(getattr(torch, dtype))
    y = torch.full((m,), float("nan"))
    way(kernel, a, x, y)
    torch.testing.assert_close(y.double(), a.double() @ x.double(), rtol=1e-4, atol=1e-4)


def test_epochs(way):
    """The protocol of four calls, in a loop: begin, fold, end into a tile, again; under conditions and inner loops."""

    @T.prim_func
    def kernel(
        A: T.Tensor((3, 20, 24), "float32"), top: T.Tensor((3, 20), "float32"), low: T.Tensor((3, 2), "float32")
    ):
        with T.Kernel(1, threads=64):
            peak = T.alloc_reducer(20, "float32", op="max")
            least = T.alloc_reducer((1, 2), "float32", op="min")
            out = T.alloc_fragment((20,), "float32")
            for k in T.serial(3):
                T.reducer_init(peak)
                T.reducer_init(least, 0.5)
                for i, j in T.Parallel(20, 6):
                    for n in T.serial(4):
                        value = A[k, i, j * 4 + n]
                        if value < 1.0:
                            T.reducer_update(peak[i], value)
                    T.reducer_update(least[0, 1], A[k, i, j])
                T.finalize_reducer(peak, out)
                T.copy(out, top[k, 0])
                T.finalize_reducer(least)
                T.copy(least, low[k, 0])

    a = torch.randn(3, 20, 24).clamp(-3, 0.99) + (torch.rand(3, 20, 24) < 0.1) * 5
    top, low = torch.full((3, 20), float("nan")), torch.full((3, 2), float("nan"))
    way(kernel, a, top, low)
    assert torch.equal(top, a.masked_fill(a >= 1, -torch.inf).amax(2))
    assert torch.equal(low[:, 1], a[:, :, :6].amin((1, 2)).clamp(max=0.5)) and (low[:, 0] == 0.5).all()


def test_places_of_all_kinds(way, seed):
    """Dimensions in another order, shifted, given by one index; several left out; two reducers; a reducer of halves."""

    @T.prim_func
    def kernel(
        A: T.Tensor((6, 5, 4), "float16"), B: T.Tensor((7, 8), "float32"), C: T.Tensor((2, 4), "float16"),
        D: T.Tensor((1,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            turned = T.alloc_reducer((7, 8), "float32")
            row = T.alloc_reducer((2, 4), "float16", "max")
            whole = T.alloc_reducer((1,), "float32")
            T.clear(turned)
            T.fill(row, -5)
            T.fill(whole, 3)
            for i, j, k in T.Parallel(6, 5, 4):
                x = T.cast(A[i, j, k], "float32")
                turned[k + 2, i + 1] += x
                row[1, k] = T.max(row[1, k], A[i, j, k])
                whole[0] = x + whole[0] + x
            for i, j in T.Parallel(6, 5):
                whole[0] -= T.cast(A[i, j, 0], "float32")
            T.copy(turned, B)
            T.copy(row, C)
            T.copy(whole, D)

    a = torch.randn(6, 5, 4).half()
    b, c, d = torch.full((7, 8), torch.nan), torch.full((2, 4), torch.nan).half(), torch.full((1,), torch.nan)
    way(kernel, a, b, c, d)
    want = torch.zeros(7, 8, dtype=torch.float64)
    want[2:6, 1:7] = a.double().sum(1).T
    torch.testing.assert_close(b.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(c, torch.stack([torch.full((4,), -5.0).half(), a.amax((0, 1)).clamp(min=-5)]))
    total = 3 + 2 * a.double().sum() - a[..., 0].double().sum()
    torch.testing.assert_close(d[0].double(), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "dtype"), [("bitor", "int32"), ("bitand", "int32"), ("bitxor", "int64"), ("sum", "int8")]
)
def test_integers(op, dtype, way, seed):
    @T.prim_func
    def kernel(A: T.Tensor((9, 40), dtype), out: T.Tensor((9,), dtype)):
        with T.Kernel(1, threads=32):
            acc = T.alloc_reducer((9,), dtype, op=op)
            T.reducer_init(acc)
            for i, j in T.Parallel(9, 40):
                T.reducer_update(acc[i], A[i, j])
            T.finalize_reducer(acc)
            T.copy(acc, out)

    info = torch.iinfo(getattr(torch, dtype))
    a = torch.randint(info.min // 2, info.max // 2, (9, 40)).to(getattr(torch, dtype))
    out = torch.zeros(9, dtype=a.dtype)
    way(kernel, a, out)
    want = torch.full((9,), -1 if op == "bitand" else 0, dtype=a.dtype)
    for j in range(40):
        x = a[:, j]
        want = {"bitor": want | x, "bitand": want & x, "bitxor": want ^ x, "sum": want + x}[op]
    assert torch.equal(out, want)


def test_updates_are_tile_operations():
    """A nest and its reductions, so that threads share the work; not so where nothing meets, or more is done."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), B: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            acc = T.alloc_reducer((8,), "float32")
            T.clear(acc)
            for i, j in T.Parallel(8, 8):
                acc[i] += A[i, j]
            for i in T.Parallel(8):
                acc[i] += 1
            for i, j in T.Parallel(8, 8):
                acc[i] += A[i, j]
                B[i, j] = acc[i]

    kinds = [type(n) for n in kernel.program.kernels[0].body.stmts if isinstance(n, For | Reduce)]
    assert [k is For for k in kinds] == [True, False, True, True]
    assert not kernel.program.kernels[0].body.stmts[-1].body.stmts[-1].value.buffer.name.endswith("part")
    assert len(list(find(kernel.program, Store))) == 5
    assert "runs in order" in str(tilelang.compile(kernel, target="cuda:sm_80").schedule)


def test_running_totals_run_in_order(way):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((4, 6), "float32")):
        with T.Kernel(1, threads=32):
            acc = T.alloc_reducer((4,), "float32")
            T.clear(acc)
            for i, j in T.Parallel(4, 6):
                acc[i] += A[i, j]
                B[i, j] = acc[i]

    a, b = torch.randn(4, 6), torch.full((4, 6), torch.nan)
    way(kernel, a, b)
    torch.testing.assert_close(b, a.cumsum(1), rtol=1e-5, atol=1e-5)


def of_no_operation():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.alloc_reducer((4,), "float32", op="mean")  # here


def bits_of_floats():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.alloc_reducer((4,), "float32", op="bitor")  # here


def no_reducer():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_fragment((4,), "float32")
            T.reducer_init(acc)  # here


def no_element():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_reducer((4,), "float32")
            T.reducer_update(acc, 1.0)  # here


def another_shape():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_reducer((4,), "float32")
            out = T.alloc_fragment((5,), "float32")
            T.reducer_init(acc)
            T.finalize_reducer(acc, out)  # here

    tilelang.compile(kernel)


def steps(*, begin=True, update=lambda acc, A: None, end=True, **ending):
    """A reduction over four elements, with one step left out or another one between."""

    def make():
        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), out: T.Tensor((1,), "float32")):
            with T.Kernel(1, threads=32):
                acc = T.alloc_reducer((1,), "float32")
                whole = T.alloc_fragment((1,), "float32")
                if begin:
                    T.reducer_init(acc)
                for i in T.Parallel(4):
                    T.reducer_update(acc[0], A[i])
                update(acc, A)
                if end:
                    T.finalize_reducer(acc, whole, **ending)
                T.copy(whole, out)

    return make


@T.macro
def in_a_loop(acc, A):
    for _ in T.serial(3):
        T.finalize_reducer(acc)


@T.macro
def in_an_inner_scope(acc, A):
    T.finalize_reducer(acc)
    for _ in T.serial(3):
        T.reducer_init(acc)


@T.macro
def by_an_operator(acc, A):
    for i in T.Parallel(4):
        acc[0] += A[i]


def stored(acc, A):
    acc[0] = 1.0


PROTOCOL = {
    "before its init": (steps(begin=False), "T.reducer_update before T.reducer_init"),
    "without an end": (steps(end=False), "never finalized"),
    "begun twice": (steps(update=lambda acc, A: T.reducer_init(acc)), "double T.reducer_init"),
    "a store": (steps(update=stored), "illegal store to reducer"),
    "an operator": (steps(update=by_an_operator), "illegal (store to|read of) reducer"),
    "a read": (steps(update=lambda acc, A: T.copy(acc, A[0:1])), "illegal read of reducer"),
    "a fill": (steps(update=lambda acc, A: T.clear(acc)), "illegal .* reducer"),
    "no loop": (steps(update=lambda acc, A: T.reducer_update(acc[0], A[0])), "outside any T.Parallel"),
    "an end in a loop": (steps(update=in_a_loop), "not in the scope of its T.reducer_init"),
    "a begin in a loop": (steps(update=in_an_inner_scope), "not in the scope of its T.reducer_init|never finalized"),
    "no batch": (steps(batch=0), "batch must be >= 1"),
    "a larger batch": (steps(batch=2), "exceeds total output elements"),
}  # fmt: skip


@pytest.mark.parametrize("case", PROTOCOL)
def test_the_protocol_of_four_calls(case):
    """Between T.reducer_init and T.finalize_reducer nothing but T.reducer_update touches a reducer."""
    make, words = PROTOCOL[case]
    with pytest.raises(TileError, match=words):
        make()


def test_conditions_and_loops_inside_an_epoch(way):
    """An epoch may end under a condition; updates stand in any loops."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 40), "float32"), B: T.Tensor((2,), "float32")):
        with T.Kernel(2, threads=64) as bx:
            acc = T.alloc_reducer((1,), "float32")
            whole = T.alloc_fragment((1,), "float32")
            T.clear(whole)
            T.reducer_init(acc, T.cast(bx, "float32"))
            for k in T.serial(3):
                for i in T.Parallel(40):
                    T.reducer_update(acc[0], A[k, i])
            if bx == 1:
                T.finalize_reducer(acc, whole)
            T.copy(whole, B[bx])

    a, b = torch.rand(3, 40), torch.full((2,), torch.nan)
    way(kernel, a, b)
    assert b[0] == 0
    torch.testing.assert_close(b[1].double(), a.double().sum() + 1, rtol=1e-5, atol=0)


def test_a_start_of_another_dtype_is_refused():
    with pytest.raises(TileError, match="does not match reducer"):

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float16")):
            with T.Kernel(1):
                acc = T.alloc_reducer((1,), "float32")
                T.reducer_init(acc, A[0])


def ended_before_it_began():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.finalize_reducer(T.alloc_reducer((1,), "float32"))  # here


def no_divisor():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            acc = T.alloc_reducer((4,), "float32")
            T.fill(acc, 0)
            T.finalize_reducer(acc, batch=3)  # here


MISTAKES = {
    ended_before_it_began: ("reducer_protocol", 'T.finalize_reducer(T.alloc_reducer((1,), "float32"))'),
    no_divisor: ("bad_argument", "T.finalize_reducer(acc, batch=3)"),
    of_no_operation: ("bad_argument", 'T.alloc_reducer((4,), "float32", op="mean")'),
    bits_of_floats: ("bad_argument", 'T.alloc_reducer((4,), "float32", op="bitor")'),
    no_reducer: ("bad_argument", "T.reducer_init(acc)"),
    no_element: ("bad_argument", "T.reducer_update(acc, 1.0)"),
    another_shape: ("copy_shape", "T.finalize_reducer(acc, out)"),
}


@pytest.mark.parametrize("case", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(case, refused):
    refused(case, *MISTAKES[case])


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_machine_code(dtype, target):
    made = tilelang.compile(gemv(1000, 2000, 64, 128, dtype), target=target)
    (found,) = made.resources.values()
    assert not made.cubin.warnings and not found.spills and "in order" not in str(made.schedule), made.schedule


def gemv_allreduce(N, K, block_n, reduce_threads, dtype="float16", accum_dtype="float"):
    """Each thread multiplies 16 bytes of a row at a time; `reduce_threads` of them share a row."""
    tile_k = 16 // T.dtype(dtype).itemsize
    block_k = reduce_threads * tile_k

    @T.prim_func
    def main(A: T.Tensor((K,), dtype), B: T.Tensor((N, K), dtype), C: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block_n), threads=(block_n, reduce_threads)) as bn:
            tn = T.get_thread_binding(0)
            tk = T.get_thread_binding(1)
            a = T.alloc_local((tile_k,), dtype)
            b = T.alloc_local((tile_k,), dtype)
            total = T.alloc_local((1,), accum_dtype)
            T.clear(total)
            for bk in T.serial(T.ceildiv(K, block_k)):
                for k in T.vectorized(tile_k):
                    a[k] = A[bk * block_k + tk * tile_k + k]
                    b[k] = B[bn * block_n + tn, bk * block_k + tk * tile_k + k]
                for k in T.serial(tile_k):
                    total[0] += a[k].astype(accum_dtype) * b[k].astype(accum_dtype)
            reduced = T.alloc_local((1,), accum_dtype)
            with T.attr(
                T.comm_reducer(lambda x, y: x + y, [T.Cast(accum_dtype, 0)]),
                "reduce_scope",
                T.reinterpret(T.uint64(0), dtype="handle"),
            ):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), total[0], True, reduced[0], tk, dtype="handle"))
            C[bn * block_n + tn] = reduced[0]

    return main


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize(("block_n", "threads"), [(2, 32), (32, 4), (4, 8), (8, 6), (3, 5), (1, 64)])
def test_gemv_allreduce(block_n, threads, target, seed):
    """Groups inside a warp, over several warps, of sizes that no shuffle knows; ragged rows and columns."""
    rng = random.Random(seed)
    n, k = rng.randint(1, 3 * block_n), 8 * rng.randint(1, 3 * threads)
    a, b, c = torch.randn(k).half(), torch.randn(n, k).half(), torch.full((n,), torch.nan).half()
    made = tilelang.compile(gemv_allreduce(n, k, block_n, threads), target=target)
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert made.cubin.data[:4] == b"\x7fELF" and not made.cubin.warnings
    torch.testing.assert_close(c.double(), b.double() @ a.double(), rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("shape", [(4, 8, 2), (16, 2, 4), (3, 7, 2)])
def test_several_indices_and_conditions(shape, seed):
    """Maxima over two of three indices, of what a condition lets pass; all threads of a group get one result."""
    count = int(np.prod(shape))

    @T.prim_func
    def kernel(A: T.Tensor((count,), "int32"), out: T.Tensor((2, count), "int32")):
        with T.Kernel(1, threads=shape):
            tx, ty, tz = T.get_thread_bindings()
            own = T.alloc_local((2,), "int32")
            place = (tz * shape[1] + ty) * shape[0] + tx
            value = A[place]
            for n in range(2):
                with T.attr(T.comm_reducer(lambda x, y: T.max(x, y), [-1000]), "reduce_scope", 0):
                    T.tvm_thread_allreduce(1, value * (n + 1), value < 50, own[n], tx, tz)
                out[n, place] = own[n]

    a, out = torch.randint(0, 100, (count,), dtype=torch.int32), torch.zeros(2, count, dtype=torch.int32)
    findings = tilelang.compile(kernel, target="cuda:sm_80").interpret(a, out)
    assert not findings, findings.report()
    x = a.reshape(shape[::-1])
    for n in range(2):
        want = torch.where(x < 50, x * (n + 1), -1000).amax((0, 2), keepdim=True).expand(x.shape)
        assert torch.equal(out[n].reshape(x.shape), want.int())


def outside_of_attr():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_local((1,), "float32")
            T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding())  # here


def into_memory():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32), T.attr(T.comm_reducer(lambda x, y: x + y, [0]), "reduce_scope", 0):
            T.tvm_thread_allreduce(1, A[0], True, A[1], T.get_thread_binding())  # here


def over_no_index():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_local((1,), "float32")
            with T.attr(T.comm_reducer(lambda x, y: x + y, [0]), "reduce_scope", 0):
                T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding() + 1)  # here


def another_attribute():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32), T.attr(A, "pragma_unroll", 4):  # here
            A[0] = 1


MISTAKES_allreduce = {
    outside_of_attr: "T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding())",
    into_memory: "T.tvm_thread_allreduce(1, A[0], True, A[1], T.get_thread_binding())",
    over_no_index: "T.tvm_thread_allreduce(1, A[0], True, own[0], T.get_thread_binding() + 1)",
    another_attribute: 'T.attr(A, "pragma_unroll", 4)',
}


@pytest.mark.parametrize("case", MISTAKES_allreduce, ids=lambda f: f.__name__)
def test_mistakes_allreduce(case, refused):
    refused(case, "bad_argument", MISTAKES_allreduce[case])


def test_one_value_at_a_time():
    for use in (lambda: T.comm_reducer(lambda x, y: x, [0, 1]), lambda: T.attr(None, "reduce_scope", 0)):
        with pytest.raises(TileError):
            use()


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("threads", [8, 24, 64])
def test_products_are_folded_by_neighbours(threads, target):
    """Rounded values are combined in a tree, the same in a warp and across warps: here bfloat16 rounds nothing away."""

    @T.prim_func
    def kernel(A: T.Tensor((threads,), "bfloat16"), out: T.Tensor((threads,), "bfloat16")):
        with T.Kernel(1, threads=threads):
            tx = T.get_thread_binding(0)
            own = T.alloc_local((1,), "bfloat16")
            product = T.comm_reducer(lambda x, y: x * y, [T.cast(1, "bfloat16")])
            with T.attr(product, "reduce_scope", 0):
                T.tvm_thread_allreduce(1, A[tx], True, own[0], tx)
            out[tx] = own[0]

    a = torch.ones(threads, dtype=torch.bfloat16)
    a[:8] = torch.tensor([3.0, 8, 5, 2, 7, 6, 4, 6])  # 3 * 8 * ... one after the other is rounded at 10080
    out = torch.zeros(threads, dtype=torch.bfloat16)
    tilelang.compile(kernel, target=target).interpret(a, out)
    assert (out == torch.tensor(241920.0).bfloat16()).all()
