# SPDX-License-Identifier: Apache-2.0
"""Valid kernels with float64 references, and edits of their statements that leave valid Python.

An edit drops a statement, swaps arguments or indices, rounds a count down, changes a number by one, a dtype, or a name
to another of its kind. `answer` says what the compiler has to say, and whether the results are right.
"""

import ast
import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEAD = "import torch\nimport torch_tile\nimport torch_tile.language as T\n"

KERNELS: dict[str, tuple[str, Callable[[], list[Any]], Callable[..., Any]]] = {}
"""By name: the text, arguments, and the reference in float64."""


def kernel(args: Callable[[], list[Any]], reference: Callable[..., Any]) -> Callable[[Callable[[], str]], None]:
    """Add the kernel whose text the function returns."""

    def add(text: Callable[[], str]) -> None:
        KERNELS[text.__name__] = text(), args, reference

    return add


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return x.double().softmax(1)


@kernel(lambda: [torch.randn(37, 200)], _softmax)
def online_softmax() -> str:
    return """
@torch_tile.jit
def run(X, rows=16, step=64):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(M, rows), threads=128) as bx:
        x = T.alloc_fragment((rows, step), "float32")
        top = T.alloc_fragment((rows,), "float32")
        old = T.alloc_fragment((rows,), "float32")
        part = T.alloc_fragment((rows,), "float32")
        total = T.alloc_fragment((rows,), "float32")
        T.fill(top, -1e30)
        T.clear(total)
        for k in T.serial(T.ceildiv(N, step)):
            T.copy(X[bx * rows, k * step], x)
            for i, j in T.Parallel(rows, step):
                x[i, j] = T.if_then_else(k * step + j < N, x[i, j], -1e30)
            T.copy(top, old)
            T.reduce_max(x, top, dim=1, clear=False)
            for i, j in T.Parallel(rows, step):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, part, dim=1)
            for i in T.Parallel(rows):
                total[i] = total[i] * T.exp(old[i] - top[i]) + part[i]
        for k in T.serial(T.ceildiv(N, step)):
            T.copy(X[bx * rows, k * step], x)
            for i, j in T.Parallel(rows, step):
                x[i, j] = T.exp(x[i, j] - top[i]) / total[i]
            T.copy(x, Y[bx * rows, k * step])
    return Y
"""


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = q.double(), k.double(), v.double()
    return (q @ k.T * 0.125).softmax(1) @ v


@kernel(lambda: [torch.randn(50, 64), torch.randn(90, 64), torch.randn(90, 48)], _attention)
def attention() -> str:
    return """
@torch_tile.jit
def run(Q, K, V, rows=32, keys=32):
    M, N, D, E = T.const("M, N, D, E")
    Q: T.Tensor((M, D), "float32")
    K: T.Tensor((N, D), "float32")
    V: T.Tensor((N, E), "float32")
    O = T.empty((M, E), "float32")
    with T.Kernel(T.ceildiv(M, rows), threads=128) as bx:
        q = T.alloc_shared((rows, D), "float32")
        k = T.alloc_shared((keys, D), "float32")
        v = T.alloc_shared((keys, E), "float32")
        s = T.alloc_fragment((rows, keys), "float32")
        p = T.alloc_shared((rows, keys), "float32")
        o = T.alloc_fragment((rows, E), "float32")
        top = T.alloc_fragment((rows,), "float32")
        old = T.alloc_fragment((rows,), "float32")
        part = T.alloc_fragment((rows,), "float32")
        total = T.alloc_fragment((rows,), "float32")
        T.copy(Q[bx * rows, 0], q)
        T.clear(o)
        T.clear(total)
        T.fill(top, -1e30)
        for n in T.Pipelined(T.ceildiv(N, keys), num_stages=2):
            T.copy(K[n * keys, 0], k)
            T.clear(s)
            T.gemm(q, k, s, transpose_B=True)
            for i, j in T.Parallel(rows, keys):
                s[i, j] = T.if_then_else(n * keys + j < N, s[i, j] * 0.125, -1e30)
            T.copy(top, old)
            T.reduce_max(s, top, dim=1, clear=False)
            for i, j in T.Parallel(rows, keys):
                s[i, j] = T.exp(s[i, j] - top[i])
            T.reduce_sum(s, part, dim=1)
            for i in T.Parallel(rows):
                old[i] = T.exp(old[i] - top[i])
                total[i] = total[i] * old[i] + part[i]
            for i, j in T.Parallel(rows, E):
                o[i, j] = o[i, j] * old[i]
            T.copy(V[n * keys, 0], v)
            T.copy(s, p)
            T.gemm(p, v, o)
        for i, j in T.Parallel(rows, E):
            o[i, j] = o[i, j] / total[i]
        T.copy(o, O[bx * rows, 0])
    return O
"""


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.double(), (x.shape[1],), w.double(), b.double(), 1e-5)


@kernel(lambda: [torch.randn(19, 100), torch.randn(100), torch.randn(100)], _layer_norm)
def layer_norm() -> str:
    return """
@torch_tile.jit(out_idx=[3])
def make(M, N, rows=8):
    @T.prim_func
    def main(X: T.Tensor((M, N), "float32"), W: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32"),
             Y: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, rows), threads=64) as bx:
            x = T.alloc_fragment((rows, N), "float32")
            d = T.alloc_fragment((rows, N), "float32")
            mean = T.alloc_fragment((rows,), "float32")
            var = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            T.reduce_sum(x, mean, dim=1)
            for i, j in T.Parallel(rows, N):
                x[i, j] = x[i, j] - mean[i] / N
                d[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(d, var, dim=1)
            for i, j in T.Parallel(rows, N):
                x[i, j] = x[i, j] * T.rsqrt(var[i] / N + 1e-5) * W[j] + B[j]
            T.copy(x, Y[bx * rows, 0])
    return main
run = make(19, 100)
"""


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.double() @ b.double()


@kernel(lambda: [torch.randn(40, 300), torch.randn(300, 70)], _product)
def split_k() -> str:
    return """
@torch_tile.jit
def run(A, B, rows=32, columns=32, step=32, parts=3):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), "float32")
    B: T.Tensor((K, N), "float32")
    W = T.alloc_global((parts, M, N), "float32")
    C = T.empty((M, N), "float32")
    turns = T.ceildiv(K, step * parts)
    with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows), parts, threads=128) as (bx, by, bz):
        a = T.alloc_shared((rows, step), "float32")
        b = T.alloc_shared((step, columns), "float32")
        c = T.alloc_fragment((rows, columns), "float32")
        T.clear(c)
        for k in T.Pipelined(turns, num_stages=2):
            T.copy(A[by * rows, (bz * turns + k) * step], a)
            T.copy(B[(bz * turns + k) * step, bx * columns], b)
            T.gemm(a, b, c)
        for i, j in T.Parallel(rows, columns):
            if by * rows + i < M and bx * columns + j < N:
                W[bz, by * rows + i, bx * columns + j] = c[i, j]
    with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows), threads=128) as (bx, by):
        for i, j in T.Parallel(rows, columns):
            total = T.alloc_var("float32", init=0.0)
            for z in T.serial(parts):
                total += W[z, by * rows + i, bx * columns + j]
            C[by * rows + i, bx * columns + j] = total
    return C
"""


def _smoothed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    weights = w.double()[None, None]
    return torch.nn.functional.conv2d(x.double()[None, None], weights, padding=1)[0, 0]


@kernel(lambda: [torch.randn(45, 70), torch.randn(3, 3)], _smoothed)
def stencil() -> str:
    return """
@torch_tile.jit
def run(X, W, rows=16, columns=32):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    W: T.Tensor((3, 3), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows), threads=128) as (bx, by):
        y = T.alloc_fragment((rows, columns), "float32")
        T.clear(y)
        for di, dj in T.grid(3, 3):
            for i, j in T.Parallel(rows, columns):
                r = by * rows + i + di - 1
                c = bx * columns + j + dj - 1
                if r >= 0 and r < M and c >= 0 and c < N:
                    y[i, j] += X[r, c] * W[di, dj]
        T.copy(y, Y[by * rows, bx * columns])
    return Y
"""


def _gathered(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table.double()[rows.long()]


@kernel(lambda: [torch.randn(30, 72), torch.randint(0, 30, (50,), dtype=torch.int32)], _gathered)
def embedding() -> str:
    return """
@torch_tile.jit
def run(table, rows, block=16):
    V, D, N = T.const("V, D, N")
    table: T.Tensor((V, D), "float32")
    rows: T.Tensor((N,), "int32")
    out = T.empty((N, D), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=64) as bx:
        which = T.alloc_shared((block,), "int32")
        T.copy(rows[bx * block], which)
        for i, j in T.Parallel(block, D):
            if bx * block + i < N:
                out[bx * block + i, j] = table[which[i], j]
    return out
"""


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


@kernel(lambda: [torch.randn(21, 6, 32), torch.randn(21, 16), torch.randn(21, 16)], _rotated)
def rotary() -> str:
    return """
@torch_tile.jit
def run(X, C, S, block=8):
    N, H, D = T.const("N, H, D")
    X: T.Tensor((N, H, D), "float32")
    C: T.Tensor((N, D // 2), "float32")
    S: T.Tensor((N, D // 2), "float32")
    Y = T.empty((N, H, D), "float32")
    with T.Kernel(T.ceildiv(N, block), H, threads=64) as (bx, h):
        for i, j in T.Parallel(block, D // 2):
            n = bx * block + i
            if n < N:
                a = X[n, h, j]
                b = X[n, h, j + D // 2]
                Y[n, h, j] = a * C[n, j] - b * S[n, j]
                Y[n, h, j + D // 2] = b * C[n, j] + a * S[n, j]
    return Y
"""


def _scanned(x: torch.Tensor) -> torch.Tensor:
    return x.double().cumsum(1)


@kernel(lambda: [torch.randn(9, 150)], _scanned)
def scan() -> str:
    return """
@torch_tile.jit
def run(X, step=32):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(M, threads=32) as bx:
        x = T.alloc_shared((step,), "float32")
        y = T.alloc_shared((step,), "float32")
        carry = T.alloc_var("float32", init=0.0)
        for k in T.serial(T.ceildiv(N, step)):
            T.copy(X[bx, k * step], x)
            T.cumsum(x, y, dim=0)
            for j in T.Parallel(step):
                x[j] = y[j] + carry
            carry += y[step - 1]
            T.copy(x, Y[bx, k * step])
    return Y
"""


def _loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x.double(), y.long(), reduction="none")


@kernel(lambda: [torch.randn(23, 130), torch.randint(0, 130, (23,), dtype=torch.int32)], _loss)
def cross_entropy() -> str:
    return """
@torch_tile.jit
def run(X, labels, step=64):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    labels: T.Tensor((M,), "int32")
    loss = T.empty((M,), "float32")
    with T.Kernel(M, threads=64) as bx:
        x = T.alloc_fragment((step,), "float32")
        top = T.alloc_fragment((1,), "float32")
        part = T.alloc_fragment((1,), "float32")
        total = T.alloc_fragment((1,), "float32")
        T.fill(top, -1e30)
        T.clear(total)
        for k in T.serial(T.ceildiv(N, step)):
            for j in T.Parallel(step):
                x[j] = T.if_then_else(k * step + j < N, X[bx, k * step + j], -1e30)
            T.reduce_max(x, top, dim=0, clear=False)
        for k in T.serial(T.ceildiv(N, step)):
            for j in T.Parallel(step):
                x[j] = T.if_then_else(k * step + j < N, T.exp(X[bx, k * step + j] - top[0]), 0.0)
            T.reduce_sum(x, part, dim=0)
            for i in T.Parallel(1):
                total[i] += part[i]
        for i in T.Parallel(1):
            loss[bx] = T.log(total[i]) + top[i] - X[bx, labels[bx]]
    return loss
"""


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_pool2d(x.double()[None], 2)[0]


@kernel(lambda: [torch.randn(3, 34, 50)], _pooled)
def pooling() -> str:
    return """
@torch_tile.jit
def run(X, rows=8, columns=16):
    C, H, W = T.const("C, H, W")
    X: T.Tensor((C, H, W), "float32")
    Y = T.empty((C, H // 2, W // 2), "float32")
    with T.Kernel(T.ceildiv(W // 2, columns), T.ceildiv(H // 2, rows), C, threads=64) as (bx, by, c):
        y = T.alloc_fragment((rows, columns), "float32")
        T.fill(y, -1e30)
        for di, dj in T.grid(2, 2):
            for i, j in T.Parallel(rows, columns):
                y[i, j] = T.max(y[i, j], X[c, 2 * (by * rows + i) + di, 2 * (bx * columns + j) + dj])
        for i, j in T.Parallel(rows, columns):
            Y[c, by * rows + i, bx * columns + j] = y[i, j]
    return Y
"""


def _unpacked(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    low, high = (w & 15).double() - 8, (w >> 4).double() - 8
    weights = torch.stack([low, high], -1).flatten(1) * s.double().repeat_interleave(32, 1)
    return x.double() @ weights.T


@kernel(lambda: [torch.randn(20, 96), torch.randint(0, 256, (40, 48), dtype=torch.uint8), torch.rand(40, 3)], _unpacked)
def four_bits() -> str:
    return """
@torch_tile.jit
def run(X, W, S, rows=16, columns=32, step=32):
    M, N, K = T.const("M, N, K")
    X: T.Tensor((M, K), "float32")
    W: T.Tensor((N, K // 2), "uint8")
    S: T.Tensor((N, K // 32), "float32")
    Y = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows), threads=128) as (bx, by):
        x = T.alloc_shared((rows, step), "float32")
        words = T.alloc_shared((columns, step // 2), "uint8")
        w = T.alloc_shared((columns, step), "float32")
        y = T.alloc_fragment((rows, columns), "float32")
        T.clear(y)
        for k in T.Pipelined(T.ceildiv(K, step), num_stages=2):
            T.copy(X[by * rows, k * step], x)
            T.copy(W[bx * columns, k * step // 2], words)
            for i, j in T.Parallel(columns, step):
                nibble = (T.cast(words[i, j // 2], "int32") >> (j % 2 * 4)) & 15
                w[i, j] = T.cast(nibble - 8, "float32") * S[bx * columns + i, k]
            T.gemm(x, w, y, transpose_B=True)
        T.copy(y, Y[by * rows, bx * columns])
    return Y
"""


def _histogram(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.double()
    return [y.sum(0), (y * y).sum(0)]


@kernel(lambda: [torch.randn(70, 40)], _histogram)
def moments() -> str:
    return """
@torch_tile.jit
def run(X, rows=16, columns=32):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    S = T.empty((N,), "float32")
    Q = T.empty((N,), "float32")
    with T.Kernel(1, threads=64) as _:
        T.clear(S)
        T.clear(Q)
    with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows), threads=64) as (bx, by):
        x = T.alloc_fragment((rows, columns), "float32")
        s = T.alloc_fragment((columns,), "float32")
        q = T.alloc_fragment((columns,), "float32")
        T.copy(X[by * rows, bx * columns], x)
        T.reduce_sum(x, s, dim=0)
        for i, j in T.Parallel(rows, columns):
            x[i, j] = x[i, j] * x[i, j]
        T.reduce_sum(x, q, dim=0)
        for j in T.Parallel(columns):
            if bx * columns + j < N:
                T.atomic_add(S[bx * columns + j], s[j])
                T.atomic_add(Q[bx * columns + j], q[j])
    return S, Q
"""


def _best(x: torch.Tensor) -> list[torch.Tensor]:
    found = x.double().topk(4, 1)
    return [found.values, found.indices.double()]


@kernel(lambda: [torch.randn(18, 60)], _best)
def top_k() -> str:
    return """
@torch_tile.jit
def run(X, rows=8, K=4):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), "float32")
    values = T.empty((M, K), "float32")
    places = T.empty((M, K), "int32")
    with T.Kernel(T.ceildiv(M, rows), threads=64) as bx:
        x = T.alloc_fragment((rows, N), "float32")
        at = T.alloc_fragment((rows, N), "int32")
        top = T.alloc_fragment((rows,), "float32")
        place = T.alloc_fragment((rows,), "int32")
        T.copy(X[bx * rows, 0], x)
        for k in T.serial(K):
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(rows, N):
                at[i, j] = T.if_then_else(x[i, j] == top[i], j, N)
            T.reduce_min(at, place, dim=1)
            for i, j in T.Parallel(rows, N):
                if j == place[i]:
                    x[i, j] = -1e30
            for i in T.Parallel(rows):
                if bx * rows + i < M:
                    values[bx * rows + i, k] = top[i]
                    places[bx * rows + i, k] = place[i]
    return values, places
"""


@dataclass(frozen=True)
class Edit:
    """One edit of one kernel: its kind, the text, its line (1-based), and the line as it is now."""

    kernel: str
    kind: str
    text: str
    line: int
    what: str


class _Replace(ast.NodeTransformer):
    """Put a node in place of another one; None drops a statement."""

    def __init__(self, old: ast.AST, new: ast.AST | None):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def edits(name: str) -> Iterator[Edit]:
    """Yield the edits of a kernel."""
    text = HEAD + KERNELS[name][0]
    tree = ast.parse(text)
    for node, kind, new in _changes(tree):
        line = text.split("\n")[node.lineno - 1]
        changed = _edited(text, node, new)
        if changed is not None and changed != text:
            after = changed.split("\n")[node.lineno - 1]
            yield Edit(name, kind, changed, node.lineno, f"{line.strip()} -> {after.strip()}")


def _edited(text: str, node: Any, new: str) -> str | None:
    """Return the text with `new` where a node stands; None if that is no Python."""
    lines = text.split("\n")
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    head, tail = first.encode()[: node.col_offset].decode(), last.encode()[node.end_col_offset :].decode()
    lines[node.lineno - 1 : node.end_lineno] = [f"{head}{new}{tail}", *[""] * (node.end_lineno - node.lineno)]
    changed = "\n".join(lines)
    try:
        compile(changed, "edit", "exec")
    except SyntaxError:
        return None
    return changed


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str, str]]:
    """Yield nodes with the kind of their edit and the new text."""
    tiles: dict[str, str] = {}  # names of tiles, by how each was made
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value)
            if called.startswith(("T.alloc_", "T.empty")) and isinstance(node.targets[0], ast.Name):
                tiles[node.targets[0].id] = called
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "dropped", "pass"
        if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(_target(node), ast.Subscript):
            yield node, "dropped", "pass"
        if isinstance(node, ast.AugAssign) and isinstance(_target(node), ast.Name):
            yield node, "dropped", "pass"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "T.ceildiv":
            yield node, "rounded down", f"({ast.unparse(node.args[0])}) // ({ast.unparse(node.args[1])})"
            yield node, "one less", f"({ast.unparse(node)} - 1)"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("T.") and len(node.args) > 1:
            changed = copy.deepcopy(node)
            changed.args[0], changed.args[1] = changed.args[1], changed.args[0]
            yield node, "swapped arguments", ast.unparse(changed)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            changed = copy.deepcopy(node)
            parts = changed.slice.elts  # type: ignore[attr-defined]
            parts[-2], parts[-1] = parts[-1], parts[-2]
            yield node, "swapped indices", ast.unparse(changed)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store) and len(node.elts) > 1:
            yield node, "swapped names", f"({', '.join(ast.unparse(e) for e in reversed(node.elts))})"
        if isinstance(node, ast.AnnAssign):
            sizes = node.annotation.args[0]  # type: ignore[attr-defined]
            if isinstance(sizes, ast.Tuple) and len(sizes.elts) > 1:
                yield sizes, "swapped sizes", f"({', '.join(ast.unparse(e) for e in reversed(sizes.elts))})"
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "number", str(node.value + 1)
            if node.value > 0:
                yield node, "number", str(node.value - 1)
        if isinstance(node, ast.Constant) and node.value in ("float32", "int32", "uint8"):
            yield node, "dtype", repr({"float32": "float16", "int32": "int8", "uint8": "int8"}[node.value])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in tiles:
            for other, made in tiles.items():
                if other != node.id and made == tiles[node.id]:
                    yield node, "name", other


def _target(node: ast.Assign | ast.AugAssign) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target


def drawn(seed: int) -> list[Edit]:
    """Return all edits in an order drawn from a seed: the n-th of each kernel and kind before the n+1-st of any."""
    rng, cells = random.Random(seed), {}
    for each in (edit for name in KERNELS for edit in edits(name)):
        cells.setdefault((each.kernel, each.kind), []).append(each)
    turns = []
    for cell in cells.values():
        rng.shuffle(cell)
        turns += [(number, rng.random(), edit) for number, edit in enumerate(cell)]
    return [edit for _, _, edit in sorted(turns, key=lambda turn: turn[:2])]


def run_text(name: str, text: str, path: Path) -> tuple[str, bool]:
    """Run a kernel's text; return what its error or warnings say, and whether the results are right."""
    _, make, reference = KERNELS[name]
    path.write_text(text)
    names: dict[str, Any] = {"__name__": "edited"}
    args = make()
    wanted = reference(*args)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            exec(compile(text, str(path), "exec"), names)
            got = names["run"](*args)
        except Exception as problem:
            return f"{type(problem).__name__}: {problem}", False
    said = "\n".join(str(each.message) for each in told)
    got, wanted = (each if isinstance(each, list | tuple) else [each] for each in (got, wanted))
    right = len(got) == len(wanted) and all(
        a.shape == b.shape and torch.allclose(a.double(), b, rtol=2e-3, atol=2e-3, equal_nan=False)
        for a, b in zip(got, wanted, strict=True)
    )
    return said, right
