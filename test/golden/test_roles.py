# SPDX-License-Identifier: Apache-2.0
"""The order of threads in roles: barriers of their own, and fences only where engines read what threads wrote."""

from __future__ import annotations

import textwrap

from expecttest import assert_expected_inline

import torch_tile.language as T
from torch_tile.compiler.context import Build
from torch_tile.hardware import Target
from torch_tile.ir.expr import Call
from torch_tile.ir.stmt import Block, Do, For, If, Role, Store, While
from torch_tile.lowering import cuda_passes, lower
from torch_tile.lowering.sync.insert_barriers import insert_barriers

H, F = "float16", "float32"
# What data moves by; the rest orders it.
MOVES = {
    "tma_load": "load", "tma_store": "store", "stmatrix": "write", "ldmatrix": "read", "vector_copy": "copy",
}  # fmt: skip


def order(kernel) -> str:
    """What orders threads and what engines do, a line for each loop and role, repeated words left out."""
    build = Build(Target.of("cuda:sm_90a"))
    program = lower(kernel.program, cuda_passes(build))
    lines: list[list[str]] = [[]]

    def word(call: Call) -> str:
        given = [str(n) for n in call.options if isinstance(n, int) and call.name in ("named_barrier", "wgmma_wait")]
        return MOVES.get(call.name, call.name) + (f"({', '.join(given)})" if given else "")

    def add(text: str) -> None:
        if not lines[-1] or lines[-1][-1] != text:
            lines[-1].append(text)

    def visit(node, indent: str) -> None:
        if isinstance(node, Do):
            if node.call.name not in ("set_registers", "wgmma_results", "mbarrier_init", "fence_barrier_init"):
                add(word(node.call))
        elif isinstance(node, Store) and node.buffer.scope == "shared":
            add("write")
        elif isinstance(node, Block):
            for one in node.stmts:
                visit(one, indent)
        elif isinstance(node, If):
            visit(node.then, indent)
            visit(node.otherwise, indent)
        elif isinstance(node, For | While | Role):
            plain = isinstance(node, For) and node.kind.value in ("unroll", "vectorized")
            if plain:
                visit(node.body, indent)
                return
            inner = indent + "  "
            head = f"role {node.first}+{node.count}:" if isinstance(node, Role) else "loop:"
            lines.append([indent + head])
            visit(node.body, inner)
            lines.append([indent[:-1]] if indent else [])

    visit(program.kernels[0].body, "")
    text = [" ".join(line) for line in lines if any(word.strip() for word in line)]
    return "\n".join(textwrap.fill(x, 110, subsequent_indent=" " * (len(x) - len(x.lstrip()) + 4)) for x in text)


def test_results_by_way_of_shared_memory() -> None:
    """A fence and the role's barrier between what threads write and the bulk copy that reads it.

    The results lie where operands did, so that another barrier ends the last products of all warps.
    """

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            a, b, c = T.alloc_shared((128, 64), H), T.alloc_shared((128, 64), H), T.alloc_fragment((128, 128), F)
            s = T.alloc_shared((128, 128), H)
            T.clear(c)
            for k in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 128, k * 64], a)
                T.copy(B[bx * 128, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, s)
            T.copy(s, C[by * 128, bx * 128])

    assert_expected_inline(
        order(kernel),
        """\
prefetch_map barrier
role 0+256:
  loop: mbarrier_wait wgmma_fence wgmma wgmma_commit wgmma_wait(1) mbarrier_arrive
  wgmma_wait(0) mbarrier_arrive named_barrier(1, 256) write fence_proxy_async named_barrier(1, 256) store
      bulk_commit bulk_wait
role 256+128:
  loop: mbarrier_wait mbarrier_expect load mbarrier_expect load mbarrier_arrive""",
    )


def test_results_tile_after_tile() -> None:
    """The tile is written again only when it has been read."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(4, threads=128) as bx:
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            s = T.alloc_shared((64, 64), H)
            for tile in T.serial(8):
                T.clear(c)
                for k in T.Pipelined(8, num_stages=3):
                    T.copy(A[tile * 64, k * 64], a)
                    T.copy(B[bx * 64, k * 64], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, s)
                T.copy(s, C[tile * 64, bx * 64])

    assert_expected_inline(
        order(kernel),
        """\
prefetch_map barrier
role 0+128:
  loop:
    loop: mbarrier_wait wgmma_fence wgmma wgmma_commit wgmma_wait(1) mbarrier_arrive
    wgmma_wait(0) mbarrier_arrive bulk_wait named_barrier(1, 128) write fence_proxy_async named_barrier(1,
        128) store bulk_commit
  bulk_wait
role 128+32:
  loop:
    loop: mbarrier_wait mbarrier_expect load mbarrier_expect load mbarrier_arrive""",
    )


def test_operands_that_threads_write() -> None:
    """Probabilities by way of shared memory, as warpgroups that share rows need them."""

    @T.prim_func
    def kernel(Q: T.Tensor((64, 64), H), K: T.Tensor((512, 64), H), O: T.Tensor((64, 512), F)):
        with T.Kernel(1, threads=256):
            q, k, p = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
            s, o = T.alloc_fragment((64, 64), F), T.alloc_fragment((64, 64), F)
            T.copy(Q, q)
            T.clear(o)
            for j in T.Pipelined(8, num_stages=2):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(s, p)
                T.gemm(p, k, o, policy=T.GemmWarpPolicy.FullCol)
            T.copy(o, O[0:64, 0:64])

    assert_expected_inline(
        order(kernel),
        """\
prefetch_map barrier
role 0+256: mbarrier_wait
  loop: mbarrier_wait wgmma_fence wgmma wgmma_commit wgmma_wait(0) named_barrier(1, 256) write wgmma_fence
      fence_proxy_async named_barrier(1, 256) wgmma wgmma_commit wgmma_wait(0) mbarrier_arrive
  copy
role 256+128: mbarrier_expect load mbarrier_arrive
  loop: mbarrier_wait mbarrier_expect load mbarrier_arrive""",
    )


def test_what_only_threads_touch_needs_no_fence() -> None:
    """Sums over columns that two warpgroups hold."""

    @T.prim_func
    def kernel(Q: T.Tensor((64, 64), H), K: T.Tensor((512, 64), H), O: T.Tensor((64,), F)):
        with T.Kernel(1, threads=256):
            q, k = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H)
            s, m = T.alloc_fragment((64, 64), F), T.alloc_fragment((64,), F)
            T.copy(Q, q)
            T.clear(m)
            for j in T.Pipelined(8, num_stages=2):
                T.copy(K[j * 64, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                T.reduce_sum(s, m, dim=1, clear=False)
            T.copy(m, O)

    text = order(kernel)
    assert "named_barrier(1, 256)" in text and "fence_proxy_async" not in text and " barrier " not in text


def test_roles_of_the_author() -> None:
    """Barriers are numbered by role; a single warp has its own; after roles all threads meet."""

    @T.prim_func
    def kernel(A: T.Tensor((512,), F), B: T.Tensor((512,), F)):
        with T.Kernel(1, threads=288):
            s, t, u = T.alloc_shared((128,), F), T.alloc_shared((128,), F), T.alloc_shared((32,), F)
            tx = T.get_thread_binding()
            with T.role(0, 128):
                s[tx] = A[tx]
                B[tx] = s[127 - tx]
            with T.role(128, 128):
                t[tx - 128] = A[tx]
                B[tx] = t[255 - tx]
            with T.role(256, 32):
                u[tx - 256] = A[tx]
                B[tx] = u[287 - tx]
            B[288 + tx] = s[tx % 128] + t[tx % 128]

    assert_expected_inline(
        order(kernel),
        """\
role 0+128: write named_barrier(1, 128)
role 128+128: write named_barrier(2, 128)
role 256+32: write warp_barrier
barrier""",
    )


def test_own_elements_in_a_role_need_no_barrier() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512,), F), B: T.Tensor((512,), F)):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((128,), F)
            tx = T.get_thread_binding()
            with T.role(128, 128):
                s[tx - 128] = A[tx]
                B[tx] = s[tx - 128]

    assert "barrier" not in order(kernel)


def test_what_was_before_roles_is_seen_by_them() -> None:
    @T.prim_func
    def kernel(A: T.Tensor((512,), F), B: T.Tensor((512,), F)):
        with T.Kernel(1, threads=256):
            s = T.alloc_shared((256,), F)
            tx = T.get_thread_binding()
            s[tx] = A[tx]
            with T.role(128, 128):
                B[tx] = s[255 - tx]

    assert_expected_inline(
        order(kernel),
        """\
write barrier
role 128+128:""",
    )


def test_a_program_with_barriers_stays_as_it_is() -> None:
    """Also one with fences in front of them."""

    @T.prim_func
    def kernel(A: T.Tensor((512, 512), H), B: T.Tensor((512, 512), H), C: T.Tensor((512, 512), H)):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            a, b, c = T.alloc_shared((64, 64), H), T.alloc_shared((64, 64), H), T.alloc_fragment((64, 64), F)
            s = T.alloc_shared((64, 64), H)
            T.clear(c)
            for k in T.Pipelined(8, num_stages=3):
                T.copy(A[by * 64, k * 64], a)
                T.copy(B[bx * 64, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, s)
            T.copy(s, C[by * 64, bx * 64])

    build = Build(Target.of("cuda:sm_90a"))
    passes = cuda_passes(build)
    end = next(n for n, (step, _) in enumerate(passes) if step.__name__ == "insert_barriers") + 1
    program = lower(kernel.program, passes[:end])
    assert insert_barriers(program) is program
