# SPDX-License-Identifier: Apache-2.0
"""Turn Python's own exceptions on an author's line into errors that the author understands.

Tile expressions and buffers are no numbers, lists or tensors. If an author gives one to a function of Python or torch,
Python names classes of the compiler. So it does for methods of a tensor. Authors do not know those.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from torch_tile.diagnostics.errors import Span, TileError, diagnose, error
from torch_tile.diagnostics.spelling import nearest
from torch_tile.ir.buffer import Region
from torch_tile.ir.expr import Expr
from torch_tile.language.trace import author_span
from torch_tile.language.values import Handle

_CLASSES = {c.__name__ for c in (*Expr.__subclasses__(), Handle, Region)}
_CASTS = {"int": "T.cast(x, 'int32')", "float": "T.cast(x, 'float32')", "divmod": "x // n and x % n"}
_HAVE = {
    Handle: "a buffer has .shape, .strides, .dtype, .ndim, .name and .scope(); functions, T's or yours, take it: f(A)",
    Region: "a region can be copied, filled, reduced and multiplied by T's functions",
}


_WRITE = "write operators and T's functions, such as T.exp(x) or T.cast(x, dtype)"
# Keywords of Triton, CUDA, torch and NumPy that no function here has: the functions, and what to write instead.
_RAGGED = "leave it out: reads outside of a tensor give 0, or T.annotate_safe_value; writes there are dropped"
_COUNTED = "loops count from 0 by 1: compute the place from the index, A[start + step * i]"
_SCALED = "T.gemm adds the product to C: scale or add in a loop behind it, `for i, j in T.Parallel(m, n)`"
_SUMS = "T.gemm sums in the dtype of C: choose it at T.alloc_fragment(shape, dtype)"
_OWN = "the compiler decides it: leave it out, or loop by T.unroll(n)"
_TYPED = "tiles have their dtype from T.alloc_...(shape, dtype), and what is stored gets it"
_KEYWORDS = (
    (r"copy|ldg\d+|stg\d+", r"mask|other|boundary_check|pad\w*|predicate", _RAGGED),
    (r"Kernel", r"grid|blocks?|num_blocks|num_ctas", "the grid comes first, by position: T.Kernel(m, n, threads=128)"),
    (r"Kernel|serial|Parallel", r"(num_)?stages", "loops have stages: for k in T.Pipelined(n, num_stages=3)"),
    (r"Kernel", r"(num_)?warps", "a warp is 32 threads: threads=128 for four"),
    (r"Kernel", r"num_threads|block_dim|threads_per_block", "its name is `threads`"),
    (r"gemm", r"alpha|beta|scale\w*|bias", _SCALED),
    (r"gemm", r"acc\w*_?d?type|out_?dtype|dtype|\w*precision|allow_tf32", _SUMS),
    (r"gemm", r"out\w*|acc", "the third operand is the result: T.gemm(a, b, c)"),
    (r"Parallel|grid", r"step|start|stop|begin|end", _COUNTED),
    (r"Pipelined|vectorized", r"step", _COUNTED),
    (r"Parallel|Pipelined|vectorized", r"unroll\w*|num_warps|threads|parallel", _OWN),
    (
        r"alloc_(shared|fragment|local|global)",
        r"init|value|fill",
        "tiles are set afterwards: T.clear(tile), or T.fill(tile, value)",
    ),
    (r"reduce_\w+|cum\w+", r"keep_?dims?", "the result's shape says it: (m, 1) keeps the dimension, (m,) drops it"),
    (r"reduce_\w+", r"out_?dtype|dtype", "the dtype of the result says it: T.alloc_fragment(shape, dtype)"),
    (r"fill|clear|copy", r"dtype", _TYPED),
    (r"atomic_\w+", r"mask|pred\w*|cond\w*", "update in a branch: `if condition:`, and the update inside"),
)
# How functions are called whose parameters' names alone do not say it.
CALLS = {
    "const": "give all names in one text: M, N = T.const('M, N')",
    "annotate_layout": "give a dictionary: T.annotate_layout({tile: layout})",
    "Pipelined": "give the number of iterations: for k in T.Pipelined(n, num_stages=2)",
}
_TABLE = (
    "give the numbers to the kernel as a parameter, a tensor of its own, or choose by T.if_then_else(c, a, b); "
    "of several tiles, loop over the list itself, which is unrolled: for tile in tiles; "
    "or allocate one with a dimension more: tiles[k, :]"
)
_METHODS = {
    "sum": "T.reduce_sum(tile, out, dim) adds up a tile",
    "max": "T.reduce_max(tile, out, dim) takes the largest; T.max(x, y) of two values",
    "min": "T.reduce_min(tile, out, dim) takes the smallest; T.min(x, y) of two values",
    "mean": "T.reduce_sum(tile, out, dim), then divide by the size",
    "size": "write A.shape[0]: `shape` holds the sizes",
    "T": "T.transpose(src, dst), or T.gemm(..., transpose_A=True)",
    "t": "T.transpose(src, dst), or T.gemm(..., transpose_A=True)",
    "transpose": "T.transpose(src, dst), or T.gemm(..., transpose_A=True)",
    "view": "T.view(A, shape, dtype) names the elements by another shape",
    "reshape": "T.reshape(A, shape) names the elements by another shape",
    "to": "T.cast(x, dtype); T.copy converts tiles",
    "float": "T.cast(x, 'float32'); T.copy converts tiles",
    "double": "T.cast(x, 'float64'); T.copy converts tiles",
    "int": "T.cast(x, 'int32'); T.copy converts tiles",
    "type": "T.cast(x, dtype); T.copy converts tiles",
    "astype": "T.cast(x, dtype); T.copy converts tiles",
    "half": "T.cast(x, 'float16'); T.copy converts tiles",
    "copy_": "T.copy(src, dst)",
    "zero_": "T.clear(tile)",
    "fill_": "T.fill(tile, value)",
    "append": "a kernel cannot grow a buffer: give it the size that it will have",
}
_OF_TORCH = ("item", "numpy", "tolist", "cpu", "cuda", "detach", "clone", "contiguous", "value", "requires_grad_")


_AGAIN = "a part of a buffer is indexed again", "write all indices in one pair of brackets: A[i, j]"

# What Python says where a loop and a kernel are opened by the wrong statement, and what to write.
_STATEMENTS = {
    "Loop' object does not support the context manager": (  # Python 3.14 writes the module before the class
        "a loop is opened by `with`",
        "write `for i in T.Parallel(n):`",
    ),
    "object does not support the context manager": (
        "`with` opens what has no beginning and end",
        "write `with T.Kernel(...) as bx:`; tiles, tensors and values are used as they are",
    ),
    "'Handle' object is not callable": ("a buffer is called", "index it by brackets: A[i, j]"),
    "'Region' object does not support item assignment": _AGAIN,
    "'Region' object is not subscriptable": _AGAIN,
}
_ONE_VALUE = (
    "a value is indexed",
    "a value has no elements, one of T.alloc_var neither: write `v += x`; T.alloc_local((n,), dtype) holds several",
)


def explain(problem: Exception, span: Span | None, language: Any) -> TileError:
    """Return the author's error for the exception `problem`, raised by the author's line at `span`.

    `language` has the functions whose calls may be wrong.
    """
    text = str(problem)
    if isinstance(problem, NameError):
        name = problem.name or text.split("'")[1]
        return error("undefined_name", span, name=name, fix=_suggestion(name, problem, language))
    if isinstance(problem, AttributeError):
        kind = type(problem.obj)
        if isinstance(problem.obj, Expr | Handle | Region):
            what = f"`{str(problem.obj)[:60]}` has no `{problem.name}`"
            fix = _METHODS.get(str(problem.name)) or _HAVE.get(kind, _WRITE)
            if problem.name in _OF_TORCH:
                fix = f"leave `.{problem.name}()` out: a kernel computes with the value as it is"
            if (own := str(problem.name)) not in _METHODS and callable(getattr(language, own, None)):
                fix = f"T.{own} is a function: call it with its arguments, T.{own}(...)"
            return error("python_value", span, problem=what, fix=fix)
        if isinstance(problem.obj, ModuleType) and problem.obj.__name__.startswith(f"{language.__name__}."):
            module, name = problem.obj.__name__.rpartition(".")[2], str(problem.name)
            fix = f"write T.{name}" if hasattr(language, name) else instead(name) or "T has all functions: T.exp, T.max"
            return error("unknown_name", span, name=f"{module}.{name}", fix=fix)
    if isinstance(problem, LookupError) and (not text or not problem.args or isinstance(problem.args[0], Expr)):
        return device_key_error(problem.args[0] if problem.args else text, span)
    if isinstance(problem, IndexError) and "valid indices" in text:  # of NumPy, whose text names no class
        return error("python_value", span, problem=text.split("\n")[0], fix=_TABLE)
    indexed = re.match(r"([\w.]+)\.(shape|strides)\[", span.source()[span.column :]) if span else None
    called = re.match(r"([\w.]+)\.(shape|strides)\((\w*)", span.source()[span.column :]) if span else None
    if called and "'tuple' object is not callable" in text:
        fix = f"`{called[2]}` is a tuple: write {called[1]}.{called[2]}[{called[3]}]"
        return error("python_value", span, problem=f"`{called[1]}.{called[2]}` is called", fix=fix)
    if type(problem) is IndexError and indexed and "tuple" in text:
        fix = f"`{indexed[1]}.ndim` dimensions are counted from 0, or from -1 backwards"
        return error("python_value", span, problem=f"`{indexed[1]}` has no such dimension", fix=fix)
    if type(problem) is IndexError and re.match(r"(list|tuple) index out of range|pop from empty list", text):
        fix = "a loop of the device is traced once, so its lists get one entry: use T.alloc_local((n,), dtype)"
        return error("python_value", span, problem=text, fix=fix)
    indexed_value = re.match(r"'(\w+)' object (is not subscriptable|does not support item assignment)", text)
    if indexed_value and indexed_value[1] in _CLASSES and indexed_value[1] not in ("Handle", "Region"):
        return error("python_value", span, problem=_ONE_VALUE[0], fix=_ONE_VALUE[1])
    for part, (what, fix) in _STATEMENTS.items():
        if part in text:
            return error("python_value", span, problem=what, fix=fix)
    called = re.match(r"(\w+)(\.__init__)?\(\) (got|missing|takes)", text)
    function = getattr(language, called[1], None) if called else None
    if callable(function):
        return bad_call(called[1], function, text, span)  # type: ignore[index]
    if "'torch.dtype' object is not callable" in text:
        called = re.match(r"[\w.]+\.(\w+)\(", span.source()[span.column :]) if span else None
        fix = f"write T.{called[1]}(x)" if called else "write T.cast(x, dtype)"
        return error("python_value", span, problem="a dtype of torch converts no value", fix=fix)
    if (read := re.match(r"(?:could not convert string to|invalid literal for) (\w+)", text)) is not None:
        what = f"{read[1]}() reads a number from a text; a value of the device has none while the kernel is traced"
        return error("python_value", span, problem=what, fix="write T.cast(x, dtype) of the value itself")
    words = set(re.findall(r"\w+", text))
    if words.isdisjoint(_CLASSES):
        fix = _uncalled(text, span, language)
        if isinstance(problem, AttributeError) and (near := nearest(str(problem.name), dir(problem.obj))):
            fix = f"did you mean `{near}`?"
        return error("python_error", span, problem=f"{type(problem).__name__}: {text}", fix=fix)
    text = re.sub(rf"\b({'|'.join(_CLASSES)})\b", lambda m: _kind(m[0]), text)
    fix = _instead(span, language)
    if isinstance(problem, IndexError):  # of a tensor or array that the author's Python holds
        fix = _TABLE
    elif "has no len()" in text:
        fix = "write A.shape[0], the size of a dimension"
    elif "indices must be integers" in text:  # of a list or tuple
        fix = _TABLE
    elif "__format__" in text:
        fix = "T.print(x, msg='text') prints a value of the device"
    return error("python_value", span, problem=text, fix=fix)


def device_key_error(key: object, span: Span | None = None) -> TileError:
    """Build the error for a dictionary that is asked for a key that only the device knows."""
    return error("python_value", span, problem=f"a dictionary is asked for `{str(key)[:60]}`", fix=_TABLE)


def bad_call(name: str, function: Callable[..., Any], text: str, span: Span | None) -> TileError:
    """Build the error for a call of `T.name` whose arguments do not fit, with Python's `text` about it."""
    given = inspect.signature(function).parameters.values()
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if unknown:
        known = [p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
        near = nearest(unknown[1], known)
        fix = (
            f"did you mean `{near}`?" if near else f"its parameters are {', '.join(known)}" if known else "leave it out"
        )
        told = (fix for f, k, fix in _KEYWORDS if re.fullmatch(f, name) and re.fullmatch(k, unknown[1]))
        fix = next(told, fix)
        if name in ("max", "min") and unknown[1] in ("axis", "dim", "keepdims", "keepdim"):
            fix = f"T.{name} compares values; T.reduce_{name}(tile, result, dim) folds a tile"
        return error("unknown_keyword", span, name=name, keyword=unknown[1], fix=fix)
    why = text[text.index("()") + 3 :] if "()" in text else text
    parameters = [str(p).split(":")[0].split(" =")[0] for p in given]
    fix = CALLS.get(name, "")
    if name.startswith("reduce_") and "missing" in why:
        fix = f"the result is a tile of yours: T.{name}(tile, out, dim) writes into `out`"
    return error("bad_call", span, name=name, why=why, parameters=", ".join(parameters), fix=fix)


def _suggestion(name: str, problem: NameError, language: Any) -> str:
    """Suggest what an undefined name stands for: a near name of its function, T's, or what replaces it; "" if none."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    known = [*trace.tb_frame.f_locals, *trace.tb_frame.f_globals] if trace is not None else []
    if near := get_close_matches(name, (each for each in known if not each.startswith("__")), 1, 0.75):
        return f"did you mean `{near[0]}`?"
    if name in vars(language) and not isinstance(getattr(language, name), ModuleType):
        return f"write T.{name}"
    return instead(name)


def _uncalled(text: str, span: Span | None, language: Any) -> str:
    """Suggest the call of a function of T that stands where a value is wanted; "" if there is none."""
    if "'function'" not in text or span is None:
        return ""
    named = re.findall(r"\bT\.(\w+)\b(?!\s*[(.])", span.source())
    found = next((name for name in named if inspect.isfunction(getattr(language, name, None))), None)
    return f"T.{found} is a function: write its call, T.{found}(...)" if found else ""


def _kind(name: str) -> str:
    """Return the author's word for a type of the language."""
    return {"Handle": "a buffer", "Region": "a region"}.get(name, "a tile expression")


def _instead(span: Span | None, language: Any) -> str:
    """Suggest a replacement for the function that is called where the span begins."""
    source = span.source()[span.column :] if span else ""
    called = re.match(r"([\w.]+)\(", source)
    name = called[1].rpartition(".")[2] if called else ""
    if name in _CASTS:
        return f"write {_CASTS[name]}"
    if called and not called[1].startswith("T."):
        if callable(getattr(language, name, None)):
            return f"write T.{name}(...)"
        if name in INSTEAD:
            return INSTEAD[name]
    return "write operators and T's functions, such as T.exp(x), T.max(x, y) or T.cast(x, dtype)"


# Names that `T` does not have. Authors ask for them by mistake, or because TileLang has them.

# Replacements for names of TileLang that have no counterpart of the same name.
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
    "inf": "T.infinity(dtype), as T.infinity('float32'); Python's `float('inf')` is taken, too",
    "nan": "write Python's `float('nan')`, which takes the type beside it",
    "pi": "write Python's `math.pi`, which takes the type beside it",
    "e": "write Python's `math.e`, which takes the type beside it",
    "newaxis": "leave it out: `tile[i]` in `for i, j in T.Parallel(m, n)` repeats along j",
    "empty_like": "T.empty(X.shape, X.dtype)",
    "full_like": "allocate by T.alloc_fragment(X.shape, X.dtype), then T.fill(tile, value)",
    "ones_like": "allocate by T.alloc_fragment(X.shape, X.dtype), then T.fill(tile, 1)",
    "tensor": "T.Tensor(shape, dtype) annotates a parameter; T.alloc_fragment and T.alloc_shared make tiles",
    "array": "T.alloc_local(shape, dtype) is an array of each thread; T.alloc_fragment is a tile",
    "arange": "loop by `for i in T.Parallel(n)`, whose i counts from 0",
    "device_print": "T.print(value, msg)",
    "threadIdx": "tiles need no thread: write elements in T.Parallel; T.get_thread_binding() is the thread's number",
    "blockIdx": "`with T.Kernel(...) as (bx, by)` names the block's indices",
    "blockDim": "T.Kernel(..., threads=128) sets the threads of a block",
    "program_id": "`with T.Kernel(...) as (bx, by)` names the block's indices",
    "range": "`for i in range(n)` is a loop of the device, as T.serial is",
    "softmax": "T.reduce_max(tile, row_max, dim), T.exp(x - row_max), T.reduce_sum(tile, total, dim), then divide",
    "relu": "write T.max(x, 0)",
    "silu": "write x * T.sigmoid(x)",
    "gelu": "write 0.5 * x * (1 + T.erf(x * 0.70710678))",
    "mean": "T.reduce_sum(src, dst, dim), then divide by the size",
    "reduce_mean": "T.reduce_sum(src, dst, dim), then divide by the size",
    "reduce_var": "T.reduce_sum of the squares of what is left without the mean, then divide by the size",
    "norm": "T.reduce_sum of the squares, then T.sqrt",
    "reduce_any": "T.any_of(tile) asks about a whole tile; T.reduce_max(flags, out, dim) about each row",
    "reduce_all": "T.all_of(tile) asks about a whole tile; T.reduce_min(flags, out, dim) about each row",
    "reduce_prod": "loop over the dimension by T.serial, `acc[i] = acc[i] * x[i, j]`",
    "topk": "take the largest by T.reduce_max, blank it, and repeat: examples/kernels/top_k.py",
    "sort": "no tile is sorted at once: take the smallest by T.reduce_min, blank it, and repeat",
    "ones": "allocate by T.alloc_fragment or T.alloc_shared, then T.fill(tile, 1)",
    "zeros_like": "allocate by T.alloc_fragment or T.alloc_shared, then T.clear(tile)",
    "einsum": "T.gemm(a, b, c) adds the product of tiles to c",
    "cat": "copy each part into its place: T.copy(a, tile[0:16, :])",
    "concat": "copy each part into its place: T.copy(a, tile[0:16, :])",
    "barrier": "T.sync_threads() is a barrier; the compiler places those that tiles need",
    "len": "write A.shape[0]",
    "shared": "T.alloc_shared(shape, dtype) is a tile in shared memory",
    "fragment": "T.alloc_fragment(shape, dtype) is a tile in registers",
    "local": "T.alloc_local(shape, dtype) is an array of each thread",
    "tma_store": "T.tma_copy(src, dst) copies in bulk",
    # Triton's names.
    "constexpr": "a parameter that is no tensor is a compile-time constant: `def f(X, block=32):`",
    "num_programs": "T.get_block_extent(dim) is the number of blocks along a dimension of the grid",
    "static_range": "`for i in T.unroll(n)` is unrolled; a Python tuple is run by Python: `for i in (0, 1, 2):`",
    "static_assert": "write `assert condition, text`: Python checks what it knows, and the device the rest",
    "static_print": "Python's `print(text)` runs once, while the kernel is traced",
    "make_block_ptr": "there are no pointers to blocks: T.copy(A[i * 32, j * 32], tile) takes the tile's extents",
    "make_tensor_descriptor": "T.copy makes descriptors by itself: T.copy(A[i * 32, j * 32], tile)",
    "nn": "write the formula of an element: `for i in T.Parallel(n): Y[i] = T.max(X[i], 0)`; examples/kernels has more",
    "functional": "write the formula of an element: `for i in T.Parallel(n): Y[i] = T.max(X[i], 0)`",
    "linalg": "T.gemm(a, b, c) multiplies tiles; T.reduce_sum and the like fold them",
    "advance": "compute the place from the loop's index: T.copy(A[i * 32, k * 32], tile)",
    "debug_barrier": "T.sync_threads() is a barrier; the compiler places those that tiles need",
    "__syncthreads": "T.sync_threads() is a barrier; the compiler places those that tiles need",
    "__syncwarp": "T.sync_warp() is a barrier of a warp",
    "__shfl_xor_sync": "T.shfl_xor(value, mask) exchanges values between lanes",
    "__shfl_down_sync": "T.shfl_down(value, delta) exchanges values between lanes",
    "__shared__": "T.alloc_shared(shape, dtype) is a tile in shared memory",
    "multiple_of": "T.assume(n % 16 == 0) states what a size is divided by",
    "max_contiguous": "leave it out: T.copy and T.Parallel find out what lies side by side",
    "trans": "T.transpose(src, dst), or T.gemm(..., transpose_A=True)",
    "expand_dims": "index with fewer names: tile[i] in `for i, j in T.Parallel(m, n)` repeats along j",
    "broadcast_to": "index with fewer names: tile[i] in `for i, j in T.Parallel(m, n)` repeats along j",
    "associative_scan": "T.cumsum and T.cummax scan tiles; other scans are loops of T.serial",
    "inline_asm_elementwise": "T.call_extern calls functions of T.import_source's text",
}  # fmt: skip

# Replacements for whole families of TileLang's names, most special first: a pattern of names, and the reason.
_SM100 = "has an instruction of sm_100 alone, and this compiler writes sm_80 and sm_90a"
FAMILIES = (
    (r"(alloc|deallocate)_tmem", f"tensor memory {_SM100}: accumulate in T.alloc_fragment"),
    (r"(tcgen05|TCGEN05|ptx_tcgen05|alloc_tcgen05|initialize_tcgen05)\w*|compute_umma_descriptor|is_f8f6f4_family",
     f"tcgen05 {_SM100}: T.gemm chooses the instruction"),
    (r"clc_\w+", f"cluster launch control {_SM100}: T.PersistentTileScheduler gives blocks their tiles"),
    (r"tma_(gather|scatter)4\w*", f"a bulk copy of four rows {_SM100}: T.copy(A[rows[i], :], tile[i, :]) copies each"),
    (r"tma_load_2sm", f"a copy for two multiprocessors {_SM100}: T.tma_copy(src, dst, barrier=...) copies in bulk"),
    (r"(mma_|make_)?(gemm_)?block_?scaled\w*|\w+_blockscaled\w*|ptx_mma_block_scale|TensorCoreIntrinEmitterSM120",
     "products with scales of blocks are instructions of sm_100 and sm_120, and this compiler writes sm_80 and sm_90a: "
     "multiply the tiles by their scales before T.gemm"),
    (r"float4_e2m1_unpacked",
     f"to give each number of 4 bits a byte, a bulk copy {_SM100}: give the tile T.float4_e2m1fn"),
    (r"is_float4\w*", "compare types: x.dtype == T.float4_e2m1fn"),
    (r"float6\w*|float8_e4m3(b11fnuz)?|float8_e3m4",
     "no value of this type can be computed with: read it as uint8 and decode its bits"),
    (r"ptx_mma_sm70", "sm_70 is not supported: T.gemm chooses the instruction"),
    (r"(u?(char|short|int|long)|float|double|half)[2-4]",
     "a vector is named by its dtype and lanes: T.float32x4(x), or A[T.Ramp(i * 4, 1, 4)] of four neighbours"),
    (r"[a-z]+\d+\w*x\d+", "values have one lane: write elements, in T.vectorized or T.Parallel"),
    (r"__(exp|exp10|log|log2|log10|sin|cos|tan|pow)f", "T.__exp and its like are CUDA's fast forms"),
    (r"(WS[A-Z]\w*|WSID|ws_op|annotate_ws_\w+)",
     "roles are not declared: write `with T.ws(n):` or `with T.role(...):`, or leave them to T.Pipelined"),
    (r"(WGMMA|Sparse|WGSparse|TensorCore)\w*|compute_gmma_descriptor",
     "T.TensorCoreIntrinEmitter and T.WGMMATensorCoreIntrinEmitter multiply dense tiles in their own order"),
    (r"(increase_descriptor_offset|initialize_wgmma_descriptor|alloc_(wgmma_desc|descriptor)|ptx_wgmma\w*|wgmma_mma)",
     "descriptors are the compiler's: T.wgmma_gemm(a, b, c) starts a product, T.wait_wgmma(n) waits"),
    (r"warpgroup_(arrive|commit_batch|fence_operand|wait)",
     "the compiler places it: T.wgmma_gemm(a, b, c) starts a product, T.wait_wgmma(n) waits"),
    (r"tvm_(bmma_sync|mma_sync|fill_fragment|load_matrix_sync|store_matrix_sync)|mma_(fill|store\w*)|ptx_(mma|ldmatrix)\w*"
     r"", "T.gemm chooses the instruction"),
    (r"call_kernel", "T.call_extern calls functions of T.import_source's text from a kernel"),
    (r"(call_)?llvm\w*|call_intrin|vscale|get_active_lane_mask|vector(combine|high|low)",
     "is of LLVM's code: write operators and T's functions"),
    (r"(anylist|TVMBackend|call_c?packed|tvm_call|tvm_stack|tvm_struct|tvm_throw|lookup_param|handle_add)\w*|isnullptr",
     "calls the host from TVM's code: a kernel computes on its tensors, and Python calls it"),
    (r"(start|end)_profile_intrinsic", "of the profiler of another vendor: `kernel.get_profiler()` measures"),
    (r"ptx_cp_async_(bulk|barrier\w*)|create_barriers",
     "mbarriers are T.alloc_barrier's: T.tma_copy(src, dst, barrier=...) and T.mbarrier_wait_parity"),
    (r"ptx_(init_barrier_thread_count|fence_barrier_init)", "T.alloc_barrier(arrive_count) makes and fences barriers"),
    (r"ptx_arrive_barrier\w*", "T.mbarrier_arrive(barrier), T.mbarrier_arrive_expect_tx(barrier, bytes)"),
    (r"(ptx_)?arrive_cluster_barrier|alloc_cluster_barrier", "blocks of a cluster meet at T.cluster_sync()"),
    (r"(JITFunc|KernelLaunchFrame|WarpSpecializeFrame|AnyDType|BufferLoad|ProducerLoad|CallEffectKind"
     r"|CommReducer|IterVar|SizeVar|\w+Imm|PrimExpr)", "is a class of TileLang's compiler: kernels need none"),
    (r"(Add|Sub|Mul|Div|Mod|FloorDiv|FloorMod|Max|Min|EQ|NE|LT|LE|GT|GE|Call|Reduce|Broadcast|Ramp"
     r"|Shuffle|Let|let|type_annotation|undef|q_multiply\w*|extract_lane|ignore_loop_partition)",
     "is a node of TVM's IR: write operators and T's functions"),
    (r"(If|Then|Else|Assert|Range|sblock\w*|s?block_\w*|alloc_buffer|allocate|arg|axis|buffer\w*|decl_buffer"
     r"|env_thread|func_\w+|index_map|init|iter_var|match_buffer|meta_var|reads|writes|target|var|void|handle|Ptr|where"
     r"|(get|has)_let_value|get_tvm_dtype|validate_gemm_ab_dtypes|tvm_tuple|tvm_thread_invariant)",
     "is a statement of TVM's IR: write Python's `if`, `while`, `assert` and assignments, T.Tensor, T.alloc_..."),
    (r"(ret|break_loop|continue_loop)", "write `return`, `break` or `continue`; T.thread_return() ends a thread"),
    (r"inline|meta_class|BaseTileScheduler", "write a T.macro, or a Python class whose methods are traced as they run"),
    (r"tma_store_(arrive|wait)", "T.tma_copy(src, dst) without barrier starts bulk stores; the kernel's end awaits"),
    (r"(reduce_)?arg_?max", "T.reduce_max(src, row_max, dim), then T.reduce_min of the indices where it stands"),
    (r"(reduce_)?arg_?min", "T.reduce_min(src, row_min, dim), then T.reduce_min of the indices where it stands"),
    (r"atomic_?(cas|compare\w*|cmpxchg)|atomicCAS",
     "no compare-and-swap is offered: T.atomic_add, T.atomic_max and T.atomic_min update an element"),
    (r"atomic_?(xchg|exch\w*|swap)|atomicExch",
     "no exchange is offered: T.atomic_store writes, T.atomic_add, T.atomic_max and T.atomic_min update an element"),
    (r"ldexp", "write x * T.exp2(n)"),
    (r"nextafter", "the neighbour's bits are one off: T.reinterpret(T.reinterpret(x, 'int32') + 1, 'float32')"),
)  # fmt: skip
_FAMILIES = tuple((re.compile(pattern), reason) for pattern, reason in FAMILIES)


def instead(name: str) -> str:
    """Suggest a replacement for a name of TileLang, or say why there is none. Return "" for other names."""
    return INSTEAD.get(name) or next((reason for pattern, reason in _FAMILIES if pattern.fullmatch(name)), "")


class UnknownName(TileError, AttributeError):
    """The error for an unknown `T.name`; an AttributeError too, so that `hasattr` works."""


def unknown_name(name: str, known: Iterable[str]) -> UnknownName:
    """Build the error for an unknown `T.name`: what to write instead, or the nearest `known` names."""
    fix = instead(name)
    if not fix:
        public = (n for n in known if not n.startswith("_"))
        by_case = sorted(public, key=lambda n: n[0].isupper() == name[0].isupper())  # T.Parallel and T.parallel
        spellings = {n.lower(): n for n in by_case}
        near = get_close_matches(name.lower(), spellings, cutoff=0.7)
        meant = " or ".join(f"T.{spellings[n]}" for n in near)
        fix = f"did you mean {meant}?" if near else "see docs/writing-kernels.md for what the language offers"
    return UnknownName(diagnose("unknown_name", author_span(), name=name, fix=fix))
