# SPDX-License-Identifier: Apache-2.0
"""Loops of arithmetic that fills operands, and products: these run beside the arithmetic of the next iteration."""

import math

import pytest
import torch

import torch_tile
import torch_tile.language as T
from torch_tile.lowering.hopper.async_wgmma import DOUBLED

TARGET = "cuda:sm_90a"


def decoded(
    rows=128, columns=64, depth=192, step=64, threads=256, stages=2, form="nest", padding=0, min_blocks=1,
    part=1.0,
):  # fmt: skip
    """A by decoded B: bytes of two signed halves. `form` says how B is written, `padding` how much memory lies idle.

    With `part` below 1 only that part of the decoded tile's rows is written.
    """
    written = int(columns * part)

    @T.prim_func
    def kernel(
        A: T.Tensor((rows, depth), "bfloat16"),
        B: T.Tensor((columns, depth // 2), "uint8"),
        C: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            T.annotate_min_blocks_per_sm(min_blocks)
            a, packed = T.alloc_shared((rows, step), "bfloat16"), T.alloc_shared((columns, step // 2), "uint8")
            b = T.alloc_shared((columns, step), "bfloat16")
            c = T.alloc_fragment((rows, columns), "float32")
            idle = T.alloc_shared((max(1, padding), 32), "float32")
            own = T.alloc_fragment((columns, step), "bfloat16")
            pair = T.alloc_local((2,), "bfloat16")
            T.clear(c)
            T.clear(idle)
            if part < 1 or form == "sums":
                T.clear(b)
            for k in T.Pipelined(depth // step, num_stages=stages):
                T.copy(A[0, k * step], a)
                T.copy(B[0, k * step // 2], packed)
                if form == "nest":
                    for i, j in T.Parallel(written, step):
                        b[i, j] = T.cast((packed[i, j // 2] >> (j % 2 * 4)) & 15, "bfloat16") - 8
                elif form == "copy":
                    for i, j in T.Parallel(columns, step):
                        own[i, j] = T.cast((packed[i, j // 2] >> (j % 2 * 4)) & 15, "bfloat16") - 8
                    T.copy(own, b)
                elif form == "threads":
                    tx = T.get_thread_binding()
                    for i in T.serial(written * step // 2 // threads):
                        at = i * threads + tx
                        row = at // (step // 2)
                        for v in T.serial(2):
                            pair[v] = T.cast((packed[row, at % (step // 2)] >> (v * 4)) & 15, "bfloat16") - 8
                        for v in T.vectorized(2):
                            b[row, at % (step // 2) * 2 + v] = pair[v]
                elif form == "sums":
                    for i, j in T.Parallel(columns, step):
                        b[i, j] += T.cast((packed[i, j // 2] >> (j % 2 * 4)) & 15, "bfloat16") - 8
                elif form == "scaled":
                    for i, j in T.Parallel(columns, step):
                        b[i, j] = T.cast((packed[i, j // 2] >> (j % 2 * 4)) & 15, "bfloat16") - 8
                    for i, j in T.Parallel(rows, columns):
                        c[i, j] *= 0.5
                T.gemm(a, b, c, transpose_B=True)
            if padding:
                for i, j in T.Parallel(rows, columns):
                    c[i, j] += idle[0, 0]
            T.copy(c, C)

    return kernel


def tiles_of(kernel, **options):
    """Return the compiled kernel, and whether its report tells of two versions."""
    made = torch_tile.compile(kernel, target=TARGET, **options)
    return made, any(DOUBLED in remark.became for remark in made.schedule.remarks)


def inputs(rows=128, columns=64, depth=192, step=64, form="nest", part=1.0):
    """Return A and B, and the product in float64."""
    a = torch.randint(-3, 4, (rows, depth)).bfloat16()
    b = torch.randint(0, 256, (columns, depth // 2), dtype=torch.uint8)
    wide = torch.stack([b & 15, b >> 4], -1).view(columns, depth).double() - 8
    if form == "sums":
        wide = wide.view(columns, depth // step, step).cumsum(1).view(columns, depth)
    wide[int(columns * part) :] = 0
    if form != "scaled":
        return a, b, a.double() @ wide.T
    want = torch.zeros(rows, columns, dtype=torch.float64)
    for k in range(0, depth, step):
        want = want * 0.5 + a[:, k : k + step].double() @ wide[:, k : k + step].T
    return a, b, want


@pytest.mark.parametrize(
    ("options", "doubled"),
    [
        ({"form": "nest"}, True),
        ({"form": "copy"}, True),
        ({"form": "threads"}, True),
        ({"form": "nest", "depth": 64}, True),
        ({"form": "nest", "depth": 320, "stages": 3}, True),
        ({"form": "threads", "rows": 192, "columns": 96, "threads": 384}, True),
        ({"form": "sums"}, False),  # holds values of the iteration before
        ({"form": "scaled"}, False),  # the arithmetic reads the sums
        ({"form": "nest", "part": 0.5}, False),  # the other half keeps what was there
        ({"form": "threads", "part": 0.5}, False),
        ({"form": "nest", "threads": 128}, False),  # two blocks may share a multiprocessor
        ({"form": "nest", "stages": 1}, False),  # A has one version
    ],
)
def test_values(options, doubled, seed):
    """No thread races, and the values are those of float64."""
    torch.manual_seed(seed)
    kernel = decoded(**options)
    a, b, want = inputs(**{k: v for k, v in options.items() if k not in ("threads", "stages")})
    c = torch.zeros(want.shape)
    made, found = tiles_of(kernel)
    assert found is doubled, made.schedule
    assert not any(used.spills for used in made.resources.values())
    findings = made.interpret(a, b, c)
    assert not findings, findings.report()
    assert torch.equal(c.double(), want)


def test_one_version_where_two_need_too_much_memory():
    """Beside 137 KiB of another tile one version fits."""
    wide = {"columns": 256, "step": 64, "rows": 128}
    made, found = tiles_of(decoded(**wide, padding=8))
    assert found, made.schedule
    made, found = tiles_of(decoded(**wide, padding=1100))
    told = [r.became for r in made.schedule.remarks if "one version of operands" in r.became]
    assert not found and told, made.schedule
    assert "with T.role(" in repr(made.lowered) and made.lowered.kernels[0].shared_bytes < 227 * 1024


def test_kernels_of_the_library_and_of_many_blocks_keep_one_version():
    assert not tiles_of(decoded(min_blocks=2))[1]
    assert math.prod(tiles_of(decoded())[0].lowered.kernels[0].threads) == 384
