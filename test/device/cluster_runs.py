# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_cluster.py do: compile kernels whose blocks have to do with each other, and run them on a
GPU: blocks of clusters, and those that join what others left in global memory.

A problem is known by its seed. A module of its own, on the path: processes that are spawned have to find it by its
name.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import torch_tile
from torch_tile.diagnostics.errors import TileError

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import in_clusters
import joined_last

TURNS = 10  # of each problem: what has no order often comes out right
SHARED = 227 * 1024  # bytes of a block
LARGEST = 1500
CLUSTERS = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (4, 2, 1), (2, 4, 1), (8, 1, 1)]
# What one rounding changes: of products, as tensor cores have them (those of 8-bit floats add with 14 bits, and tf32
# drops 13 of each factor), and of results.
PRODUCTS = {"float16": 2**-19, "bfloat16": 2**-19, "float8_e4m3fn": 2**-9, "float32": 2**-9, "int8": 0}
RESULTS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-20, "int32": 0}
LEAST = {"float16": 2**-14, "bfloat16": 2**-126, "float32": 2**-126, "int32": 0}  # below, digits become fewer


@dataclass
class Problem:
    """A kernel and its operands. `reference` gives from these, on any device, what comes out and how far off it may be;
    `out` holds what the kernel must replace.
    """

    text: str
    kernel: object
    inputs: list
    out: torch.Tensor
    reference: Callable
    options: dict = field(default_factory=dict)

    def compile(self):
        """The kernel for Hopper."""
        return torch_tile.compile(self.kernel, target="cuda:sm_90a", pass_configs=self.options)

    def wrong(self, got):
        """What is wrong with a result; "" if nothing."""
        want, allowed = self.reference(*(x.to(got.device) for x in self.inputs))
        bad = ~((got.double() - want).abs() <= allowed)  # NaN is bad, too
        if not bad.any():
            return ""
        at = tuple(bad.nonzero()[0].tolist())
        return f"{self.text}: {int(bad.sum())} of {bad.numel()} elements, first {at}: {got[at]}, not {want[at]}"


def operand(rng, shape, dtype):
    """Numbers of size 1; of 8-bit integers any."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if dtype == "int8":
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def filled(shape, dtype):
    """What no kernel gives."""
    return torch.full(shape, 77 if dtype == "int32" else float("nan"), dtype=getattr(torch, dtype))


def product(dtype, out, factors):
    """The reference of a product of the two matrices that `factors` makes of the operands."""

    def reference(*inputs):
        a, b = factors(*(x.double() for x in inputs))
        want = a @ b
        return want, RESULTS[out] * want.abs().clamp_min(LEAST[out]) + PRODUCTS[dtype] * (a.abs() @ b.abs())

    return reference


def gemm(rng, largest):
    """Any type, order of operands and cut."""
    dtype = rng.choice(["float16", "float16", "bfloat16", "float8_e4m3fn", "int8", "float32"])
    size = getattr(torch, dtype).itemsize
    turned = rng.choice([(False, True), (False, False), (True, False), (True, True)]) if size == 2 else (False, True)
    out = {"float8_e4m3fn": "bfloat16", "int8": "int32"}.get(dtype, dtype)
    groups = rng.choice([1, 2])
    block = 64 * groups, rng.choice([32, 64, 128, 256]), rng.choice([64, 128]) // size
    stages = rng.randint(1, 5)
    while stages > 1 and stages * (block[0] + block[1]) * block[2] * size > SHARED - 1024:
        stages -= 1
    unit = 16 // size
    m, n, k = (unit * rng.randint(1, most // unit) for most in (largest, largest, 2 * largest))
    m = m if turned[0] else rng.randint(1, largest)
    n = n if not turned[1] else rng.randint(1, largest)
    cluster = rng.choice(CLUSTERS)
    kernel = in_clusters.gemm(
        m, n, k, cluster, block, stages, dtype, turned, 128 * groups, "int32" if dtype == "int8" else "float32", out
    )
    a = operand(rng, (k, m) if turned[0] else (m, k), dtype)
    b = operand(rng, (n, k) if turned[1] else (k, n), dtype)
    reference = product(dtype, out, lambda a, b: (a.T if turned[0] else a, b.T if turned[1] else b))
    text = f"gemm {m} x {n} x {k} {dtype} {turned}, blocks {block}, {stages} stages, cluster {cluster}"
    return Problem(text, kernel, [a, b], filled((m, n), out), reference, {"tl.enable_tf32": dtype == "float32"})


def changed(rng, largest):
    """Threads read the stages."""
    m, n, k = rng.randint(1, largest), rng.randint(1, largest), 8 * rng.randint(1, largest // 8)
    cluster, stages = rng.choice(CLUSTERS), rng.randint(1, 4)
    text = f"changed {m} x {n} x {k}, {stages} stages, cluster {cluster}"
    reference = product("float16", "float16", lambda a, b: (a.relu(), b.T))
    inputs = [operand(rng, shape, "float16") for shape in ((m, k), (n, k))]
    return Problem(text, in_clusters.changed(m, n, k, cluster, stages), inputs, filled((m, n), "float16"), reference)


def persistent(rng, largest):
    """Clusters take tile after tile."""
    m, n, k = rng.randint(1, largest), rng.randint(1, largest), 8 * rng.randint(1, largest // 8)
    cluster, clusters, stages = (rng.choice([2, 4, 8]), 1, 1), rng.randint(1, 40), rng.randint(1, 5)
    text = f"persistent {m} x {n} x {k}, {stages} stages, {clusters} clusters {cluster}"
    reference = product("float16", "float16", lambda a, b: (a, b.T))
    inputs = [operand(rng, shape, "float16") for shape in ((m, k), (n, k))]
    kernel = in_clusters.persistent(m, n, k, cluster, clusters, stages)
    return Problem(text, kernel, inputs, filled((m, n), "float16"), reference)


def attention(rng, largest):
    """Keys and values are shared, queries not."""
    width, groups = rng.choice([64, 128]), rng.choice([1, 2])
    queries, keys = rng.randint(1, largest), 64 * rng.randint(1, largest // 64)
    cluster, stages = (rng.choice([2, 4, 8]), 1, 1), rng.randint(1, 3)

    def reference(q, k, v):
        scores = q.double() @ k.double().T
        weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
        want = weights / weights.sum(-1, keepdim=True) @ v.double()
        return want, 2**-7 * want.abs() + 2**-7

    text = f"attention of {queries} x {keys} x {width}, {groups} warpgroups, {stages} stages, cluster {cluster}"
    inputs = [operand(rng, (n, width), "float16") for n in (queries, keys, keys)]
    inputs[0] /= width**0.5
    kernel = in_clusters.attention(queries, keys, cluster, width, stages, 128 * groups)
    return Problem(text, kernel, inputs, filled((queries, width), "float16"), reference)


def joined(rng, largest):
    """Blocks that add up what the others of their cluster left in shared memory."""
    dtype, count, groups = rng.choice(["float16", "bfloat16"]), rng.randint(2, 8), rng.choice([0, 1, 2])
    block = groups * 64 or 16, rng.choice([16, 32, 64]) if groups else 64, rng.choice([32, 64])
    m, n, k = (rng.randint(1, most) for most in (largest // 2, largest // 2, 2 * largest))
    k = -(-k // 8) * 8 if rng.random() < 0.8 else k
    options = {"stages": rng.randint(1, 4), "threads": 128 * max(groups, 1), "rows": rng.random() < 0.5}
    kernel = in_clusters.joined(m, n, k, count, block, dtype=dtype, **options)
    a, b = operand(rng, (m, k), dtype), operand(rng, (n, k), dtype)
    text = f"joined {m} x {n} x {k} {dtype}, blocks {block}, {options}, clusters of {count}"
    return Problem(text, kernel, [a, b], filled((m, n), "float32"), product(dtype, "float32", lambda a, b: (a, b.T)))


def left(inputs, shares, shape, counters):
    """What a kernel is given besides: parts that nobody reads before they are written, and counters at 0."""
    return [*inputs, filled((shares, *shape), "float32"), torch.zeros(counters, dtype=torch.int32)]


def shared_tiles(rng, largest):
    """Blocks that share the tiles of a product, which the last of them finishes; each takes one share, or several."""
    m, n, k = (8 * rng.randint(1, most // 8) for most in (largest // 2, largest // 2, 2 * largest))
    groups, splits = rng.choice([1, 2]), rng.randint(1, 9)
    options = {"stages": rng.randint(1, 4)}
    if rng.random() < 0.5:
        block = 64, 64
        made = joined_last.tile_after_tile(m, n, k, splits, rng.randint(1, 132), **options)
    else:
        block = 64 * groups, rng.choice([32, 64])
        options |= {"block": (*block, 64), "threads": 128 * groups, "staged": rng.random() < 0.5}
        made = joined_last.products(m, n, k, splits, **options)
    reference = product("float16", "float16", lambda a, b, *rest: (a, b))
    inputs = [operand(rng, shape, "float16") for shape in ((m, k), (k, n))]
    inputs = left(inputs, splits, (m, n), (-(-m // block[0]), -(-n // block[1])))
    text = f"shared tiles {m} x {n} x {k} by {splits}, {options}"
    return Problem(text, made, inputs, filled((m, n), "float16"), reference)


def shared_sums(rng, largest):
    """Sums of rows, or of tiles that leave and come by bulk copies."""
    splits = rng.randint(1, 24)
    if rng.random() < 0.5:
        rows, columns = 8 * rng.randint(1, 4), 32
        made = joined_last.bulk(rows, columns, min(splits, 12))
        inputs = left([operand(rng, (min(splits, 12), rows, columns), "float32")], min(splits, 12), (rows, columns), 1)

        def doubled(a, *rest):
            want = 2 * a.double().sum(0)
            return want, 2**-18 * a.double().abs().sum(0)

        return Problem(f"bulk {rows} by {splits}", made, inputs, filled((rows, columns), "float32"), doubled)
    rows, columns, height = rng.randint(1, largest), rng.randint(1, 4 * largest), rng.choice([1, 4, 16])
    made = joined_last.sums(rows, columns, splits, (height, 64), rng.choice([32, 128, 256]))
    inputs = left([operand(rng, (rows, columns), "float32")], splits, (rows,), -(-rows // height))

    def reference(a, *rest):
        return a.double().sum(1), 2**-16 * a.double().abs().sum(1)

    return Problem(f"sums {rows} x {columns} by {splits}", made, inputs, filled((rows,), "float32"), reference)


KINDS = [gemm, gemm, gemm, changed, persistent, attention, joined, shared_tiles, shared_sums]


def problem(seed, largest=LARGEST):
    """The problem of a seed."""
    rng = random.Random(seed)
    return rng.choice(KINDS)(rng, largest)


def prepare(seed):
    """Compile into the cache: `(seed, whether blocks reach each other, what was wrong)`."""
    try:
        made = problem(seed).compile()
    except TileError as error:
        return seed, False, "" if error.code == "shared_memory" else str(error)
    except Exception as error:
        return seed, False, f"{type(error).__name__}: {error}"
    reach = any(word in made.source for word in ("multicast", "at_rank", "arrive_last"))
    return seed, reach, "; ".join(made.cubin.warnings)


def difference(seed):
    """What a problem's kernel does on the GPU that it should not; "" if nothing."""
    made = problem(seed)
    try:
        kernel = made.compile()
    except TileError:
        return ""  # `prepare` has judged it
    inputs = [x.cuda() for x in made.inputs]
    outs = [made.out.cuda() for _ in range(TURNS)]
    for out in outs:
        kernel(*inputs, out)
    torch.cuda.synchronize()
    if text := made.wrong(outs[0]):
        return text
    if any(x.any() for x in inputs if x.dtype == torch.int32):
        return f"{made.text}: counters are left at other numbers than 0"
    again = [n for n, out in enumerate(outs) if not torch.equal(out, outs[0])]
    return f"{made.text}: runs {again} differ from the first" if again else ""
