# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import torch_tile as tile
import torch_tile.language as T
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.kernel import JITKernel
from torch_tile.kernels.attention import forward as module
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.arguments import empty_beside
from torch_tile.kernels.attention.forward import attention, flash_attention, reference
from torch_tile.kernels.attention.spec import Config, Spec
from torch_tile.kernels.common import Machine
from torch_tile.lowering import cuda_passes, lower
from torch_tile.simulator.interpret import interpret


def by_hand(q, k, v, mask, causal, scale, window, q_offset):
    """One query at a time, over lists of the keys it sees."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = v.shape[1:]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    full = None if mask is None else mask.broadcast_to(batch, heads, q_len, kv_len)
    out = torch.zeros(batch, heads, q_len, v_dim, dtype=q.dtype)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // kv_heads)
            for i in range(q_len):
                seen = [
                    j
                    for j in range(kv_len)
                    if not (causal and j > i + q_offset)
                    and not (window and j <= i + q_offset - window)
                    and not (full is not None and full.dtype == torch.bool and not full[b, h, i, j])
                ]
                scores = [float(q[b, h, i] @ k[b, g, j]) * scale for j in seen]
                if full is not None and full.dtype != torch.bool:
                    scores = [s + float(full[b, h, i, j]) for s, j in zip(scores, seen, strict=True)]
                total = sum(math.exp(s) for s in scores)
                if total:
                    lse[b, h, i] = math.log(total)
                    out[b, h, i] = sum(math.exp(s) / total * v[b, g, j] for s, j in zip(scores, seen, strict=True))
    return out, lse


@pytest.mark.parametrize("seed", range(24))
def test_reference_is_the_definition(seed):
    g = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=g))]

    def rand(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    batch, kv_heads, groups = pick(1, 2), pick(1, 2), pick(1, 2, 3)
    q_len, kv_len, d, dv = pick(1, 3, 5), pick(1, 4, 7), pick(1, 3, 8), pick(2, 5)
    q, k, v = (
        rand(batch, kv_heads * groups, q_len, d),
        rand(batch, kv_heads, kv_len, d),
        rand(batch, kv_heads, kv_len, dv),
    )
    mask = pick(None, "bool", "row", "float")
    if mask == "bool":
        mask = torch.rand(batch, 1, q_len, kv_len, generator=g) > 0.5
    elif mask == "row":
        mask = torch.rand(kv_len, generator=g) > 0.5
    elif mask == "float":
        mask = rand(kv_heads * groups, q_len, kv_len).masked_fill(
            torch.rand(q_len, kv_len, generator=g) > 0.7, -math.inf
        )
    options = (mask, pick(False, True), pick(None, 0.3), pick(0, 0, 1, 3), pick(0, kv_len - q_len, -2, 4))
    for got, want in zip(reference(q, k, v, *options), by_hand(q, k, v, *options), strict=True):
        torch.testing.assert_close(got, want)


def test_reference_is_torchs_sdpa():
    q, k, v = (torch.randn(2, 4, n, 16, dtype=torch.float64) for n in (9, 9, 9))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(reference(q, k, v, causal=True)[0], want)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty(shape):
    batch, heads, q_len, d = shape
    q, k, v = torch.randn(shape), torch.randn(batch, heads, 5, d), torch.randn(batch, heads, 5, 6)
    out, lse = reference(q, k, v)
    assert out.shape == (batch, heads, q_len, 6) and lse.shape == (batch, heads, q_len)
    if d == 0:  # all scores are zero
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


def test_no_keys_give_zero():
    out, lse = reference(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 5))
    assert out.shape == (1, 2, 3, 5) and not out.any() and lse.isneginf().all()


FORMS = {  # dtype, D, Dv, mask, causal, windowed
    "full": (torch.float32, 32, 32, None, False, False),
    "causal": (torch.float32, 32, 32, None, True, False),
    "window": (torch.float32, 32, 48, None, True, True),
    "window_only": (torch.float32, 40, 24, None, False, True),
    "bool_mask": (torch.float32, 16, 16, torch.bool, False, False),
    "float_mask": (torch.float32, 48, 16, torch.float32, True, False),
    "bfloat16": (torch.bfloat16, 64, 32, torch.bfloat16, False, False),
    "float16": (torch.float16, 32, 32, None, True, False),
    "float64": (torch.float64, 8, 5, torch.bool, True, True),
}
SMALL = Config(block_q=16, block_kv=32)
CONFIGS = (
    SMALL,
    replace(SMALL, split=True),
    replace(SMALL, heavy_first=True, resident=True, shared_probs=True),
)


@pytest.mark.parametrize("spec", FORMS)
def test_random_problems(spec, rounds, problems, check):
    dtype, d, dv, mask_dtype, causal, windowed = FORMS[spec]
    for number in rounds(8):
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2, 3), problems.pick(1, 1, 2, 4, 7)
        q_len, kv_len = problems.size(20), problems.size(60)
        layout = "gaps" if number == 0 else problems.pick("dense", "slice")
        q = problems.reordered(batch, kv_heads * groups, q_len, d, dtype=dtype, layout=layout)
        k = problems.tensor(batch, kv_len, kv_heads, d, dtype=dtype, layout=layout).transpose(1, 2)
        v = problems.tensor(batch, kv_heads, kv_len, dv, dtype=dtype, layout=layout)
        mask = problems.mask(mask_dtype, batch, kv_heads * groups, q_len, kv_len) if mask_dtype else None
        window = problems.random.randint(1, 30) if windowed else 0
        options = (causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, kv_len - q_len, -3, 5))
        config = problems.pick(*CONFIGS) if number % 5 else None
        got = attention(q, k, v, mask, *options, config=config, splits=problems.pick(1, 2, 5))
        want = reference(*(x.double() for x in (q, k, v)), mask, *options)
        assert got[0].dtype == dtype
        for name, a, b in zip(("out", "lse"), got, want, strict=True):
            what = f"{name} of {spec} {tuple(q.shape)} {tuple(k.shape)} {options} {config}"
            check(a, b, what, dtype, empty_beside(q, dv) if name == "out" else None)


@pytest.mark.parametrize("head_dim, v_dim", [(72, 80), (128, 128), (192, 128), (256, 256), (64, 1), (1, 64)])
def test_head_dims(head_dim, v_dim, problems, check):
    q, k, v = (problems.tensor(1, h, n, e) for h, n, e in ((4, 70, head_dim), (2, 150, head_dim), (2, 150, v_dim)))
    got, want = (
        attention(q, k, v, causal=True, q_offset=80),
        reference(*(x.double() for x in (q, k, v)), None, True, None, 0, 80),
    )
    for a, b in zip(got, want, strict=True):
        check(a, b, f"{head_dim} {v_dim}")


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_problems(shape, engine):
    q, k, v = torch.randn(shape), torch.randn(*shape[:2], 5, shape[3]), torch.randn(*shape[:2], 5, 6)
    for got, want in zip(attention(q, k, v), reference(q, k, v), strict=True):
        torch.testing.assert_close(got, want)


def test_no_keys(engine):
    out, lse = attention(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 0, 16), torch.randn(1, 2, 0, 5))
    assert out.shape == (1, 2, 3, 5) and not out.any() and lse.isneginf().all()


def test_large_scores_do_not_overflow(engine):
    q, k, v = torch.full((1, 1, 3, 16), 30.0), torch.full((1, 1, 20, 16), 30.0), torch.randn(1, 1, 20, 16)
    for got, want in zip(
        attention(q, k, v, scale=1.0), reference(q.double(), k.double(), v.double(), scale=1.0), strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("text", [False, True], ids=["mask", "text"])
def test_rows_of_numbers_that_stand_for_minus_infinity(text, low, engine):
    """Such a row is the mean of all values, others do not see the keys."""
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 8)
    mask = torch.zeros(1, 1, 5, 70)
    mask[:, :, :2], mask[:, :, 2, :66], mask[:, :, 3, 3:] = low, low, low
    options = {"aux": [mask == 0], "score": f"v=where(x0,acc0,{low});ret v"} if text else {"mask": mask}
    want = torch.softmax((q @ k.mT / 4).masked_fill(mask != 0, low), -1) @ v
    for out, lse in (attention(q, k, v, **options), reference(q, k, v, **options)):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, :, :2], torch.full((1, 2, 2), low))


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_heads_that_are_apart(config, problems, check):
    """Rows of heads that share a key head are no view where heads lie within each query: still one result."""
    q = problems.tensor(2, 5, 6, 16, layout="dense").transpose(1, 2)
    k, v = problems.tensor(2, 3, 40, 16), problems.tensor(2, 3, 40, 8)
    got, want = attention(q, k, v, config=config, splits=2), reference(*(x.double() for x in (q, k, v)))
    check(got[0], want[0], "out", like=empty_beside(q, 8))
    check(got[1], want[1], "lse")


HOPPER = Machine(Target("cuda", 90), 132)
TWO_STAGES = Config(64, 64, 128, 2, partial_sums=8)
APART = replace(TWO_STAGES, packed=False, heavy_first=True, staged=True)
AHEAD = replace(APART, block_q=128, threads=256, queries_ahead=True, early=True, ping_pong=True)


@pytest.mark.parametrize(
    "heads, q_len, kv_len, causal, config, splits",
    [
        (1, 70, 200, False, TWO_STAGES, 0),  # the last keys, which come first, end inside a tile
        (1, 64, 30, False, TWO_STAGES, 0),
        (1, 150, 220, True, APART, 0),
        (1, 150, 150, True, APART, 0),  # masks cut one tile of each block of queries
        (2, 20, 400, False, replace(TWO_STAGES, split=True), 3),
        (2, 150, 220, True, replace(APART, through_queries=True), 0),
        (3, 330, 330, True, replace(APART, persistent=4), 0),  # shares of 5 and 4 tiles, the fewest keys first at last
        (1, 130, 200, False, replace(APART, persistent=2), 0),
        (3, 290, 330, True, replace(APART, persistent=4, paired=True), 0),  # 15 tiles: a pair of two heads, half a pair
        (1, 150, 200, False, replace(APART, persistent=4, paired=True), 0),  # two blocks without a tile
        (3, 290, 330, True, replace(APART, persistent=2, paired=True, rounds_by_length=2), 0),  # parts of two heads
        (3, 330, 330, True, replace(APART, persistent=4, paired=True, rounds_by_length=1), 0),  # two rounds of pairs
        (3, 150, 230, False, replace(APART, persistent=4, in_order=True), 0),  # nine tiles in turn
        (3, 330, 330, True, replace(APART, persistent=4, queries_ahead=True), 0),  # shares of 5 and 4 tiles
        (1, 130, 200, False, replace(APART, persistent=2, queries_ahead=True), 0),
        (3, 290, 330, True, replace(APART, persistent=4, paired=True, queries_ahead=True), 0),
        (3, 330, 330, True, replace(AHEAD, persistent=4), 0),  # the next tile's scores beside the last product
        (1, 130, 200, False, replace(AHEAD, persistent=1, in_order=True), 0),
        (2, 290, 290, True, replace(AHEAD, persistent=2, paired=True), 0),
        (3, 290, 290, True, replace(AHEAD, persistent=2, paired=True, rounds_by_length=1), 0),
        (2, 290, 290, True, replace(AHEAD, block_kv=128, persistent=2, paired=True, halved=True), 0),
        (1, 330, 215, True, replace(AHEAD, block_kv=128, persistent=1, paired=True, halved=True), 0),
        (1, 200, 500, True, replace(AHEAD, persistent=1, paired=True, halved=True), 0),
        (2, 300, 300, True, replace(APART, block_q=128, threads=256, block_kv=128, paired=True, halved=True), 0),
        (1, 100, 70, False, replace(AHEAD, persistent=2), 0),  # a block of one tile of two steps, and one without
        (1, 200, 100, True, replace(AHEAD, persistent=2), 0),  # tiles without a key do not start early
        (1, 200, 230, True, replace(APART, block_q=192, block_kv=128, threads=384, ping_pong=True, own_keys=True), 0),
        (
            1,
            150,
            260,
            True,
            replace(APART, block_q=128, threads=256, own_keys=True),
            0,
        ),  # warpgroups of two masked tiles
    ],
)
def test_values_on_hopper(monkeypatch, heads, q_len, kv_len, causal, config, splits):
    """The kernel as it is lowered, thread by thread."""

    def call(kernel, *args):
        flat = lower(kernel.program, cuda_passes(Build(HOPPER.target, PassOptions(fast_math=True))))
        assert not interpret(flat, kernel.program, args)

    monkeypatch.setattr(module, "machine_of", lambda x: HOPPER)
    monkeypatch.setattr(JITKernel, "__call__", call)
    g = torch.Generator().manual_seed(0)
    shapes = (1, heads, q_len, 64), (1, 1, kv_len, 64), (1, 1, kv_len, 64)
    q, k, v = (torch.randn(shape, generator=g).half() for shape in shapes)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    options = (None, causal, 0.125, 0, kv_len - q_len)
    out, lse = attention(q, k, v, *options, config=config, splits=splits)
    want, want_lse = reference(q, k, v, *options)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("engine", ["interpreter", "threads", "text"], indirect=True)
@pytest.mark.parametrize("one_tile", [False, True])
@pytest.mark.parametrize("kind", [None, torch.bool])
def test_splits_in_turns(kind, one_tile, engine, problems, check):
    """Splits take tiles of keys in turns: some have one more, and some none. Windows cut tiles at both ends."""
    dtype, target = problems.pick(torch.float16, torch.bfloat16), Target("cuda", problems.pick(80, 90))
    batch, kv_heads, q_len = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 1, 2, 5)
    groups = problems.pick(*range(1, (16 if one_tile else 40) // q_len + 1))
    kv_len, d, dv = problems.size(200), problems.pick(32, 40, 64), problems.pick(32, 64)
    q = problems.tensor(batch, kv_heads * groups, q_len, d, dtype=dtype, layout="dense")
    k = problems.tensor(batch, kv_len, kv_heads, d, dtype=dtype, layout="dense").transpose(1, 2)
    v = problems.tensor(batch, kv_heads, kv_len, dv, dtype=dtype, layout="dense")
    mask = None if kind is None else problems.mask(kind, batch, kv_heads * groups, q_len, kv_len)
    causal, window = problems.pick((False, 0), (True, 0), (True, problems.size(90)), (False, problems.size(90)))
    args = AttentionArgs(q, k, v, mask, causal, None, window, kv_len - q_len)
    config = Config(16, problems.pick(16, 32), 128, problems.pick(1, 2, 3), split=True, shared_probs=True)
    config = replace(config, packed=problems.pick(True, False), one_tile=one_tile)
    splits = problems.pick(1, 2, 3, 5, 16)
    out, lse = (torch.full_like(x, math.nan) for x in module.empty_results(args))
    assert module.run(args, out, lse, Machine(target, 132), config, splits)
    want = reference(*(x.double() for x in (q, k, v)), *args[3:])
    what = f"{tuple(q.shape)} {tuple(k.shape)} {dtype} {kind} {args[4:8]} {config} {splits} {target}"
    check(out, want[0], f"out of {what}", dtype, empty_beside(q, dv))
    check(lse, want[1], f"lse of {what}", dtype)


@pytest.mark.parametrize("engine", ["interpreter", "threads", "text"], indirect=True)
@pytest.mark.parametrize("arch, config", [
    (80, Config(64, 64, 128, partial_sums=8)),
    (90, TWO_STAGES),
    (90, Config(192, 128, 384, 2, partial_sums=8, ping_pong=True)),
], ids=str)  # fmt: skip
def test_windows(arch, config, engine, problems, check):
    """Windows cut tiles at both ends, where threads hold neighbouring columns, and heads are packed or apart."""
    target, dtype = Target("cuda", arch), problems.pick(torch.float16, torch.bfloat16)
    groups, q_len, kv_len = problems.pick(1, 3), problems.size(90), problems.size(200)
    heads = problems.pick(1, 2)
    q = problems.tensor(1, heads * groups, q_len, 64, dtype=dtype, layout="dense")
    k, v = (problems.tensor(1, heads, kv_len, 64, dtype=dtype, layout="dense") for _ in range(2))
    args = AttentionArgs(q, k, v, None, problems.pick(True, False), None, problems.size(120), kv_len - q_len)
    config = replace(config, packed=problems.pick(True, False))
    out, lse = (torch.full_like(x, math.nan) for x in module.empty_results(args))
    assert module.run(args, out, lse, Machine(target, 132), config, 0)
    want = reference(*(x.double() for x in (q, k, v)), *args[3:])
    what = f"{tuple(q.shape)} {tuple(k.shape)} {dtype} {args[4:8]} {config} {target}"
    check(out, want[0], f"out of {what}", dtype, empty_beside(q, 64))
    check(lse, want[1], f"lse of {what}", dtype)


@tile.jit
def tiles_in_order(config):
    """Store the tile that each persistent block takes in each wave: the block of rows and the head."""
    heads, blocks, places = T.dynamic("heads, blocks, places")

    @T.prim_func
    def order(x: T.Tensor((heads, blocks), T.float32), out: T.Tensor((places, 2), T.int32)):
        with T.Kernel(config.persistent, threads=32) as block:
            for wave in T.serial(config.waves(block, heads * blocks)):
                rows, head = config.tile(wave, block, blocks, heads, heads * blocks)
                out[wave * config.persistent + block, 0] = rows
                out[wave * config.persistent + block, 1] = head

    return order


def order_of(config, heads, blocks):
    """Return the tiles by waves and blocks, `[waves, blocks, 2]`; -1 where a block has none."""
    waves = -(-heads * blocks // config.persistent) + 2  # by pairs alone some blocks have two more
    out = torch.full((waves * config.persistent, 2), -1, dtype=torch.int32)
    tiles_in_order(config)(torch.empty(heads, blocks), out)
    return out.view(waves, config.persistent, 2)


@pytest.mark.parametrize(
    "order", [{}, {"in_order": True}, *({"paired": True, "rounds_by_length": n} for n in range(4))], ids=str
)
@pytest.mark.parametrize("persistent", [1, 3, 4, 132])
def test_persistent_blocks_take_each_tile_once(persistent, order):
    config = Config(persistent=persistent, **order)
    for heads, blocks in [(1, 1), (1, 60), (2, 13), (3, 5), (7, 4), (29, 3), (64, 1), (32, 32), (40, 17), (9, 131)]:
        taken = order_of(config, heads, blocks).flatten(0, 1).tolist()
        every = [[rows, head] for rows in range(blocks) for head in range(heads)]
        assert sorted(one for one in taken if one != [-1, -1]) == every, (heads, blocks)


@pytest.mark.parametrize("heads, blocks, rounds", [(32, 16, 1), (64, 16, 2), (32, 32, 2), (64, 32, 2), (40, 32, 2)])
def test_shares_of_persistent_blocks_are_even(heads, blocks, rounds):
    """A tile's work is its blocks of keys. Pairs to the end leave blocks idle in the last round, 3 % of the time."""
    config = Config(persistent=132, paired=True, rounds_by_length=rounds)
    rows = order_of(config, heads, blocks)[..., 0].double()
    shares = (rows + 1).sum(0)
    assert float(shares.max() / shares.mean()) < 1.015
    alone = (order_of(replace(config, rounds_by_length=0), heads, blocks)[..., 0].double() + 1).sum(0)
    assert float(alone.max()) > float(shares.max())


def test_pairs_keep_few_heads_in_the_cache():
    """In whole rounds of pairs, blocks read as many heads at once as 132 pairs are; at last twice as many."""
    order = order_of(Config(persistent=132, paired=True, rounds_by_length=2), 64, 64)
    several = [torch.unique(wave[:, 1][wave[:, 1] >= 0]).numel() for wave in order]
    of_pairs = 2 * (64 * 64 // (2 * 132) - 1)
    assert max(several[:of_pairs]) <= 6 and max(several[of_pairs:]) <= 9


@pytest.mark.parametrize(
    "width, order",
    [(128, {}), (128, {"paired": True}), (128, {"paired": True, "rounds_by_length": 2}), (96, {})],
    ids=str,
)
def test_warps_of_persistent_blocks_do_not_meet(width, order):
    """Each stores its own rows, and no barrier stands between the tiles of a block."""
    spec = Spec(torch.bfloat16, 128, width, True, True, False, None, True, True, 8, shifted=False, lse=False)
    config = replace(APART, block_q=128, block_kv=128, threads=256, persistent=132, ping_pong=True, **order)
    text = flash_attention.on(HOPPER.target)(config, spec).source
    kernel = str(text)[str(text).index("__global__") :]
    assert "tma_load" in kernel and kernel.count("warp_barrier") == 2 and "named_barrier" not in kernel


EARLY = "of the next tile beside the last product of a tile"


@pytest.mark.parametrize("order", [{}, {"paired": True}, {"paired": True, "rounds_by_length": 2}], ids=str)
@pytest.mark.parametrize("causal, shifted", [(True, False), (True, True), (False, False)])
def test_persistent_blocks_start_the_next_tile(causal, shifted, order):
    """Unless a tile may see no key. No mask is in the loop over those key tiles that all rows of a block see."""
    spec = Spec(torch.bfloat16, 128, 128, True, causal, False, None, False, True, 8, shifted=shifted, lse=False)
    config = replace(AHEAD, block_kv=128, persistent=132, **order)
    kernel = flash_attention.on(HOPPER.target)(config, spec)
    assert any(remark.became == EARLY for remark in kernel.schedule.remarks) == (not shifted)
    text = str(kernel.source)
    loop = text[text.index("for (int iteration = ") :]
    assert shifted or "bool seen" not in loop[: loop.index("wgmma_wait<0>")]


TILED = replace(TWO_STAGES, packed=False, tiled=True)
AMPERE = Machine(Target("cuda", 80), 4)


@pytest.mark.parametrize(
    "machine, dtype, shape, kv_len, causal, config",
    [
        (HOPPER, torch.float16, (1, 2, 70, 208), 203, False, TILED),  # read past the last key, which nobody sees
        (HOPPER, torch.bool, (1, 1, 70, 208), 200, True, TILED),
        (HOPPER, torch.float32, (70, 208), 208, False, replace(TILED, block_q=128, threads=256)),
        (
            AMPERE,
            torch.float16,
            (1, 2, 70, 208),
            203,
            False,
            Config(64, 32, 128, partial_sums=8, packed=False, tiled=True),
        ),
        (AMPERE, torch.bool, (70, 208), 208, True, Config(64, 32, 128, partial_sums=8, packed=False, tiled=True)),
        (HOPPER, torch.bool, (1, 1, 1, 208), 203, True, TILED),  # of keys alone
        (
            AMPERE,
            torch.float16,
            (1, 1, 1, 208),
            203,
            False,
            Config(64, 32, 128, partial_sums=8, packed=False, tiled=True),
        ),
    ],
)
def test_masks_come_by_tiles(monkeypatch, machine, dtype, shape, kv_len, causal, config):
    """Each tile is waited for, and release when it was read, beside products that are in flight."""

    def call(kernel, *args):
        flat = lower(kernel.program, cuda_passes(Build(machine.target, PassOptions(fast_math=True))))
        assert not interpret(flat, kernel.program, args)
        notes = [str(note) for note in kernel.schedule.remarks]
        if machine is HOPPER:
            assert any("operand_tile: bulk copies" in note for note in notes), notes
            assert any("beside the arithmetic of the iteration before" in note for note in notes), notes

    monkeypatch.setattr(module, "machine_of", lambda x: machine)
    monkeypatch.setattr(JITKernel, "__call__", call)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, s, 64, generator=g).half() for h, s in ((2, 70), (1, kv_len), (1, kv_len)))
    stored = torch.randn(shape, generator=g)
    mask = (stored > 0 if dtype == torch.bool else stored.to(dtype))[..., :kv_len]
    options = (mask, causal, 0.125, 0, kv_len - 70)
    out, lse = attention(q, k, v, *options, config=config)
    want, want_lse = reference(q, k, v, *options)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [3, 10, 20, 25, 31, 40, 60, 100])
def test_scores_of_any_magnitude(exponent, dtype):
    """Scores that are exact numbers, some of them equal; keys of several blocks."""
    q, k = torch.zeros(1, 2, 40, 16, dtype=dtype), torch.zeros(1, 2, 200, 16, dtype=dtype)
    q[..., 0] = 2.0**exponent * torch.tensor([1.0, -1.0])[:, None]
    k[..., 0] = torch.randint(64, 73, (1, 2, 200)) / 64
    v = torch.randn(1, 2, 200, 16, dtype=dtype)
    out, lse = attention(q, k, v, scale=0.3)
    want, want_lse = reference(q.double(), k.double(), v.double(), scale=0.3)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_over_millions_of_keys(causal, rows, seed):
    """Float32 sums of a row drift by half of a last place with each tile: 4e-4 for 2**21 keys in a row."""
    few = torch.randn(1, 1, 61, 8) * 0.3, torch.rand(1, 1, 61, 8) + 1
    k, v = (x.repeat(1, 1, 2**15, 1) for x in few)
    q = torch.randn(1, 1, rows, 8)
    out, _ = attention(q, k, v, None, causal, None, 0, k.shape[2] - rows)
    weights = torch.softmax(q.double() @ k[:, :, :61].double().mT * 8**-0.5, -1)
    torch.testing.assert_close(out.double(), weights @ v[:, :, :61].double(), rtol=1e-4, atol=0)
