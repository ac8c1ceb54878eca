# SPDX-License-Identifier: Apache-2.0
"""Matrix products against torch: square, tall, decoding, with an epilogue. `python benchmarks/gemm.py [--only NAME]`."""

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


def main() -> None:
    options = arguments(__doc__)
    for name, dtype, m, n, k in PROBLEMS:
        if options.only not in name:
            continue
        a, b, w, u = (torch.randn(s, dtype=dtype) / 8 for s in ((m, k), (k, n), (n, k), (n, k)))
        bias, count = torch.randn(n, dtype=dtype), 1
        if name == "linear_gelu":
            rivals = {"torch": lambda: F.gelu(F.linear(a, w, bias)), "tile": lambda: gemm(a, [w.T], [bias], "r", BIAS_GELU, dtype)}
        elif name == "swiglu":
            rivals = {
                "torch": lambda: F.silu(F.linear(a, w)) * F.linear(a, u),
                "tile": lambda: gemm(a, [w.T, u.T], [], "", SWIGLU, dtype),
            }
            count = 2
        elif name.startswith(("linear", "decode")):
            rivals = {"torch": lambda: F.linear(a, w), "tile": lambda: gemm(a, [w.T], [], "", "", dtype)}
        elif name == "batched":
            many, others = torch.randn(32, m, k), torch.randn(32, k, n)
            rivals = {"torch": lambda: torch.bmm(many, others), "tile": lambda: gemm(many, [others], [], "", "", dtype)}
            count = 32
        else:
            rivals = {"torch": lambda: torch.mm(a, b), "tile": lambda: gemm(a, [b], [], "", "", dtype)}
        report(f"{name} {m}x{n}x{k}", rivals, 2.0 * m * n * k * count, seconds=options.seconds)


if __name__ == "__main__":
    main()
