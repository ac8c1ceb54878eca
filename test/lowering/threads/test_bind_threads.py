# SPDX-License-Identifier: Apache-2.0
"""What one thread does, and that all threads together do what was asked: run by the thread interpreter."""

import math
from random import Random

import pytest
import torch

import torch_tile as tilelang
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.expr import Load, Var
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import Alloc, For, LoopKind, Store
from torch_tile.lowering.threads.bind_loop import is_overwritten
from torch_tile.lowering.threads.bind_threads import bind_threads
from torch_tile.lowering.threads.infer_layouts import infer_layouts
from torch_tile.tileop.parallel.nest import nest_of

TARGET = "cuda:sm_90a"


def bound(kernel):
    build = Build(Target.of(TARGET))
    return bind_threads(infer_layouts(kernel.program, build), build), build


def run(kernel, *args):
    """All threads of all blocks; there must be no race and no access out of bounds."""
    findings = tilelang.compile(kernel, target=TARGET).interpret(*args)
    assert not findings, "\n".join(map(str, findings))


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def test_an_elementwise_nest_is_vectors_on_registers():
    @T.prim_func
    def kernel(A: T.Tensor((32, 256), "float16"), B: T.Tensor((32, 256), "float16")):
        with T.Kernel(1, threads=128) as _:
            x = T.alloc_fragment((32, 256), "float16")
            T.copy(A, x)
            for i, j in T.Parallel(32, 256):
                x[i, j] = x[i, j] * x[i, j]
            T.copy(x, B)

    program, _ = bound(kernel)
    loops = [n for n in walk(program) if isinstance(n, For)]
    assert [(f.kind, f.stops[0].value) for f in loops[:2]] == [(LoopKind.UNROLLED, 8), (LoopKind.VECTOR, 8)]
    assert [a.buffer.static_shape for a in walk(program) if isinstance(a, Alloc)] == [(64,)]
    registers = [n for n in walk(program) if isinstance(n, Load | Store) and n.buffer.scope == "local"]
    assert len(registers) == 5
    assert not any(isinstance(v, Var) and v.role == "thread" for n in registers for i in n.indices for v in walk(i))


@pytest.mark.parametrize("threads", [32, 96, 128, 256])
@pytest.mark.parametrize("shape", [(16, 64), (9, 33), (1, 5), (3, 500)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_of_any_shape(threads, shape, dtype):
    rows, width = shape

    @T.prim_func
    def kernel(
        A: T.Tensor((2 * rows - 1, width), dtype),
        B: T.Tensor((2 * rows - 1, width), "float32"),
        C: T.Tensor((2 * rows - 1,), "float32"),
    ):
        with T.Kernel(2, threads=threads) as bx:
            x = T.alloc_fragment((rows, width), "float32")
            peak = T.alloc_fragment((rows,), "float32")
            T.copy(A[bx * rows, 0], x)
            T.reduce_max(x, peak, dim=1)
            for i, j in T.Parallel(rows, width):
                x[i, j] = x[i, j] * peak[i]
            for i in T.Parallel(rows):
                C[bx * rows + i] = peak[i]
            T.copy(x, B[bx * rows, 0])

    a = random(2 * rows - 1, width, dtype=getattr(torch, dtype))
    b, c = empty(*a.shape), empty(a.shape[0])
    run(kernel, a, b, c)
    peak = a.float().amax(1)
    torch.testing.assert_close(c, peak)
    torch.testing.assert_close(b, a.float() * peak[:, None])


@pytest.mark.parametrize("threads", [128, 256])
def test_fragments_of_other_threads_come_through_shared_memory(threads):
    @T.prim_func
    def kernel(
        A: T.Tensor((32, 64), "float32"), B: T.Tensor((64, 32), "float32"), C: T.Tensor((32, 64), "float32"),
        D: T.Tensor((32, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=threads) as _:
            x = T.alloc_fragment((32, 64), "float32")
            turned = T.alloc_fragment((64, 32), "float32")
            T.copy(A, x)
            T.copy(B, turned)
            for i, j in T.Parallel(32, 64):
                x[i, j] = x[i, j] + turned[j, i]
            for i, j in T.Parallel(32, 64):
                C[i, j] = x[i, j // 4] + x[i, j % 4]
            for i, j in T.Parallel(32, 16):
                x[i, j + 8] = C[i, j + 40]
            T.copy(x, D)

    _, build = bound(kernel)
    assert any("through shared memory" in note.became for note in build.remarks)
    a, b, c, d = random(32, 64), random(64, 32), empty(32, 64), empty(32, 64)
    run(kernel, a, b, c, d)
    total, j = a + b.T, torch.arange(64)
    torch.testing.assert_close(c, total[:, j // 4] + total[:, j % 4])
    total[:, 8:24] = c[:, 40:56]
    torch.testing.assert_close(d, total)


READS = {
    "one place": (lambda sums, n, i: sums[n - 1], True),
    "two places": (lambda sums, n, i: sums[0] + sums[n // 2], True),
    "a place by data": (lambda sums, n, i: sums[i % n], False),
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("threads", [16, 96, 128])
@pytest.mark.parametrize("n", [3, 8, 9])
def test_a_few_elements_of_other_lanes_come_by_shuffles(n, threads, reads, way):
    """Of fragments that every warp holds; the others, and those with an element chosen by data, through memory."""
    read, known = READS[reads]

    @T.prim_func
    def kernel(A: T.Tensor((16, n), "float32"), B: T.Tensor((50,), "float32"), C: T.Tensor((50,), "float32")):
        with T.Kernel(2, threads=threads) as b:
            rows, sums = T.alloc_fragment((16, n), "float32"), T.alloc_fragment((n,), "float32")
            T.copy(A, rows)
            T.reduce_sum(rows, sums, dim=0)
            for i in T.Parallel(25):
                C[b * 25 + i] = B[b * 25 + i] * read(sums, n, i)

    a, b, c = torch.randint(-9, 9, (16, n)).float(), torch.randint(-9, 9, (50,)).float(), empty(50)
    way(kernel, a, b, c)
    total = a.double().sum(0)
    assert torch.equal(c.double(), b.double() * torch.stack([read(total, n, i % 25) for i in range(50)]))
    _, build = bound(kernel)
    found = {word for note in build.remarks for word in ("by shuffles", "through shared") if word in note.became}
    if known and n <= 8 and threads == 128:  # runs of 3 or 12 of 96 threads begin elsewhere in each warp
        assert found == {"by shuffles"}
    else:
        assert "by shuffles" not in found


@pytest.mark.parametrize("threads", [64, 96, 160, 192, 384])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 8])
def test_a_few_loaded_elements_lie_in_the_same_lanes_of_all_warps_or_come_through_memory(n, threads, way):
    """Where a number of elements divides the threads but not a warp, each warp begins at another element."""

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), C: T.Tensor((2, threads), "float32")):
        with T.Kernel(1, threads=threads) as _:
            few = T.alloc_fragment((n,), "float32")
            for i in T.Parallel(n):
                few[i] = A[i]
            for j, i in T.Parallel(2, threads):
                C[j, i] = few[n - 1] - few[n // 2] * i

    a, c = random(n), empty(2, threads)
    way(kernel, a, c)
    want = a[n - 1].double() - a[n // 2].double() * torch.arange(threads)
    torch.testing.assert_close(c.double(), want.expand(2, threads), rtol=1e-5, atol=1e-5)


def test_nests_of_sizes_known_at_run_time():
    n, m = T.dynamic("n, m")

    @T.prim_func
    def kernel(A: T.Tensor((n, m), "float32"), B: T.Tensor((n, m), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i, j in T.Parallel(n, m):
                B[i, j] = A[i, j] + 1.0

    a, b = random(3, 150), empty(3, 150)
    run(kernel, a, b)
    torch.testing.assert_close(b, a + 1)


def test_sums_by_hand_and_names_bound_again():
    @T.prim_func
    def kernel(A: T.Tensor((24, 40), "float32"), B: T.Tensor((24,), "float32"), C: T.Tensor((24,), "float32")):
        with T.Kernel(1, threads=128) as _:
            total = T.alloc_fragment((24,), "float32")
            T.clear(total)
            for i, j in T.Parallel(24, 40):
                total[i] += A[i, j]
            for i in T.Parallel(24):
                row = 23 - i
                B[row] = total[i]
            for i in T.Parallel(24):
                row = i // 2
                C[i] = total[row]

    a, b, c = random(24, 40), empty(24), empty(24)
    run(kernel, a, b, c)
    torch.testing.assert_close(b, a.sum(1).flip(0))
    torch.testing.assert_close(c, a.sum(1)[torch.arange(24) // 2])


def test_what_runs_in_order_is_told():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), to: T.Tensor((64,), "int32"), y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                y[to[i]] = x[i]
            for i in T.Parallel(32):  # spread over threads
                y[2 * i] = y[2 * i + 1]

    build = Build(Target.of("cuda:sm_80"))
    bind_threads(infer_layouts(kernel.program, build), build)
    (told,) = (note for note in build.remarks if note.why_not)
    assert told.op == "T.Parallel" and told.became == "`i` runs in order, in one thread"
    assert told.why_not == "iterations may touch the same elements of `y`; if they never do, say independent=True"


def scatter(independent, size):
    @T.prim_func
    def kernel(x: T.Tensor((size,), "float32"), to: T.Tensor((size,), "int32"), y: T.Tensor((size,), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(size, independent=independent):
                y[to[i]] = x[i] + y[to[i]]

    return kernel


@pytest.mark.parametrize("length", [100, None])
def test_iterations_that_never_meet_as_the_author_says(length):
    """A permutation is spread over threads; where two iterations meet after all, the interpreter says so."""
    size = T.dynamic("n") if length is None else length
    x, y, to = random(100), random(100), torch.randperm(100).int()
    want = y.index_add(0, to, x)
    for independent in (False, True):
        kernel, got = scatter(independent, size), y.clone()
        run(kernel, x, to, got)
        torch.testing.assert_close(got, want)
        _, build = bound(kernel)
        assert any("in order" in note.became for note in build.remarks) != independent
    to[40] = to[0]
    findings = tilelang.compile(scatter(True, size), target=TARGET).interpret(x, to, y.clone())
    assert {f.kind for f in findings} == {"race"}
    got = y.clone()
    tilelang.compile(scatter(True, size), target="cpu")(x, to, got)  # in order there
    torch.testing.assert_close(got, y.index_add(0, to, x))


def test_what_stands_outside_nests_is_done_once():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=64) as _:
            s = T.alloc_shared((4,), "int32")
            for k in T.serial(4):
                s[k] = A[k] * 2
            T.atomic_add(B[0], s[3])
            B[1] = s[2]

    a, b = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run(kernel, a, b)
    assert b.tolist() == [6, 4, 0, 0]


def test_roles_share_a_kernel_each_with_threads_of_its_own():
    """Rows summed by two warps, columns by six; nobody waits for anybody before the end."""

    @T.prim_func
    def kernel(A: T.Tensor((192, 64), "float32"), B: T.Tensor((192, 64), "float32"), C: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            s, t = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64, 64), "float32")
            with T.role(0, 64):
                x, rows = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
                T.copy(A[0:64, :], x)
                T.reduce_sum(x, rows, dim=1)
                T.copy(rows, C[0:64])
                T.copy(x, s)
                for i, j in T.Parallel(64, 64):
                    B[i, j] = s[63 - i, j]
            with T.role(64, 192):
                y, columns = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
                T.copy(A[64:128, :], y)
                T.reduce_max(y, columns, dim=0)
                T.copy(columns, C[64:128])
                T.copy(y, t)
                for i, j in T.Parallel(64, 64):
                    B[64 + i, j] = t[i, 63 - j]
            for i, j in T.Parallel(64, 64):
                B[128 + i, j] = s[i, j] + t[i, j]

    a, b, c = random(192, 64), empty(192, 64), empty(128)
    run(kernel, a, b, c)
    x, y = a[:64], a[64:128]
    torch.testing.assert_close(b, torch.cat([x.flip(0), y.flip(1), x + y]), rtol=0, atol=0)
    torch.testing.assert_close(c, torch.cat([x.sum(1), y.amax(0)]))


@pytest.mark.parametrize(
    ("first", "implementation"), [(0, "wgmma"), (128, "wgmma"), (64, "mma.sync"), (32, "mma.sync")]
)
def test_products_of_a_role_go_by_wgmma_where_it_is_a_warpgroup(first, implementation):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256), T.role(first, 128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c)
            T.copy(c, C)

    a, b, c = random(64, 64, dtype=torch.float16), random(64, 64, dtype=torch.float16), empty(64, 64)
    run(kernel, a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-3)
    (note,) = (n for n in tilelang.compile(kernel, target=TARGET).schedule.remarks if n.op == "T.gemm")
    assert note.became.startswith(implementation)


def test_a_tile_that_is_overwritten_through_memory_is_not_moved_there_first():
    """Threads of the second product hold whole rows of `q`, those of the first one elements of `p`."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 16), "float32"), B: T.Tensor((32, 16), "float32"), C: T.Tensor((32, 16), "float32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((32, 16), "float32"), T.alloc_shared((32, 16), "float32")
            p, q = T.alloc_fragment((32, 32), "float32"), T.alloc_fragment((32, 32), "float32")
            out = T.alloc_fragment((32, 16), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, p, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(32, 32):
                q[i, j] = p[i, j] + 1.0
                p[i, j] = 0.0
            T.gemm(q, b, out, clear_accum=True)
            T.copy(out, C)

    program, build = bound(kernel)
    assert "q moved through shared memory" in str(build.schedule(program.name))
    stores = [n for n in walk(program) if isinstance(n, Store) and n.buffer.name == "q" and n.buffer.scope == "shared"]
    assert [isinstance(n.value, Load) for n in stores] == [False]  # the product has it in registers
    a, b, c = random(32, 16), random(32, 16), empty(32, 16)
    run(kernel, a, b, c)
    expected = (a.double() @ b.double().T + 1) @ b.double()
    torch.testing.assert_close(c, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nest", ["whole", "part", "branch", "moved", "crossed", "reads", "ends early"])
def test_which_nests_overwrite_a_tile(nest):
    @T.prim_func
    def kernel(A: T.Tensor((8, 8), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            q = T.alloc_fragment((8, 8), "float32")
            for i, j in T.Parallel(8, 7 if nest == "part" else 8):
                if nest == "ends early" and A[i, j] > 0:
                    continue
                if nest == "branch":
                    if n > 0:
                        q[i, j] = A[i, j]
                elif nest == "moved":
                    q[i, (j + 1) % 8] = A[i, j]
                elif nest == "crossed":
                    q[j, i] = A[i, j]
                else:
                    q[i, j] = A[i, j] + (q[i, j] if nest == "reads" else 0.0)

    loop = next(n for n in walk(kernel.program) if isinstance(n, For))
    (fragment,) = {n.buffer for n in walk(loop) if isinstance(n, Store)}
    assert is_overwritten(fragment, nest_of(loop, {})) == (nest == "whole")


@pytest.mark.parametrize("place", ["layout given", "layout inferred", "several threads an element"])
def test_iterations_that_meet_in_an_element_of_one_thread_are_spread(place, seed):
    """A maximum by hand over rows and neighbours: each thread updates its own element with its part of the input."""
    draw = Random(seed)
    threads, vector, cols = draw.choice([64, 128]), draw.choice([2, 4, 8]), draw.choice([16, 32, 64])
    at_once = threads * vector // cols  # rows that the threads hold in one step
    rows = at_once * draw.choice([2, 4])
    merged = 2 if place == "several threads an element" else 1

    @T.prim_func
    def kernel(A: T.Tensor((rows, cols), "float32"), B: T.Tensor((threads // merged,), "float32")):
        with T.Kernel(1, threads=threads):
            a = T.alloc_fragment((rows, cols), "float32")
            most = T.alloc_fragment((threads // merged,), "float32")
            T.annotate_layout(
                {
                    a: T.Fragment(
                        (rows, cols),
                        forward_fn=lambda i, j: (
                            (i * cols + j) // vector % threads,
                            (i * cols) // (threads * vector) * vector + j % vector,
                        ),
                    )
                }
            )
            if place == "layout given":
                T.annotate_layout({most: T.Fragment((threads,), forward_fn=lambda k: (k, 0))})
            T.copy(A, a)
            T.fill(most, -1.0)
            for i, j in T.Parallel(rows, cols):
                k = (i % at_once * cols + j) // vector // merged
                most[k] = T.max(most[k], a[i, j])
            T.copy(most, B)

    made = tilelang.compile(kernel, target="cuda:sm_80")
    a, b = torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)), torch.zeros(threads // merged)
    findings = made.interpret(a, b)
    assert not findings, findings.report()
    wanted = a.view(rows // at_once, threads // merged, vector * merged).amax((0, 2))
    assert torch.equal(b, wanted)
    program, build = bound(kernel)
    assert ("runs in order" in str(build.schedule(program.name))) == (merged > 1)


def test_one_thread_may_update_its_own_elements_in_a_branch():
    """Iterations meet in elements that several threads hold: one thread runs them, and waits for nobody inside."""
    rows, cols, threads = 32, 64, 128
    at_once = threads * 4 // cols

    @T.prim_func
    def kernel(A: T.Tensor((rows, cols), "float32"), B: T.Tensor((threads,), "float32")):
        with T.Kernel(1, threads=threads):
            a, most = T.alloc_fragment((rows, cols), "float32"), T.alloc_fragment((threads,), "float32")
            T.annotate_layout(
                {
                    a: T.Fragment(
                        (rows, cols),
                        forward_fn=lambda i, j: (
                            (i * cols + j) // 4 % threads,
                            i * cols // (threads * 4) * 4 + j % 4,
                        ),
                    ),
                    most: T.Fragment(
                        (threads,), forward_fn=lambda k: (k % (threads // 2) * 2 + k // (threads // 2), 0)
                    ),
                }
            )
            T.copy(A, a)
            T.fill(most, -1.0)
            for i, j in T.Parallel(rows, cols):
                k = (i % at_once * cols + j) // 4
                most[k] = T.max(most[k], a[i, j])
            T.copy(most, B)

    a, b = torch.rand(rows, cols), torch.zeros(threads)
    run(kernel, a, b)
    assert torch.equal(b, a.view(rows // at_once, threads, 4).amax((0, 2)))


@pytest.mark.parametrize("parts", [(1, 1), (1, 4), (4, 1), (1, 64), (64, 1), (2, 8)])
@pytest.mark.parametrize("ends", [False, True])
def test_variables_of_one_value_take_no_registers(parts, ends):
    """Rows and columns of a sum in parts, one of which may be all of them. A part of one row had the rows' threads."""
    (s, t), n = parts, 64
    rows, columns = n // s, n // t
    shape = (1, rows, s, columns, t, 1) if ends else (rows, s, columns, t)

    @T.prim_func
    def kernel(A: T.Tensor((n, n), "float16"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=128) as _:
            a = T.alloc_shared((n, n), "float16")
            c = T.alloc_fragment((n, n), "float32")
            own = T.alloc_fragment(shape, "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            if ends:
                for o, i, p, j, q, z in T.Parallel(*shape):
                    own[o, i, p, j, q, z] = c[i * s + p + o, z + j * t + q] * 2.0
            else:
                for i, p, j, q in T.Parallel(*shape):
                    own[i, p, j, q] = c[i * s + p, j * t + q] * 2.0
            T.copy(own, B)

    program, _ = bound(kernel)
    arrays = [a.buffer for a in walk(program) if isinstance(a, Alloc) and a.buffer.scope == "local"]
    assert max(math.prod(buffer.static_shape) for buffer in arrays) == n * n // 128, arrays
    a, b = random(n, n, dtype=torch.float16), empty(*shape)
    run(kernel, a, b)
    torch.testing.assert_close(b.view(n, n), (2 * a.double() @ a.double()).float(), rtol=1e-3, atol=1e-3)
