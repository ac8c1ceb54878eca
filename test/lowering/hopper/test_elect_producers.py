# SPDX-License-Identifier: Apache-2.0
"""One lane runs what a producer warp does, unless other lanes have work, or the block goes on behind its roles."""

from dataclasses import replace

import pytest
import torch

import torch_tile
import torch_tile.language as T
from test.emulate import emulate
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.intrinsics.memory import warp_barrier
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Call, Load, binary, cast, const
from torch_tile.ir.node import Rewriter, find
from torch_tile.ir.stmt import Block, If, Program, Role
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.hopper.elect_producers import elect_producers

HOPPER = "cuda:sm_90a"
H, F = T.float16, T.float32


def product(warpgroups=1, tiles=1, cluster=1, rows=64, scaled=True):
    """A product of 16-bit matrices, by blocks that make some tiles one after the other; its parts may be scaled."""

    @T.prim_func
    def kernel(A: T.Tensor((rows * warpgroups, 256), H), B: T.Tensor((256, 64 * 2 * tiles), H), D: T.Tensor((4, 64), F),
               C: T.Tensor((rows * warpgroups, 64 * 2 * tiles), F)):  # fmt: skip
        with T.Kernel(2, threads=128 * warpgroups, cluster_dims=(cluster, 1, 1)) as bx:
            for tile in T.serial(tiles):
                column = (bx * tiles + tile) * 64
                a, b = T.alloc_shared((rows * warpgroups, 64), H), T.alloc_shared((64, 64), H)
                c, part = (T.alloc_fragment((rows * warpgroups, 64), F) for _ in range(2))
                d, e, own = T.alloc_shared((64,), F), T.alloc_shared((64,), F), T.alloc_fragment((64,), F)
                T.clear(c)
                for ko in T.Pipelined(4, num_stages=3):
                    T.copy(A[0, ko * 64], a)
                    T.copy(B[ko * 64, column], b)
                    if scaled:
                        T.copy(D[ko, 0], d)
                        T.copy(D[3 - ko, 0], e)
                        for j in T.Parallel(64):
                            own[j] = d[j] * e[j]
                    T.gemm(a, b, part, clear_accum=True)
                    for i, j in T.Parallel(rows * warpgroups, 64):
                        c[i, j] += part[i, j] * (own[j] if scaled else 1.0)
                T.copy(c, C[0, column])

    return kernel


def lowered(kernel):
    build = Build(Target.of(HOPPER), PassOptions())
    return lower(kernel.program, cuda_passes(build)), build


def chosen(program):
    return [n for n in find(program, Call) if n.name == "one_lane"]


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_the_lane_copies_waits_and_arrives(warpgroups, tiles):
    """Without a condition on the thread below its own, and with the values that the kernel had."""
    kernel = product(warpgroups, tiles)
    program, build = lowered(kernel)
    assert len(chosen(program)) == 1
    (role,) = (r for r in find(program, Role) if chosen(r))
    (branch,) = (s for s in find(role, If) if isinstance(s.condition, Call))
    (thread,) = (k.thread for k in program.kernels)
    assert not any(n is thread for s in branch.then.stmts for n in find(s, type(thread)))
    assert {"mbarrier_wait", "mbarrier_expect", "mbarrier_arrive", "tma_load"} <= {
        n.name for n in find(branch.then, Call)
    }
    (expect,) = (n for n in find(branch.then, Call) if n.name == "mbarrier_expect")
    assert expect.args[1].value == (64 * warpgroups + 64) * 64 * 2 + 2 * 64 * 4  # of all four copies
    assert elect_producers(program, build) is program
    compiled = torch_tile.compile(kernel, target=HOPPER)
    a, b, d = torch.randn(64 * warpgroups, 256).half(), torch.randn(256, 128 * tiles).half(), torch.rand(4, 64) + 0.5
    parts = a.double().view(-1, 4, 64).transpose(0, 1) @ b.double().view(4, 64, -1)
    want = (parts * (d * d.flip(0)).double().repeat(1, 2 * tiles)[:, None]).sum(0)
    for run in (compiled.interpret, lambda *given: emulate(compiled, *given)):
        c = torch.full(want.shape, float("nan"))
        run(a, b, d, c)
        torch.testing.assert_close(c.double(), want, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("few", [{"scaled": False}, {"rows": 256, "warpgroups": 1}])
def test_two_copies_or_large_ones_keep_all_lanes(few):
    """One lane was no faster there."""
    program, _ = lowered(product(**few))
    assert any(n.name == "tma_load" for n in find(program, Call)) and not chosen(program)


def test_other_chips_and_blocks_that_go_on_keep_all_lanes():
    """The blocks of a cluster meet behind their roles."""
    program, _ = lowered(product(cluster=2))
    assert list(find(program, Role)) and not chosen(program)
    build = Build(Target.of("cuda:sm_80"), PassOptions())
    assert not chosen(lower(product().program, cuda_passes(build)))


OTHER_WORK = {
    "meets": lambda thread: warp_barrier(),
    "waits by lanes": lambda thread: If(binary("==", thread % 2, const(0, int32)), Block((warp_barrier(),)), Block(())),
}


@pytest.mark.parametrize("work", OTHER_WORK)
def test_warps_whose_other_lanes_have_work_keep_them(work):
    """The pass divides the lanes only where it knows of all that the warp does."""
    build = Build(Target.of(HOPPER), PassOptions())
    steps = [step for step in cuda_passes(build) if step[0].__name__ != "elect_producers"]
    program = lower(product().program, steps)
    assert chosen(elect_producers(program, build))
    more: Program = _More(OTHER_WORK[work])(program)
    assert more is not program and elect_producers(more, build) is more


def test_copies_whose_places_are_loaded_keep_all_lanes():
    """A page number is loaded to a lane, so one lane gains no uniform coordinates."""
    build = Build(Target.of(HOPPER), PassOptions())
    steps = [step for step in cuda_passes(build) if step[0].__name__ != "elect_producers"]
    program = lower(product().program, steps)
    paged: Program = _Paged()(program)
    assert chosen(elect_producers(program, build))
    assert paged is not program and elect_producers(paged, build) is paged


class _Paged(Rewriter):
    """Add a number from memory to the last coordinate of each copy."""

    def visit_Program(self, program):
        (self.pages,) = (p for p in program.params if p.name == "D")
        return self.children(program)

    def visit_Call(self, call):
        if call.name != "tma_load":
            return self.children(call)
        page = cast(Load(self.pages, tuple(const(0, int32) for _ in self.pages.shape)), int32)
        return replace(call, args=(*call.args[:-1], binary("+", call.args[-1], page)))


class _More(Rewriter):
    """Give each role of one warp more work."""

    def __init__(self, work):
        self.work = work

    def visit_Kernel(self, kernel):
        self.thread = kernel.thread
        return self.children(kernel)

    def visit_Role(self, role):
        more = self.work(self.thread)
        return replace(role, body=Block((*role.body.stmts, more))) if role.count == 32 else role
