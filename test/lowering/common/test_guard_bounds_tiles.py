# SPDX-License-Identifier: Apache-2.0
"""On CPUs a tile indexed by data outside of its size reads as 0, and what is written there is dropped."""

import pytest
import torch

import torch_tile
import torch_tile.language as T

N, COUNT = 13, 40  # elements of a tile, indices
SCOPES = {"shared": T.alloc_shared, "fragment": T.alloc_fragment, "local": T.alloc_local}
Index = T.Tensor((COUNT,), "int32")
Values = T.Tensor((COUNT,), "float32")
Tile = T.Tensor((N,), "float32")


def kernel_of(form, alloc):
    """A kernel that fills a tile from S, runs `form` on it, and stores it back."""

    @torch_tile.jit(target="cpu")
    def kernel(I: Index, X: Values, S: Tile, Y: Values):
        with T.Kernel(1):
            s = alloc((N,), "float32")
            for i in T.serial(N):
                s[i] = S[i]
            form(s, I, X, Y)
            for i in T.serial(N):
                S[i] = s[i]

    return kernel


@T.macro
def load(s, I, X, Y):
    for i in T.Parallel(COUNT):
        Y[i] = s[I[i]] + X[i]


@T.macro
def named(s, I, X, Y):
    at = T.alloc_var("int32", 0)
    for i in T.serial(COUNT):
        first = I[i] - 1
        at = first + 1
        Y[i] = s[at] * 0.5 + s[first + 1] * 0.5 + X[i]


@T.macro
def vector_load(s, I, X, Y):
    for i in T.serial(COUNT):
        for j in T.vectorized(1):
            Y[i + j] = s[I[i] + j] + X[i + j]


@T.macro
def copied(s, I, X, Y):
    for i in T.serial(COUNT):
        T.copy(s[I[i] : I[i] + 1], Y[i : i + 1])
        Y[i] += X[i]


@T.macro
def store(s, I, X, Y):
    for i in T.serial(COUNT):
        s[I[i]] = X[i]


@T.macro
def add(s, I, X, Y):
    for i in T.serial(COUNT):
        s[I[i]] += X[i]


@T.macro
def atomic(s, I, X, Y):
    for i in T.Parallel(COUNT):
        T.atomic_add(s[I[i]], X[i])


@T.macro
def previous(s, I, X, Y):
    for i in T.serial(COUNT):
        Y[i] = T.atomic_max(s[I[i]], 0.0, return_prev=True) + X[i]


@T.macro
def filled(s, I, X, Y):
    for i in T.serial(COUNT):
        T.fill(s[I[i] : I[i] + 1], X[i])


READS = load, named, vector_load, copied, previous
WRITES = {store: lambda old, x: x, filled: lambda old, x: x, add: torch.add, atomic: torch.add}
ON_CHIP = [(form, scope) for form in (*READS, *WRITES) for scope in SCOPES if form is not atomic or scope == "shared"]


def given(seed):
    """Indices of which some are far outside, some by one; whole numbers as values."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-3, N + 3, (COUNT,), generator=generator, dtype=torch.int32)
    index[:6] = torch.tensor([-1, N, 2**31 - 1, -(2**31), 10**7, 0])
    values, tile = (torch.randint(1, 9, (n,), generator=generator).float() for n in (COUNT, N))
    return index, values, tile, torch.zeros(COUNT)


@pytest.mark.parametrize(("form", "scope"), ON_CHIP, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_elements(form, scope):
    index, values, tile, got = given(len(form.__name__))
    wanted, old = values.clone(), tile.clone()
    for i, at in enumerate(index.tolist()):
        if 0 <= at < N:
            wanted[i] += old[at]
            if form in WRITES:
                old[at] = WRITES[form](old[at], values[i])
    kernel_of(form, SCOPES[scope])(index, values, tile, got)
    assert torch.equal(*((tile, old) if form in WRITES else (got, wanted)))


@pytest.mark.parametrize("at", [0, 3, 5, 8, 12, -3, -8, 10**6, -(10**6)])
def test_parts(at):
    """Products and folds of a part that data places read 0 beyond the tile, and write nothing there."""

    @torch_tile.jit(target="cpu")
    def kernel(
        I: T.Tensor((1,), "int32"), A: T.Tensor((8, 8), "float32"), C: T.Tensor((8, 8), "float32"),
        D: T.Tensor((8, 8), "float32"), R: T.Tensor((8,), "float32"), M: T.Tensor((8,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1):
            a, c = T.alloc_shared((8, 8), "float32"), T.alloc_fragment((8, 8), "float32")
            r = T.alloc_fragment((8,), "float32")
            T.copy(A, a)
            T.fill(c, 1.0)
            T.gemm(a[I[0] : I[0] + 8, :], a, c)
            T.copy(c, C)
            T.fill(c, 1.0)
            T.gemm(a, a, c[I[0] : I[0] + 8, :])
            T.copy(c, D)
            T.reduce_sum(a[:, I[0] : I[0] + 8], r, dim=1)
            T.copy(r, R)
            T.reduce_max(a[I[0] : I[0] + 8, :], r, dim=1)
            T.copy(r, M)

    a = torch.randint(1, 5, (8, 8)).float()
    c, d, r, m = torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(8), torch.zeros(8)
    kernel(torch.tensor([at], dtype=torch.int32), a, c, d, r, m)

    def moved(x):
        """Row i is row i + at of x, and 0 where x has none."""
        return torch.stack([x[i + at] if 0 <= i + at < 8 else torch.zeros(8) for i in range(8)])

    written = [a[i - at] @ a if 0 <= i - at < 8 else torch.zeros(8) for i in range(8)]
    assert torch.equal(c, moved(a) @ a + 1)
    assert torch.equal(d, torch.stack(written) + 1)
    assert torch.equal(r, moved(a.T.contiguous()).sum(0))
    assert torch.equal(m, moved(a).amax(1))


def test_proven_indices_have_no_guard():
    @torch_tile.jit(target="cpu")
    def kernel(I: Index, Y: Index):
        with T.Kernel(1):
            s = T.alloc_shared((16,), "int32")
            T.clear(s)
            for i in T.Parallel(COUNT):
                T.atomic_add(s[I[i] & 15], 1)
            for i in T.serial(COUNT):
                s[I[i] % 16] += s[T.min(T.max(I[i], 0), 15)]
                Y[i] = s[I[i] & 7]

    assert " if (" not in kernel.compile().get_kernel_source().split("extern")[0]
