# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.tile.*` on CUDA tensors against float64: random shapes and layouts, and that a tile kernel ran."""

import functools
import math

import pytest
import torch

import torch_tile.ops  # noqa: F401
from torch_tile.kernels.attention import forward as attention
from torch_tile.kernels.attention.args import AttentionArgs
from torch_tile.kernels.attention.score_mod import inputs
from torch_tile.kernels.epilogue.autodiff import vjp
from torch_tile.kernels.epilogue.program import soft_cap
from torch_tile.kernels.gemm import dequant as dequant_gemm, gemm, scaled
from torch_tile.kernels.gemm.formats import FORMATS
from torch_tile.kernels.mla import decode as mla_decode, scheduler as mla_schedule
from torch_tile.kernels.norm import fused as fused_norm, norm, quantize, softmax

PARTS = 8  # of each test
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("poisoned", "kernels_ran"),
    pytest.mark.parametrize("parts", [pytest.param(PARTS, id=f"part{n}") for n in range(PARTS)]),
]


EPILOGUES = {  # kinds, text, number of bs
    "plain": ("", "", 1),
    "bias_gelu": ("r", "v=add(acc0,x0);w=gelu(v);ret w", 1),
    "swiglu": ("", "g=silu(acc0);y=mul(g,acc1);ret y", 2),
    "every_kind": ("trcs", "a=mul(acc0,x0);b=add(a,x1);c=sub(b,x2);d=div(c,x3);ret d", 1),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gemm(epilogue, problems, check):
    kinds, text, count = EPILOGUES[epilogue]
    for _ in range(problems.count):
        dtype, batch = problems.dtype(), problems.pick(None, None, 1, 3)
        out_dtype = problems.pick(dtype, dtype, torch.float32)
        m, n, k = problems.size(500), problems.size(700), problems.size(900)
        m = problems.pick(m, m, m, 1)
        lead = () if batch is None else (batch,)
        layout = problems.pick("dense", "turned", "slice", "aligned slice", "gaps")
        a = problems.tensor(*lead, m, k, dtype=dtype, layout=layout)
        turned = problems.pick(True, False)
        bs = [problems.tensor(*lead, *((n, k) if turned else (k, n)), dtype=dtype, layout=layout) for _ in range(count)]
        bs = [b.mT if turned else b for b in bs]
        shapes = {"t": (*lead, m, n), "r": (n,), "c": (*lead, m, 1), "s": (1,)}
        aux = [problems.tensor(*shapes[x], dtype=problems.pick(dtype, torch.float32)) for x in kinds]
        aux = [x.abs() + 1 if kind == "s" else x for x, kind in zip(aux, kinds, strict=True)]
        got = torch.ops.tile.gemm(a, bs, aux, kinds, text, out_dtype)

        def exact(a, *rest, kinds=kinds, text=text, count=count):
            return gemm.reference(a, rest[:count], rest[count:], kinds, text, torch.float64)

        types = f"{dtype} to {out_dtype} with {[x.dtype for x in aux]}"
        what = f"{epilogue} {types} {batch}x{m}x{n}x{k} {layout} turned {turned}"
        check(got, exact, (a, *bs, *aux), what, dtype)


WORDS = {  # dtype of words, bits of a weight
    "int8": (torch.int8, 8),
    "int4": (torch.int8, 4),
    "uint4": (torch.uint8, 4),
    "uint2": (torch.uint8, 2),
    "float8": (torch.float8_e4m3fn, 8),
}


@pytest.mark.parametrize("form", ["matrix", "rows", "blocks", "runs"])
def test_scaled_gemm(form, problems, check):
    cut = lambda size: -(-size // 128)  # noqa: E731
    for _ in range(problems.count):
        m, n, k = problems.pick(1, problems.size(70), problems.size(500)), problems.size(700), problems.size(900)
        k = problems.pick(k, 16 * cut(k))
        dtypes = problems.pick((torch.float8_e4m3fn,) * 2, (torch.float8_e5m2, torch.float8_e4m3fn))
        a, b = (problems.tensor(*shape).to(x) for shape, x in zip(((m, k), (n, k)), dtypes, strict=True))
        of_a = {"matrix": (1, 1), "rows": (m, 1)}.get(form, (m, cut(k)))
        of_b = {"matrix": (1, 1), "rows": (n, 1), "blocks": (cut(n), cut(k))}.get(form, (n, cut(k)))
        scale_a, scale_b = (problems.tensor(*shape).abs() + 0.1 for shape in (of_a, of_b))
        row, dtype = problems.tensor(n), problems.pick(torch.bfloat16, torch.float16, torch.float32)
        text = "v=add(acc0,x0);w=silu(v);ret w"
        got = torch.ops.tile.scaled_gemm(a, b.mT, scale_a, scale_b.mT, [row], "r", text, dtype)

        def exact(a, b, scale_a, scale_b, row, text=text):
            return scaled.reference(a, b.mT, scale_a, scale_b.mT, [row], "r", text, torch.float64)

        # Hopper's tensor cores keep about 13 bits of each product beside the largest one.
        kept = torch.float16 if dtype == torch.float32 else dtype
        check(got, exact, (a.double(), b.double(), scale_a, scale_b, row), f"{form} {m}x{n}x{k} {dtypes} {dtype}", kept)


@pytest.mark.parametrize("group", [0, 32, 128])
def test_quantize_fp8(group, problems):
    for _ in range(problems.count):
        x = problems.tensor(problems.size(300), problems.size(9000), dtype=problems.dtype())
        kind = problems.pick(torch.float8_e4m3fn, torch.float8_e5m2)
        values, scales = torch.ops.tile.quantize_fp8(x, group, kind)
        wanted, exact = quantize.reference(x, group, kind)
        torch.testing.assert_close(scales, exact, rtol=1e-6, atol=0)
        # A reciprocal that is off by a last place moves numbers that lie between two. Small tensors may hold two such.
        assert (values.float() != wanted.float()).sum() <= 2 + 0.01 * x.numel()


@pytest.mark.parametrize("format", FORMATS)
def test_tables_of_4_bits(format, problems, check):
    for _ in range(problems.count):
        dtype, group = problems.pick(torch.bfloat16, torch.float16), problems.pick(0, 32, 64, 128)
        m, n = problems.pick(1, problems.size(70), problems.size(500)), problems.size(700)
        k = max(group, 8) * problems.size(900 // max(group, 8))
        a, words = problems.tensor(m, k, dtype=dtype) / 16, problems.words(n, k // 2, dtype=torch.uint8)
        scale = (problems.tensor(n, k // group if group else 1).abs() + 0.1) / 4
        scale = scale.to(problems.pick(torch.float32, dtype, torch.float8_e8m0fnu))
        got = torch.ops.tile.dequant_gemm(a, [words], [scale], [], 4, True, 0, [], "", "", torch.float32, format)
        weight = dequant_gemm.dequantize(words, scale, None, 4, True, 0, torch.float64, format)
        # Numbers of a table are rounded to a's dtype, and so are weights.
        check(got, lambda a, w: a @ w.mT, (a, weight), f"{format} {scale.dtype} {m}x{n}x{k} group {group}", dtype)


@pytest.mark.parametrize("words", WORDS)
def test_dequant_gemm(words, problems, check):
    kind, bits = WORDS[words]
    for _ in range(problems.count):
        dtype, group = problems.dtype(), problems.pick(0, 16, 32, 64, 128)
        out_dtype, high_first, offset = (
            problems.pick(dtype, torch.float32),
            problems.pick(True, False),
            problems.pick(0, 7),
        )
        epilogue = problems.pick("plain", "bias_gelu", "swiglu")
        kinds, text, count = EPILOGUES[epilogue]
        unit = max(group, 8)
        m, n, k = (
            problems.pick(1, problems.size(70), problems.size(500)),
            problems.size(700),
            unit * problems.size(900 // unit),
        )
        a = problems.tensor(m, k, dtype=dtype) / 16
        turned, groups = problems.pick(True, False), k // group if group else 1
        bs = [problems.words(n, k * bits // 8, dtype=kind, turned=turned) for _ in range(count)]
        scales = [problems.tensor(n, groups, dtype=problems.pick(dtype, torch.float32)) / 4 for _ in bs]
        zeros = [(problems.tensor(n, groups) * 3).to(torch.int8) for _ in problems.pick(bs, ())]
        aux = [problems.tensor(n, dtype=dtype) for _ in kinds]
        scheme = (bits, high_first, offset)
        got = torch.ops.tile.dequant_gemm(a, bs, scales, zeros, *scheme, aux, kinds, text, out_dtype)

        def exact(a, *rest, bs=bs, zeros=zeros, scheme=scheme, kinds=kinds, text=text, count=count):
            # Widened weights are rounded to a's dtype, once: as inputs they change by as much.
            weights, aux = rest[:count], rest[count:]
            return gemm.reference(a, [w.mT for w in weights], aux, kinds, text, torch.float64)

        factors = [scales, zeros or [None] * count]
        widen = [(b, s.double(), z) for b, s, z in zip(bs, *factors, strict=True)]
        weights = [dequant_gemm.dequantize(b, s, z, *scheme, torch.float64) for b, s, z in widen]
        types = f"{words} with scales {scales[0].dtype}, {len(zeros)} zeros, {scheme}, {dtype} to {out_dtype}"
        what = f"{epilogue} {types} {m}x{n}x{k} group {group} turned {turned}"
        check(got, exact, (a, *weights, *aux), what, dtype)


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32], ids=str)
def test_attention(masked, problems, check):
    for _ in range(problems.count):
        dtype, d = problems.dtype(), problems.pick(16, 64, 64, 128, 128, 40, 72, 96, 192, 256)
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2, 3), problems.pick(1, 1, 2, 4, 8)
        q_len, kv_len, dv = problems.size(400), problems.size(600), problems.pick(d, d, 64, 24)
        causal, window = problems.pick(True, False), problems.pick(0, 0, 0, problems.random.randint(1, 200))
        layout = problems.pick("dense", "dense", "slice", "aligned slice", "gaps")
        q = problems.tensor(batch, q_len, kv_heads * groups, d, dtype=dtype, layout=layout).transpose(1, 2)
        q = problems.pick(q, q.contiguous())  # the result lies as q does
        k = problems.tensor(batch, kv_len, kv_heads, d, dtype=dtype, layout=layout).transpose(1, 2)
        v = problems.tensor(batch, kv_heads, kv_len, dv, dtype=dtype, layout=layout)
        mask = None
        if masked is not None:
            heads, sizes = kv_heads * groups, (q_len, kv_len)
            shape = problems.pick((kv_len,), sizes, (batch, 1, *sizes), (heads, *sizes), (heads, 1, kv_len))
            keep = torch.rand(shape, device=q.device, generator=problems.generator) > problems.pick(0.1, 0.9)
            kind = problems.pick(masked, dtype if dtype.itemsize < 4 else masked)
            mask = keep if masked == torch.bool else torch.randn_like(keep, dtype=kind).masked_fill(~keep, -math.inf)
        options = causal, problems.pick(None, 0.3, -0.1), window, problems.pick(0, kv_len - q_len, -3, 5)
        got = torch.ops.tile.attention_lse(q, k, v, mask, *options)
        shown = None if mask is None else (mask.dtype, tuple(mask.shape))
        what = f"{dtype} {tuple(q.shape)} {tuple(k.shape)} dv {dv} {layout} {options} mask {shown}"

        def exact(q, k, v, mask=mask, options=options):
            return attention.reference(q, k, v, mask, *options)

        check(got, exact, (q, k, v), what, dtype)


SCORES = {  # what changes scores, and the shape of what it reads: batch, heads, queries, keys
    "cap": (soft_cap(3.0), ""),
    "slopes": ("v0=sub(i3,i2);v1=mul(x0,v0);v2=add(acc0,v1);ret v2", "h"),
    "padding": ("v0=where(x0,acc0,-inf);ret v0", "bk"),
}


def read_by(score, problems, sizes):
    """The operands of a text, for sizes `[B, H, Sq, Skv]`."""
    _, given = SCORES[score]
    if not given:
        return []
    shape = [size if axis in given else 1 for axis, size in zip("bhqk", sizes, strict=True)]
    x = problems.tensor(*shape, layout="dense") / sizes[3]
    return [x > -0.5 / sizes[3] if score == "padding" else x]


@pytest.mark.parametrize("score", SCORES)
def test_attention_scores(score, problems, check):
    text, _ = SCORES[score]
    for _ in range(problems.count):
        dtype, d = problems.dtype(), problems.pick(64, 64, 128, 128, 40, 256)
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 2, 4)
        q_len, kv_len = problems.size(400), problems.size(600)
        q = problems.tensor(batch, kv_heads * groups, q_len, d, dtype=dtype)
        k, v = (problems.tensor(batch, kv_heads, kv_len, d, dtype=dtype) for _ in "kv")
        aux = read_by(score, problems, (batch, kv_heads * groups, q_len, kv_len))
        options = problems.pick(True, False), None, problems.pick(0, 0, 100), problems.pick(0, kv_len - q_len)
        got = torch.ops.tile.attention_lse(q, k, v, None, *options, aux, text)

        def exact(q, k, v, options=options, aux=aux, text=text):
            return attention.reference(
                q, k, v, None, *options, [x.to(q.dtype) if x.is_floating_point() else x for x in aux], text
            )

        check(got, exact, (q, k, v), f"{score} {dtype} {tuple(q.shape)} {tuple(k.shape)} {options}", dtype)


def gradients(grad, q, k, v, out, mask, causal, scale, window, q_offset, keep="", aux=(), score=""):
    """dq, dk and dv as sums over scores' gradients, which are what is left of two large numbers (one comes from `out`);
    and these, if a mask's gradient is kept.
    """
    scale = attention.default_scale(q.shape[3]) if scale is None else scale
    aux = [x.to(q.dtype) for x in aux]
    rule = mask, causal, scale, window, q_offset
    p, _ = attention.softmax_with_lse(attention.scores(AttentionArgs(q, k, k, *rule, aux, score)))
    slope = torch.ones_like(p)
    if score:
        products = attention.scores(AttentionArgs(q, k, k, scale=scale))
        slope = vjp(score, inputs(products, aux, q_offset), slope)["acc0"].masked_fill(p == 0, 0)
    by_group = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    p, q, grad, out, slope = (x.reshape(*by_group, x.shape[-1]) for x in (p, q, grad, out, slope))
    ds = p * (grad @ v.mT[:, :, None] - (grad * out).sum(-1, keepdim=True))
    kept = ds.flatten(1, 2)[None][: len(keep)]
    ds = ds * slope
    return (ds @ k[:, :, None]).flatten(1, 2) * scale, (ds.mT @ q).sum(2) * scale, (p.mT @ grad).sum(2), kept


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32], ids=str)
def test_attention_backward(masked, problems, check):
    for _ in range(problems.count):
        dtype, d = problems.dtype(), problems.pick(64, 64, 128, 128, 40, 192)
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 2, 4)
        q_len, kv_len, dv = problems.size(300), problems.size(400), problems.pick(d, d, 64)
        layout = problems.pick("dense", "dense", "aligned slice", None)
        q, grad = (problems.tensor(batch, kv_heads * groups, q_len, n, dtype=dtype, layout=layout) for n in (d, dv))
        k, v = (problems.tensor(batch, kv_heads, kv_len, n, dtype=dtype, layout=layout) for n in (d, dv))
        mask = None
        if masked is not None:
            keep = torch.rand(q_len, kv_len, device=q.device, generator=problems.generator) > 0.3
            mask = keep if masked == torch.bool else torch.randn_like(keep, dtype=masked)
        options = problems.pick(True, False), None, problems.pick(0, 0, 100), problems.pick(0, kv_len - q_len)
        out, lse = torch.ops.tile.attention_lse(q, k, v, mask, *options)
        options = *options, problems.pick("", "mask" if masked == torch.float32 else "")
        got = torch.ops.tile.attention_backward(grad, q, k, v, out, lse, mask, *options)
        what = f"{dtype} {tuple(q.shape)} {tuple(k.shape)} dv {dv} {layout} {options} {masked}"

        def exact(*inputs, mask=mask, options=options):
            return gradients(*inputs, mask, *options)

        check(got, exact, (grad, q, k, v, out), what, dtype)


@pytest.mark.parametrize("score", SCORES)
def test_attention_backward_under_scores(score, problems, check):
    text, _ = SCORES[score]
    for _ in range(problems.count):
        dtype, d = problems.dtype(), problems.pick(64, 64, 128, 128, 40, 256)
        batch, kv_heads, groups = problems.pick(1, 2), problems.pick(1, 2), problems.pick(1, 2, 4)
        q_len, kv_len = problems.size(300), problems.size(400)
        q, grad = (problems.tensor(batch, kv_heads * groups, q_len, d, dtype=dtype) for _ in "qg")
        k, v = (problems.tensor(batch, kv_heads, kv_len, d, dtype=dtype) for _ in "kv")
        aux = read_by(score, problems, (batch, kv_heads * groups, q_len, kv_len))
        options = None, problems.pick(True, False), None, problems.pick(0, 0, 100), problems.pick(0, kv_len - q_len)
        out, lse = torch.ops.tile.attention_lse(q, k, v, *options, aux, text)
        got = torch.ops.tile.attention_backward(grad, q, k, v, out, lse, *options, "", aux, text)
        what = f"{score} {dtype} {tuple(q.shape)} {tuple(k.shape)} {options}"

        def exact(*inputs, options=options, aux=aux, text=text):
            return gradients(*inputs, *options, "", aux, text)

        check(got, exact, (grad, q, k, v, out), what, dtype)


@pytest.mark.parametrize("paged", [False, True])
def test_mla_decode(paged, problems, check):
    for _ in range(problems.count):
        dtype = problems.pick(torch.float16, torch.bfloat16, torch.bfloat16, torch.float32)
        latent, rotary = problems.pick((512, 64), (512, 64), (128, 64), (64, 16), (24, 5))
        batch = problems.pick(1, mla_decode.EVENLY_SPLIT, mla_decode.EVENLY_SPLIT + 1, 20)
        q_len, heads = problems.pick(1, 1, 2, 3), problems.pick(1, 16, 64, 128, 37)
        page, columns = (problems.pick(1, 16, 64, 128, 50), problems.pick(1, 3, 9)) if paged else (0, 0)
        covered = page * columns if paged else problems.size(900)
        rows = (batch * columns + 2, page) if paged else (batch, covered)
        q, q_pe = (problems.tensor(batch, q_len, heads, n, dtype=dtype) for n in (latent, rotary))
        q = problems.pick(q, q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3))  # the result lies as q does
        kv, k_pe = (problems.tensor(*rows, n, dtype=dtype, layout="dense") for n in (latent, rotary))
        seq_lens = torch.randint(0, covered + 1, (batch,), device=q.device, dtype=torch.int32)
        table = None
        if paged:
            order = torch.randperm(rows[0], device=q.device)[: batch * columns]
            table = order.reshape(batch, columns).int()
            beyond = torch.arange(columns, device=q.device)[None, :] * page >= seq_lens[:, None]
            table = table.masked_fill(beyond, -1)
        else:
            past = torch.arange(covered, device=q.device)[None, :, None] >= seq_lens[:, None, None]
            kv, k_pe = (x.masked_fill(past, math.nan) for x in (kv, k_pe))
        splits = problems.pick(0, 0, 1, 3)
        units = problems.pick(0, 1, 7, 200)
        schedule = None if splits else problems.pick(None, torch.ops.tile.mla_schedule(seq_lens, q_len * heads, units))
        if schedule is not None:
            assert torch.equal(schedule.cpu(), mla_schedule.reference(seq_lens.cpu(), 1, len(schedule) - batch))
        got = torch.ops.tile.mla_decode_lse(q, q_pe, kv, k_pe, table, seq_lens, None, splits, schedule)
        exact = functools.partial(mla_decode.reference, block_table=table, seq_lens=seq_lens)
        shares = f"splits {splits}" if schedule is None else f"{len(schedule) - batch} units"
        what = f"{dtype} {tuple(q.shape)}+{rotary} {rows} {seq_lens.tolist()} {shares}"
        check(got, exact, (q, q_pe, kv, k_pe), what, dtype)


ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu")


@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(residual, problems, check):
    for number in range(problems.count):
        dtype, n = problems.dtype(), problems.pick(160, 256, 320, 640, 1024, 4096, problems.size(9000))
        n = problems.random.randint(30_000, 70_000) if number == 0 else n
        shape = problems.pick((problems.size(70), n), (3, problems.size(20), n))
        x, other = (problems.tensor(*shape, dtype=dtype) for _ in range(2))
        weight = problems.pick(None, problems.tensor(n, dtype=problems.pick(dtype, torch.float32)))
        options = 1e-6, problems.pick(*ACTIVATIONS), problems.pick(0.0, 1.0), problems.pick(True, False)
        what = f"{dtype} {shape} {options} {None if weight is None else weight.dtype}"
        if residual:
            y, total = torch.ops.tile.add_rms_norm(x, other, weight, *options)
            check(total, torch.add, (x, other), what, dtype)
        else:
            y, total = torch.ops.tile.rms_norm(x, weight, *options), x
        _, activation, offset, cast_first = options
        if weight is not None and cast_first:  # the sum with the offset is rounded to the weight's dtype
            weight, offset = weight + offset, 0.0

        def exact(x, weight=None, rest=(1e-6, activation, offset, cast_first)):
            return norm.rms_norm_reference(x, weight, None, *rest)[0]

        check(y, exact, (total,) if weight is None else (total, weight), what, dtype)


def test_layer_norm(problems, check):
    for number in range(problems.count):
        dtype, n = problems.dtype(), problems.pick(160, 768, 1024, 4096, problems.size(9000))
        n = problems.random.randint(30_000, 70_000) if number == 0 else n
        x = problems.tensor(problems.size(70), n, dtype=dtype)
        weight, bias = (
            problems.pick(None, problems.tensor(n, dtype=problems.pick(dtype, torch.float32))) for _ in "wb"
        )
        got = torch.ops.tile.layer_norm(x, weight, bias)
        names = [name for name, t in (("weight", weight), ("bias", bias)) if t is not None]

        def exact(x, *factors, names=names):
            return norm.layer_norm_reference(x, **dict(zip(names, factors, strict=True)))

        given = [t for t in (weight, bias) if t is not None]
        what = f"{dtype} {tuple(x.shape)} {names} {[t.dtype for t in given]}"
        check(got, exact, (x, *given), what, dtype)


def test_softmax(problems, check):
    for number in range(problems.count):
        dtype = problems.dtype()
        shape = [problems.size(60) for _ in range(problems.random.randint(1, 3))]
        dim = problems.random.randrange(len(shape))
        shape[dim] = problems.random.randint(30_000, 70_000) if number == 0 else problems.size(5000)
        x = problems.tensor(*shape, dtype=dtype) * 3
        if problems.pick(True, False, False):
            x = x.masked_fill(torch.rand_like(x, dtype=torch.float32) < 0.5, -math.inf)
        out_dtype = problems.pick(None, None, torch.float32)
        got = torch.ops.tile.softmax(x, dim, out_dtype)
        exact = functools.partial(softmax.reference, dim=dim)
        check(got, exact, (x,), f"{dtype} to {out_dtype} {shape} {dim}", dtype)


@pytest.mark.parametrize("keep", [False, True])
def test_fused_norm(keep, problems, check):
    """The gated residual and the modulation of a diffusion block, by rows of 2 sequences or 3."""
    prologue, epilogue = "v0=mul(x0,x1);v1=add(acc0,v0);ret v1", "v0=mul(acc0,x2);v1=add(v0,x3);v2=silu(v1);ret v2"
    for _ in range(problems.count):
        dtype, n = problems.dtype(), problems.pick(160, 768, 1152, 4096, problems.size(9000))
        batch, rows = problems.pick(2, 3), problems.size(30)
        x, y = (problems.tensor(batch, rows, n, dtype=dtype) for _ in "xy")
        aux = [y, *(problems.tensor(batch, 1, n, dtype=dtype) for _ in range(2)), problems.tensor(n, dtype=dtype)]
        options = "tggr", prologue, epilogue, problems.pick(True, False), 1e-5, keep
        out_dtype = problems.pick(dtype, torch.float32)
        got = torch.ops.tile.fused_norm(x, aux, *options, out_dtype)

        def exact(x, *aux, options=options, dtype=dtype):
            # The sum is rounded before it is normalised: as an input it changes by as much.
            return fused_norm.reference(x, aux, *options, torch.float64)

        what = f"{dtype} to {out_dtype} {tuple(x.shape)} {options[3:]}"
        check(got if keep else got[0], exact if keep else lambda *a: exact(*a)[0], (x, *aux), what, dtype)
