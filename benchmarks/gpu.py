# SPDX-License-Identifier: Apache-2.0
"""The library on a GPU against its rivals, in one run: checked, then timed in turns on N(0, 1) data.

`python benchmarks/gpu.py [--seconds S] [--only NAME] [--configs]` prints a line for each problem: our time, the
rival's, how many times faster we are, our rate, and the error against the rival. Each time is the median of medians of
triton's do_bench (which flushes the L2 cache); rivals take turns. `--seconds` is for all problems together. `--configs`
tries the cuts of one family (`--only gemm`, `attention`, `mla`) beside the one that is chosen.

Rivals: gemm torch.mm; attention and decode FlashAttention-2 as torch ships it; mla the same maths in eager torch;
norms and softmax a copy of as many bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_tile.kernels import attention as attention_kernels, gemm as gemm_kernels, mla_decode as mla_kernels, norm
from torch_tile.kernels.attention_form import Config as AttentionConfig
from torch_tile.kernels.gemm_config import HALF_TILES
from torch_tile.kernels.mla_form import Config as MlaConfig
from torch_tile.kernels.softmax import softmax

Call = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """Something to time: our call and the rival's, the work of one call and its unit, and other cuts to try.

    With `check` both calls give the same tensor (or a tuple that starts with it).
    """

    name: str
    tile: Call
    rival: Call
    work: float
    unit: str
    check: bool = True
    configs: tuple[tuple[str, Call], ...] = ()


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


# m, n, k of large language models, and rows times matrices.
MATRICES = {
    "M0": (4096, 1024, 8192), "M1": (4096, 8192, 8192), "M3": (4096, 8192, 28672), "M5": (8192, 8192, 8192),
    "M6": (8192, 28672, 8192), "m16": (16, 16384, 16384), "m64": (64, 16384, 16384), "V0": (1, 16384, 16384),
    "V2": (1, 14336, 14336), "V5": (1, 9216, 9216),
}  # fmt: skip


def gemms() -> Iterator[tuple[str, Callable[[], Problem]]]:
    for dtype in (torch.float16, torch.bfloat16):
        for turned in (False, True):
            for name, size in MATRICES.items():
                label = f"gemm {name} {'fp16' if dtype == torch.float16 else 'bf16'} {'NT' if turned else 'NN'}"
                if (dtype == torch.float16 or name in ("M5", "V0")) and (turned or size[0] > 1):
                    yield label, partial(gemm_problem, label, dtype, turned, *size)


def gemm_problem(label: str, dtype: torch.dtype, turned: bool, m: int, n: int, k: int) -> Problem:
    a, b = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype).T if turned else normal(k, n, dtype=dtype)
    ours = partial(gemm_kernels.gemm, a, [b], [], "", "", dtype)
    cuts = [t.config for t in HALF_TILES if t.config.block_m <= 2 * m]
    cuts += [replace(c, block_k=96 - c.block_k) for c in cuts] + [replace(c, stages=c.stages - 1) for c in cuts]
    others = tuple((str(c), partial(ours, config=c)) for c in dict.fromkeys(cuts))
    work, unit = (2.0 * m * n * k / 1e12, "TFLOP/s") if m > 128 else (2.0 * (m * k + n * k + m * n) / 1e12, "TB/s")
    return Problem(label, ours, partial(torch.mm, a, b), work, unit, configs=others)


# batch, query heads, key heads, queries, keys, head size, causal
ATTENTION = (
    (1, 32, 32, 512, 512, 128, True), (1, 32, 32, 1024, 1024, 128, False), (1, 32, 32, 4096, 4096, 128, True),
    (1, 32, 32, 4096, 4096, 128, False), (2, 32, 32, 8192, 8192, 128, True), (2, 64, 8, 4096, 4096, 128, True),
    (2, 32, 32, 8192, 8192, 64, True), (1, 64, 8, 1, 8192, 128, False), (8, 64, 8, 1, 8192, 128, False),
    (32, 64, 8, 1, 8192, 128, False),
)  # fmt: skip


def attentions() -> Iterator[tuple[str, Callable[[], Problem]]]:
    for size in ATTENTION:
        batch, heads, kv_heads, q_len, kv_len, d, causal = size
        kind = "decode" if q_len == 1 else "attention"
        label = f"{kind} b{batch} h{heads}/{kv_heads} s{kv_len} d{d} {'causal' if causal else 'full'}"
        yield label, partial(attention_problem, label, *size)


def attention_problem(
    label: str, batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, d: int, causal: bool
) -> Problem:
    q = normal(batch, heads, q_len, d, dtype=torch.bfloat16)
    k, v = (normal(batch, kv_heads, kv_len, d, dtype=torch.bfloat16) for _ in range(2))

    def rival() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

    ours = partial(attention_kernels.attention, q, k, v, None, causal)
    base = AttentionConfig(heavy_first=causal, staged=heads == kv_heads)
    cuts = [replace(base, block_q=128, block_kv=keys, stages=stages) for keys in (64, 32) for stages in (1, 2, 3)]
    cuts += [replace(base, block_kv=keys, stages=n, resident=True) for keys in (64, 128) for n in (1, 2)]
    cuts += [
        replace(base, block_q=128, threads=256, block_kv=keys, stages=stages, resident=resident)
        for keys in (64, 128)
        for stages in (1, 2)
        for resident in (False, True)
    ]
    others = tuple((str(c), partial(ours, config=c)) for c in cuts) if q_len > 1 else ()
    work = 4.0 * batch * heads * q_len * kv_len * d * (0.5 if causal else 1.0) / 1e12
    if q_len > 1:
        return Problem(label, ours, rival, work, "TFLOP/s", configs=others)
    return Problem(label, ours, rival, 2 * k.nbytes / 1e12, "TB/s")


MLA = (
    (64, 1024, 128),
    (64, 4096, 128),
    (64, 8192, 128),
    (128, 4096, 128),
    (16, 8192, 128),
    (1, 8192, 128),
    (64, 8192, 16),
)


def mlas() -> Iterator[tuple[str, Callable[[], Problem]]]:
    for batch, length, heads in MLA:
        label = f"mla b{batch} s{length} h{heads}"
        yield label, partial(mla_problem, label, batch, length, heads)


def mla_problem(label: str, batch: int, length: int, heads: int) -> Problem:
    q, q_pe = (normal(batch, 1, heads, n, dtype=torch.bfloat16) for n in (512, 64))
    kv, k_pe = (normal(batch, length, n, dtype=torch.bfloat16) for n in (512, 64))

    def eager() -> torch.Tensor:
        scores = (torch.cat([q, q_pe], -1)[:, 0] @ torch.cat([kv, k_pe], -1).mT) * 576**-0.5
        return (torch.softmax(scores.float(), -1).to(q.dtype) @ kv)[:, None]

    ours = partial(mla_kernels.mla_decode, q, q_pe, kv, k_pe)
    cuts = [MlaConfig(64, keys, 256, stages) for keys, stages in ((64, 1), (32, 2), (32, 3), (64, 2))]
    cuts += [MlaConfig(32, keys, 256, 2) for keys in (32, 64)]
    others = tuple((str(c), partial(ours, config=c)) for c in cuts)
    return Problem(label, ours, eager, 2.0 * batch * heads * length * (2 * 512 + 64) / 1e12, "TFLOP/s", configs=others)


ROWS = ((1209600, 160), (1209600, 256), (1209600, 320), (1209600, 512), (302400, 640), (302400, 1024), (302400, 4096))


def rows() -> Iterator[tuple[str, Callable[[], Problem]]]:
    for m, n in ROWS:
        for name in ("rms_norm silu", "layer_norm", "softmax"):
            if name == "rms_norm silu" or n in (1024, 4096):
                label = f"{name} {m}x{n}"
                yield label, partial(rows_problem, label, name, m, n)


def rows_problem(label: str, name: str, m: int, n: int) -> Problem:
    x, w, b = normal(m, n, dtype=torch.bfloat16), normal(n, dtype=torch.bfloat16), normal(n, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    call: Call = {
        "rms_norm silu": partial(norm.rms_norm, x, w, None, 1e-6, "silu"),
        "layer_norm": partial(norm.layer_norm, x, w, b),
        "softmax": partial(softmax, x),
    }[name]
    return Problem(label, call, lambda: out.copy_(x), 2 * x.nbytes / 1e12, "TB/s", check=False)


def median_time(call: Call, milliseconds: float) -> float:
    """Seconds of a call: the median of as many as fit into the time."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=milliseconds / 4, rep=milliseconds, return_mode="median")) / 1e3


def timed(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """The median time of each call; they take turns."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    turns = 3
    share = 1e3 * seconds / (turns * len(calls) * 1.25)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(median_time(call, share))
    return {name: statistics.median(found) for name, found in times.items()}


def error_of(problem: Problem) -> float:
    """The largest distance from the rival's result, as a share of its root mean square."""
    got, want = (r[0] if isinstance(r, tuple) else r for r in (problem.tile(), problem.rival()))
    assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    return float((got.float() - want.float()).abs().max() / want.float().square().mean().sqrt())


def run(name: str, make: Callable[[], Problem], seconds: float, configs: bool) -> None:
    """Check and time one problem, and print a line; what fails is printed, not raised."""
    try:
        problem = make()
        error = f"{error_of(problem):.1e}" if problem.check else "-"
        times = timed({"tile": problem.tile, "rival": problem.rival}, seconds)
        ours, theirs = times["tile"], times["rival"]
        rate = f"{problem.work / ours:8.2f} {problem.unit:7}"
        print(f"{name:44} {ours * 1e6:10.1f} {theirs * 1e6:10.1f} {theirs / ours:7.3f} {rate} {error}", flush=True)
    except Exception as problem_error:  # the next problems are to be seen too
        print(f"{name:44} FAILED {type(problem_error).__name__}: {str(problem_error)[:600]}", flush=True)
        traceback.print_exc(limit=-3)
        return
    for config, call in problem.configs if configs else ():
        try:
            time_of = timed({"tile": call}, seconds / 4)["tile"]
            print(f"    {theirs / time_of:7.3f} {config}", flush=True)
        except Exception as config_error:
            print(f"    failed {config}: {type(config_error).__name__}: {str(config_error)[:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all problems together")
    parser.add_argument("--only", default="", help="run the problems whose name contains one of these, apart by commas")
    parser.add_argument("--configs", action="store_true", help="try other cuts too")
    options = parser.parse_args()
    found = [p for family in (gemms, attentions, mlas, rows) for p in family()]
    found = [(name, make) for name, make in found if any(o in name for o in options.only.split(","))]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, at {time.strftime('%Y-%m-%d %H:%M')}")
    print(f"{'problem':44} {'tile us':>10} {'rival us':>10} {'speedup':>7} {'rate':>16} error")
    end = time.monotonic() + options.seconds
    for left, (name, make) in zip(range(len(found), 0, -1), found, strict=True):
        remaining = end - time.monotonic()
        if remaining <= 0:
            print(f"out of time: {left} problems left")
            break
        run(name, make, min(3.0, 0.6 * remaining / left), options.configs)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
