# SPDX-License-Identifier: Apache-2.0
"""Kernels of models in TileLang's styles against float64: sequences, experts, codes of few bits, training steps."""

import math

import pytest
import torch
import torch.nn.functional as F

from test.language.test_random import sequence
from test.tilelang_kernels.cases import BF, BOTH, Case, floats, halves, run


def attend(q, k, v, seen=None, scale=None):
    """Attention of (heads, rows, dim) in float64."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), seen, scale=scale)


def packed(q, k, v, begins):
    parts = []
    for a, b in zip(begins.tolist(), begins.tolist()[1:], strict=False):
        parts.append(
            F.scaled_dot_product_attention(
                *(x[a:b].double().transpose(0, 1) for x in (q, k, v)), is_causal=True
            ).transpose(0, 1)
        )
    return torch.cat(parts).half()


def of_pages(q, k, v, table, lengths):
    found = []
    for row, pages, length in zip(q, table.long(), lengths.tolist(), strict=True):
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        found.append(attend(row[None], keys[None], values[None])[0])
    return torch.stack(found).half()


def with_sinks(window):
    def reference(qkv, sinks, _):
        q, k, v = qkv.double()
        apart = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        scores = (q @ k.mT * q.shape[2] ** -0.5).masked_fill((apart < 0) | (apart >= window), -math.inf)
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1).softmax(-1)
        return (scores[..., :-1] @ v).to(BF)

    return reference


def of_blocks(q, k, v, chosen):
    found = []
    for row, blocks in zip(q, chosen.tolist(), strict=True):
        keys = torch.cat([torch.arange(n * 16, n * 16 + 16) for n in blocks if n >= 0] or [torch.empty(0).long()])
        found.append(attend(row[None], k[keys][None], v[keys][None])[0] if len(keys) else row.double() * 0)
    return torch.stack(found).half()


def gradients(q, k, v, g):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    (attend(q[None], k[None], v[None])[0] * g.double()).sum().backward()
    return torch.stack([q.grad, k.grad, v.grad]).float()


def indexed(q, k, w):
    products = (q.double() @ k.double().mT).view(*w.shape, -1).relu()
    return (products * w.double()[..., None]).sum(1).float()


def retained(q, k, v):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    apart = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    decay = 1 - 2.0 ** (-5 - torch.arange(q.shape[1]).double())
    fade = torch.where(apart >= 0, decay[:, None, None] ** apart.clamp(min=0), 0)
    return ((q @ k.mT * fade) @ v).transpose(1, 2).float()


def states(x, decay):
    summed = decay.double().cumsum(1)
    faded = x[..., :32].double() * (summed[:, -1:] - summed).exp()[..., None]
    return (faded.mT @ x[..., 32:].double()).float()


def appended(new, slots, cache):
    cache[slots[slots >= 0]] = new[slots >= 0]
    return cache


def by_groups(x):
    parts = x.double().view(x.shape[0], -1, 32)
    scale = 2.0 ** (parts.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
    return [(parts / scale[..., None]).clamp(-448, 448).view(x.shape).float().to(torch.float8_e4m3fn), scale.float()]


def fours(codes, exponents):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    found = values[codes & 7] * (1 - 2.0 * (codes >> 3)) * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)
    return found.to(BF)


def ternary(a, b, s):
    weights = torch.stack([(b.int() >> 2 * n & 3) - 1 for n in range(4)], -1).flatten(1)
    return ((a.double() @ weights.double().T) * s.double()).float()


def walsh(a):
    m = torch.ones(1, 1, dtype=torch.float64)
    while len(m) < a.shape[1]:
        m = torch.cat([torch.cat([m, m], 1), torch.cat([m, -m], 1)])
    return (a.double() @ m).float()


def words(x):
    bits = F.pad(x < 0, (0, -len(x) % 32)).view(-1, 32).long()
    return (bits << torch.arange(32)).sum(1).to(torch.uint32)


def best(groups, kept, top):
    def reference(logits):
        scores = logits.double().sigmoid()
        by_group = scores.view(len(scores), groups, -1)
        chosen = by_group.amax(-1).topk(kept).indices
        allowed = torch.zeros(len(scores), groups, dtype=torch.bool).scatter(1, chosen, True)
        found = scores.masked_fill(~allowed.repeat_interleave(by_group.shape[2], 1), -1).topk(top)
        return [(found.values / found.values.sum(1, keepdim=True)).float(), found.indices]

    return reference


def expert(x, up, gate, down):
    x, up, gate, down = (y.double() for y in (x, up, gate, down))
    return ((x @ up * F.silu(x @ gate)).half().double() @ down).float()


def compressed(rows, columns):
    dense = floats(rows, columns) * (torch.rand(rows, columns) < 0.3)
    kept = dense.to_sparse_csr()
    return [kept.values(), kept.col_indices().int(), kept.crow_indices().int(), floats(columns)]


def compressed_product(values, columns, begins, x):
    parts = [
        (values[a:b].double() * x[columns[a:b].long()].double()).sum()
        for a, b in zip(begins.tolist(), begins.tolist()[1:], strict=False)
    ]
    return torch.stack(parts).float()


def solved(low, b):
    return torch.linalg.solve_triangular(low.double(), b.double(), upper=False, unitriangular=True).float()


def adam(step, g, p, m, v):
    m, v, g = 0.9 * m.double() + 0.1 * g.double(), 0.99 * v.double() + 0.01 * g.double() ** 2, g.double()
    p = p.double() - 0.01 * m / (1 - 0.9 ** int(step)) / ((v / (1 - 0.99 ** int(step))).sqrt() + 1e-8)
    return [p.float(), m.float(), v.float()]


def normed(x):
    y = x.double()
    mean, rstd = y.mean(-1), (y.var(-1, correction=0) + 1e-5).rsqrt()
    return [((y - mean[..., None]) * rstd[..., None]).half(), torch.stack([mean, rstd], -1).float()]


def in_time(x, w, state):
    padded = torch.cat([state.double(), x.double().mT], -1)
    y = F.silu(F.conv1d(padded, w.double()[:, None], groups=len(w)))
    return [y.mT.half(), padded[..., -3:].half()]


def in_turn(x):
    m = (x.double() - x.double().amax(2, keepdim=True)).exp()
    for _ in range(20):
        m = m / m.sum(2, keepdim=True)
        m = m / m.sum(1, keepdim=True)
    return m.float()


def blocks_of(b, kept):
    return b.double() * kept.mT.repeat_interleave(32, 0).repeat_interleave(32, 1)


def of_points(x):
    tokens = x.view(x.shape[0] // 4, 4, -1, 4).transpose(1, 2).reshape(-1, 16)
    return [tokens.contiguous(), x]


def digits(rows, columns):
    """Rows of int16 numbers, whose upper bytes differ in pairs."""
    upper = torch.stack([torch.randperm(256)[:columns] - 128 for _ in range(rows)])
    return (upper * 256 + torch.randint(0, 256, upper.shape)).to(torch.int16)


def marked(x):
    least = x.sort(1, descending=True).values[:, 19:20]
    return [x >= least, torch.tensor([[20, 1]] * len(x), dtype=torch.int32)]


def dropped(x, g):
    """Draws of curand's Philox: 37 numbers of each row's own sequence."""
    draws = [[(word + 0.5) / 2**32 for word in sequence(99, row, 0, 37)] for row in range(3)]
    kept = (torch.tensor(draws, dtype=torch.float64) >= 0.25) / 0.75
    return [(x * kept).float(), (g * kept).float()]


def int8s(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


CASES = [
    Case("sequences.packed_attention", {"heads": 2, "dim": 32, "longest": 61},
         lambda: [*(halves(113, 2, 32) for _ in range(3)), torch.tensor([0, 61, 61, 80, 113], dtype=torch.int32)],
         packed, 1e-2, BOTH),
    Case("sequences.paged_decoding", {"heads": 20, "dim": 32, "page": 16, "most_pages": 4},
         lambda: [halves(3, 20, 32), halves(13, 16, 32), halves(13, 16, 32),
                  torch.randperm(13)[:12].view(3, 4).int(), torch.tensor([64, 17, 1], dtype=torch.int32)],
         of_pages, 1e-2, BOTH),
    Case("sequences.attention_with_sinks", {"length": 90, "heads": 2, "dim": 32, "window": 37},
         lambda: [floats(3, 2, 90, 32, dtype=BF), floats(2), torch.zeros(1, dtype=torch.int32)],
         with_sinks(37), 3e-2, BOTH),
    Case("sequences.chosen_blocks", {},
         lambda: [halves(7, 16, 32), halves(96, 32), halves(96, 32),
                  torch.stack([torch.randperm(6)[:3] for _ in range(7)]).int() - torch.arange(3).eq(1).int() * 9],
         of_blocks, 1e-2, BOTH),
    Case("sequences.joined_splits", {"heads": 3, "dim": 40, "splits": 4},
         lambda: [floats(4, 5, 3, 40), floats(4, 5, 3) * 4],
         lambda o, m: (o.double() * m.double().softmax(0)[..., None]).sum(0).float()),
    Case("sequences.attention_gradients", {"length": 96, "dim": 32}, lambda: [halves(96, 32) for _ in range(4)],
         gradients, 3e-2, BOTH),
    Case("sequences.scores_of_an_indexer", {"queries": 20, "keys": 70, "heads": 4, "dim": 64},
         lambda: [halves(80, 64) / 8, halves(70, 64), floats(20, 4)], indexed, 1e-2, BOTH),
    Case("sequences.retention", {"batch": 2, "length": 96, "heads": 2, "dim": 32},
         lambda: [halves(2, 96, 2, 32) / 4 for _ in range(3)], retained, 2e-2, BOTH),
    Case("sequences.chunk_states", {"chunks": 3, "size": 64, "rows": 32, "columns": 48},
         lambda: [floats(3, 64, 80, dtype=BF), -torch.rand(3, 64) / 8], states, 5e-2, BOTH),
    Case("sequences.appended_keys", {"heads": 3, "dim": 20},
         lambda: [halves(5, 4, 20)[:, :3].clone().as_strided((5, 3, 20), (60, 20, 1)),
                  torch.tensor([7, -1, 2, 0, 5]), halves(9, 3, 20)], appended, 0.0),
    Case("codes.float8_by_groups", {"M": 21, "N": 96}, lambda: [floats(21, 96, dtype=BF) * 9], by_groups, 0.0, BOTH),
    Case("codes.microscaled", {"N": 5, "K": 192},
         lambda: [torch.randint(0, 256, (5, 96), dtype=torch.uint8),
                  torch.randint(100, 140, (5, 6), dtype=torch.uint8)],
         fours, 0.0, on_cpu=False),
    Case("codes.ternary_product", {"M": 50, "N": 40, "K": 128},
         lambda: [int8s(50, 128), int8s(40, 32), torch.rand(1)], ternary, 1e-6, BOTH),
    Case("codes.products_of_four", {"N": 9, "K": 256}, lambda: [int8s(256), int8s(9, 256)],
         lambda a, b: (b.int() @ a.int()), 0.0, on_cpu=False),
    Case("codes.scaled_integers", {"M": 70, "N": 64, "K": 128},
         lambda: [int8s(70, 128), int8s(64, 128), torch.rand(134) / 99, halves(64)],
         lambda a, b, s, c: (a.double() @ b.double().T * s[:70, None].double() * s[70:].double() + c).half(),
         1e-2, BOTH),
    Case("codes.signs_as_bits", {}, lambda: [halves(150)], words, 0.0, on_cpu=False),
    Case("codes.hadamard", {"rows": 3, "n": 256}, lambda: [floats(3, 256)], walsh, 1e-4, on_cpu=False),
    Case("experts.routed", {"tokens": 7, "experts": 32, "groups": 4, "kept_groups": 2, "top": 5},
         lambda: [floats(7, 32)], best(4, 2, 5), 1e-5, BOTH),
    Case("experts.sorted_by_expert", {"N": 300, "experts": 10},
         lambda: [torch.randint(0, 10, (300,), dtype=torch.int32)],
         lambda x: [F.pad(torch.bincount(x, minlength=10).cumsum(0), (1, 0)).int(), x.sort().values], 0.0),
    Case("experts.gated_expert", {}, lambda: [halves(40, 64), *(halves(64, 96) / 8 for _ in "ug"), halves(96, 64) / 8],
         expert, 2e-2, BOTH),
    Case("experts.block_sparse_product", {"M": 50, "N": 64, "K": 96},
         lambda: [halves(50, 96), halves(96, 64), torch.rand(2, 3) < 0.6],
         lambda a, b, kept: (a.double() @ blocks_of(b, kept)).half(), 2e-2, BOTH),
    Case("experts.sparse_rows", {"rows": 11}, lambda: compressed(11, 90), compressed_product, 1e-4, on_cpu=False),
    Case("experts.triangular_solve", {"batch": 2, "size": 20, "columns": 24},
         lambda: [floats(2, 20, 20) / 8, floats(2, 20, 24)], solved),
    Case("experts.largest_by_digits", {"rows": 3, "N": 200, "top": 20}, lambda: [digits(3, 200)], marked, 0.0,
         on_cpu=False),
    Case("training.adam", {}, lambda: [torch.tensor([3], dtype=torch.int32), floats(300, dtype=BF), floats(300),
                                       floats(300), torch.rand(300)], adam, 1e-4),
    Case("training.norm_of_groups", {"batch": 2, "groups": 3, "size": 150}, lambda: [halves(2, 3, 150)], normed, 1e-2),
    Case("training.largest_of_windows", {"images": 2, "height": 9, "width": 12, "channels": 3},
         lambda: [floats(2, 3, 9, 12)], lambda x: list(F.max_pool2d(x, 3, 2, return_indices=True)), 0.0),
    Case("training.convolved_in_time", {"batch": 2, "length": 9, "channels": 21},
         lambda: [halves(2, 9, 21), floats(21, 4), halves(2, 21, 3)], in_time, 1e-2, on_cpu=False),
    Case("training.doubly_normalized", {"batch": 3, "n": 4}, lambda: [floats(3, 4, 4)], in_turn, 1e-4),
    Case("training.product_of_doubles", {"M": 20, "N": 33, "K": 40},
         lambda: [*(torch.randn(s, dtype=torch.float64) for s in ((20, 40), (40, 33), (20, 33))), 0.3, -1.7],
         lambda a, b, c, x, y: x * a @ b + y * c, 1e-12, BOTH),
    Case("training.complex_product", {"N": 100}, lambda: [floats(100, 2), floats(100, 2)],
         lambda a, b: torch.view_as_real(torch.view_as_complex(a.double()) * torch.view_as_complex(b.double()))
         .float()),
    Case("training.dropped_again", {"M": 3, "N": 37}, lambda: [floats(3, 37), floats(3, 37)], dropped, 1e-5),
    Case("training.tiles_of_tokens", {"height": 12, "width": 20},
         lambda: [torch.randint(-99, 99, (12, 20), dtype=torch.int32)], of_points, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.on_cpu], ids=lambda c: c.name)
def test_on_the_cpu(case):
    run(case, "cpu")


@pytest.mark.parametrize(("case", "target"), [pytest.param(c, t, id=f"{c.name}-{t}") for c in CASES for t in c.targets])
def test_thread_by_thread(case, target):
    run(case, target)
