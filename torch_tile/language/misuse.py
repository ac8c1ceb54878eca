# SPDX-License-Identifier: Apache-2.0
"""What Python itself finds wrong on an author's line, told as an error of the author's.

Tile expressions and buffers are no numbers, lists or tensors: where an author gives one to a function of Python or
torch, or asks it for a method of a tensor, Python names classes of the compiler, which authors do not know.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from torch_tile.diagnostics.errors import Span, TileError, diagnose, error
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Expr
from torch_tile.language.trace import author_span
from torch_tile.language.values import Handle

_CLASSES = {c.__name__ for c in (*Expr.__subclasses__(), Handle, Region)}
_CASTS = {"int": "T.cast(x, 'int32')", "float": "T.cast(x, 'float32')"}
_HAVE = {
    Handle: "a buffer has .shape, .strides, .dtype, .ndim, .name and .scope(); T's functions compute with it",
    Region: "a region can be copied, filled, reduced and multiplied by T's functions",
}


def explain(problem: Exception, span: Span | None, language: Any) -> TileError | None:
    """The author's error that `problem`, raised on the author's own line at `span`, stands for; None if it is another.

    `language` has the functions whose calls may be wrong.
    """
    text = str(problem)
    if isinstance(problem, AttributeError):
        kind = type(problem.obj)
        if isinstance(problem.obj, Expr | Handle | Region):
            what = f"`{str(problem.obj)[:60]}` has no `{problem.name}`"
            fix = _HAVE.get(kind, "write operators and T's functions, such as T.exp(x) or T.cast(x, dtype)")
            return error("python_value", span, problem=what, fix=fix)
    called = re.match(r"(\w+)(\.__init__)?\(\) (got|missing|takes)", text)
    function = getattr(language, called[1], None) if called else None
    if callable(function):
        return bad_call(called[1], function, text, span)  # type: ignore[index]
    words = set(re.findall(r"\w+", text))
    if words.isdisjoint(_CLASSES):
        return None
    text = re.sub(rf"\b({'|'.join(_CLASSES)})\b", lambda m: _kind(m[0]), text)
    fix = _instead(span, language)
    if isinstance(problem, IndexError):  # of a tensor or array that the author's Python holds
        fix = "give the tensor to the kernel as a parameter; only Python's own numbers may be captured"
    return error("python_value", span, problem=text, fix=fix)


def bad_call(name: str, function: Callable[..., Any], text: str, span: Span | None) -> TileError:
    """The error for a call of `T.name` whose arguments do not fit, with Python's `text` about it."""
    given = inspect.signature(function).parameters.values()
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown:
        known = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
        near = nearest(unknown[1], known)
        fix = (
            f"did you mean `{near}`?" if near else f"its parameters are {', '.join(known)}" if known else "leave it out"
        )
        return error("unknown_keyword", span, name=name, keyword=unknown[1], fix=fix)
    why = text[text.index("()") + 3 :] if "()" in text else text
    parameters = [str(p).split(":")[0].split(" =")[0] for p in given]
    return error("bad_call", span, name=name, why=why, parameters=", ".join(parameters))


def nearest(name: str, known: Sequence[str]) -> str:
    """The name of `known` that is spelt most like `name`; empty if none is."""
    spellings = {k.lower(): k for k in known}
    found = get_close_matches(name.lower(), spellings, 1)
    return spellings[found[0]] if found else ""


def _kind(name: str) -> str:
    return {"Handle": "a buffer", "Region": "a region"}.get(name, "a tile expression")


def _instead(span: Span | None, language: Any) -> str:
    """What to write for the function that is called where the span begins."""
    source = span.source()[span.column :] if span else ""
    called = re.match(r"([\w.]+)\(", source)
    name = called[1].rpartition(".")[2] if called else ""
    if name in _CASTS:
        return f"write {_CASTS[name]}"
    if called and not called[1].startswith("T.") and callable(getattr(language, name, None)):
        return f"write T.{name}(...)"
    return "write operators and T's functions, such as T.exp(x), T.max(x, y) or T.cast(x, dtype)"


# Names that `T` does not have: an author asks for one by mistake, or because TileLang has it.

# What to write for names of TileLang that have no counterpart of the same name.
INSTEAD = {
    "sum": "T.reduce_sum(src, dst, dim) adds up tiles; `+` adds values",
    "any": "T.any_of(flags) asks about a tile; `or` joins conditions",
    "all": "T.all_of(flags) asks about a tile; `and` joins conditions",
    "where": "write `a if c else b`, or T.if_then_else(c, a, b)",
    "zeros": "allocate by T.alloc_fragment or T.alloc_shared, then T.clear(tile)",
    "full": "allocate by T.alloc_fragment or T.alloc_shared, then T.fill(tile, value)",
    "load": "read elements as A[i, j], tiles by T.copy(A[i, j], tile)",
    "store": "write elements as A[i, j] = x, tiles by T.copy(tile, A[i, j])",
    "dot": "T.gemm(a, b, c) adds the product of tiles to c",
    "matmul": "T.gemm(a, b, c) adds the product of tiles to c",
    "arange": "loop by `for i in T.Parallel(n)`, whose i counts from 0",
    "program_id": "`with T.Kernel(...) as (bx, by)` names the block's indices",
    "range": "`for i in range(n)` is a loop of the device, as T.serial is",
    "loop_break": "write `break`",
    "annotate_safe_value": "reads outside a tensor give 0; for more write `T.if_then_else(i < n, A[i], value)`",
    "activemask": "all 32 lanes of a warp take part in what lanes do together",
    "sync_grid": "T.arrive_last tells which block is the last to arrive; several T.Kernel in one function run in order",
    "launch_thread": "T.Kernel(blocks, threads=n) launches; T.get_thread_binding(dim) names the running thread",
    "import_source": "kernels hold no CUDA text: write it in the language",
    "call_extern": "kernels hold no CUDA text: write it in the language",
    "annotate_pass_configs": "give pass_configs to torch_tile.jit or torch_tile.compile",
    "annotate_compile_flags": "give compile_flags to torch_tile.jit or torch_tile.compile",
    "ieee_add": "write `x + y`; products and sums may be fused, which rounds once",
    "ieee_sub": "write `x - y`; products and sums may be fused, which rounds once",
    "ieee_mul": "write `x * y`; products and sums may be fused, which rounds once",
    "ieee_fmaf": "write `T.fma(x, y, z)`",
    "ieee_fdiv": "write `x / y`",
    "ieee_frcp": "write `1 / x`",
    "ieee_fsqrt": "write `T.sqrt(x)`",
    "ieee_frsqrt": "write `T.rsqrt(x)`",
    "add2": "write `x + y` in T.Parallel or T.vectorized",
    "sub2": "write `x - y` in T.Parallel or T.vectorized",
    "mul2": "write `x * y` in T.Parallel or T.vectorized",
    "fma2": "write `T.fma(x, y, z)` in T.Parallel or T.vectorized",
    "alloc_tmem": "tensor memory is sm_100's: accumulate in T.alloc_fragment",
    "tcgen05_gemm": "T.gemm chooses the instruction; sm_100's own are not supported",
    "gemm_sp": "sparse products are not supported: T.gemm multiplies dense tiles",
    "rng_init": "give random numbers as a tensor",
    "rng_rand": "give random numbers as a tensor",
    "rng_rand_float": "give random numbers as a tensor",
    "alloc_cluster_barrier": "blocks of a cluster meet at T.cluster_sync()",
    "ptx_cp_async": "T.async_copy(src, dst) is asynchronous, and so are copies in T.Pipelined loops",
    "tma_load": "T.tma_copy(src, dst, barrier=...) copies in bulk",
    "tma_store": "T.tma_copy(src, dst) copies in bulk",
}  # fmt: skip


class UnknownName(TileError, AttributeError):
    """`T.name` where there is no such name: shows the author's line, and is what `hasattr` asks for."""


def unknown_name(name: str, known: Iterable[str]) -> UnknownName:
    """The error for `T.name`, to be raised by the caller: with what to write instead, or the nearest `known` names."""
    fix = INSTEAD.get(name, "")
    if not fix:
        spellings = {n.lower(): n for n in known if not n.startswith("_")}
        near = get_close_matches(name.lower(), spellings, cutoff=0.75)
        meant = " or ".join(f"T.{spellings[n]}" for n in near)
        fix = f"did you mean {meant}?" if near else "see docs/writing-kernels.md for what the language offers"
    return UnknownName(diagnose("unknown_name", author_span(), name=name, fix=fix))
