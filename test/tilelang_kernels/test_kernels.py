# SPDX-License-Identifier: Apache-2.0
"""Kernels in TileLang's styles, whose files import tilelang: run as they are, on the CPU and thread by thread."""

import pytest
import torch
import torch.nn.functional as F

from test.tilelang_kernels.cases import BF, BOTH, Case, H, floats, halves, run
from torch_tile.utils.sparse import compress, randn_semi_sparse


def rotated(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1).half()


def sparse_operands():
    dense = randn_semi_sparse(64, 64, torch.float16, "cpu")
    return [*compress(dense), halves(64, 32)]


def sparse_product(kept, places, b):
    groups = torch.stack([places.int() >> 4 * n & 15 for n in range(4)], -1).reshape(64, 16)
    which = torch.stack([groups & 3, groups >> 2], -1).long()
    dense = torch.zeros(64, 16, 4).scatter(2, which, kept.float().reshape(64, 16, 2))
    return dense.reshape(64, 64) @ b.float()


def averaged(a):
    b = a.clone()
    b[1:-1, 1:-1] = (a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]) / 4
    return b


def quantized(x):
    scale = x.abs().amax(1).clamp(min=1e-4) / 127
    return [scale, (x / scale[:, None]).round().clamp(-127, 127).to(torch.int8)]


def scaled_product(a, b, s, t):
    a, b = (x.float() * y.repeat_interleave(32, 1) for x, y in ((a, s), (b, t)))
    return (a @ b.T).to(torch.bfloat16)


def eighths(*shape):
    return floats(*shape).to(torch.float8_e4m3fn)


def grouped(sizes):
    def reference(a, b):
        return torch.cat([x.float() @ y.float() for x, y in zip(a.split(sizes), b, strict=True)]).half()

    return reference


def gathered(x, w, rows):
    return torch.stack([x[i.long()].float() @ m.float().T for i, m in zip(rows, w, strict=True)]).half()


def convolved(S, D, P):
    def reference(x, w):
        x, w = x.float().permute(0, 3, 1, 2), w.float().permute(3, 2, 0, 1)
        return F.conv2d(x, w, stride=S, dilation=D, padding=P).permute(0, 2, 3, 1).half()

    return reference


def attended(how):
    def reference(q, k, v):
        q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(how.get("groups", 1), 1) for x in (k, v))
        apart = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        if how["is_causal"]:
            seen = apart >= 0
        elif how.get("window"):
            seen = (apart >= 0) & (apart < how["window"])
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).half()

    return reference


def block_sparse(q, k, v, mask):
    seen = mask.bool().repeat_interleave(32, 2).repeat_interleave(32, 3)
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), seen).half()


def latent(q, q_pe, kv, k_pe):
    keys = torch.cat([kv, k_pe], -1)[:, :, 0].float()
    scores = torch.cat([q, q_pe], -1).float() @ keys.transpose(1, 2) * 80**-0.5
    return (scores.softmax(-1) @ kv[:, :, 0].float()).half()


def linear(q, k, v):
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(2, 3)).tril() @ v).transpose(1, 2).half()


def scanned(a, x):
    h = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h[:, t] = x[:, t] + (a[:, t] * h[:, t - 1] if t else 0)
    return h


def conditioned(a):
    """What Python makes of the statements of `python_conditions`."""
    found = []
    for i, x in enumerate(a.tolist()):
        x = (x + 3 - i) * 2
        if -5 <= x < 20 and not (x % 3 == 0 or i == 7):
            x //= 3
        elif x < -30:
            x %= 7
        else:
            x ^= 5
        x = x << 1 | 1
        found.append(x if x > 4 else -x)
    return torch.tensor(found, dtype=torch.int32)


def delta(q, k, v, beta):
    state, out = torch.zeros(q.shape[0], q.shape[2], v.shape[2]), torch.zeros_like(v)
    for t in range(q.shape[1]):
        seen = beta[:, t, None] * (v[:, t] - torch.einsum("bi,bij->bj", k[:, t], state))
        state = state + torch.einsum("bi,bj->bij", k[:, t], seen)
        out[:, t] = torch.einsum("bi,bij->bj", q[:, t], state)
    return out


CASES = [
    Case("elementwise.add", {}, lambda: [floats(50, 70), floats(50, 70)], lambda a, b: a + b),
    Case("elementwise.vector_add_dynamic", {}, lambda: [floats(1000), floats(1000)], lambda a, b: a + b),
    Case("elementwise.gelu", {"N": 1000}, lambda: [halves(1000)], F.gelu, 2e-3),
    Case("elementwise.swiglu", {"M": 20, "N": 100}, lambda: [floats(20, 200, dtype=BF)],
         lambda x: (F.silu(x[:, :100].float()) * x[:, 100:].float()).to(BF), 2e-2),
    Case("elementwise.transpose", {"M": 50, "N": 70}, lambda: [floats(50, 70)], lambda a: a.T.contiguous()),
    Case("elementwise.rope", {"seq": 9, "heads": 3, "dim": 16},
         lambda: [halves(9, 3, 16), floats(9, 8), floats(9, 8)],
         rotated, 2e-2),
    Case("elementwise.embedding", {"rows": 11, "vocabulary": 20, "dim": 40},
         lambda: [torch.randint(-1, 20, (11,), dtype=torch.int32), floats(20, 40)],
         lambda i, t: torch.where(i[:, None] >= 0, t[i.clamp(min=0)], 0)),
    Case("elementwise.stencil", {"M": 30, "N": 50}, lambda: [floats(30, 50)],
         averaged),
    Case("elementwise.quantize_rows", {"M": 12, "N": 64}, lambda: [floats(12, 64)], quantized),
    Case("rows.rms_norm", {"M": 10, "N": 128}, lambda: [halves(10, 128), halves(128)],
         lambda x, w: (F.rms_norm(x.float(), (128,), eps=1e-6) * w.float()).half(), 1e-2),
    Case("rows.rms_norm_split", {"M": 10, "N": 150}, lambda: [floats(10, 150)],
         lambda x: F.rms_norm(x, (150,), eps=1e-6)),
    Case("rows.layer_norm", {"M": 7, "N": 96}, lambda: [floats(7, 96), floats(96), floats(96)],
         lambda x, w, b: [*torch.native_layer_norm(x, (96,), w, b, 1e-5)[:1], x.mean(1),
                          (x.var(1, unbiased=False) + 1e-5).rsqrt()]),
    Case("rows.online_softmax", {"M": 6, "N": 192}, lambda: [halves(6, 192)],
         lambda x: x.float().softmax(-1).half(), 1e-2),
    Case("rows.row_sums", {"M": 30, "N": 200}, lambda: [floats(30, 200)], lambda a: a.sum(1)),
    Case("rows.column_extrema", {"M": 24, "N": 40}, lambda: [floats(24, 40)], lambda a: [a.amin(0), a.amax(0)]),
    Case("rows.cumulative_sums", {"M": 12, "N": 64}, lambda: [floats(12, 64)], lambda a: a.cumsum(1)),
    Case("rows.cumulative_sums", {"M": 12, "N": 64, "reverse": True}, lambda: [floats(12, 64)],
         lambda a: a.flip(1).cumsum(1).flip(1)),
    Case("rows.top_k", {"M": 12, "N": 32, "topk": 4}, lambda: [torch.rand(12, 32).argsort(1).float()],
         lambda x: [x.topk(4).values, x.topk(4).indices.int()]),
    Case("rows.cross_entropy", {"M": 9, "V": 150},
         lambda: [floats(9, 150), torch.randint(0, 150, (9,), dtype=torch.int32)],
         lambda x, y: F.cross_entropy(x, y.long(), reduction="none")),
    Case("rows.histogram", {"N": 500, "bins": 20}, lambda: [torch.randint(0, 20, (500,), dtype=torch.int32)],
         lambda x: torch.bincount(x, minlength=20).int()),
    Case("rows.argmax", {"M": 5, "N": 40}, lambda: [floats(5, 40)], lambda a: a.argmax(1).int()),
    Case("rows.bitonic_sort", {"N": 64}, lambda: [floats(64)], lambda a: a.sort().values),
    Case("products.matmul_relu", {}, lambda: [halves(100, 80), halves(80, 72)],
         lambda a, b: (a.float() @ b.float()).relu().half(), 5e-2, BOTH),
    *[Case("products.matmul", {"M": 80, "N": 72, "K": 64, "trans_A": ta, "trans_B": tb},
           lambda ta=ta, tb=tb: [floats(*((64, 80) if ta else (80, 64)), dtype=H),
                                 floats(*((72, 64) if tb else (64, 72)), dtype=H)],
           lambda a, b, ta=ta, tb=tb: (a.T if ta else a).float() @ (b.T if tb else b).float(), 1e-2, BOTH)
      for ta in (False, True) for tb in (False, True)],
    Case("products.matmul", {"M": 64, "N": 64, "K": 64, **dict.fromkeys(("out_dtype", "accum_dtype"), "int32"),
                             "in_dtype": "int8"},
         lambda: [torch.randint(-9, 9, (64, 64), dtype=torch.int8) for _ in range(2)],
         lambda a, b: a.int() @ b.int().T, 0),
    Case("products.matmul", {"M": 64, "N": 64, "K": 64, "in_dtype": "float32"},
         lambda: [floats(64, 64), floats(64, 64)], lambda a, b: a @ b.T, 2e-2),
    Case("products.matmul_bias_gelu", {"M": 64, "N": 128, "K": 64},
         lambda: [halves(64, 64) / 8, halves(64, 128), floats(128)],
         lambda a, b, c: (x := a.float() @ b.float() + c) * torch.sigmoid(1.702 * x), 1e-2),
    Case("products.matmul_split_k", {"M": 64, "N": 64, "K": 256},
         lambda: [halves(64, 256), halves(64, 256), torch.zeros(64, 64)],
         lambda a, b, c: a.float() @ b.float().T, 2e-2, BOTH),
    Case("products.matmul_stream_k", {"M": 70, "N": 64, "K": 128},
         lambda: [halves(70, 128), halves(64, 128), torch.zeros(70, 64)],
         lambda a, b, c: a.float() @ b.float().T, 2e-2),
    Case("products.matmul_persistent", {"M": 100, "N": 70, "K": 64},
         lambda: [halves(100, 64), halves(64, 70)],
         lambda a, b: (a.float() @ b.float()).half(), 5e-2, BOTH),
    Case("products.matmul_batched", {"batch": 3, "M": 40, "N": 50, "K": 64},
         lambda: [floats(3, 40, 64, dtype=BF), floats(3, 64, 50, dtype=BF)],
         lambda a, b: a.float() @ b.float(), 1e-2),
    Case("products.matmul_grouped", {"sizes": (20, 40, 7), "N": 64, "K": 64},
         lambda: [halves(67, 64), halves(3, 64, 64)],
         grouped([20, 40, 7]), 5e-2),
    Case("products.matmul_gathered", {"tokens": 30, "experts": 2, "picked": 20, "N": 64, "K": 64},
         lambda: [halves(30, 64), halves(2, 64, 64), torch.randint(0, 30, (2, 20), dtype=torch.int32)],
         gathered, 5e-2),
    Case("products.matmul_int4", {"M": 40, "N": 64, "K": 128},
         lambda: [halves(40, 128), torch.randint(0, 256, (64, 64), dtype=torch.uint8)],
         lambda a, b: a.float() @ (torch.stack([b & 15, b >> 4], -1).flatten(1).float() - 8).T, 5e-2),
    Case("products.matmul_scaled", {"M": 40, "N": 64, "K": 96},
         lambda: [eighths(40, 96), eighths(64, 96), floats(40, 3), floats(64, 3)],
         scaled_product, 5e-2, ("cuda:sm_90a",)),
    Case("products.gemv", {"N": 20, "K": 512}, lambda: [halves(512), halves(20, 512)],
         lambda a, b: b.float() @ a.float(), 1e-2, on_cpu=False),
    Case("products.gemv_shared", {"N": 64, "K": 128}, lambda: [halves(128), halves(64, 128)],
         lambda a, b: (b.float() @ a.float()).half(), 2e-2, on_cpu=False),
    *[Case("products.convolution", dict(zip("NCHWFKSDP", sizes, strict=True)),
           lambda sizes=sizes: [halves(*(sizes[d] for d in dims)) / 2 for dims in ((0, 2, 3, 1), (5, 5, 1, 4))],
           convolved(*sizes[6:]), 5e-2)
      for sizes in ((2, 16, 9, 8, 32, 3, 1, 1, 1), (1, 32, 10, 10, 24, 3, 2, 1, 0))],
    Case("products.matmul_roles", {"M": 64, "N": 128, "K": 128},
         lambda: [halves(64, 128), halves(128, 128)],
         lambda a, b: a.float() @ b.float(), 2e-2, ("cuda:sm_90a",), on_cpu=False),
    *[Case("attention.flash_attention", {"batch": 1, "heads": 2, "seq_len": 70, "dim": 32, **more},
           lambda more=more: [halves(1, 70, n, 32) for n in (2, *[2 // more.get("groups", 1)] * 2)],
           attended(more), 2e-2, BOTH)
      for more in ({"is_causal": False}, {"is_causal": True, "groups": 2}, {"is_causal": False, "window": 20},
                   {"is_causal": True, "block_M": 64, "threads": 128, "num_stages": 2})],
    Case("attention.flash_decoding", {"batch": 2, "heads": 8, "groups": 4, "length": 150, "dim": 32},
         lambda: [halves(2, 8, 32), halves(2, 150, 2, 32), halves(2, 150, 2, 32), torch.empty(2, 8, 3),
                  torch.empty(2, 8, 3, 32)],
         lambda q, k, v, *_: attended({"is_causal": False, "groups": 4})(q[:, None], k, v)[:, 0], 2e-2),
    Case("attention.block_sparse_attention", {"batch": 1, "heads": 2, "length": 96, "dim": 32},
         lambda: [*(halves(1, 2, 96, 32) for _ in range(3)), torch.ones(1, 2, 3, 3, dtype=torch.int8).tril()],
         block_sparse, 2e-2),
    Case("attention.latent_decoding", {"batch": 2, "heads": 16, "length": 64, "dim": 64, "rope_dim": 16},
         lambda: [halves(2, 16, 64), halves(2, 16, 16), halves(2, 64, 1, 64), halves(2, 64, 1, 16)],
         latent, 2e-2, BOTH),
    Case("attention.linear_attention", {"batch": 2, "length": 64, "heads": 2, "dim": 32},
         lambda: [halves(2, 64, 2, 32) / 4 for _ in range(3)], linear, 2e-2),
    Case("attention.gated_scan", {"batch": 2, "length": 9, "dim": 100},
         lambda: [torch.rand(2, 9, 100), floats(2, 9, 100)], scanned),
    Case("attention.delta_rule", {"batch": 2, "length": 5, "dim": 32},
         lambda: [*(floats(2, 5, 32) / 5 for _ in range(3)), torch.rand(2, 5)], delta),
    Case("forms.loops_without_a_kernel", {"M": 5, "N": 7}, lambda: [floats(5, 7)], lambda a: a.sum()[None]),
    Case("forms.one_block", {"N": 100}, lambda: [floats(100)], lambda a: a.flip(0)),
    Case("forms.two_launches", {"M": 8, "N": 50}, lambda: [floats(8, 50)], lambda a: 2 * a.sum(0)),
    Case("forms.roles_by_hand", {"M": 16, "N": 100}, lambda: [halves(16, 100)], lambda a: a + 1, 1e-2, BOTH,
         on_cpu=False),
    Case("forms.fibonacci", {"N": 8}, list, lambda: torch.tensor([0, 1, 1, 2, 3, 5, 8, 13], dtype=torch.int32)),
    Case("forms.reversed_in_place", {"N": 64}, lambda: [floats(64)], lambda a: a.flip(0)),
    Case("forms.squares_in_parallel", {"batch": 3, "N": 32}, lambda: [halves(3, 32, 32)],
         lambda a: a.float() @ a.float(), 2e-2),
    Case("forms.conditioned_sums", {"M": 8, "N": 40}, lambda: [floats(8, 40)], lambda a: a.clamp(min=0).sum(1)),
    Case("newer_forms.planned_row_sums", {"M": 32, "K": 40}, lambda: [floats(32, 40)], lambda a: a.sum(1)),
    Case("newer_forms.largest_by_copy_groups", {"N": 100}, lambda: [floats(100)], lambda a: a.max()[None]),
    Case("newer_forms.persistent_scale", {"M": 40, "N": 72}, lambda: [floats(40, 72)], lambda a: a * 2),
    Case("newer_forms.turned_by_tile_numbers", {"M": 40, "N": 24}, lambda: [halves(40, 24)], lambda a: a.mT),
    Case("newer_forms.stages_of_one_layout", {"M": 48, "N": 64}, lambda: [halves(48, 64)],
         lambda a: a.float().reshape(3, 16, 64).sum(0)),
    Case("newer_forms.places_and_back", {"N": 96}, lambda: [floats(8, 12)], lambda a: a.flip(0, 1)),
    Case("newer_forms.saturated_rows", {"M": 3, "N": 40}, lambda: [floats(3, 40) * 400],
         lambda a: torch.cat([a, torch.full((1, 40), 1e6)]).clamp(-448, 448).to(torch.float8_e4m3fn), 0.0),
    Case("newer_forms.shifted_rows_of_any_length", {}, lambda: [floats(3, 70)], lambda a: a.roll(-1, 1)),
    Case("newer_forms.half_of_the_columns", {"M": 64, "N": 32, "K": 64}, sparse_operands, sparse_product, 2e-2),
    Case("mixed_forms.ring_of_tiles", {"M": 32, "K": 160}, lambda: [floats(32, 160)], lambda a: a.sum(1), targets=BOTH),
    Case("mixed_forms.python_conditions", {"N": 50}, lambda: [torch.randint(-40, 40, (50,), dtype=torch.int32)],
         conditioned, 0.0),
    Case("mixed_forms.tiles_in_objects", {"M": 12, "N": 20}, lambda: [floats(12, 20)], lambda a: (a * a).mean(0)),
    Case("mixed_forms.swapped_variables", {"N": 6}, lambda: [torch.tensor([2, 1], dtype=torch.int32)],
         lambda s: torch.tensor([2, 1, 3, 4, 7, 11], dtype=torch.int32), 0.0),
    Case("mixed_forms.patches", {}, lambda: [floats(2, 7, 7, 4)],
         lambda x: F.unfold(x.permute(0, 3, 1, 2), 3, padding=1, stride=2).view(2, 4, 9, 16).permute(0, 3, 2, 1)
         .reshape(2, 16, 36), 0.0),
    Case("mixed_forms.normalized_by_two_launches", {"M": 16, "N": 64}, lambda: [floats(16, 64)],
         lambda a: (a - a.mean()) / a.std(correction=0), targets=BOTH),
    Case("mixed_forms.sums_up_to_the_diagonal", {}, lambda: [halves(64, 96)],
         lambda a: torch.stack([a[i * 16 : i * 16 + 16, : (i + 1) * 24].float().sum() for i in range(4)]), 2e-2, BOTH),
    Case("mixed_forms.decoded_by_scales", {"M": 3, "N": 512},
         lambda: [torch.randint(0, 256, (3, 256), dtype=torch.uint8), halves(3, 16)],
         lambda a, s: ((torch.stack([a & 15, a >> 4], -1).flatten(1).float() - 8).view(3, 16, 32)
                       * s[..., None].float()).view(3, 512).half(), 0.0),
    Case("newer_forms.counted_signs", {"N": 70}, lambda: [floats(70)], lambda a: a.sign().int()),
]  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.on_cpu], ids=lambda c: c.name)
def test_on_the_cpu(case):
    run(case, "cpu")


@pytest.mark.parametrize(("case", "target"), [pytest.param(c, t, id=f"{c.name}-{t}") for c in CASES for t in c.targets])
def test_thread_by_thread(case, target):
    run(case, target)
