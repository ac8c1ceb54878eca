# SPDX-License-Identifier: Apache-2.0
"""A pipeline made by hand: right as it is, and reported without any one of its waits and barriers."""

import pytest
import torch
from mutation import ordering, removals

from torch_tile.intrinsics import memory as tm
from torch_tile.ir import dtype as dt
from torch_tile.ir.expr import Var, const, select
from torch_tile.kernels.attention import block_sparse, forward as attention, fp8, nsa, paged
from torch_tile.kernels.conv import conv
from torch_tile.kernels.gemm import (
    dequant as dequant_gemm,
    gemm,
    grouped,
    grouped_scaled,
    grouped_scaled_wgrad,
    grouped_wgrad,
)
from torch_tile.kernels.gemm.tiling import Config
from torch_tile.kernels.linear_attention import delta, step
from torch_tile.kernels.loss import linear_cross_entropy
from torch_tile.kernels.mla import decode as mla_decode, indexer, packed
from torch_tile.kernels.moe import group, route
from torch_tile.kernels.norm import norm, softmax
from torch_tile.kernels.row_groups import PLANNERS
from torch_tile.kernels.ssm import ssd
from torch_tile.simulator.simt.interpreter import run_threads


def pipeline(b, steps, stages=2):
    """y[t] = sum over steps of x[step, 63 - t], through `stages` versions of shared memory."""
    n = b.threads
    x, y = b.tensor("x", torch.randn(steps * n)), b.tensor("y", torch.zeros(n))
    tile, total = b.shared("s", stages * n), b.var("total", "float32", 0.0)
    k = Var("k", dt.int32, "loop")

    def copy(step):
        valid = select(step < steps, 4, 0)
        source = select(step < steps, step, 0)
        return tm.cp_async(b.address(tile, step % stages * n + b.thread), b.address(x, source * n + b.thread), valid, 4)

    before = [s for m in range(stages - 1) for s in (copy(const(m, dt.int32)), tm.cp_async_commit())]
    body = (
        tm.cp_async_wait(stages - 2),
        tm.barrier(),
        copy(k + stages - 1),
        tm.cp_async_commit(),
        b.store(total, None, b.load(total) + b.load(tile, k % stages * n + (n - 1 - b.thread))),
    )
    return [*before, b.loop(k, 0, steps, *body), b.store(y, b.thread, b.load(total))]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_each_removal_is_reported(build, stages):
    b = build(64)
    program = b.program(*pipeline(b, 5, stages))
    tensors = dict(zip(b.params, b.tensors, strict=True))
    assert not run_threads(program, tensors, {})
    x, y = b.tensors
    torch.testing.assert_close(y, x.view(5, 64).sum(0).flip(0))
    assert [c.name for c in ordering(program)] == ["cp_async_wait", "barrier"]
    made = list(removals(program))
    assert [r.name for r in made] == ["cp_async_wait", "cp_async_wait, one laxer", "barrier"]
    for removal in made:
        assert len(ordering(removal.program)) == (2 if "laxer" in removal.name else 1)
        assert run_threads(removal.program, tensors, {}), removal.name


def joined(b):
    """y: what all blocks wrote to x, added up by the last of them."""
    n, (bx,) = b.threads, b.blocks
    x, y = b.tensor("x", torch.zeros(3 * n)), b.tensor("y", torch.zeros(n))
    counter, flag = b.tensor("counter", torch.zeros(1, dtype=torch.int32)), b.shared("flag", 1, "int32")
    total = sum((b.load(x, b.thread ^ 1 | m * n) for m in (1, 2)), b.load(x, b.thread ^ 1))
    arrival = b.store(flag, 0, tm.arrive_last(b.address(counter, 0), 3))
    return [
        b.store(x, bx * n + b.thread, 1.0), tm.barrier(), b.when(b.thread == 0, arrival), tm.barrier(),
        b.when(b.load(flag, 0) == 1, b.store(y, b.thread, total)),
    ]  # fmt: skip


def test_without_an_arrival_all_blocks_are_the_last(build):
    b = build(64, (3,))
    program = b.program(*joined(b))
    tensors = dict(zip(b.params, b.tensors, strict=True))
    for _ in range(2):
        assert not run_threads(program, tensors, {})
        assert b.tensors[1].eq(3).all() and b.tensors[2].item() == 0
    made = list(removals(program))
    assert [r.name for r in made] == ["barrier", "barrier", "arrive_last"]
    assert "arrive_last" not in repr(made[-1].program) and "arrive_last" in repr(made[0].program)
    for removal in made:
        assert run_threads(removal.program, tensors, {}), removal.name


def test_the_program_itself_is_untouched(build):
    b = build(32)
    program = b.program(tm.barrier(), tm.barrier())
    text = repr(program)
    assert len(list(removals(program))) == 2 and repr(program) == text
    assert list(removals(b.program())) == []


def randn(*shape, dtype=torch.float16):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def of_gemm(m, n, k, dtype, text=""):
    a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype)
    return gemm.gemm(a, [b], [], "", text, dtype), gemm.reference(a.double(), [b.double()], [], "", text, torch.float64)


def of_dequant_gemm(m, n, k):
    """4 bits in groups of 64, with zeros."""
    a, b = randn(m, k) / 64, torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale, zero = randn(n, k // 64).abs() / 8 + 0.1, torch.randint(0, 16, (n, k // 64), dtype=torch.int8)
    stored = [zero], 4, False, 0, [], "", ""
    want = dequant_gemm.reference(a.double(), [b], [scale.double()], *stored, torch.float64)
    return dequant_gemm.dequant_gemm(a, [b], [scale], *stored, torch.float16), want


def of_grouped_gemm(m, n, k, config=None):
    """More groups than are planned at a time, of which three have rows."""
    groups = PLANNERS + 9
    a, b, offsets = randn(m, k), randn(groups, n, k).mT, torch.full((groups,), m - 2, dtype=torch.int32)
    offsets[0], offsets[1:-2] = m // 3, m // 2
    got = grouped.grouped_gemm(a, [b], offsets, [], "", "", torch.float16, config=config)
    return got, grouped.reference(a.double(), [b.double()], offsets, [], "", "", torch.float64)


def of_k_grouped_gemm(rows, m, n):
    a, b, offsets = randn(rows, m), randn(rows, n), torch.tensor([rows // 3, rows // 3, rows - 2], dtype=torch.int32)
    got = grouped_wgrad.k_grouped_gemm(a, b, offsets, torch.float16)
    return got, grouped_wgrad.reference(a.double(), b.double(), offsets, torch.float64)


def of_k_grouped_scaled_gemm(m, n, k):
    """Groups that begin and end inside of a step, in scales of groups."""
    a, b = (randn(size, k, dtype=torch.float8_e4m3fn) for size in (m, n))
    scale_a, scale_b, offsets = torch.rand(3, m, 1) + 0.5, torch.rand(1, 1, n) + 0.5, torch.tensor([5, 5, k - 9]).int()
    given = a, b.mT, scale_a, scale_b, offsets, torch.float16
    got = grouped_scaled_wgrad.k_grouped_scaled_gemm(*given, config=Config(64, 64, 128, 128, 2))
    wide = [x.double() for x in (a, b.mT, scale_a, scale_b)]
    return got, grouped_scaled_wgrad.reference(*wide, offsets, torch.float64)


def of_attention(causal, queries, heads=1, dtype=torch.float16):
    q, k, v = (randn(1, h, n, d, dtype=dtype) for h, n, d in ((heads, queries, 32), (1, 500, 32), (1, 500, 48)))
    args = None, causal, 0.2, 0, 20
    return attention.attention(q, k, v, *args), attention.reference(*(x.double() for x in (q, k, v)), *args)


def of_mla(dtype=torch.float16):
    q, q_pe, kv, k_pe = (randn(*s, dtype=dtype) for s in ((1, 1, 16, 64), (1, 1, 16, 16), (1, 150, 64), (1, 150, 16)))
    want = mla_decode.reference(*(x.double() for x in (q, q_pe, kv, k_pe)))
    return mla_decode.mla_decode(q, q_pe, kv, k_pe), want


def of_block_sparse(gradients):
    """Blocks of 32 in any order; one list is empty, so that no turn orders what comes before the loop and after it."""
    q, k, v, grad = (randn(1, 1, n, 32) for n in (40, 100, 100, 40))
    lists = torch.tensor([[[3, 0]]]).int(), torch.tensor([[[[3, 0, 1], [2, 1, 9]]]]).int()
    args = *lists, None, None, 32, 32, True, None, 0, 60
    wide = [x.double() for x in (q, k, v)]
    want = block_sparse.reference(*wide, *args)
    if not gradients:
        return block_sparse.attention_block_sparse(q, k, v, *args), want
    out, lse = (x.to(t) for x, t in zip(want, (torch.float16, torch.float32), strict=True))
    got = block_sparse.attention_block_sparse_backward(grad, q, k, v, out, lse, *args)
    return got, block_sparse.backward_reference(grad.double(), *wide, None, None, *args)


def of_attention_fp8():
    """In the error of rounded weights, which removals exceed by far or are reported."""
    e4m3 = torch.float8_e4m3fn
    q, k = (torch.randint(-1, 2, (1, 1, n, 32)).to(e4m3) for n in (40, 200))
    v = torch.ones(1, 1, 200, 32).to(e4m3)  # weights add up to 1, and their errors vanish
    args = q, k, v, torch.full((1, 1), 2.0), None, None, True, 1e-6, 0, 160, torch.float32
    return fp8.attention_fp8(*args), fp8.reference(*args)


def of_paged_float8():
    """Three tiles of keys for one sequence: a last tile waits early, to clear values past the last."""
    q, (k, v) = randn(2, 1, 2, 32), ((randn(9, 64, 1, 32) / 2).to(torch.float8_e4m3fn) for _ in range(2))
    table, lengths = torch.tensor([[3, 1, 8, 0, 6], [2, 5, 7, 4, 1]]).int(), torch.tensor([300, 33]).int()
    scales = torch.rand(9, 64, 1) + 0.5, torch.rand(1, 1, 1) + 0.5
    args = k, v, table, lengths, None, 0, True, None, 0, 1, None, "", *scales
    return paged.attention_paged(q, *args), paged.reference(q.double(), *args)


def of_mla_fp8():
    q, q_pe = randn(1, 1, 16, 128), randn(1, 1, 16, 16)
    cache = packed.pack(randn(1, 150, 128), randn(1, 150, 16))
    return packed.mla_decode_fp8(q, q_pe, cache), packed.fp8_reference(q.double(), q_pe.double(), cache)


def of_mla_sparse():
    tensors = [randn(*s) for s in ((1, 2, 16, 64), (1, 2, 16, 16), (1, 150, 64), (1, 150, 16))]
    listed = torch.stack([torch.randperm(150)[:100] for _ in range(2)])[None].int()
    return packed.mla_sparse(*tensors, listed), packed.sparse_reference(*(x.double() for x in tensors), listed)


def of_lightning_index():
    """Small integers, whose scores are exact."""
    q, k = (torch.randint(-3, 4, s).half() for s in ((1, 2, 16, 32), (1, 150, 32)))
    args = torch.randint(1, 4, (1, 2, 16)).float(), 150
    made = [list_of(q, k, *args) for list_of in (indexer.lightning_index, indexer.reference)]
    scores = indexer.scores_reference(q.double(), k.double(), args[0])
    return tuple(scores.gather(-1, x.clamp(min=0).long()).nan_to_num(neginf=0) for x in made)


def of_index_scores():
    q, k, weights = randn(1, 2, 16, 32), randn(1, 150, 32), randn(1, 2, 16).float()
    return indexer.index_scores(q, k, weights), indexer.all_scores_reference(q.double(), k.double(), weights.double())


def of_nsa_select():
    q, k = randn(1, 4, 3, 32), randn(1, 1, 70, 32)
    lse = torch.logsumexp((q.double() @ k.double().mT) * 32**-0.5, -1).float()
    args = q, k, lse, 4 * 70 + 3, 71, 4, 4, 4
    made = [list_of(*args).double() for list_of in (nsa.nsa_select, nsa.reference)]
    return tuple(x.sort(-1).values for x in made)


def of_rms_norm(n, dtype=torch.float16):
    x, weight, residual = randn(5, n, dtype=dtype), randn(n, dtype=dtype), randn(5, n, dtype=dtype)
    args = 1e-6, "silu", 0.0, False
    return norm.add_rms_norm(x, residual, weight, *args), norm.rms_norm_reference(x, weight, residual, *args)


def of_layer_norm(n, dtype=torch.float32):
    x, weight, bias = randn(5, n, dtype=dtype), randn(n, dtype=dtype), randn(n, dtype=dtype)
    return norm.layer_norm(x, weight, bias), norm.layer_norm_reference(x.double(), weight.double(), bias.double())


def of_softmax(shape, dim, dtype=torch.float32):
    x = randn(*shape, dtype=dtype)
    return softmax.softmax(x, dim), softmax.reference(x.double(), dim)


def of_grouped_scaled_gemm(m, n, k):
    """Float8 with a scale for each row and 128 columns."""
    a, b = (randn(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (3, n, k)))
    scale_a, scale_b = torch.rand(m, -(-k // 128)) + 0.1, torch.rand(3, -(-k // 128), -(-n // 128)) + 0.1
    given, more = (b.mT, scale_a, scale_b), (ends(m), [], "", "")
    want = grouped_scaled.reference(a.double(), *(x.double() for x in given), *more, torch.float64)
    return grouped_scaled.grouped_scaled_gemm(a, *given, *more, torch.float16), want


def ends(rows):
    """Where three groups end; one has no rows, and some rows have no group."""
    return torch.tensor([rows // 3, rows // 3, rows - 2], dtype=torch.int32)


def of_linear_cross_entropy(rows, k, classes):
    """In two chunks of rows, with the gradients."""
    hidden, weight = randn(rows, k, dtype=torch.float32), randn(classes, k, dtype=torch.float32)
    target, grad = torch.randint(0, classes, (rows,)), torch.rand(rows)
    got = linear_cross_entropy.linear_cross_entropy_gradients(grad, hidden, weight, target, chunk=rows // 2)
    wide = grad.double(), hidden.double(), weight.double(), target
    return got[:3], linear_cross_entropy.gradients_reference(*wide)[:3]


def of_route(tokens, experts):
    logits, bias = randn(tokens, experts, dtype=torch.float32), randn(experts, dtype=torch.float32) / 8
    args = 3, "sigmoid", 4, 2, 2, True, 2.5
    return route.route(logits, bias, *args)[0], route.reference(logits.double(), bias.double(), *args)[0]


def of_group_tokens(pairs, count):
    experts = torch.randint(0, count, (pairs,))
    return group.group_tokens(experts, count), group.reference(experts, count)


DELTA = delta.Config(16, 32, 16, 16, base=8, channel_tile=16, threads=64, key_threads=64, stages=2)


def of_delta_rule(channels):
    """Three chunks of two heads, in two tiles of keys."""
    q, v = randn(1, 37, 2, 24, dtype=torch.float32) / 4, randn(1, 37, 2, 16, dtype=torch.float32)
    k = randn(1, 37, 2, 24, dtype=torch.float32) / 4
    g = -torch.rand(1, 37, 2, *([24] if channels else []))
    state = randn(1, 2, 24, 16, dtype=torch.float32)
    given = q, k, v, g, torch.rand(1, 37, 2), state, None
    wide = [x if x is None else x.double() for x in given]
    return delta.gated_delta_rule(*given, None, True, config=DELTA), delta.reference(*wide, None, True)


def of_delta_rule_in_one_scan():
    """Three chunks by Hopper's tiles, whose states stay in registers; four tiles of keys, more than stages."""
    q, v = randn(1, 150, 1, 64) / 8, randn(1, 150, 1, 64)
    k = torch.nn.functional.normalize(randn(1, 150, 1, 64).float(), dim=-1).half()
    given = q, k, v, -torch.rand(1, 150, 1), torch.rand(1, 150, 1)
    config = delta.Config(64, 64, 16, 32, stages=2, staged=True, fused_values=64)
    return delta.gated_delta_rule(*given, config=config), delta.reference(*(x.double() for x in given))


def of_ssd_in_one_scan():
    """Three chunks by Hopper's tiles, whose states stay in registers."""
    x, b, c = randn(1, 150, 1, 64), *(randn(1, 150, 1, 64) / 8 for _ in range(2))
    given = x, torch.rand(1, 150, 1) / 8, -torch.rand(1) - 0.1, b, c, torch.rand(1)
    config = ssd.Config(64, state_tile=64, whole=True)
    return ssd.ssd_chunk_scan(*given, config=config), ssd.reference(*(x.double() for x in given))


def of_conv():
    """Two blocks take boxes of two rows, one after the other."""
    given = randn(1, 5, 40, 24), randn(40, 2, 2, 24) / 10, randn(40)
    config = conv.Config(2, 32, 32, 16, 128, 3, True, 2)
    found = conv.conv(*given, None, (), (1, 0), (), "silu", config=config)
    return found, conv.reference(*(x.double() for x in given), None, (), (1, 0), (), "silu")


def of_delta_rule_step():
    state, q = randn(1, 2, 16, 16, dtype=torch.float32), randn(1, 2, 2, 16, dtype=torch.float32)
    given = state, q, q, q, -torch.rand(1, 2, 2, 16), torch.rand(1, 2, 2)
    return step.gated_delta_rule_step(*given, None, True), step.reference(*(x.double() for x in given), None, True)


LIBRARY = {
    # Six turns: more than stages, so that tiles are filled again; and even, as an odd number skips a product.
    "grouped_scaled_gemm": lambda: of_grouped_scaled_gemm(200, 136, 768),
    "k_grouped_scaled_gemm": lambda: of_k_grouped_scaled_gemm(80, 80, 1040),
    "linear_cross_entropy": lambda: of_linear_cross_entropy(12, 24, 40),
    "route": lambda: of_route(9, 32),
    "group_tokens": lambda: of_group_tokens(600, 9),
    "delta rule": lambda: of_delta_rule(False),
    "delta rule in one scan": of_delta_rule_in_one_scan,
    "ssd in one scan": of_ssd_in_one_scan,
    "kda": lambda: of_delta_rule(True),
    "delta rule step": of_delta_rule_step,
    "conv": of_conv,
    "gemm fp16": lambda: of_gemm(70, 72, 840, torch.float16),  # more turns than stages: tiles are filled again
    "gemm ragged bf16": lambda: of_gemm(33, 41, 300, torch.bfloat16, "v=silu(acc0);ret v"),
    "gemm fp32": lambda: of_gemm(40, 40, 72, torch.float32),
    "gemm one row": lambda: of_gemm(1, 64, 1772, torch.float16),  # parts of a sum lie where the last stages did
    "grouped_gemm": lambda: of_grouped_gemm(200, 136, 264, Config(64, 64, 64, 128, 2, panel=2, staged=True, blocks=2)),
    "grouped_gemm of few rows": lambda: of_grouped_gemm(40, 64, 648),
    "k_grouped_gemm": lambda: of_k_grouped_gemm(1500, 72, 64),
    "dequant_gemm": lambda: of_dequant_gemm(33, 90, 8192),  # three spans of scales in each share
    "dequant_gemm of many rows": lambda: of_dequant_gemm(70, 72, 768),
    "attention": lambda: of_attention(False, 70, 2),
    "attention causal": lambda: of_attention(True, 500, dtype=torch.bfloat16),
    "attention_block_sparse": lambda: of_block_sparse(False),
    "attention_block_sparse_backward": lambda: of_block_sparse(True),
    "attention_fp8": of_attention_fp8,
    "attention_paged float8": of_paged_float8,
    "mla_decode": of_mla,
    "mla_decode_fp8": of_mla_fp8,
    "mla_sparse": of_mla_sparse,
    "index_scores": of_index_scores,
    "lightning_index": of_lightning_index,
    "nsa_select": of_nsa_select,
    "rms_norm": lambda: of_rms_norm(200),
    "rms_norm long": lambda: of_rms_norm(9001),
    "layer_norm": lambda: of_layer_norm(300),
    "softmax": lambda: of_softmax((3, 500), 1),
    "softmax outer": lambda: of_softmax((40, 7), 0),
}


# Not all of these order anything, but most of each kernel do: the last stages of a loop are released for nobody, a turn
# peeled off has nothing to wait for, and the assembler wants a fence after a wait between products even if no register
# changed.
MOST = ("warp_arrive", "mbarrier_arrive", "wgmma_fence", "wgmma_wait")
# Kernels of many parts, in which a barrier may order tiles that other barriers order, too.
SPARE = dict.fromkeys(("delta rule", "grouped_scaled_gemm", "kda", "ssd in one scan"), ("barrier",))
# A step whose tiles threads fill in part: the next one waits for all warps by an mbarrier, too.
SPARE["k_grouped_scaled_gemm"] = ("named_barrier",)
# A producer waits for each of its two tiles, although consumers always release one of them before the other.
SPARE["delta rule in one scan"] = "barrier", "mbarrier_wait"


def flatten(results):
    return [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
def test_library_kernels_need_each_of_their_waits_and_barriers(name, on_gpu):
    got, want = LIBRARY[name]()
    for x, y in zip(flatten(got), flatten(want), strict=True):
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 8e-2}.get(x.dtype, 1e-3)
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)
    assert on_gpu
    most = (*MOST, *SPARE.get(name, ()))
    for launch in on_gpu:
        missed = [r for r in removals(launch.flat) if not launch.run(r.program)]
        places = {(r.name.split(",")[0], r.number) for r in missed}
        for name in most:
            count = sum(call.name == name for call in ordering(launch.flat))
            assert 2 * sum(missing == name for missing, _ in places) <= count, name
        wrong = [f"{r.name} {r.number} at {r.span}" for r in missed if not r.name.startswith(most)]
        assert not wrong, f"{launch.program.name} without {wrong}: nothing found"
