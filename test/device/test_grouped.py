# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows on the GPU, and the gradients of their matrices."""

import pytest
import torch

import torch_tile.ops  # noqa: F401
from torch_tile.kernels.gemm import grouped, grouped_wgrad

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("poisoned", "kernels_ran"),
]

EPILOGUES = {  # text, number of bs
    "plain": ("", 1),
    "swiglu": ("g=silu(acc0);y=mul(g,acc1);ret y", 2),
    "masked": ("g=where(x0,0.0,acc0);y=mul(g,x1);ret y", 1),  # truth values and numbers, one for each row
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_grouped_gemm(epilogue, problems, check):
    text, count = EPILOGUES[epilogue]
    for _ in range(problems.count):
        dtype, groups, rows = problems.dtype(), problems.size(20), problems.size(1500)
        offsets = problems.ends(groups, rows)
        n, k = problems.size(700), problems.size(700)
        n, k = problems.pick((n, k), (8 * (n // 8 + 1), 8 * (k // 8 + 1)))
        layout = problems.pick("dense", "dense", "slice", "gaps")
        a = problems.tensor(rows, k, dtype=dtype, layout=layout)
        turned = problems.pick(True, False)
        bs = [
            problems.tensor(groups, *((n, k) if turned else (k, n)), dtype=dtype, layout=layout) for _ in range(count)
        ]
        bs = [b.mT if turned else b for b in bs]
        x = [problems.tensor(rows, 1, dtype=dtype) for _ in range(2)]
        aux = [x[0] > 0, x[1]] if "x0" in text else []
        kinds = "c" * len(aux)
        got = torch.ops.tile.grouped_gemm(a, bs, offsets, aux, kinds, text, dtype)

        def exact(a, *bs, offsets=offsets, text=text, aux=aux, kinds=kinds):
            return grouped.reference(a, bs, offsets, aux, kinds, text, torch.float64)

        what = f"{epilogue} {dtype} {offsets.tolist()} {rows}x{n}x{k} {layout} turned {turned}"
        check(got, exact, (a, *bs), what, dtype)


def test_k_grouped_gemm(problems, check):
    for _ in range(problems.count):
        dtype, groups, rows = problems.dtype(), problems.size(20), problems.size(1500)
        offsets = problems.ends(groups, rows)
        m, n = (problems.pick(size, 8 * (size // 8 + 1)) for size in (problems.size(400), problems.size(400)))
        layout = problems.pick("dense", "dense", "slice", "gaps")
        a, b = (problems.tensor(rows, columns, dtype=dtype, layout=layout) for columns in (m, n))
        got = torch.ops.tile.k_grouped_gemm(a, b, offsets, dtype)

        def exact(a, b, offsets=offsets):
            return grouped_wgrad.reference(a, b, offsets, torch.float64)

        check(got, exact, (a, b), f"{dtype} {offsets.tolist()} {m}x{n}x{rows} {layout}", dtype)
