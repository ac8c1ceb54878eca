# SPDX-License-Identifier: Apache-2.0
"""Matrix products against torch: square, tall, decoding, with an epilogue.

`python benchmarks/gemm.py [--only NAME] [--seconds S]`
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timer import arguments, report

from torch_tile.kernels.gemm import gemm

BIAS_GELU = "v=add(acc0,x0);w=gelu(v);ret w"
SWIGLU = "g=silu(acc0);y=mul(g,acc1);ret y"
PROBLEMS = [  # name, dtype, m, n, k
    ("square", torch.float32, 1024, 1024, 1024),
    ("square_bf16", torch.bfloat16, 512, 512, 512),
    ("ragged", torch.float32, 777, 555, 999),
    ("linear", torch.float32, 512, 1024, 1024),
    ("linear_gelu", torch.float32, 512, 1024, 1024),
    ("linear_bf16", torch.bfloat16, 256, 1024, 1024),
    ("swiglu", torch.float32, 256, 1024, 1024),
    ("decode", torch.float32, 1, 2048, 2048),
    ("decode_bf16", torch.bfloat16, 1, 2048, 2048),
    ("decode_8", torch.float32, 8, 2048, 2048),
    ("long_k", torch.float32, 16, 64, 65536),
    ("batched", torch.float32, 64, 64, 64),
]


def rivals_of(name: str, dtype: torch.dtype, m: int, n: int, k: int) -> tuple[dict[str, Callable[[], object]], int]:
    """What to time, torch first, and how many products of this size it makes."""
    a, b, w, u = (torch.randn(s, dtype=dtype) / 8 for s in ((m, k), (k, n), (n, k), (n, k)))
    bias = torch.randn(n, dtype=dtype)
    if name == "linear_gelu":
        ours = partial(gemm, a, [w.T], [bias], "r", BIAS_GELU, dtype)
        return {"torch": lambda: F.gelu(F.linear(a, w, bias)), "tile": ours}, 1
    if name == "swiglu":
        ours = partial(gemm, a, [w.T, u.T], [], "", SWIGLU, dtype)
        return {"torch": lambda: F.silu(F.linear(a, w)) * F.linear(a, u), "tile": ours}, 2
    if name == "batched":
        many, others = torch.randn(32, m, k), torch.randn(32, k, n)
        return {"torch": partial(torch.bmm, many, others), "tile": partial(gemm, many, [others], [], "", "", dtype)}, 32
    if name.startswith(("linear", "decode")):
        return {"torch": partial(F.linear, a, w), "tile": partial(gemm, a, [w.T], [], "", "", dtype)}, 1
    return {"torch": partial(torch.mm, a, b), "tile": partial(gemm, a, [b], [], "", "", dtype)}, 1


def main() -> None:
    options = arguments(__doc__)
    for name, dtype, m, n, k in PROBLEMS:
        if options.only in name:
            rivals, count = rivals_of(name, dtype, m, n, k)
            report(f"{name} {m}x{n}x{k}", rivals, 2.0 * m * n * k * count, seconds=options.seconds)


if __name__ == "__main__":
    main()
