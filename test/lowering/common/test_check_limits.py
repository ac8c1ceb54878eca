# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile
import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.lowering.common.check_limits import check_limits
from torch_tile.lowering.hopper.warp_specialize import split_warps


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


@pytest.mark.parametrize("threads", [(), (1, 2, 3, 4)])
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
    assert split_warps(kernel.program, made) is kernel.program
    assert [note.why_not for note in made.notes] == ["a block has at most 1024 threads, and 1024 of them multiply"]
