# SPDX-License-Identifier: Apache-2.0
"""Few queries over few keys: results are those of float64, and the kernel is chosen where it computes a call."""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_tile.hardware import Target
from torch_tile.kernels.attention import paged
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.few_keys import Tiling, column_of, tiling_for
from torch_tile.kernels.attention.forward import empty_results, reference, run
from torch_tile.kernels.attention.operands import Operand
from torch_tile.kernels.attention.sequences import Layout
from torch_tile.kernels.attention.spec import Spec
from torch_tile.kernels.attention.tiling import Problem
from torch_tile.kernels.common import Machine

HOPPER, AMPERE = Machine(Target("cuda", 90), 132), Machine(Target("cuda", 80), 108)
ENGINES = ["interpreter", "threads", "text"]


def results(args, tiling, machine=HOPPER):
    """The result and the log-sum-exp, by this kernel."""
    out, lse = (torch.full_like(x, math.nan) for x in empty_results(args))
    assert run(args, out, lse, machine, tiling, 0)
    return out, lse


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32, torch.bfloat16])
def test_random_problems(kind, engine, problems, check):
    """Last tiles that end early, rows that fill no product, masks of all shapes, and heads that lie apart."""
    dtype, machine = problems.pick(torch.float16, torch.bfloat16), problems.pick(HOPPER, AMPERE)
    batch, kv_heads, q_len = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 1, 2, 3)
    groups = problems.pick(*range(1, 16 // q_len + 1))
    kv_len, d, dv = problems.size(300), problems.pick(32, 64, 96, 128), problems.pick(64, 128)
    q = problems.tensor(batch, q_len, kv_heads * groups, d, dtype=dtype, layout="dense").transpose(1, 2)
    k = problems.tensor(batch, kv_len, kv_heads, d, dtype=dtype, layout="dense").transpose(1, 2)
    v = problems.tensor(batch, kv_heads, kv_len, dv, dtype=dtype, layout="dense")
    mask = None if kind is None else problems.mask(kind, batch, kv_heads * groups, q_len, kv_len)
    args = AttentionArgs(q, k, v, mask, scale=problems.pick(None, 0.3, -0.1))
    keys = problems.pick(64, 128, 256, 512 if dv == 128 else 256)
    threads = 256 if dv == 128 and keys > 64 and (keys > 256 or problems.pick(False, True)) else 128
    tiling = Tiling(8 if groups * q_len <= 8 else 16, keys, threads)
    tiling = replace(tiling, bulk=engine != "interpreter" and machine is HOPPER and problems.pick(False, True))
    if engine == "threads" and machine is HOPPER and problems.pick(False, True):
        tiling = replace(tiling, cluster=problems.pick(*(n for n in (2, 4, 8) if n * tiling.keys >= kv_len)))
    want = reference(*(x.double() for x in (q, k, v)), *args[3:])
    for name, a, b in zip(("out", "lse"), results(args, tiling, machine), want, strict=True):
        what = f"{name} of {tuple(q.shape)} {tuple(k.shape)} {dtype} {kind} {args.scale}, {tiling}"
        check(a, b, what, dtype, empty_beside(q, dv) if name == "out" else None)


@pytest.mark.parametrize("engine", ["threads", "text"], indirect=True)
@pytest.mark.parametrize(
    "page, keys, threads", [(64, 64, 128), (192, 64, 128), (64, 128, 128), (16, 128, 128), (32, 256, 256)]
)
def test_pages(page, keys, threads, engine, problems, check):
    """Sequences that end inside a tile, that are empty, or longer than their pages. Nothing unwritten is read."""
    dtype, columns, kv_heads = problems.pick(torch.float16, torch.bfloat16), problems.pick(1, 2, 3), problems.pick(1, 2)
    groups, (d, dv) = problems.pick(1, 3, 8, 9, 16), problems.pick((64, 64), (128, 128), (96, 128), (128, 64))
    threads = min(threads, 2 * dv)
    lengths = [problems.size(columns * page), 0, columns * page + 7]
    table = torch.randperm(3 * columns + 1, generator=problems.generator)[: 3 * columns].view(3, columns).int()
    q = problems.tensor(3, 1, kv_heads * groups, d, dtype=dtype, layout="dense")
    k, v = (problems.tensor(3 * columns + 1, page, kv_heads, n, dtype=dtype, layout="dense") for n in (d, dv))
    written = torch.zeros(k.shape[:2], dtype=torch.bool)
    for number, length in enumerate(lengths):
        for position in range(min(length, columns * page)):
            written[table[number, position // page], position % page] = True
    args = q, k, v, table, torch.tensor(lengths, dtype=torch.int32)
    filled = (x.masked_fill(~written[..., None, None], 0).double() for x in (k, v))
    want = paged.reference(q.double(), *filled, *args[3:])
    k[~written] = v[~written] = math.nan
    tiling = Tiling(8 if groups <= 8 else 16, keys, threads, bulk=problems.pick(False, True))
    if engine == "threads" and problems.pick(False, True):
        tiling = replace(tiling, cluster=next((n for n in (2, 4, 8) if n * keys >= columns * page), 1))
    for name, a, b in zip(("out", "lse"), paged.attention_paged(*args, config=tiling), want, strict=True):
        check(
            a, b, f"{name} of {lengths} in pages of {page}, {kv_heads} x {groups} heads of {d}, {dv}, {tiling}", dtype
        )


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("cluster", [1, 4])
def test_hidden_keys(cluster, engine, problems, check):
    """Rows that see no key of a block, and rows that see none at all."""
    q, k, v = (
        problems.tensor(1, h, n, 64, dtype=torch.float16, layout="dense") for h, n in ((4, 1), (1, 200), (1, 200))
    )
    mask = torch.zeros(1, 4, 1, 200, dtype=torch.bool)
    mask[0, 1, 0, 77] = mask[0, 2, 0, :64] = mask[0, 3, 0, 199] = True
    args = AttentionArgs(q, k, v, mask)
    (out, lse), want = results(args, Tiling(cluster=cluster)), reference(q.double(), k.double(), v.double(), mask)
    check(out, want[0], "out", torch.float16)
    assert not out[0, 0].any() and lse[0, 0, 0] == -math.inf
    check(lse[:, 1:], want[1][:, 1:], "lse", torch.float16)


@pytest.mark.parametrize("engine", ["threads"], indirect=True)
@pytest.mark.parametrize("exponent, cluster", [(4, 1), (12, 1), (12, 4)])
def test_large_scores(exponent, cluster, engine, problems, check):
    """The largest score has all the weight, in whichever block it is."""
    q, k, v = (
        problems.tensor(1, h, n, 64, dtype=torch.bfloat16, layout="dense") for h, n in ((2, 1), (1, 140), (1, 140))
    )
    args = AttentionArgs(q * 2.0**exponent, k * 2.0**exponent, v)
    check(
        results(args, Tiling(cluster=cluster))[0],
        reference(*(x.double() for x in args[:3]))[0],
        f"2 ** {exponent}",
        torch.bfloat16,
    )


def test_slots_are_a_permutation_of_columns():
    """Lane t of a row keeps the runs that it loads: columns 8 t to 8 t + 7 of each 32."""
    for d in (32, 96, 128):
        assert sorted(map(column_of, range(d))) == list(range(d))
        for slot in range(d):
            assert column_of(slot) % 32 // 8 == slot % 8 // 2


SPEC = Spec(torch.bfloat16, 128, 128, True, False, False, None, True, True, vector=8, lse=False)
ONE = Problem(8, 4, 1024, 4)


def test_chosen_where_it_computes_a_call():
    masked = replace(SPEC, mask=Operand("k", torch.bool, aligned=True))
    found = tiling_for(SPEC, ONE, HOPPER)
    assert found == tiling_for(masked, ONE, HOPPER) and found.cluster * found.keys >= ONE.keys
    refused = (
        {"causal": True}, {"windowed": True}, {"score": "s=tanh(acc0);ret s"}, {"exact": False}, {"vector": 1},
        {"dtype": torch.float32}, {"tile_d": 80}, {"tile_dv": 96}, {"tile_d": 256}, {"scaled": True},
    )  # fmt: skip
    assert not any(tiling_for(replace(SPEC, **fields), ONE, HOPPER) for fields in refused)
    assert tiling_for(SPEC, replace(ONE, rows=17), HOPPER) is None
    assert tiling_for(SPEC, replace(ONE, keys=1 << 20), HOPPER) is None
    assert tiling_for(SPEC, replace(ONE, heads=512), HOPPER) is None
    assert tiling_for(SPEC, ONE, AMPERE) is None  # not measured there
    assert not any(tiling_for(replace(SPEC, **fields), ONE, HOPPER) for fields in ({"tile_dv": 192}, {"tile_dv": 32}))


@pytest.mark.parametrize("page", [16, 64, 128, 256])
def test_chosen_for_one_query_behind_its_pages(page):
    paged_spec = replace(SPEC, causal=True, layout=Layout(page=page))
    found = tiling_for(SPEC, ONE, HOPPER)
    assert found and tiling_for(paged_spec, ONE, HOPPER) == replace(found, bulk=page >= 64)
    assert tiling_for(replace(paged_spec, layout=Layout(page=48)), ONE, HOPPER) is None  # no whole pages, no part
    assert tiling_for(replace(paged_spec, windowed=True), ONE, HOPPER) is None
    assert tiling_for(paged_spec, replace(ONE, rows=8), HOPPER) is None  # two queries, the first of which sees less


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_chosen_for_other_rows_and_widths(rows, width):
    found = tiling_for(replace(SPEC, tile_d=width), replace(ONE, rows=rows, groups=rows), HOPPER)
    assert found == Tiling(8 if rows <= 8 else 16, 128, 128, 8, True)


NARROW = {  # measured for one width only: what half as wide heads take with twice as many keys
    (64, 512, False): Tiling(keys=256, cluster=4),
    (40, 512, False): Tiling(keys=256, cluster=4),
    (16, 3000, True): Tiling(keys=256),
    (24, 2700, True): Tiling(keys=256),
    (16, 4096, True): Tiling(keys=256),
}


@pytest.mark.parametrize(
    "heads, keys, masked, want",
    [
        (8, 200, True, Tiling(keys=64, cluster=4)),
        (64, 200, True, Tiling(keys=64, cluster=4)),
        (64, 200, False, None),
        (128, 100, False, None),
        (8, 512, True, Tiling(keys=64, cluster=8)),
        (64, 512, True, Tiling(keys=256, cluster=2)),
        (32, 512, True, Tiling(keys=128, cluster=4)),
        (64, 512, False, None),
        (40, 512, False, None),
        (64, 300, False, None),
        (96, 512, False, None),
        (16, 1024, False, Tiling(keys=256, cluster=4)),
        (32, 1024, True, Tiling(keys=128, cluster=8)),
        (32, 1024, False, Tiling(keys=128, cluster=8)),
        (64, 1024, True, Tiling(keys=512, threads=256, cluster=2)),
        (64, 1024, False, None),
        (8, 2048, False, Tiling(keys=256, cluster=8)),
        (8, 2048, True, Tiling(keys=256, cluster=8)),
        (16, 1200, False, Tiling(keys=256, cluster=8)),
        (16, 2048, False, Tiling(keys=512, threads=256, cluster=4)),
        (8, 4096, False, Tiling(keys=512, threads=256, cluster=8)),
        (16, 2112, False, None),  # no room for 16 clusters of 8 at once
        (16, 2112, True, Tiling(keys=128)),
        (16, 2500, True, Tiling(keys=128)),
        (16, 3000, True, Tiling(keys=256)),
        (24, 2700, True, Tiling(keys=256)),
        (32, 2048, True, Tiling(keys=128)),
        (16, 4096, True, Tiling(keys=256)),
        (70, 900, True, Tiling(keys=128)),
        (8, 4096, True, Tiling(keys=512, threads=256, cluster=8)),
        (8, 8192, True, Tiling(keys=128)),
        (8, 8192, False, None),
        (8, 16384, True, None),
    ],
)
def test_the_fastest_that_was_measured(heads, keys, masked, want):
    spec = replace(SPEC, mask=Operand("k", torch.bool, aligned=True)) if masked else SPEC
    found = tiling_for(spec, replace(ONE, heads=heads, keys=keys), HOPPER)
    assert found == (want and replace(want, bulk=True))
    narrow = replace(spec, tile_d=64, tile_dv=64)  # twice as many keys have as many bytes
    twice = tiling_for(narrow, replace(ONE, heads=heads, keys=2 * keys), HOPPER)
    if (heads, keys, masked) in NARROW:
        assert twice == replace(NARROW[heads, keys, masked], bulk=True)
    else:
        assert twice == ((found and found.threads == 128 and replace(found, keys=2 * found.keys)) or None)


@pytest.mark.parametrize(
    "heads, keys",
    [(1, 1), (8, 512), (8, 513), (8, 1024), (8, 1025), (8, 2048), (16, 1024), (33, 1), (32, 1024)],
)
def test_clusters_hold_all_keys(heads, keys):
    found = tiling_for(SPEC, replace(ONE, heads=heads, keys=keys), HOPPER)
    assert found and (found.cluster == 1 or found.cluster * found.keys >= keys)


def test_no_cluster_for_a_size_known_at_run_time():
    """Another call may have more keys than a cluster, and the choice asks nothing of the size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    keys = mode.from_tensor(torch.empty(1000), symbolic_context=sizes).shape[0]
    found = tiling_for(SPEC, replace(ONE, keys=keys), HOPPER)
    assert found and found.cluster == 1 and not mode.shape_env.guards
