# SPDX-License-Identifier: Apache-2.0
"""Make mistakes by program: valid programs of each place, and edits of each kind of thing that a user gets wrong.

A place is what a user writes (a kernel's signature, a tile op, an operator's call); a kind is what is wrong with it.
`mistakes()` has each edit of each program. An edit changes one line, so that the line of the mistake is known.

As a script, `mistakes.py SEED SECONDS FOLDER` tries edits in an order drawn from the seed, one of each cell of places
and kinds before a second of any. It prints what each gives as a line of JSON.
"""

import ast
import json
import linecache
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = "import torch\nimport torch_tile\nimport torch_tile.language as T\n"

KERNELS = {
    "gemm": """
@torch_tile.jit
def mm(A, B, block_M=32, block_N=32, block_K=32):
    M, N, K = T.const("M, N, K")
    A: T.Tensor((M, K), "float32")
    B: T.Tensor((K, N), "float32")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
        a = T.alloc_shared((block_M, block_K), "float32")
        b = T.alloc_shared((block_K, block_N), "float32")
        c = T.alloc_fragment((block_M, block_N), "float32")
        T.clear(c)
        for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
            T.copy(A[by * block_M, k * block_K], a)
            T.copy(B[k * block_K, bx * block_N], b)
            T.gemm(a, b, c)
        T.copy(c, C[by * block_M, bx * block_N])
    return C
mat_a = torch.randn(40, 70)
mat_b = torch.randn(70, 50)
result = mm(mat_a, mat_b)
""",
    "element-wise": """
@torch_tile.jit
def add(A, B, block=32, scale=2.0):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B: T.Tensor((N,), "float16")
    C = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=64) as bx:
        for i in T.Parallel(block):
            C[bx * block + i] = T.max(A[bx * block + i], 0.0) * scale + T.cast(B[bx * block + i], "float32")
    return C
left = torch.randn(50)
right = torch.randn(50).half()
result = add(left, right)
""",
    "reduce": """
@torch_tile.jit(out_idx=[-1])
def rows(columns, dtype="float32"):
    n = T.dynamic("n")
    @T.prim_func
    def main(X: T.Tensor((n, columns), dtype), Y: T.Tensor((n, columns), dtype)):
        with T.Kernel(n, threads=128) as bx:
            x = T.alloc_fragment((1, columns), "float32")
            top = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[bx, 0], x)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(1, columns):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(1, columns):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[bx, 0])
    return main
data = torch.randn(7, 40)
kernel = rows(40)
result = kernel(data)
""",
    "atomics": """
@torch_tile.jit
def count(keys, bins=16, block=64):
    N = T.const("N")
    keys: T.Tensor((N,), "int32")
    out = T.empty((bins,), "int32")
    with T.Kernel(1, threads=64) as _:
        T.clear(out)
    with T.Kernel(T.ceildiv(N, block), threads=64) as bx:
        local = T.alloc_shared((bins,), "int32")
        T.clear(local)
        for i in T.Parallel(block):
            if bx * block + i < N:
                T.atomic_add(local[keys[bx * block + i]], 1)
        for i in T.Parallel(bins):
            T.atomic_add(out[i], local[i])
    return out
numbers = torch.randint(0, 16, (100,), dtype=torch.int32)
result = count(numbers)
""",
    "loops": """
@torch_tile.jit
def steps(X, limit: T.int32):
    R, C = T.const("R, C")
    X: T.Tensor((R, C), "float32")
    Y = T.empty((R,), "int32")
    with T.Kernel(R, threads=32) as bx:
        found = T.alloc_var("int32", init=0)
        total = T.alloc_var("float32", init=0.0)
        for j in T.serial(C):
            total += X[bx, j]
            if total > 1.0 and found < limit:
                found += 1
            elif total < -9.0:
                total = 0.0
        while found > 3:
            found = found // 2
        Y[bx] = T.if_then_else(total > 0.0, found, found + 10)
    return Y
values = torch.randn(5, 30)
result = steps(values, 9)
""",
    "macros": """
@T.macro
def smooth(tile, out, n, weight):
    for i in T.Parallel(n):
        out[i] = tile[i] * weight
@torch_tile.jit
def scale(X, block=16):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=32) as bx:
        x = T.alloc_shared((block,), "float32")
        y = T.alloc_fragment((block,), "float32")
        T.copy(X[bx * block], x)
        smooth(x, y, block, 0.5)
        T.cumsum(y, dim=0)
        T.copy(y, Y[bx * block])
    return Y
inputs = torch.randn(40)
result = scale(inputs)
""",
    "barriers": """
@T.prim_func
def staged(A: T.Tensor((256, 64), "float16"), C: T.Tensor((256, 64), "float16")):
    with T.Kernel(1, threads=256) as _:
        a = T.alloc_shared((64, 64), "float16")
        full = T.alloc_barrier(128)
        empty = T.alloc_barrier(128)
        with T.ws(0):
            for k in T.serial(4):
                T.mbarrier_wait_parity(empty, (k + 1) % 2)
                T.tma_copy(A[k * 64:k * 64 + 64, :], a, barrier=full)
                T.mbarrier_arrive(full)
        with T.ws(1):
            out = T.alloc_fragment((64, 64), "float16")
            for k in T.serial(4):
                T.mbarrier_wait_parity(full, k % 2)
                T.copy(a, out)
                T.mbarrier_arrive(empty)
                T.copy(out, C[k * 64, 0])
result = torch_tile.compile(staged, target="cuda:sm_90a").get_kernel_source()
""",
    "layouts": """
@torch_tile.jit
def flip(A, size=32):
    M, N = T.const("M, N")
    A: T.Tensor((M, N), "float32")
    B = T.empty((N, M), "float32")
    with T.Kernel(T.ceildiv(M, size), T.ceildiv(N, size), threads=128) as (bx, by):
        T.use_swizzle(4)
        s = T.alloc_shared((size, size), "float32")
        t = T.alloc_shared((size, size), "float32")
        T.annotate_layout({s: T.make_swizzled_layout(s)})
        T.copy(A[bx * size, by * size], s)
        T.transpose(s, t)
        T.copy(t, B[by * size, bx * size])
    return B
matrix = torch.randn(40, 70)
result = flip(matrix)
""",
    "parameters": """
@T.prim_func
def axpy(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), alpha: T.float32, n: T.int32):
    with T.Kernel(2, threads=32) as bx:
        x = T.alloc_local((1,), "float32")
        for i in T.Parallel(32):
            if bx * 32 + i < n:
                Y[bx * 32 + i] = alpha * X[bx * 32 + i] + 1.0
source = torch.randn(64)
result = torch.zeros(64)
kernel = torch_tile.compile(axpy, target="cpu")
kernel(source, result, 0.5, 60)
""",
    "tune": """
@torch_tile.autotune(configs=[{"block": 16}, {"block": 32}], warmup=1, rep=1)
@torch_tile.jit
def double(X, block=16):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=32) as bx:
        for i in T.Parallel(block):
            Y[bx * block + i] = X[bx * block + i] * 2.0
    return Y
items = torch.randn(64)
result = double(items)
""",
}
"""Programs with kernels, by their place."""

CALLS = {
    "attention": "q, k, v = torch.randn(1, 4, 24, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)\n"
    "result = torch_tile.ops.attention(q, k, v, causal=False, scale=0.5, window=0)",
    "attention_varlen": "q, k, v = torch.randn(24, 4, 32), torch.randn(24, 2, 32), torch.randn(24, 2, 32)\n"
    "cu_seqlens_q = torch.tensor([0, 10, 24], dtype=torch.int32)\n"
    "result = torch_tile.ops.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_q, 14, 14)",
    "attention_paged": "q = torch.randn(2, 1, 4, 32)\n"
    "k_pages, v_pages = torch.randn(8, 16, 2, 32), torch.randn(8, 16, 2, 32)\n"
    "block_tables = torch.arange(6, dtype=torch.int32).view(2, 3)\n"
    "lengths = torch.tensor([20, 40], dtype=torch.int32)\n"
    "result = torch_tile.ops.attention_paged(q, k_pages, v_pages, block_tables, lengths)",
    "norms": "x, weight, bias = torch.randn(5, 48), torch.randn(48), torch.randn(48)\n"
    "result = torch_tile.ops.layer_norm(x, weight, bias, eps=1e-5)",
    "rms": "x, weight = torch.randn(5, 48), torch.randn(48)\n"
    'result = torch_tile.ops.rms_norm(x, weight, eps=1e-5, activation="silu")',
    "softmax": "x = torch.randn(5, 48)\nresult = torch_tile.ops.softmax(x, dim=1)",
    "linear": "x, weight, bias = torch.randn(5, 48), torch.randn(32, 48), torch.randn(32)\n"
    "residual = torch.randn(5, 32)\n"
    'result = torch_tile.ops.linear(x, weight, bias, residual, activation="gelu")',
    "loss": "logits = torch.randn(6, 30)\ntarget = torch.randint(0, 30, (6,))\nweight = torch.rand(30)\n"
    "result = torch_tile.ops.cross_entropy(logits, target, weight, ignore_index=-100, label_smoothing=0.1)",
    "linear_loss": "hidden, weight = torch.randn(6, 16), torch.randn(30, 16)\ntarget = torch.randint(0, 30, (6,))\n"
    "result = torch_tile.ops.linear_cross_entropy(hidden, weight, target)",
    "conv": "x, weight, bias = torch.randn(1, 12, 12, 4), torch.randn(8, 3, 3, 4), torch.randn(8)\n"
    "result = torch_tile.ops.conv(x, weight, bias, stride=[1, 1], padding=[1, 1])",
    "quantize": "x = torch.randn(4, 256)\nresult = torch_tile.ops.quantize_int8(x, group=128)",
    "route": "logits, bias = torch.randn(6, 8), torch.randn(8)\n"
    "result = torch_tile.ops.route(logits, bias, 2, scale=1.0)",
    "conv1d": "x, weight, bias = torch.randn(2, 20, 16), torch.randn(16, 4), torch.randn(16)\n"
    'result = torch_tile.ops.causal_conv1d(x, weight, bias, activation="silu")',
    "delta": "q, k, v = torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16)\n"
    "g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)\n"
    "result = torch_tile.ops.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True)",
    "mla": "q, q_pe = torch.randn(2, 1, 16, 512), torch.randn(2, 1, 16, 64)\n"
    "kv, k_pe = torch.randn(2, 40, 512), torch.randn(2, 40, 64)\n"
    "result = torch_tile.ops.mla_decode(q, q_pe, kv, k_pe)",
    "layers": "x = torch.randn(5, 48)\ntorch.manual_seed(1)\n"
    'layer = torch_tile.nn.Linear(48, 32, bias=True, activation="relu")\nresult = layer(x).detach()',
    "attention_layer": "x = torch.randn(2, 10, 64)\ntorch.manual_seed(1)\n"
    "layer = torch_tile.nn.Attention(64, 4, num_kv_heads=2, bias=True)\nresult = layer(x)",
    "norm_layer": "x = torch.randn(5, 48)\n"
    'layer = torch_tile.nn.RMSNorm(48, eps=1e-5, activation="none")\nresult = layer(x)',
    "quantized_layer": "x = torch.randn(5, 64)\ntorch.manual_seed(1)\nlinear = torch.nn.Linear(64, 64)\n"
    'layer = torch_tile.nn.QuantizedLinear.from_linear(linear, "nf4")\nresult = layer(x)',
    "replace_layers": "x = torch.randn(5, 48)\ntorch.manual_seed(1)\n"
    "model = torch.nn.Sequential(torch.nn.Linear(48, 32))\n"
    "torch_tile.replace_layers(model, linear=True, norm=False)\nresult = model(x)",
    "backend": "x = torch.randn(5, 48)\ntorch.manual_seed(1)\nmodel = torch.nn.Linear(48, 32)\n"
    'options = {"select": "tile"}\n'
    'result = torch.compile(model, backend="tile", options=options)(x)',
    "explain": "x = torch.randn(5, 48)\ntorch.manual_seed(1)\nmodel = torch.nn.Linear(48, 32)\n"
    'torch_tile.explain(model, x, select="tile", backward=False)\nresult = x',
    "custom_op": KERNELS["reduce"].split("kernel =")[0].strip("\n") + "\nop = torch_tile.custom_op(rows(40))\n"
    "result = op(data)",
    "bench": "x = torch.randn(5)\n"
    'ms = torch_tile.do_bench(lambda: x + 1, warmup=1, rep=1, return_mode="median")\nresult = x',
    "cli": "import torch_tile.__main__ as command\nimport sys\n"
    'sys.argv = ["torch_tile", "env"]\ncommand.main()\nresult = torch.ones(1)',
}
"""Programs without a kernel of their own, by their place."""

PLACES = {**KERNELS, **{place: f"\n{text}\n" for place, text in CALLS.items()}}
DTYPES = ("float32", "float16", "int32")
OTHER_SCOPE = {
    "alloc_shared": ("alloc_local", "alloc_var", "alloc_barrier"),
    "alloc_fragment": ("alloc_local", "alloc_var", "alloc_barrier"),
    "alloc_var": ("alloc_fragment", "alloc_shared"),
    "alloc_barrier": ("alloc_shared", "alloc_var"),
}
TENSOR_EDITS = {
    "dtype": ("{0}.to(torch.int64)", "{0}.to(torch.complex64)", "{0}.bool()"),
    "rank": ("{0}[None]", "{0}[0]", "{0}.flatten()"),
    "size": ("{0}[..., :-1]", "{0}[:-1]", "{0}[:0]"),
    "device": ("{0}.to('meta')",),
    "stride": ("{0}[..., None].expand(*{0}.shape, 2)[..., 0]", "{0}.flip(0).flip(0)"),
    "type": ("{0}.numpy()", "{0}.tolist()", "[{0}]", "None", "{0}.to_sparse()", "torch.nn.Linear(4, 4)"),
    "value": ("{0} * 0 - 3", "{0} * 0 + 1000000"),
}
SWAPS = {
    "wrong idiom": {
        "T.copy(": "T.load(",
        "T.exp(": "torch.exp(",
        "T.max(": "max(",
        "T.ceildiv(": "triton.cdiv(",
        "T.alloc_shared(": "torch.zeros(",
        "T.alloc_fragment(": "T.zeros(",
        "T.Parallel(": "enumerate(",
        "T.serial(": "torch.arange(",
        "T.Pipelined(": "T.static_range(",
        "T.empty(": "torch.empty(",
        "T.clear(": "T.zeros_like(",
        "T.gemm(": "T.dot(",
        "T.atomic_add(": "torch.add(",
        "T.cast(": "torch.Tensor(",
        "T.const(": "T.constexpr(",
        "T.Tensor(": "torch.Tensor(",
        "T.Kernel(": "T.grid(",
        "T.if_then_else(": "torch.where(",
        "T.reduce_sum(": "sum(",
        "T.transpose(": "torch.transpose(",
        "T.ws(": "T.role(",
        " and ": " & ",
        "elif ": "else if ",
        " += ": " =+ ",
        "with ": "for ",
        "torch_tile.ops.": "torch_tile.",
        "torch_tile.nn.": "torch_tile.",
    },
}


@dataclass(frozen=True)
class Mistake:
    """One edit of a program: its place and kind, the text, its line (1-based), and the words that a reason may name."""

    place: str
    kind: str
    text: str
    line: int
    words: tuple[str, ...]
    edit: str


class Program:
    """One program of the grid, with the edits of each of its nodes."""

    def __init__(self, place: str):
        self.place, self.text = place, HEAD + PLACES[place]
        self.lines = self.text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.tree = ast.parse(self.text)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def source(self, node: ast.AST) -> str:
        begin, end = self.span(node)
        return self.text[begin:end]

    def put(self, kind: str, node: ast.AST, new: str, *words: str) -> Mistake:
        """Replace the text of a node."""
        begin, end = self.span(node)
        return self.replace(kind, begin, end, node.lineno, new, *words)

    def replace(self, kind: str, begin: int, end: int, line: int, new: str, *words: str) -> Mistake:
        edit = f"{self.text[begin:end]!r} -> {new!r}"
        return Mistake(self.place, kind, self.text[:begin] + new + self.text[end:], line, words, edit)

    def mistakes(self) -> Iterator[Mistake]:
        """Yield all edits of the program."""
        tensors = set(re.findall(r"^(\w+(?:, \w+)*) = -?torch\.", self.text, re.MULTILINE))
        tensors = {name for names in tensors for name in names.split(", ")} - {"result", "cu"}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and node.lineno > HEAD.count("\n"):
                yield from self.of_call(node, tensors)
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                yield from self.of_subscript(node)
            elif isinstance(node, ast.stmt) and node.lineno > HEAD.count("\n"):
                yield from self.of_statement(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and len(node.id) > 4:
                wrong = misspelt(node.id)
                yield self.put("name", node, wrong, wrong)
        for kind, swaps in SWAPS.items():
            for old, new in swaps.items():
                for found in re.finditer(re.escape(old), self.text):
                    line = self.text.count("\n", 0, found.start()) + 1
                    if line > HEAD.count("\n"):
                        words = (re.findall(r"\w+", new) or ["="])[-1], (re.findall(r"\w+", old) or ["="])[-1]
                        yield self.replace(kind, found.start(), found.end(), line, new, *words)

    def of_call(self, call: ast.Call, tensors: set[str]) -> Iterator[Mistake]:
        name = self.source(call.func)
        last = name.rpartition(".")[2]
        if name.startswith("torch.") or last in ("half", "view", "manual_seed", "detach") or last == "main":
            return
        if isinstance(call.func, ast.Attribute):
            wrong = misspelt(last)
            end = self.span(call.func)[1]
            yield self.replace("name", end - len(last), end, call.func.end_lineno, wrong, wrong)
        for keyword in call.keywords:
            begin = self.span(keyword)[0]
            wrong = misspelt(keyword.arg)
            yield self.replace("name", begin, begin + len(keyword.arg), keyword.lineno, wrong, wrong)
            yield self.put("missing step", keyword, f"{keyword.arg}=None", keyword.arg, last)
        args = call.args
        given = [(self.source(a), a, re.findall(r"\w+", self.source(a))) for a in args]
        if args:
            begin = self.span(args[-2])[1] if len(args) > 1 else self.span(args[-1])[0]
            end = self.span(args[-1])[1]
            yield self.replace("count", begin, end, call.lineno, "", last, *given[-1][2][:1])
            yield self.replace("count", end, end, call.lineno, ", 7", last, "7")
        if len(args) > 1 and given[0][0] != given[1][0]:
            begin, end = self.span(args[0])[0], self.span(args[1])[1]
            yield self.replace(
                "order", begin, end, call.lineno, f"{given[1][0]}, {given[0][0]}", last, *given[0][2], *given[1][2]
            )
        for text, argument, words in given:
            if text in tensors:
                for kind, edits in TENSOR_EDITS.items():
                    for edit in edits:
                        indices = re.search(
                            rf"\b{text} = torch\.(tensor|randint|arange)|{text}.*= .*randint", self.text
                        )
                        if kind != "value" or indices:
                            yield self.put(kind, argument, edit.format(text), text, last)
                continue
            is_value = isinstance(argument, ast.Subscript | ast.BinOp | ast.Compare) or is_fraction(argument)
            for wrong in ('"text"', "None", "[1, 2]", "2.5", "len", "torch.ones(2)"):
                if wrong != text and not (is_value and wrong == "2.5"):  # which is a valid value, too
                    yield self.put("type", argument, wrong, last, wrong.strip('"'), *words[:1])
        for keyword in call.keywords:
            is_value = is_fraction(keyword.value) or keyword.arg in ("warmup", "rep")
            if not (isinstance(keyword.value, ast.List)):
                for wrong in ('"text"', "[1, 2]", "len", "torch.ones(2)", *(() if is_value else ("2.5",))):
                    yield self.put("type", keyword.value, wrong, keyword.arg, last)
        for value in (*args, *(k.value for k in call.keywords)):
            for part in value.elts if isinstance(value, ast.Tuple | ast.List) else (value,):
                if isinstance(part, ast.Constant) and type(part.value) in (int, float):
                    for wrong in ("0", "-1", "100000", "float('nan')"):
                        yield self.put("value range", part, wrong, last, wrong, *(k.arg for k in call.keywords))
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    known = part.value in DTYPES
                    for wrong in (misspelt(part.value), *(("int8", "bool") if known else ("",))):
                        yield self.put("dtype" if known else "value range", part, repr(wrong), last, wrong)
                elif isinstance(part, ast.Name) and isinstance(value, ast.Tuple) and name.startswith("T."):
                    yield self.put("size", part, f"{part.id} + 1", part.id, last)
                    yield self.put("size", part, f"{part.id} // 2", part.id, last)
            if isinstance(value, ast.Tuple) and name.startswith("T."):
                inner = self.source(value)[1:-1].rstrip(",")
                yield self.put("rank", value, f"({inner}, 4)", last, "4")
                if "," in inner:
                    yield self.put("rank", value, f"({inner.split(',')[0]},)", last)
        for other in OTHER_SCOPE.get(last, ()):
            yield self.put("scope", call.func, f"T.{other}", *(w for _, _, ws in given for w in ws), other)
        if name == "T.Kernel":
            for threads in (0, 33, 2048, -32):
                for keyword in call.keywords:
                    yield self.put("unit", keyword.value, str(threads), keyword.arg, str(threads))

    def of_subscript(self, node: ast.Subscript) -> Iterator[Mistake]:
        if node.value.id in ("torch", "sys"):
            return
        name, indices = node.value.id, node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        texts = [self.source(i) for i in indices]
        yield self.put("rank", node.slice, ", ".join([*texts, "0"]), name)
        if len(texts) > 1:
            yield self.put("rank", node.slice, texts[0], name)
            yield self.put("order", node.slice, ", ".join(reversed(texts)), name)
        yield self.put("value range", indices[-1], f"{texts[-1]} + 1000000", name)
        yield self.put("value range", indices[-1], f"{texts[-1]} - 1000000", name)
        yield self.put("type", indices[-1], f"({texts[-1]}) / 2", name)
        yield self.put("type", indices[-1], "None", name, "None")
        yield self.put("type", indices[-1], '"text"', name, "text")
        yield self.put("name", node.value, f"{name}_", f"{name}_")

    def of_statement(self, node: ast.stmt) -> Iterator[Mistake]:
        first, last = node.lineno, node.end_lineno
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                begin, end = self.span(decorator)
                yield self.replace("missing step", begin - 1, end, first, "# ", node.name)
            return
        if isinstance(node, ast.Import | ast.ImportFrom) or first != last:
            return
        words = tuple(w for w in re.findall(r"\w+", self.source(node)) if w != "T")
        line = self.lines[first - 1]
        indent = line[: len(line) - len(line.lstrip())]
        begin, end = self.starts[first - 1], self.starts[first] - 1
        if not re.search(r"result|manual_seed", line):
            yield self.replace("missing step", begin, end, first, f"{indent}pass", *words)
        before = self.lines[first - 2]
        if (
            first - 1 > HEAD.count("\n") + 1
            and before.startswith(indent)
            and before[len(indent) : len(indent) + 1].strip()
            and not before.rstrip().endswith(":")
            and "=" in before
            and not before.strip().startswith(("@", "result"))
            and "torch." not in before
            and reads(line, before)
        ):
            yield self.replace(
                "order of statements", self.starts[first - 2], end, first - 1, f"{line}\n{before}", *words
            )
        if len(indent) >= 12 and self.lines[first].startswith(indent[4:]) is False:
            yield self.replace("scope", begin, end, first, f"{indent[4:]}{line.strip()}", *words)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            names = self.source(node.targets[0])
            yield self.put("count", node.targets[0], names.rpartition(",")[0] or names, *words)
        if isinstance(node, ast.AnnAssign):
            begin = self.span(node.target)[1]
            yield self.replace("wrong idiom", begin, begin + 1, first, " =", *words)
        if isinstance(node, ast.Return) and node.value:
            yield self.put("missing step", node, "return", *words)
            yield self.put("type", node.value, f"{self.source(node.value)}[0]", *words)


def is_fraction(node: ast.expr) -> bool:
    """Return whether an argument is a number that need not be whole."""
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def reads(line: str, before: str) -> bool:
    """Return whether a line reads a name that the line before assigns."""
    assigned = set(re.findall(r"\w+", before.partition("=")[0].partition(":")[0]))
    return bool(assigned & set(re.findall(r"\w+", line.partition("=")[2] or line)))


def misspelt(name: str) -> str:
    """Leave out a letter in the middle."""
    at = max(1, len(name) // 2)
    return name[:at] + name[at + 1 :] if len(name) > 3 else name + "x"


def mistakes() -> list[Mistake]:
    """Return all edits of all programs."""
    return [mistake for place in PLACES for mistake in Program(place).mistakes()]


def drawn(seed: int) -> list[Mistake]:
    """Return all edits in an order drawn from a seed: the n-th of each cell before the n+1-st of any."""
    rng = random.Random(seed)
    cells: dict[tuple[str, str], list[Mistake]] = {}
    for mistake in mistakes():
        cells.setdefault((mistake.place, mistake.kind), []).append(mistake)
    turns = []
    for cell in cells.values():
        rng.shuffle(cell)
        turns += [(number, rng.random(), mistake) for number, mistake in enumerate(cell)]
    return [mistake for _, _, mistake in sorted(turns, key=lambda turn: turn[:2])]


def tried(mistake: Mistake, path: Path) -> dict[str, Any]:
    """Run an edited program in this process; return its exception or warnings, and what they name."""
    import torch

    import torch_tile

    path.write_text(mistake.text)
    linecache.checkcache(str(path))
    torch.manual_seed(0)
    found: dict[str, Any] = {"error": "", "message": "", "frames": [], "from": "", "tile": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            exec(compile(mistake.text, str(path), "exec"), {"__name__": "mistake"})
        except BaseException as problem:
            frames = traceback.extract_tb(problem.__traceback__)
            found["error"] = type(problem).__name__
            found["message"] = "\n".join([str(problem), *getattr(problem, "__notes__", [])])
            found["frames"] = [frame.lineno for frame in frames if frame.filename == str(path)]
            raised = (frames[-1].line or "").startswith("raise") and "torch_tile" in frames[-1].filename
            found["from"] = "the author" if frames[-1].filename == str(path) else "a check" if raised else "elsewhere"
            found["tile"] = isinstance(problem, torch_tile.TileError)
            if isinstance(problem, SyntaxError):
                found["frames"], found["from"] = [problem.lineno], "the author"
    found["message"] += "\n".join(str(each.message) for each in told if "torch.jit" not in str(each.message))
    found["lines"] = [int(line) for line in re.findall(rf"{re.escape(str(path))}:(\d+)", found["message"])]
    return found


def in_a_child(mistake: Mistake, path: Path, seconds: int) -> dict[str, Any]:
    """Run an edited program in a process of its own, which may crash."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.write(writer, json.dumps(tried(mistake, path)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        given = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(given) if given else {"error": f"signal {-status}", "message": "", "from": "elsewhere"}


def main() -> None:
    """Try edits for some seconds."""
    import torch

    import torch_tile.language
    import torch_tile.nn  # noqa: F401 - once for all children

    torch.set_num_threads(1)
    seed, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    end = time.monotonic() + seconds
    for number, mistake in enumerate(drawn(seed)):
        if time.monotonic() > end:
            break
        found = in_a_child(mistake, folder / f"mistake_{number}.py", 60)
        print(json.dumps({**vars(mistake), "found": found}), flush=True)


if __name__ == "__main__":
    main()
