# SPDX-License-Identifier: Apache-2.0
"""For every kernel of the library small ragged problems that it is chosen for, and what comes of them in float64."""

import random
from collections.abc import Callable


class Problems:
    """Draws tensors on the host, in a few orders of memory, and copies them to the GPU."""

    def __init__(self, seed: int):
        import torch

        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, *options):
        return self.random.choice(options)

    def size(self, most):
        """A size that no tile divides, most of the time."""
        return self.random.randint(max(1, most // 3), most)

    def tensor(self, *shape, dtype, layout=None):
        """Dense; at an odd place in something larger; or with rows that have gaps of a few elements."""
        import torch

        layout = layout or self.pick("dense", "dense", "odd", "gaps")
        extra, first = {"dense": (0, 0), "odd": (3, 1), "gaps": (8, 0)}[layout]
        whole = torch.randn([n + extra for n in shape], generator=self.generator).to(dtype)
        return whole.cuda()[tuple(slice(first, first + n) for n in shape)]


def half(dtype):
    """Kernels for tensor cores take 16-bit types."""
    import torch

    return torch.float16 if dtype == torch.float32 else dtype


def wide(*xs):
    """On the host, in float64."""
    return [None if x is None else x.cpu().double() if x.is_floating_point() else x.cpu() for x in xs]


def product(p, dtype, number, m, n, k, turned):
    """`gelu(a b + row) * full`, once in batches."""
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.gemm import gemm

    lead = (2,) if number == 1 else ()
    a = p.tensor(*lead, m, k, dtype=dtype)
    b = p.tensor(*lead, n, k, dtype=dtype).mT if turned else p.tensor(*lead, k, n, dtype=dtype)
    aux = [p.tensor(n, dtype=torch.float32), p.tensor(*lead, m, n, dtype=dtype)]
    text = "v=add(acc0,x0);w=gelu(v);y=mul(w,x1);ret y"
    got = torch.ops.tile.gemm(a, [b], aux, "rt", text, dtype)
    return [got], [gemm.reference(*wide(a), wide(b), wide(*aux), "rt", text, torch.float64)]


def matmul(p, dtype, number):
    unit = 8 if number == 2 else 1  # which 16-byte accesses divide
    m, n, k = (unit * p.size(most // unit) for most in (200, 200, 100))
    return product(p, dtype, number, m, n, k, p.pick(True, False))


def split_matmul(p, dtype, number):
    return product(p, dtype, 0, p.size(60), p.size(60), p.pick(1600, 1500 + p.size(300)), p.pick(True, False))


def cluster_matmul(p, dtype, number):
    return product(p, half(dtype), 0, p.size(16), 448 + p.size(64), 2048 + 8 * p.size(20), p.pick(True, False))


def persistent_matmul(p, dtype, number):
    """More tiles than a GPU has multiprocessors."""
    return product(p, half(dtype), 0, 1536 - 8 * p.size(9), 3328 - 8 * p.size(9), 8 * p.size(20), p.pick(True, False))


def row_times_matrix(p, dtype, number):
    return product(p, dtype, 0, 1, p.size(100), p.pick(512, p.size(900)), True)


def grouped_product(p, dtype, rows, columns, k):
    import torch

    from torch_tile.kernels.gemm import grouped, grouped_wgrad

    ends = torch.tensor(sorted(p.random.randint(0, rows) for _ in range(4)), dtype=torch.int32)
    if k is None:  # summed over rows
        a, b = (p.tensor(rows, columns, dtype=dtype) for _ in "ab")
        want = grouped_wgrad.reference(*wide(a, b), ends, torch.float64)
        return [torch.ops.tile.k_grouped_gemm(a, b, ends.cuda(), dtype)], [want]
    a, b = p.tensor(rows, k, dtype=dtype), p.tensor(4, columns, k, dtype=dtype).mT
    want = grouped.reference(*wide(a), wide(b), ends, [], "", "", torch.float64)
    return [torch.ops.tile.grouped_gemm(a, [b], ends.cuda(), [], "", "", dtype)], [want]


def grouped_matmul(p, dtype, number):
    return grouped_product(p, dtype, (40, 100, 300)[number], 8 * p.size(20), 8 * p.size(20))


def persistent_grouped_matmul(p, dtype, number):
    return grouped_product(p, half(dtype), 1500, 3328 - 8 * p.size(9), 8 * p.size(20))


def k_grouped_matmul(p, dtype, number):
    return grouped_product(p, dtype, p.size(400), 8 * p.size(18), None)


def persistent_k_grouped_matmul(p, dtype, number):
    return grouped_product(p, half(dtype), p.size(400), 1544 - 8 * p.size(9), None)


def sdpa(p, dtype, number, keys):
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.attention import forward as attention

    queries, d, groups = p.size(150), p.pick(64, 64, 40), (1, 2, 4)[number]
    q = p.tensor(1, 2 * groups, queries, d, dtype=dtype)
    k, v = (p.tensor(1, 2, keys, d, dtype=dtype) for _ in "kv")
    mask = None
    if number == 1:
        mask = (torch.rand(queries, keys, generator=p.generator) > 0.3).cuda()
    options = number == 0, None, 30 if number == 2 else 0, max(0, keys - queries)
    got = torch.ops.tile.attention_lse(q, k, v, mask, *options)
    return got, attention.reference(*wide(q, k, v, mask), *options)


def flash_attention(p, dtype, number):
    return sdpa(p, dtype, number, p.size(120))


def combine(p, dtype, number):
    return sdpa(p, dtype, number, 1100 + p.size(100))


def query_gradients(p, dtype, number):
    """Those of keys and values, too, which are another kernel."""
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.attention import backward, forward as attention

    queries, keys, d, groups = p.size(150), p.size(150), p.pick(64, 40), (1, 2, 4)[number]
    q, grad = (p.tensor(1, 2 * groups, queries, d, dtype=dtype) for _ in "qg")
    k, v = (p.tensor(1, 2, keys, d, dtype=dtype) for _ in "kv")
    options = None, number == 0, None, 30 if number == 2 else 0, max(0, keys - queries)
    # By the host: initcheck does not see what attention stores in bulk.
    out, lse = (x.cpu().cuda() for x in torch.ops.tile.attention_lse(q, k, v, *options))
    got = torch.ops.tile.attention_backward(grad, q, k, v, out, lse, *options)
    exact = attention.reference(*wide(q, k, v), *options)[1]
    return got, backward.reference(*wide(grad, q, k, v, out), exact, *options)


def flash_mla(p, dtype, number):
    import torch_tile.ops  # noqa: F401

    heads, (latent, rotary), page = p.pick(7, 16), p.pick((128, 64), (64, 16), (24, 5)), (0, 64, 17)[number]
    return decoded(p, dtype, heads, latent, rotary, page)


def flash_mla_hopper(p, dtype, number):
    """Sequences, and units of a schedule."""
    import torch_tile.ops  # noqa: F401

    heads, latent, page = p.pick(37, 64), p.pick(128, 512), (0, 64, 128)[number]
    (got, want), (others, exact) = (f(p, dtype, heads, latent, 64, page) for f in (decoded, scheduled))
    return (*got, *others), (*want, *exact)


def decoded(p, dtype, heads, latent, rotary, page):
    import torch

    from torch_tile.kernels.mla import decode as mla_decode

    covered = 3 * page if page else 200
    rows = (8, page) if page else (2, covered)
    q, q_pe = (p.tensor(2, p.pick(1, 2), heads, n, dtype=dtype) for n in (latent, latent))
    q, q_pe = q[:, :1], q_pe[:, :1, :, :rotary]
    kv, k_pe = (p.tensor(*rows, n, dtype=dtype, layout="dense") for n in (latent, rotary))
    lens = torch.tensor([covered - p.size(40), p.size(covered)], dtype=torch.int32).cuda()
    table = torch.randperm(8, generator=p.generator)[:6].reshape(2, 3).int().cuda() if page else None
    got = torch.ops.tile.mla_decode_lse(q, q_pe, kv, k_pe, table, lens, None, p.pick(0, 1, 2))
    return got, mla_decode.reference(*wide(q, q_pe, kv, k_pe, table, lens))


def plan_units(p, dtype, number):
    """And what its plan is for: sequences by units, whose parts are joined."""
    latent, rotary, page = ((512, 64, 64), (128, 64, 0), (24, 5, 17))[number]
    return scheduled(p, dtype, p.pick(7, 16), latent, rotary, page)


def scheduled(p, dtype, heads, latent, rotary, page):
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.mla import decode as mla_decode

    batch, columns = mla_decode.EVENLY_SPLIT + 1, -(-300 // page) if page else 0  # fewer take no schedule
    rows = (batch * columns + 1, page) if page else (batch, 300)
    q, q_pe = (p.tensor(batch, 1, heads, n, dtype=dtype, layout="dense") for n in (latent, rotary))
    kv, k_pe = (p.tensor(*rows, n, dtype=dtype, layout="dense") for n in (latent, rotary))
    lens = torch.tensor([p.pick(0, 1, 64, p.size(300)) for _ in range(batch)], dtype=torch.int32).cuda()
    order = torch.randperm(rows[0], generator=p.generator)[: batch * columns]
    table = order.reshape(batch, -1).int().cuda() if page else None
    schedule = torch.ops.tile.mla_schedule(lens, heads, p.pick(2, 3, 7))
    got = torch.ops.tile.mla_decode_lse(q, q_pe, kv, k_pe, table, lens, None, 0, schedule)
    return got, mla_decode.reference(*wide(q, q_pe, kv, k_pe, table, lens))


def rms_norm_rows(p, dtype, number):
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.norm import norm

    n = (p.size(900), 8 * p.size(100), 40_000 + p.size(999))[number]
    x, other = (p.tensor(p.size(9) if number < 2 else 2, n, dtype=dtype, layout="dense") for _ in range(2))
    other, weight = other[:1].expand_as(x), p.tensor(n, dtype=dtype)
    y, total = torch.ops.tile.add_rms_norm(x, other, weight, 1e-6, "silu")
    return [y], [norm.rms_norm_reference(*wide(total, weight), None, 1e-6, "silu")[0]]


def layer_norm_rows(p, dtype, number):
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.norm import norm

    n = (p.size(900), 8 * p.size(100), 40_000 + p.size(999))[number]
    x, weight, bias = p.tensor(p.size(9), n, dtype=dtype), *(p.tensor(n, dtype=dtype) for _ in "wb")
    return [torch.ops.tile.layer_norm(x, weight, bias)], [norm.layer_norm_reference(*wide(x, weight, bias))]


def fused_norm_rows(p, dtype, number):
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.norm import fused as fused_norm

    n = (p.size(900), 8 * p.size(100), 40_000 + p.size(999))[number]
    x, y = (p.tensor(2, p.size(9) if number < 2 else 1, n, dtype=dtype, layout="dense") for _ in "xy")
    y = y[:, :1].expand_as(x)
    aux = [y, *(p.tensor(2, 1, n, dtype=dtype) for _ in range(2)), p.tensor(n, dtype=dtype)]
    prologue, epilogue = "v0=mul(x0,x1);v1=add(acc0,v0);ret v1", "v0=mul(acc0,x2);v1=add(v0,x3);ret v1"
    options = "tggr", prologue, epilogue, number != 1, 1e-5, True
    got = torch.ops.tile.fused_norm(x, aux, *options, dtype)
    return got, fused_norm.reference(*wide(x), wide(*aux), *options, torch.float64)


def dequant_product(p, dtype, m, n, k):
    import torch

    import torch_tile.ops  # noqa: F401
    from torch_tile.kernels.gemm import dequant as dequant_gemm

    a, scale = p.tensor(m, k, dtype=dtype), p.tensor(n, k // 32, dtype=dtype) / 4
    words = torch.randint(0, 256, (n, k // 2), generator=p.generator, dtype=torch.uint8).cuda()
    scheme = 4, p.pick(True, False), 7
    got = torch.ops.tile.dequant_gemm(a, [words], [scale], [], *scheme, [], "", "", dtype)
    return [got], [dequant_gemm.reference(*wide(a), [words.cpu()], wide(scale), [], *scheme, [], "", "", torch.float64)]


def dequant_matmul(p, dtype, number):
    return dequant_product(p, dtype, (1, 70, 150)[number], p.size(200), 32 * p.size(8))


def split_dequant_matmul(p, dtype, number):
    return dequant_product(p, half(dtype), 16 + p.size(16), p.size(60), 32 * p.pick(100, 60 + p.size(60)))


def cluster_dequant_matmul(p, dtype, number):
    return dequant_product(p, half(dtype), p.size(16), p.size(60), 32 * p.pick(100, 60 + p.size(60)))


def softmax_rows(p, dtype, number):
    import torch

    import torch_tile.ops  # noqa: F401

    shape, dim = [((3, p.size(9), p.size(900)), -1), ((p.size(90), 5, p.size(9)), 0), ((2, 40_001), 1)][number]
    x = p.tensor(*shape, dtype=dtype)
    return [torch.ops.tile.softmax(x, dim)], [torch.softmax(*wide(x), dim)]


KERNELS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        matmul, split_matmul, cluster_matmul, persistent_matmul, row_times_matrix, grouped_matmul,
        persistent_grouped_matmul, k_grouped_matmul, persistent_k_grouped_matmul, dequant_matmul, split_dequant_matmul,
        cluster_dequant_matmul, flash_attention, combine, query_gradients, flash_mla, flash_mla_hopper, plan_units,
        rms_norm_rows, layer_norm_rows, fused_norm_rows, softmax_rows,
    )
}  # fmt: skip
