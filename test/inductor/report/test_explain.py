# SPDX-License-Identifier: Apache-2.0
"""`explain` says what is found, where, and why not."""

from textwrap import fill

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from torch_tile.inductor.report.explain import explain


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.mlp(x)


def test_rows_say_what_and_where():
    report = explain(Block(), torch.randn(2, 5, 16))
    where = {r.where.split()[0]: r.family for r in report.replaced()}
    assert where["norm"] == "norm"
    assert where["qkv"] == "gemm"
    assert {where[f"mlp.{i}"] for i in (0, 2)} == {"gemm"}
    (attention,) = report.replaced("attention")
    assert attention.where.endswith(f"test_explain.py:{Block.forward.__code__.co_firstlineno + 2}")
    assert report.graph_breaks == 0
    assert not report.missed()


def test_table():
    text = str(explain(Block(), torch.randn(2, 5, 16)))
    lines = text.splitlines()
    assert lines[1].split() == ["family", "status", "what", "where", "reason", "graph"]
    assert lines[-1] == "5 replaced"
    assert any("tile.layer_norm([" in line and " norm " in line for line in lines)


def test_near_misses_have_reasons():
    def f(q):
        return torch.softmax(torch.cumsum(q @ q.mT, -1), -1) @ q

    (row,) = explain(f, torch.randn(2, 3, 5, 8)).missed("attention")
    assert "cumsum" in row.reason


@pytest.mark.parametrize("between", [lambda x: x, lambda x: x.relu(), lambda x: x.reshape(10, 8).half().float()])
def test_a_pointwise_op_that_no_epilogue_has_a_word_for_is_named(between):
    report = explain(lambda x, w: torch.asinh(between(x @ w)) * 2, torch.randn(2, 5, 4), torch.randn(4, 8))
    (row,) = report.missed()
    assert (row.family, row.what) == ("gemm", "aten.asinh") and "no epilogue has a word for aten.asinh" in row.reason
    assert row.fix and len(report.replaced("gemm")) == 1


def test_a_pointwise_op_behind_a_norm_that_no_epilogue_has_a_word_for_is_named():
    report = explain(lambda x: torch.asinh(F.layer_norm(x, (8,)) * 2), torch.randn(6, 8))
    (row,) = report.missed()
    assert (row.family, row.what) == ("norm", "aten.asinh") and len(report.replaced("norm")) == 1


def test_a_change_of_scores_that_has_no_word_is_named():
    def f(q):
        return torch.softmax(torch.asinh(q @ q.mT), -1) @ q

    (row,) = explain(f, torch.randn(2, 3, 5, 8)).missed("attention")
    assert "aten.asinh" in row.reason and row.fix


def test_families_and_training():
    model, x = Block(), torch.randn(2, 5, 16)
    before = [p.grad for p in model.parameters()]
    report = explain(model, x, options={"select": "tile", "families": ["gemm"]}, backward=True)
    assert {r.family for r in report.rows} == {"gemm"}
    assert {r.graph for r in report.rows} == {"forward", "backward"}
    assert [p.grad for p in model.parameters()] == before


def test_graph_breaks_are_counted():
    def f(x):
        x = x @ x
        torch._dynamo.graph_break()
        return x @ x

    report = explain(f, torch.randn(4, 4))
    assert report.graph_breaks == 1
    assert len(report.replaced("gemm")) == 2
    assert str(report).endswith("1 graph breaks")


def test_twice_reports_twice():
    """Nothing comes from a cache, which would run no pass."""
    model, x = Block(), torch.randn(2, 5, 16)
    assert {len(explain(model, x).rows) for _ in range(10)} == {5}


def test_sizes_are_those_of_the_arguments():
    """Another size is no reason for a symbol, which only the user asks for."""
    f = nn.Linear(4, 4)
    whats = []
    for rows in (3, 5, 6, 7):
        x = torch.randn(rows, 2, 4)
        if rows > 5:
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            (row,) = explain(lambda x: F.softmax(f(x), -1), x).replaced("softmax")
        whats.append(row.what)
        assert row.cost.bytes == 2 * 4 * rows * 2 * 4
    assert whats[:2] == ["tile.softmax([3, 2, 4])", "tile.softmax([5, 2, 4])"] and "[s" in whats[2] and "[s" in whats[3]


def test_rows_have_fields_for_programs():
    with torch.no_grad():
        report = explain(Block().bfloat16(), torch.randn(2, 5, 16, dtype=torch.bfloat16))
    (row,) = (r for r in report.rows if r.module == "mlp.2")
    assert row.source.text == "return x + self.mlp(x)" and row.source.function == "forward"
    assert row.cost.flops == 2 * 10 * 32 * 16 and row.cost.dtype == torch.bfloat16
    assert row.cost.bytes == 2 * (10 * 32 + 32 * 16 + 16 + 10 * 16 + 10 * 16)  # x, weight, bias, residual, result
    assert [kernel.__name__ for kernel in row.kernels] == ["gemm"]
    assert row.times is None and row.device == torch.device("cpu")


def test_fastest_measures_both():
    with torch.no_grad():
        report = explain(nn.Sequential(nn.Linear(16, 16), nn.GELU()), torch.randn(64, 16), select="fastest")
    (row,) = report.rows
    assert row.times.tile > 0 and row.times.inductor > 0
    assert row.status == ("replaced" if row.times.tile_wins else "kept")
    with pytest.raises(Exception, match='option "select" must be one of'):
        explain(nn.Linear(16, 16), torch.randn(64, 16), select="best")


def attention_weights(x):
    weights = torch.softmax(x @ x.mT, -1)
    return weights @ x, weights


def unbiased_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True)
    return centred * torch.rsqrt(variance + 1e-5)


def norm_of_two(x):
    return F.layer_norm(x, x.shape[-2:])


def dropped(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def dropped_between(x):
    weights = torch.softmax(x @ x.mT, -1)
    return F.dropout(weights, 0.5) @ x


def summed_weights(x):
    weights = torch.softmax(x @ x.mT, -1)
    return weights.cumsum(-1) @ x


def weights_on_the_right(x):
    return x @ torch.softmax(x @ x.mT, -1)


def two_scales(x):
    scores = x @ x.mT + x.flip(1) @ x.flip(1).mT * 0.5
    return torch.softmax(scores, -1) @ x


def normalised_twice(x):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * scale * scale


def norm_and_its_statistic(x):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * scale, scale


def integers(x):
    whole = x[0, 0].to(torch.int32)
    return whole @ whole.mT


WIDE = {"width": 100, "subsequent_indent": " " * 8}
WRONG = [
    attention_weights, dropped, dropped_between, summed_weights, weights_on_the_right, two_scales,
    unbiased_norm, normalised_twice, norm_and_its_statistic, norm_of_two, integers,
]  # fmt: skip


def test_what_would_make_near_misses_match():
    """In the user's words: what the line is, why it is none of ours, what to write instead."""
    lines = []
    for function in WRONG:
        with torch.no_grad():
            rows = explain(function, torch.randn(2, 3, 6, 6)).missed()
        for row in rows:
            line = (row.cause or row.source).text
            lines += [f"{function.__name__}: {row.family}, {row.what}", f"  line: {line}"]
            lines += [fill(f"  why:  {row.reason}", **WIDE), fill(f"  fix:  {row.fix}", **WIDE)]
    assert_expected_inline(
        "\n".join(lines),
        """\
attention_weights: attention, tile.softmax
  line: weights = torch.softmax(x @ x.mT, -1)
  why:  the attention probabilities are used more than once (returned, or saved for the backward?)
  fix:  do not return the weights (need_weights=False, output_attentions=False); in training call
        F.scaled_dot_product_attention
dropped: attention, scaled_dot_product_attention
  line: return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
  why:  dropout
  fix:  call model.eval(), or pass dropout_p=0.0
dropped: attention, tile.softmax
  line: return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
  why:  aten.mul between softmax and the product with the values
  fix:  move aten.mul behind the product, or leave it out (dropout: p=0, or model.eval())
dropped_between: attention, tile.softmax
  line: return F.dropout(weights, 0.5) @ x
  why:  aten.mul between softmax and the product with the values
  fix:  move aten.mul behind the product, or leave it out (dropout: p=0, or model.eval())
summed_weights: attention, tile.softmax
  line: return weights.cumsum(-1) @ x
  why:  aten.cumsum between softmax and the product with the values
  fix:  move aten.cumsum behind the product, or leave it out (dropout: p=0, or model.eval())
weights_on_the_right: attention, tile.softmax
  line: return x @ torch.softmax(x @ x.mT, -1)
  why:  the product with the values does not sum over the keys
  fix:  take the softmax over the dimension that is summed with v
two_scales: mla, tile.softmax
  line: return torch.softmax(scores, -1) @ x
  why:  the two products that make the scores are scaled differently
  fix:  scale their sum: (q @ kv.mT + q_pe @ k_pe.mT) * scale
unbiased_norm: norm, aten.rsqrt
  line: variance = x.var(-1, keepdim=True)
  why:  the variance is unbiased
  fix:  write var(-1, correction=0, keepdim=True)
normalised_twice: norm, aten.rsqrt
  line: scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
  why:  the statistic is used elsewhere (returned, or saved for the backward?)
  fix:  use the root for the normalised tensor alone; in training call F.rms_norm or F.layer_norm
norm_and_its_statistic: norm, aten.rsqrt
  line: scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
  why:  the statistic is used elsewhere (returned, or saved for the backward?)
  fix:  use the root for the normalised tensor alone; in training call F.rms_norm or F.layer_norm
norm_of_two: norm, layer_norm
  line: return F.layer_norm(x, x.shape[-2:])
  why:  normalises over 2 dimensions
  fix:  flatten them, so that normalized_shape has one size
integers: gemm, aten.mm
  line: return whole @ whole.mT
  why:  no kernel for torch.int32
  fix:  cast both operands to bfloat16, float16, float32 or float64""",
    )


def cap(x):
    return torch.cumsum(x, -1) * 20


def test_the_line_at_fault_is_the_cause():
    """It may stand elsewhere than what was looked at."""
    with torch.no_grad():
        (row,) = explain(lambda x: torch.softmax(cap(x @ x.mT), -1) @ x, torch.randn(2, 3, 6, 6)).missed("attention")
    assert (
        "aten.cumsum" in row.reason
        and row.cause.text == "return torch.cumsum(x, -1) * 20"
        and "softmax" in row.source.text
    )


def draw(*sizes):
    return torch.randn(sizes)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("family", "name", "arguments"),
    [
        ("attention", "attention_varlen", lambda: (*(draw(8, 2, 16) for _ in "qkv"), ints(0, 8), ints(0, 8), 8, 8)),
        (
            "attention", "attention_paged",
            lambda: (draw(1, 1, 2, 16), draw(3, 16, 2, 16), draw(3, 16, 2, 16), ints([0, 1]), ints(20)),
        ),
        ("attention", "attention_fp8", lambda: tuple(draw(1, 2, 8, 16).to(torch.float8_e4m3fn) for _ in "qkv")),
        (
            "attention", "attention_block_sparse",
            lambda: (*(draw(1, 1, 128, 16) for _ in "qkv"), ints([[1]]), ints([[[0]]])),
        ),
        ("attention", "nsa_select", lambda: (draw(1, 2, 128, 16), draw(1, 1, 2, 16), draw(1, 2, 128), 128, 2)),
        ("mla", "index_scores", lambda: (draw(1, 8, 2, 16), draw(1, 8, 16), draw(1, 8, 2))),
        ("mla", "lightning_index", lambda: (draw(1, 8, 2, 16), draw(1, 8, 16), draw(1, 8, 2), 4)),
        ("mla", "mla_decode", lambda: (draw(1, 1, 2, 32), draw(1, 1, 2, 16), draw(1, 8, 32), draw(1, 8, 16))),
    ],
)  # fmt: skip
def test_operators_that_a_model_calls_have_rows(family, name, arguments):
    def f(*tensors):
        made = getattr(torch.ops.tile, name)(*tensors)
        return (made[0] if isinstance(made, tuple) else made) + 1

    given = arguments()
    (row,) = explain(f, *given).replaced()
    shapes = ", ".join(str(list(x.shape)) for x in given if isinstance(x, torch.Tensor))
    assert (row.family, row.what) == (family, f"tile.{name}({shapes})")
