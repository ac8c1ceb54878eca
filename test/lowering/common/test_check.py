# SPDX-License-Identifier: Apache-2.0

import re
import warnings

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering.common.check import check_kernel, check_limits
from torch_tile.lowering.hopper.warp_specialize import specialize_warps


def lines(kernel):
    """The code and the author's line of each finding."""
    with pytest.raises(TileError) as caught:
        check_kernel(kernel.program)
    return [(d.code, d.span.source().split("#")[-1].strip()) for d in caught.value.diagnostics]


def test_good_kernels_are_returned_as_they_are(keeps):
    m, n = T.dynamic("m, n")

    @T.prim_func
    def kernel(x: T.Tensor((m, n), "float16"), rows: T.Tensor((m,), "int32")):
        with T.Kernel(m, T.ceildiv(n, 16)) as (b, c):
            tile = T.alloc_shared((4, 16), "float16")
            T.copy(x[b * 4 - 2, c * 16 + 100], tile)  # global regions may lie outside
            T.copy(x[rows[b], c * 16], tile[0, :])
            for k in T.serial(4):
                T.copy(tile[k, 0:8], tile[3 - k, 8:16])
            for i, j in T.Parallel(4, 16):
                T.atomic_add(x[i, j], tile[i, j])
                for k in T.serial(4):
                    if k == i:
                        break

    keeps(check_kernel, kernel)


def test_every_finding_is_reported():
    @T.prim_func
    def kernel(x: T.Tensor((8, 8), "float32"), n: T.int32):
        with T.Kernel(4) as b:
            dynamic = T.alloc_shared((n, 4), "float32")  # size
            tile = T.alloc_shared((4, 4), "float32")
            other = T.alloc_fragment((4, 5), "float32")
            T.copy(tile, other)  # shapes
            T.gemm(x, tile, other)  # global operand
            tile[4, 0] = dynamic[0, 0]  # store
            tile[0, 0] = tile[0, b + 4]  # load
            T.fill(tile[2:6, :], 0)  # region
            for i in T.serial(4):
                T.copy(x[i * i, 0], tile[0, :])  # affine
            for i in T.Parallel(4):
                T.fill(tile[i, :], 0)  # tile op
                if i > 2:
                    break  # leave

    assert lines(kernel) == [
        ("dynamic_tile", "size"), ("copy_shape", "shapes"), ("gemm_scope", "global operand"),
        ("gemm_shape", "global operand"),
        ("out_of_bounds", "store"), ("out_of_bounds", "load"), ("out_of_bounds", "region"),
        ("non_affine_region", "affine"),
        ("not_in_parallel", "tile op"), ("not_in_parallel", "leave"),
    ]  # fmt: skip


def test_what_never_runs_is_outside_of_nothing(keeps):
    @T.prim_func
    def kernel(n: T.int32):
        with T.Kernel(4) as b:
            tile = T.alloc_shared((4,), "float32")
            for i in T.serial(3, 3):
                tile[i + 1] = 0.0
            if b > 3:
                tile[b] = 0.0
            if b < 4:
                tile[b] = 0.0
            else:
                tile[b] = 0.0
            if b << 3 == 7:
                tile[b % 1] = 0.0
            for i in T.serial(8):
                if i < 4:
                    tile[i] = T.if_then_else(i >= 1, tile[T.max(i - 1, 0)], 0.0)

    keeps(check_kernel, kernel)


def test_what_all_threads_do_together_is_not_for_some_of_them():
    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(4, threads=256) as b:
            thread = T.get_thread_binding()
            tile, out = T.alloc_shared((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            seen = T.alloc_var("int32", 0)
            if thread < 120:
                T.gemm(tile, tile, out)  # product
                seen = 1
            if seen > 0:
                T.copy(x, tile)  # of a variable
            for i in T.serial(thread // 32):
                for j in T.Parallel(64):  # nest
                    tile[i, j] = 0
            while seen < thread:
                if b > 1:
                    T.fill(tile, 0)  # while
                seen += 1

    places = ("product", "of a variable", "nest", "while")
    assert lines(kernel) == [("parted_threads", place) for place in places]


def test_elements_of_fragments_are_written_by_their_owners():
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(4, threads=64) as b:
            thread = T.get_thread_binding()
            out, own = T.alloc_fragment((64,), "float32"), T.alloc_local((64,), "float32")
            seen = T.alloc_var("int32", 0)
            out[(thread + 1) % 64] = 1.0  # by an index
            if thread == 0:
                out[3] += 1.0  # by one thread
                own[3] = 1.0
            seen = thread
            while seen < 3:
                out[0] = 1.0  # by some
                seen += 1
            if b > 1:
                out[n] = 2.0
            for i in T.Parallel(64):
                if thread < 10:
                    out[i] = own[i]

    assert lines(kernel) == [("foreign_element", place) for place in ("by an index", "by one thread", "by some")]


def test_what_a_thread_does_by_itself_is_for_any(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((64, 64), "float32"), n: T.int32):
        with T.Kernel(4, threads=256) as b:
            thread = T.get_thread_binding()
            tile, own = T.alloc_shared((64, 64), "float32"), T.alloc_local((4,), "float32")
            if thread < 32:
                T.copy(x[thread, 0:4], own)
                T.atomic_add(x[thread, 4], own[0])
                for v in T.vectorized(4):
                    tile[thread, v] = own[v]
            if thread < 256 and n > b:  # all of them, or none
                T.copy(x, tile)
            with T.ws(1):
                if thread >= 128:  # all of the role
                    T.copy(tile, x)

    keeps(check_kernel, kernel)


def test_turns_that_leave_a_tile_are_found():
    @T.prim_func
    def kernel(A: T.Tensor((96,), "float32"), n: T.int32):
        with T.Kernel(4, n, threads=128) as (b, c):
            thread = T.get_thread_binding()
            x, tile = T.alloc_fragment((64,), "float32"), T.alloc_shared((64, 8), "float32")
            for i in T.Parallel(96):
                x[i] = A[i]  # wide
            for i in T.Parallel(64):
                A[i] = T.if_then_else(i > 0, x[i - 2], 0.0)  # value
            for k in T.serial(n):
                T.copy(A[0:16], x[b * 20 : b * 20 + 16])  # region
                for i in T.serial(0, 9, 4):
                    if i != 4 and x[0] > A[T.max(i - 8, 0)]:
                        T.fill(x, tile[0, i])  # not known
                    elif i != 4:
                        tile[c, i + c] += 1.0  # not known
                    tile[k, i] = 0.0  # step
            tile[thread, 0] = 0.0  # thread
            if thread < 64 and b < 9:
                tile[thread, b + 5] = 1.0  # block
            with T.ws(0):
                tile[thread - 1, T.min(thread, 7)] = 1.0  # role

    places = ("wide", "value", "region", "step", "thread", "block", "role")
    assert lines(kernel) == [("leaves_tile", place) for place in places]
    with pytest.raises(TileError) as caught:
        check_kernel(kernel.program)
    messages = [d.message for d in caught.value.diagnostics]
    assert messages == [
        "index 0 of `x`, i, is 64 for i = 64, outside [0, 64)",
        "index 0 of `x`, i - 2, is -1 for i = 1, outside [0, 64)",
        "index 0 of `x`, b * 20:b * 20 + 16, is 60:76 for b = 3, outside [0, 64)",
        "index 1 of `tile`, i, is 8 for i = 8, outside [0, 8)",
        "index 0 of `tile`, thread, is 64 for thread = 64, outside [0, 64)",
        "index 1 of `tile`, b + 5, is 8 for b = 3, outside [0, 8)",
        "index 0 of `tile`, thread - 1, is 64 for thread = 65, outside [0, 64)",
    ]
    fixes = [d.fix.split("`")[1] for d in caught.value.diagnostics]
    assert fixes[:3] == ["if i < 64:", "if i - 2 >= 0:", "if b * 20 + 16 <= 64:"]


def test_turns_that_are_kept_inside_or_not_known_are_left_alone(keeps):
    @T.prim_func
    def kernel(A: T.Tensor((96,), "float32"), n: T.int32):
        with T.Kernel(4, threads=128) as b:
            thread = T.get_thread_binding()
            x, tile = T.alloc_fragment((64,), "float32"), T.alloc_shared((64, 8), "float32")
            for i in T.Parallel(96):
                if i < 64:
                    x[i] = A[i]
                if i >= 64 or i % 2 == 1:
                    A[i] = T.if_then_else(i % 2 == 0, 0.0, x[i % 64])
                A[i] = T.if_then_else(i < 64, x[T.min(i, 63)], x[i - 32])
                A[i] = T.if_then_else(i >= 64 or x[i] > 0, 0.0, x[T.max(i - 64, 0)])
            for k in T.serial(5):
                if k * 16 + 16 <= 64:
                    T.copy(A[0:16], x[k * 16 : k * 16 + 16])
            for i in T.serial(96):
                if i >= n:
                    x[i] = 0.0
                if A[i] > 0:
                    x[i] = 1.0
                if i == 64:
                    break
                x[i] = 2.0
            for i in T.serial(96):
                if i > 63:
                    continue
                x[i] = 3.0
            for i in T.serial(n):
                x[i] = 4.0
            if thread < 64:
                tile[thread, b + thread // 13] = 0.0
            seen = T.alloc_var("int32", 0)
            while seen < 64:
                x[seen] = 5.0
                seen += 1
            assert n < 0, "none"
            for i in T.serial(65):
                x[i] = 6.0

    keeps(check_kernel, kernel)


def launched(*grid, threads=128, cluster=None):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(*grid, threads=threads, cluster_dims=cluster) as _:  # here
            A[0] = 1.0

    return kernel


def build():
    return Build(Target.of("cuda:sm_90a"))


SIZE = T.dynamic("size")


@pytest.mark.parametrize(
    "grid, threads, cluster",
    [
        ((1,), 1024, None),
        ((1,), (32, 32), None),
        ((2**31 - 1,), 128, None),
        ((1, 65535, 65535), 128, (1, 1, 1)),
        ((1, 70000), 128, None),
        ((30000, 1, 70000), 128, None),
        ((2, 65534), 128, (2, 1, 1)),
        ((SIZE, 70000), 128, None),
    ],
)
def test_what_gpus_launch(grid, threads, cluster):
    program = launched(*grid, threads=threads, cluster=cluster).program
    assert check_limits(program, build()) is program


@pytest.mark.parametrize(
    "grid, threads, cluster, what, fix",
    [
        ((1,), 2048, None, "a block of 2048 threads", "at most 1024 threads"),
        ((1,), (32, 33), None, "a block of 1056 threads", "at most 1024 threads"),
        ((2**31,), 128, None, f"a grid of {2**31} blocks in x", f"at most {2**31 - 1} in x"),
        ((70000, 70000), 128, None, "a grid of 70000 x 70000 blocks", f"at most {2**31 - 1}, or 65535 in y and z"),
        ((2, 70000), 128, (2, 1, 1), "a grid of 70000 blocks in y", "leave out cluster_dims"),
        ((3,), 128, (2, 1, 1), "a grid of 3 blocks in clusters of 2", "whole clusters"),
    ],
)
def test_what_they_do_not(grid, threads, cluster, what, fix):
    kernel = launched(*grid, threads=threads, cluster=cluster)
    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target="cuda:sm_90a")
    (found,) = caught.value.diagnostics
    assert found.code == "unsupported_on_target" and found.message.startswith(f"{what} is not supported on target cuda")
    assert fix in found.fix and found.span.source().endswith("# here")
    if cluster is None and grid[0] == 1:
        torch_tile.compile(kernel, target="cpu")  # where blocks have no threads


def test_all_findings_at_once():
    with pytest.raises(TileError) as caught:
        check_limits(launched(2**31, threads=2048).program, build())
    assert len(caught.value.diagnostics) == 2


@pytest.mark.parametrize("threads", [(), (1, 2, 3, 4), True, (2, False)])
def test_threads_have_one_to_three_sizes(threads):
    with pytest.raises(TileError, match="one to three positive integers"):
        launched(1, threads=threads)


@pytest.mark.parametrize("scope", ["fragment", "shared"])
def test_tiles_are_made_by_the_whole_block(scope):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                tile = getattr(T, f"alloc_{scope}")((4,), "float32")  # here
                own = T.alloc_local((4,), "float32")
                own[0] = A[i]
                tile[0] = own[0]
                A[i] = tile[0]

    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target="cuda:sm_90a")
    (found,) = caught.value.diagnostics
    assert found.message.startswith(f"T.alloc_{scope} inside T.Parallel") and "before the loop" in found.fix
    assert found.span.source().endswith("# here")


@pytest.mark.parametrize("name", ["atomic_add", "atomic_max", "atomic_min"])
@pytest.mark.parametrize("whole", [False, True])
def test_an_iteration_updates_one_element(name, whole):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                getattr(T, name)(B if whole else B[i], A[i])  # here

    if not whole:
        torch_tile.compile(kernel, target="cpu")
        return
    with pytest.raises(TileError) as caught:
        torch_tile.compile(kernel, target="cpu")
    (found,) = caught.value.diagnostics
    assert f"T.{name} of several elements of `B` by one value" in found.message and "`B[i]`" in found.fix
    assert found.span.source().endswith("# here")


def test_copiers_are_not_added_beyond_the_limit():
    """A block of 1024 threads that multiply has none for a role of its own that copies."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), "float16"), C: T.Tensor((512, 64), "float16")):
        with T.Kernel(1, threads=1024) as _:
            a, b = T.alloc_shared((512, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((512, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(A[k * 64, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    made = build()
    assert specialize_warps(kernel.program, made) is kernel.program
    assert [note.why_not for note in made.remarks] == ["a block has at most 1024 threads, and 1024 of them multiply"]


OUTSIDE = {
    "read": lambda x, s, f, i: x.__setitem__(0, x[i]),
    "store": lambda x, s, f, i: x.__setitem__(i, 1.0),
    "atomic": lambda x, s, f, i: T.atomic_add(x[i], 1.0),
    "copy": lambda x, s, f, i: T.copy(x[i], s[0:2]),
    "slice": lambda x, s, f, i: T.copy(x[i : i + 2], s[0:2]),
    "shared": lambda x, s, f, i: x.__setitem__(0, s[i]),
    "fragment": lambda x, s, f, i: T.copy(f[i], x[0]),
}


@pytest.mark.parametrize("index", [64, 100, -67])
@pytest.mark.parametrize("access", OUTSIDE)
def test_literal_indices_outside_of_known_sizes(access, index):
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            s, f = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(x, s)
            T.copy(x, f)
            OUTSIDE[access](x, s, f, index)

    if access in ("shared", "fragment"):
        assert {code for code, _ in lines(kernel)} == {"out_of_bounds"}
    else:
        with pytest.warns(UserWarning, match=r"\[outside\]: index 0 of `x` is .*, always outside \[0, 64\)"):
            check_kernel(kernel.program)


LOOPS = {
    "beyond": (lambda i, b: 64 + i, True),
    "before": (lambda i, b: i - 200, True),
    "strided": (lambda i, b: 64 + 2 * i + b, True),
    "last inside": (lambda i, b: 63 + i, False),
    "first inside": (lambda i, b: 64 * (b + i), False),
    "of a maximum": (lambda i, b: 64 + T.max(i - 40, -1), False),
    "from the end": (lambda i, b: i - 64, False),
}


@pytest.mark.parametrize("loop", ["Parallel", "serial", "unroll"])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("access", ["read", "store", "atomic"])
@pytest.mark.parametrize("index", LOOPS)
def test_indices_of_loops_that_no_iteration_has_inside(index, access, guarded, loop):
    """Warn where all iterations are outside; not of tails, nor in branches that never run."""
    made, outside = LOOPS[index]

    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32")):
        with T.Kernel(3, threads=32) as b:
            for i in getattr(T, loop)(32):
                if guarded:
                    if made(i, b) >= 0 and made(i, b) < 64:
                        OUTSIDE[access](x, None, None, made(i, b))
                else:
                    OUTSIDE[access](x, None, None, made(i, b))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_kernel(kernel.program)
    assert any("[outside]" in str(each.message) for each in caught) == (outside and not guarded)


@pytest.mark.parametrize("index", [0, 63, -1, -64])
@pytest.mark.parametrize("access", OUTSIDE)
def test_literal_indices_inside(access, index, keeps):
    n = T.dynamic("n")
    if (access in ("copy", "slice") and index == -1) or (access, index) == ("fragment", 63):
        pytest.skip("a slice that crosses zero is another error")

    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), y: T.Tensor((n,), "float32"), none: T.Tensor((0,), "float32")):
        with T.Kernel(1, threads=64):
            s, f = T.alloc_shared((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(x, s)
            T.copy(x, f)
            OUTSIDE[access](x, s, f, index)
            x[1] = y[100] + T.if_then_else(n > 100, x[0], none[0])  # sizes that are unknown, or 0
            T.copy(s, x)
            T.copy(f, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keeps(check_kernel, kernel)


def told(kernel):
    """The codes of the warnings about a kernel."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_kernel(kernel.program)
    return [code for each in caught for code in re.findall(r"\[(\w+)\]:", str(each.message))]


COMERS = {
    "lanes": (lambda tx: tx % 32 == 0, True),
    "one": (lambda tx: tx == 96, False),
    "a warp": (lambda tx: tx // 32 == 2, False),
    "two warps": (lambda tx: tx // 32 >= 2, True),
    "all": (lambda tx: tx >= 0, True),
}


@pytest.mark.parametrize("by_warp", [False, True])
@pytest.mark.parametrize("way", ["store", "load", "barrier"])
@pytest.mark.parametrize("come", COMERS)
def test_bulk_copies_whose_threads_name_other_tiles(come, way, by_warp):
    """One thread starts the copy: warn of others that would copy another tile, or for another mbarrier."""
    passes, several = COMERS[come]

    @T.prim_func
    def kernel(x: T.Tensor((64, 32), "float32"), y: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding(0)
            tile, full = T.alloc_shared((64, 32), "float32"), T.alloc_barrier([1] * 4)
            warp = tx // 32
            row = warp * 16 if by_warp else 16
            if way != "store":
                T.clear(tile)
            else:
                T.copy(x, tile)
            if passes(tx):
                if way == "store":
                    T.tma_copy(tile[row : row + 16, :], y[row, 0])
                elif way == "load":
                    T.tma_copy(x[row, 0], tile[row : row + 16, :], barrier=full[0])
                else:
                    T.tma_copy(x[16, 0], tile[16:32, :], barrier=full[warp if by_warp else 2])
            if way != "store":
                for k in T.serial(4):
                    if tx == 0:
                        T.mbarrier_arrive(full[k])
                    T.mbarrier_wait_parity(full[k], 0)
                T.copy(tile, y)

    assert ("one_starts" in told(kernel)) == (by_warp and several)


SCHEDULES = {
    "fits": ([0, 1, 2], [0, 0, 1], None, False),
    "stage alone": (None, [0, 0, 1], None, False),
    "none": (None, None, None, False),
    "too long": ([0, 1, 2, 3], [0, 0, 1, 1], None, True),
    "too short": ([0, 1], [0, 1], None, True),
    "not as long as each other": ([0, 1], [0, 0, 1], None, True),
    "order alone": ([0, 1, 2], None, None, True),
    "a place twice": ([0, 1, 1], [0, 0, 1], None, True),
    "of groups": ([0, 1], [0, 1], [[0, 1], [2]], False),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_do_not_fit_the_body(name):
    order, stage, group, doubtful = SCHEDULES[name]

    @T.prim_func
    def kernel(x: T.Tensor((64, 32), "float32"), y: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            tile, f = T.alloc_shared((16, 32), "float32"), T.alloc_fragment((16, 32), "float32")
            for k in T.Pipelined(4, num_stages=2, order=order, stage=stage, group=group):
                T.copy(x[k * 16, 0], tile)
                T.copy(tile, f)
                T.copy(f, y[k * 16, 0])

    assert ("no_schedule" in told(kernel)) == doubtful


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn", "int32", "bool"])
@pytest.mark.parametrize("to", ["bool", "float32", "int8"])
def test_copies_of_floats_to_bools(dtype, to):
    @T.prim_func
    def kernel(x: T.Tensor((64,), dtype), y: T.Tensor((64,), to)):
        with T.Kernel(1, threads=64):
            T.copy(x, y)

    assert ("float_to_bool" in told(kernel)) == (to == "bool" and dtype.startswith("float"))
