# SPDX-License-Identifier: Apache-2.0
"""Pipelined kernels on the threads of a block: results, and no race, missing wait or access outside."""

import pytest
import torch

import torch_tile
import torch_tile.language as T


def interpreted(kernel, *args):
    """Run the lowered kernel in the thread interpreter, which must find nothing wrong."""
    findings = torch_tile.compile(kernel, target="cuda:sm_80").interpret(*args)
    assert not findings, findings.report()


@pytest.mark.parametrize(
    ("order", "stage"), [((0, 3, 2, 1, 4), (0, 1, 2, 1, 2)), ((-1, 1, 0, -1, 2), (-1, 0, 1, -1, 1))]
)
def test_products_in_a_chain_scheduled_by_hand(order, stage):
    @T.prim_func
    def kernel(
        k: T.Tensor((160, 32), "float16"), v: T.Tensor((160, 32), "float16"), out: T.Tensor((32, 32)), n: T.int32
    ):
        with T.Kernel(1, threads=32) as _:
            k_tile = T.alloc_shared((32, 32), "float16")
            v_tile = T.alloc_shared((32, 32), "float16")
            s = T.alloc_fragment((32, 32), "float32")
            p = T.alloc_fragment((32, 32), "float16")
            o = T.alloc_fragment((32, 32), "float32")
            T.clear(o)
            for step in T.Pipelined(n, num_stages=3, order=order, stage=stage):
                T.copy(k[step * 32, 0], k_tile)
                T.gemm(k_tile, k_tile, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(32, 32):
                    p[i, j] = T.cast(s[i, j] * 0.125, "float16")
                T.copy(v[step * 32, 0], v_tile)
                T.gemm(p, v_tile, o)
            T.copy(o, out)

    for n in (0, 1, 2, 5):
        k, v = (torch.randint(-2, 3, (160, 32)).half() for _ in range(2))
        out = torch.full((32, 32), float("nan"))
        interpreted(kernel, k, v, out, n)
        tiles = zip(k.float().view(5, 32, 32)[:n], v.float().view(5, 32, 32)[:n], strict=True)
        wanted = sum(((a @ a.T * 0.125).half().float() @ b for a, b in tiles), torch.zeros(32, 32))
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)


def test_nested_loops_gathered_rows_and_a_tile_that_outlives_its_loop():
    @T.prim_func
    def kernel(
        x: T.Tensor((64, 64), "float16"), table: T.Tensor((48,), "int32"), y: T.Tensor((32, 64), "float16"),
        out: T.Tensor((8, 64), "float32"), last: T.Tensor((8, 64), "float16"), count: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=64) as _:
            rows = T.alloc_shared((8, 64), "float16")
            tile = T.alloc_shared((8, 64), "float16")
            total = T.alloc_fragment((8, 64), "float32")
            T.clear(total)
            for a in T.Pipelined(3, num_stages=2):
                T.copy(y[a * 8, 0], tile)
                for b in T.Pipelined(2, num_stages=3):
                    for i, j in T.Parallel(8, 64):
                        row = table[a * 16 + b * 8 + i]
                        rows[i, j] = T.if_then_else(a * 16 + b * 8 + i < count, x[row, j], 0.0)
                    for i, j in T.Parallel(8, 64):
                        total[i, j] += T.cast(rows[7 - i, j], "float32") * T.cast(tile[i, 63 - j], "float32")
            T.copy(total, out)
            T.copy(tile, last)

    x, y = torch.randint(-4, 5, (64, 64)).half(), torch.randint(-4, 5, (32, 64)).half()
    table = torch.randint(0, 64, (48,), dtype=torch.int32)
    out, last = torch.full((8, 64), float("nan")), torch.full((8, 64), float("nan")).half()
    interpreted(kernel, x, table, y, out, last, 37)
    rows = x.float()[table.long()].view(3, 2, 8, 64)
    rows.view(48, 64)[37:] = 0
    wanted = (rows.flip(2) * y.float()[:24].view(3, 1, 8, 64).flip(3)).sum((0, 1))
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    assert torch.equal(last, y[16:24])
