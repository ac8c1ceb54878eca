# SPDX-License-Identifier: Apache-2.0
"""Norms and softmax over rows: `python -m benchmarks.norm [--quick] [--only "rms_norm silu"]`.

They are bound by memory: what is asked on a GPU is a share of what a copy of as many bytes reaches. Rivals: that copy,
and the same maths under Inductor; on the CPU torch's own kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.problem import Case, Prepare, Problem, inductor, sample_of
from benchmarks.runner import main
from benchmarks.timer import Call, name_of
from torch_tile.kernels.norm.norm import (
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from torch_tile.kernels.norm.softmax import softmax

ON_GPU = (
    (1209600, 160), (1209600, 256), (1209600, 320), (1209600, 512), (302400, 640), (302400, 1024), (302400, 4096),
)  # fmt: skip
QUICK = {(1209600, 160), (302400, 1024)}
ON_CPU = ((7, 40), (1024, 1024), (1, 4096), (4096, 128), (64, 32000))
EPS = 1e-6
# Operations for each element, for the roofline: far below any ridge.
OPERATIONS = {"rms_norm silu": 8, "rms_norm": 4, "layer_norm": 8, "softmax": 5}


def problems(device: str) -> Iterator[Problem]:
    on_gpu = device == "cuda"
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        for m, n in ON_GPU if on_gpu else ON_CPU:
            for kind in ("rms_norm silu", "layer_norm", "softmax") if on_gpu else OPERATIONS:
                if on_gpu and kind != "rms_norm silu" and n not in (1024, 4096):
                    continue
                yield Problem(
                    f"{kind} {m}x{n} {name_of(dtype)}", kind, dtype, float(OPERATIONS[kind] * m * n),
                    2.0 * m * n * dtype.itemsize, partial(case, kind, m, n, dtype, device),
                    {"copy": 0.9} if on_gpu else {}, "copy",
                    quick=kind == "rms_norm silu" and (m, n) in QUICK if on_gpu else m == 7,
                )  # fmt: skip


def case(kind: str, m: int, n: int, dtype: torch.dtype, device: str) -> Case:
    x, w, b = (torch.randn(s, device=device, dtype=dtype) for s in ((m, n), (n,), (n,)))
    rows = sample_of(m, 256, device)
    some = x[rows].double(), w.double(), b.double()
    ours: Call = {
        "rms_norm silu": partial(rms_norm, x, w, EPS, "silu", 0.0, False),
        "rms_norm": partial(rms_norm, x, w, EPS, "none", 0.0, False),
        "layer_norm": partial(layer_norm, x, w, b, EPS),
        "softmax": partial(softmax, x),
    }[kind]
    want: Callable[[], torch.Tensor] = {
        "rms_norm silu": lambda: rms_norm_reference(some[0], some[1], None, EPS, "silu")[0],
        "rms_norm": lambda: rms_norm_reference(some[0], some[1], None, EPS)[0],
        "layer_norm": lambda: layer_norm_reference(*some, EPS),
        "softmax": lambda: torch.softmax(some[0], -1),
    }[kind]
    rivals: dict[str, Prepare] = {"Inductor": partial(inductor, in_torch, kind, x, w, b)}
    if device == "cpu":
        rivals["torch"] = lambda: partial(in_torch, kind, x, w, b)
    target = torch.empty_like(x)
    return Case(ours, rivals, lambda out: out[rows], want, {"copy": lambda: target.copy_(x)})


def in_torch(kind: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    n = x.shape[1]
    if kind == "softmax":
        return torch.softmax(x, -1)
    if kind == "layer_norm":
        return F.layer_norm(x, (n,), w, b, EPS)
    y = F.rms_norm(x, (n,), w, EPS)
    return F.silu(y) if kind == "rms_norm silu" else y


if __name__ == "__main__":
    sys.exit(main(["norm"], __doc__))
