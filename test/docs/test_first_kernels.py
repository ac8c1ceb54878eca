# SPDX-License-Identifier: Apache-2.0
"""Kernels written from the README and the site alone, as they stood at the first run; each is compared with torch."""

from itertools import pairwise

import torch
import torch.nn.functional as F

import torch_tile
import torch_tile.language as T


def test_stencil_halo() -> None:
    R = 2

    @torch_tile.jit
    def f(A, bm=16, bn=32):
        M, N = T.const("M, N")
        A: T.Tensor((M, N), "float32")
        B = T.empty((M, N), "float32")
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
            s = T.alloc_shared((bm + 2 * R, bn + 2 * R), "float32")
            for i, j in T.Parallel(bm + 2 * R, bn + 2 * R):
                r = by * bm + i - R
                c = bx * bn + j - R
                s[i, j] = T.if_then_else(
                    (r >= 0) and (r < M) and (c >= 0) and (c < N), A[T.clamp(r, 0, M - 1), T.clamp(c, 0, N - 1)], 0.0
                )
            for i, j in T.Parallel(bm, bn):
                B[by * bm + i, bx * bn + j] = s[i + R, j + R] * 0.5 + 0.125 * (
                    s[i, j + R] + s[i + 2 * R, j + R] + s[i + R, j] + s[i + R, j + 2 * R]
                )
        return B

    a = torch.randn(45, 70)
    p = F.pad(a, (2, 2, 2, 2))
    ref = p[2:-2, 2:-2] * 0.5 + 0.125 * (p[:-4, 2:-2] + p[4:, 2:-2] + p[2:-2, :-4] + p[2:-2, 4:])
    torch.testing.assert_close(f(a), ref)


def test_bitonic() -> None:
    @torch_tile.jit
    def f(A):
        M, N = T.const("M, N")
        A: T.Tensor((M, N), "float32")
        B = T.empty((M, N), "float32")
        with T.Kernel(M, threads=128) as bx:
            s = T.alloc_shared((N,), "float32")
            u = T.alloc_shared((N,), "float32")
            T.copy(A[bx, 0], s)
            k = 2
            while k <= N:
                j = k // 2
                while j > 0:
                    for i in T.Parallel(N):
                        p = i ^ j
                        up = (i & k) == 0
                        lo = T.min(s[i], s[p])
                        hi = T.max(s[i], s[p])
                        u[i] = T.if_then_else((i < p) == up, lo, hi)
                    T.copy(u, s)
                    j = j // 2
                k = k * 2
            T.copy(s, B[bx, 0])
        return B

    a = torch.randn(7, 128)
    torch.testing.assert_close(f(a), a.sort(-1).values)


def test_top_p() -> None:
    # mask of the nucleus of sorted probabilities, by cumsum
    @torch_tile.jit
    def f(P, p=0.9):
        M, N = T.const("M, N")
        P: T.Tensor((M, N), "float32")
        K = T.empty((M,), "int32")
        with T.Kernel(M, threads=128) as bx:
            x = T.alloc_fragment((1, N), "float32")
            c = T.alloc_fragment((1, N), "float32")
            n = T.alloc_fragment((1, N), "int32")
            total = T.alloc_fragment((1,), "int32")
            T.copy(P[bx, 0], x)
            T.cumsum(x, c, dim=1)
            for i, j in T.Parallel(1, N):
                n[i, j] = T.if_then_else(c[i, j] - x[i, j] < p, 1, 0)
            T.reduce_sum(n, total, dim=1)
            for i in T.Parallel(1):
                K[bx] = total[i]
        return K

    pr = torch.randn(9, 50).softmax(-1).sort(-1, descending=True).values
    ref = ((pr.cumsum(-1) - pr) < 0.9).sum(-1).int()
    torch.testing.assert_close(f(pr), ref)


def test_argmax_ties() -> None:
    @torch_tile.jit
    def f(A):
        M, N = T.const("M, N")
        A: T.Tensor((M, N), "float32")
        I = T.empty((M,), "int64")
        with T.Kernel(M, threads=64) as bx:
            x = T.alloc_fragment((1, N), "float32")
            m = T.alloc_fragment((1,), "float32")
            ix = T.alloc_fragment((1, N), "int64")
            r = T.alloc_fragment((1,), "int64")
            T.copy(A[bx, 0], x)
            T.reduce_max(x, m, dim=1)
            for i, j in T.Parallel(1, N):
                ix[i, j] = T.if_then_else(x[i, j] == m[i], j, N)
            T.reduce_min(ix, r, dim=1)
            T.copy(r, I[bx])
        return I

    a = torch.randint(0, 5, (20, 33)).float()
    ref = torch.tensor([row.tolist().index(max(row.tolist())) for row in a])
    torch.testing.assert_close(f(a), ref)


def test_segmented_sum() -> None:
    @torch_tile.jit
    def f(X, offsets):
        N, S = T.const("N, S")
        X: T.Tensor((N,), "float32")
        offsets: T.Tensor((S,), "int32")
        Y = T.empty((S - 1,), "float32")
        with T.Kernel(S - 1, threads=32) as bx:
            acc = T.alloc_var("float32", 0.0)
            for k in T.serial(offsets[bx], offsets[bx + 1]):
                acc += X[k]
            Y[bx] = acc
        return Y

    off = torch.tensor([0, 3, 3, 10, 40], dtype=torch.int32)
    x = torch.randn(40)
    ref = torch.stack([x[a:b].sum() for a, b in pairwise(off.tolist())])
    torch.testing.assert_close(f(x, off), ref)


def test_csr_spmv() -> None:
    @torch_tile.jit
    def f(ptr, col, val, x, block=32):
        R, Z, N = T.const("R, Z, N")
        ptr: T.Tensor((R,), "int32")
        col: T.Tensor((Z,), "int32")
        val: T.Tensor((Z,), "float32")
        x: T.Tensor((N,), "float32")
        y = T.empty((R - 1,), "float32")
        with T.Kernel(T.ceildiv(R - 1, block), threads=block) as bx:
            for i in T.Parallel(block):
                row = bx * block + i
                acc = T.alloc_var("float32", 0.0)
                if row < R - 1:
                    for k in T.serial(ptr[row], ptr[row + 1]):
                        acc += val[k] * x[col[k]]
                    y[row] = acc
        return y

    d = torch.randn(50, 37) * (torch.rand(50, 37) < 0.2)
    s = d.to_sparse_csr()
    x = torch.randn(37)
    torch.testing.assert_close(f(s.crow_indices().int(), s.col_indices().int(), s.values(), x), d @ x)


def test_kahan() -> None:
    @torch_tile.jit
    def f(X):
        M, N = T.const("M, N")
        X: T.Tensor((M, N), "float32")
        Y = T.empty((M,), "float32")
        with T.Kernel(M, threads=1) as bx:
            s = T.alloc_var("float32", 0.0)
            c = T.alloc_var("float32", 0.0)
            for k in T.serial(N):
                y = X[bx, k] - c
                tt = s + y
                c = (tt - s) - y
                s = tt
            Y[bx] = s
        return Y

    x = torch.rand(3, 20000)
    torch.testing.assert_close(f(x).double(), x.double().sum(-1), rtol=1e-7, atol=0)


def test_box_filter() -> None:
    @torch_tile.jit
    def f(A, r=3, bm=16, bn=16):
        M, N = T.const("M, N")
        A: T.Tensor((M, N), "float32")
        B = T.empty((M, N), "float32")
        with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
            for i, j in T.Parallel(bm, bn):
                acc = T.alloc_var("float32", 0.0)
                for u in range(-r, r + 1):
                    for v in range(-r, r + 1):
                        y = by * bm + i + u
                        x = bx * bn + j + v
                        if y >= 0 and y < M and x >= 0 and x < N:
                            acc += A[y, x]
                B[by * bm + i, bx * bn + j] = acc / ((2 * r + 1) ** 2)
        return B

    a = torch.randn(30, 41)
    torch.testing.assert_close(f(a), F.avg_pool2d(a[None, None], 7, 1, 3)[0, 0], rtol=1e-4, atol=1e-5)


def test_group_norm() -> None:
    @torch_tile.jit
    def f(X, W, Bi, groups=4, eps=1e-5):
        B, C, L = T.const("B, C, L")
        X: T.Tensor((B, C, L), "float32")
        W: T.Tensor((C,), "float32")
        Bi: T.Tensor((C,), "float32")
        Y = T.empty((B, C, L), "float32")
        cg = C // groups
        with T.Kernel(groups, B, threads=128) as (g, b):
            x = T.alloc_fragment((cg, L), "float32")
            row = T.alloc_fragment((cg,), "float32")
            tot = T.alloc_fragment((1,), "float32")
            mean = T.alloc_var("float32", 0.0)
            T.copy(X[b, g * cg : (g + 1) * cg, :], x)
            T.reduce_sum(x, row, dim=1)
            T.reduce_sum(row, tot, dim=0)
            mean = tot[0] / (cg * L)
            for i, j in T.Parallel(cg, L):
                x[i, j] = x[i, j] - mean
            sq = T.alloc_fragment((cg, L), "float32")
            for i, j in T.Parallel(cg, L):
                sq[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(sq, row, dim=1)
            T.reduce_sum(row, tot, dim=0)
            rs = T.rsqrt(tot[0] / (cg * L) + eps)
            for i, j in T.Parallel(cg, L):
                Y[b, g * cg + i, j] = x[i, j] * rs * W[g * cg + i] + Bi[g * cg + i]
        return Y

    x = torch.randn(3, 12, 35)
    w = torch.randn(12)
    b = torch.randn(12)
    torch.testing.assert_close(f(x, w, b), F.group_norm(x, 4, w, b), rtol=1e-4, atol=1e-5)


def test_inverse3() -> None:
    @torch_tile.jit
    def f(A, block=64):
        B = T.const("B")
        A: T.Tensor((B, 3, 3), "float32")
        O = T.empty((B, 3, 3), "float32")
        with T.Kernel(T.ceildiv(B, block), threads=block) as bx:
            for t_ in T.Parallel(block):
                b = bx * block + t_
                if b < B:
                    m = [[A[b, i, j] for j in range(3)] for i in range(3)]
                    c = [
                        [
                            m[(i + 1) % 3][(j + 1) % 3] * m[(i + 2) % 3][(j + 2) % 3]
                            - m[(i + 1) % 3][(j + 2) % 3] * m[(i + 2) % 3][(j + 1) % 3]
                            for j in range(3)
                        ]
                        for i in range(3)
                    ]
                    det = m[0][0] * c[0][0] + m[0][1] * c[0][1] + m[0][2] * c[0][2]
                    for i in (0, 1, 2):
                        for j in (0, 1, 2):
                            O[b, i, j] = c[j][i] / det
        return O

    a = torch.rand(70, 3, 3) - 0.5 + 3 * torch.eye(3)  # far from singular
    torch.testing.assert_close(f(a), a.inverse(), rtol=1e-3, atol=1e-4)


def test_rope() -> None:
    @torch_tile.jit
    def f(X, base=10000.0):
        B, S, H, D = T.const("B, S, H, D")
        X: T.Tensor((B, S, H, D), "float16")
        Y = T.empty((B, S, H, D), "float16")
        half = D // 2
        with T.Kernel(H, S, B, threads=64) as (h, s, b):
            for i in T.Parallel(half):
                ang = T.cast(s, "float32") * T.exp(-T.log(base) * (2.0 * i / D))
                c = T.cos(ang)
                sn = T.sin(ang)
                x1 = T.cast(X[b, s, h, i], "float32")
                x2 = T.cast(X[b, s, h, i + half], "float32")
                Y[b, s, h, i] = x1 * c - x2 * sn
                Y[b, s, h, i + half] = x2 * c + x1 * sn
        return Y

    x = torch.randn(2, 17, 3, 32).half()
    inv = 10000.0 ** (-torch.arange(16) * 2 / 32)
    a = torch.arange(17)[:, None] * inv
    c, s = a.cos()[None, :, None], a.sin()[None, :, None]
    x1, x2 = x.float().chunk(2, -1)
    torch.testing.assert_close(f(x).float(), torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1), rtol=1e-2, atol=1e-2)


def test_alibi_softmax() -> None:
    @torch_tile.jit
    def f(S_, slopes):
        H, Q, K = T.const("H, Q, K")
        S_: T.Tensor((H, Q, K), "float32")
        slopes: T.Tensor((H,), "float32")
        P = T.empty((H, Q, K), "float32")
        with T.Kernel(Q, H, threads=128) as (q, h):
            x = T.alloc_fragment((K,), "float32")
            m = T.alloc_fragment((1,), "float32")
            z = T.alloc_fragment((1,), "float32")
            T.copy(S_[h, q, :], x)
            for j in T.Parallel(K):
                x[j] = T.if_then_else(j <= q, x[j] - slopes[h] * (q - j), -T.infinity("float32"))
            T.reduce_max(x, m)
            for j in T.Parallel(K):
                x[j] = T.exp(x[j] - m[0])
            T.reduce_sum(x, z)
            for j in T.Parallel(K):
                P[h, q, j] = x[j] / z[0]
        return P

    s = torch.randn(4, 20, 20)
    sl = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    d = torch.arange(20)[:, None] - torch.arange(20)
    ref = (s - sl[:, None, None] * d).masked_fill(d < 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(f(s, sl), ref)


def test_quant_channel() -> None:
    @torch_tile.jit
    def f(W):
        O, I = T.const("O, I")
        W: T.Tensor((O, I), "bfloat16")
        Qt = T.empty((O, I), "int8")
        S_ = T.empty((O,), "float32")
        with T.Kernel(O, threads=128) as o:
            w = T.alloc_fragment((1, I), "float32")
            a = T.alloc_fragment((1,), "float32")
            T.copy(W[o, 0], w)
            T.reduce_absmax(w, a, dim=1)
            scale = T.max(a[0], 1e-8) / 127.0
            for i, j in T.Parallel(1, I):
                Qt[o, j] = T.cast(T.clamp(T.round(w[i, j] / scale), -128.0, 127.0), "int8")
            S_[o] = scale
        return Qt, S_

    w = torch.randn(20, 77).bfloat16()
    q, s = f(w)
    sc = w.float().abs().amax(-1) / 127
    torch.testing.assert_close(s, sc)
    torch.testing.assert_close(q, (w.float() / sc[:, None]).round().clamp(-128, 127).to(torch.int8))


def test_weighted_histogram() -> None:
    @torch_tile.jit
    def f(X, W, H, block=256, bins=32):
        N = T.const("N")
        X: T.Tensor((N,), "float32")
        W: T.Tensor((N,), "float32")
        H: T.Tensor((bins,), "float32")
        with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
            h = T.alloc_shared((bins,), "float32")
            T.clear(h)
            for i in T.Parallel(block):
                k = bx * block + i
                if k < N:
                    b = T.clamp(T.cast(T.floor(X[k] * bins), "int32"), 0, bins - 1)
                    T.atomic_add(h[b], W[k])
            for i in T.Parallel(bins):
                T.atomic_add(H[i], h[i])

    x = torch.rand(3000)
    w = torch.rand(3000)
    h = torch.zeros(32)
    f(x, w, h)
    torch.testing.assert_close(h, torch.histogram(x, 32, range=(0.0, 1.0), weight=w).hist, rtol=1e-4, atol=1e-3)


def test_prefix_max() -> None:
    @torch_tile.jit
    def f(X, block=64):
        M, N = T.const("M, N")
        X: T.Tensor((M, N), "float32")
        Y = T.empty((M, N), "float32")
        with T.Kernel(M, threads=64) as bx:
            s = T.alloc_shared((1, block), "float32")
            carry = T.alloc_var("float32", -1e30)
            for k in T.serial(T.ceildiv(N, block)):
                T.copy(X[bx, k * block], s)
                T.cummax(s, dim=1)
                for i, j in T.Parallel(1, block):
                    Y[bx, k * block + j] = T.max(s[i, j], carry)
                carry = T.max(carry, s[0, block - 1])
        return Y

    x = torch.randn(5, 200)
    torch.testing.assert_close(f(x), x.cummax(-1).values)


def test_embedding_bag() -> None:  # gather-scatter: embedding bag, mean
    @torch_tile.jit
    def f(E, ids, off):
        V, D, N, B = T.const("V, D, N, B")
        E: T.Tensor((V, D), "float32")
        ids: T.Tensor((N,), "int64")
        off: T.Tensor((B,), "int64")
        Y = T.empty((B - 1, D), "float32")
        with T.Kernel(B - 1, threads=64) as b:
            acc = T.alloc_fragment((D,), "float32")
            T.clear(acc)
            for k in T.serial(off[b], off[b + 1]):
                for j in T.Parallel(D):
                    acc[j] += E[ids[k], j]
            n = T.max(off[b + 1] - off[b], 1)
            for j in T.Parallel(D):
                Y[b, j] = acc[j] / n
        return Y

    E = torch.randn(30, 24)
    ids = torch.randint(0, 30, (15,))
    off = torch.tensor([0, 4, 4, 9, 15])
    ref = F.embedding_bag(ids, E, off, mode="mean", include_last_offset=True)
    torch.testing.assert_close(f(E, ids, off), ref)
