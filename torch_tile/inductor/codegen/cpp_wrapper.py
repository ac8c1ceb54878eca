# SPDX-License-Identifier: Apache-2.0
"""A tile op in a C++ wrapper (cpp_wrapper, AOTInductor): a function in the wrapper's text, machine code included.

The lowering records the op's launches, when the layouts of its inputs are settled. If launches cannot be recorded,
Inductor lowers the op's reference instead (`lower_reference`): a package never needs our Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_tile.compiler.binding import scalar
from torch_tile.compiler.sources import ENTRY
from torch_tile.diagnostics.errors import LaunchError
from torch_tile.inductor import compat
from torch_tile.inductor.codegen.symbolic_launch import NotEmbedded, Recorded, Symbols, TensorMeta, record
from torch_tile.inductor.graph.nodes import val
from torch_tile.inductor.report import rows as report
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Var
from torch_tile.ops import launchers
from torch_tile.ops.reference import reference
from torch_tile.runtime import launch_plan
from torch_tile.runtime.cuda_launch import NUMBER, SCALAR, TENSOR, CudaLauncher, Launch, Plan, grid_of, slot_of
from torch_tile.runtime.host_compiler import csrc_dir
from torch_tile.runtime.launch import Launcher, bits_of
from torch_tile.runtime.launch_plan import tensors_in

Unflatten = Callable[[list[Any], list[Any]], Any]

# Conversions from the wrapper's handles to the function's arguments.
GLUE = """
namespace tile {
template <class... Handles> std::array<uint64_t, sizeof...(Handles)> addresses(const Handles&... handles) {
  std::array<uint64_t, sizeof...(Handles)> found;
  size_t count = 0;
  auto add = [&](AtenTensorHandle handle) {
    void* data = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
    found[count++] = (uint64_t)data;
  };
  (add(handles), ...);
  return found;
}
}  // namespace tile
"""
STREAM = """
namespace tile {
inline void* current_stream() {
  void* found = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(/* of the current device */ -1, &found));
  return found;
}
}  // namespace tile
"""


def recorded_call(
    name: str,
    tensors: Sequence[TensorMeta],
    outs: Sequence[TensorMeta],
    constants: Sequence[Any],
    unflatten: Unflatten,
    env: Any,
) -> Embedded:
    """Write a call of `launchers.<name>` on tensors of these forms as C++. Raises NotEmbedded if that is not possible.

    unflatten: tensors and constants to (args, kwargs). env: where the symbols in constants and forms come from.
    """
    symbols = Symbols(env)
    given = [symbols.number(c) if isinstance(c, torch.SymInt) else c for c in constants]

    def call(fakes: list[torch.Tensor]) -> None:
        args, kwargs = unflatten(fakes[: len(tensors)], given)
        results = fakes[len(tensors) :]
        getattr(launchers, name)(*args, **kwargs, out=results[0] if len(outs) == 1 else tuple(results))

    return embedded(record(call, [*tensors, *outs], symbols))


def with_copies(embed: Callable[[], Embedded], count: int, copy: Callable[[int], None]) -> Embedded:
    """Call `embed()`; whenever it reports that input n would be copied, make input n contiguous and retry."""
    copied: set[int] = set()
    while True:
        try:
            return embed()
        except NotEmbedded as why:
            if why.copies is None or why.copies in copied or why.copies >= count:
                raise
            copied.add(why.copies)
            copy(why.copies)


def why_not(node: Node) -> str:
    """Say why a C++ wrapper cannot hold the tile op called by a graph node; empty if it can."""
    name = node.target._schema.name.removeprefix("tile::")  # type: ignore[union-attr]
    leaves, spec = tree_flatten((node.args, dict(node.kwargs)))
    values = [val(each) if isinstance(each, Node) else each for each in leaves]
    is_tensor = [isinstance(each, torch.Tensor) for each in values]

    def unflatten(tensors: list[Any], constants: list[Any]) -> Any:
        queues = iter(constants), iter(tensors)
        return tree_unflatten([next(queues[each]) for each in is_tensor], spec)

    results = val(node)
    outs = results if isinstance(results, tuple | list) else (results,)
    tensors, constants = ([v for v, t in zip(values, is_tensor, strict=True) if t is kind] for kind in (True, False))
    forms, made = ([TensorMeta(x.dtype, x.device, x.shape, x.stride()) for x in each] for each in (tensors, outs))
    numbers = [*constants, *(n for form in (*forms, *made) for n in (*form.size, *form.stride))]
    env = next((n.node.shape_env for n in numbers if isinstance(n, torch.SymInt)), None)

    def copy(n: int) -> None:
        forms[n] = forms[n]._replace(stride=tensors[n].contiguous().stride())

    try:
        with_copies(lambda: recorded_call(name, forms, made, constants, unflatten, env), len(forms), copy)
    except NotEmbedded as why:
        return str(why)
    return ""


def lower_reference(op: Any, args: Any, kwargs: Any, why: str) -> Any:
    """Lower the op's reference in plain torch instead of an op that cannot be embedded."""
    from torch._inductor.virtualized import V

    report.log.warning("%s is compiled by Inductor, as it cannot be called from C++: %s", op, why)
    node = V.graph.current_node
    leaves, spec = tree_flatten((node.args, dict(node.kwargs)))
    lowered, _ = tree_flatten((list(args), dict(kwargs)), is_leaf=lambda x: not isinstance(x, list | tuple | dict))
    nodes = [each for each in leaves if isinstance(each, Node)]

    def call(*values: Any) -> Any:
        queue = iter(values)
        given, named = tree_unflatten([next(queue) if isinstance(x, Node) else x for x in leaves], spec)
        return reference(op._schema.name.removeprefix("tile::"), *given, **named)

    inputs = [x for each, x in zip(leaves, lowered, strict=True) if isinstance(each, Node)]
    return compat.lower_inline(call, [val(each) for each in nodes], inputs)


def cpp_call(wrapper: Any, name: str, made: Embedded, tensors: Sequence[str]) -> str:
    """Return the statement that makes the call; what it calls is written into the wrapper if it is not there yet."""
    is_gpu = made.is_gpu
    texts = {"tile": headers() + GLUE, **({"tile stream": STREAM} if is_gpu else {}), **made.code}
    known = vars(wrapper).setdefault("_torch_tile", {})  # texts that are written, and functions by their bodies
    for key, text in texts.items():
        if key not in known:
            known[key] = key
            wrapper.header.splice(text)
    function = known.get(made.body)
    if function is None:
        function = known[made.body] = f"tile_{name}_{wrapper.next_kernel_suffix()}"
        wrapper.header.splice(made.function(function))
    values = ", ".join(wrapper.val_to_arg_str(each) for each in made.symbols)
    numbers = f"std::array<int64_t, {len(made.symbols)}>{{{values}}}.data()" if values else "nullptr"
    stream = "tile::current_stream()" if is_gpu else "nullptr"
    return f"{function}(tile::addresses({', '.join(tensors)}).data(), {numbers}, {stream});"


# A recorded call as C++ that repeats it: the launches with their numbers, and the machine code as bytes. The text needs
# csrc/embedded.h, and neither Python nor files, so its binary can be moved.

PLACE = 256  # a place in a plan: the number of a tensor, and so many times the bytes from its beginning
_LINE = 2000  # bytes of machine code on a line


class Workspace(NamedTuple):
    """An empty tensor that a call needs; sizes and strides may be expressions in Inductor's symbols."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


class Embedded(NamedTuple):
    """C++ of a function `(const uint64_t* pointers, const int64_t* numbers, void* stream)` without its name.

    code: what defines the machine code that it uses, by the names of the definitions. workspaces: their pointers follow
    those of the arguments. symbols: Inductor's, whose values are `numbers`.
    """

    body: str
    code: dict[str, str]
    workspaces: tuple[Workspace, ...]
    symbols: tuple[sympy.Symbol, ...]
    is_gpu: bool

    def function(self, name: str) -> str:
        """Return the definition as C++ text."""
        return f"static void {name}(const uint64_t* pointers, const int64_t* numbers, void* stream) {{\n{self.body}}}\n"


def embedded(recorded: Recorded) -> Embedded:
    """Write recorded launches as C++. Raises NotEmbedded if a kernel would refuse its arguments."""
    return _Text(recorded).run()


def headers() -> str:
    """Return the headers of the text as one piece of C++."""
    own = re.compile(r'^#include "(\w+\.h)"\n', re.M)

    def inlined(name: str) -> str:
        text = (csrc_dir() / name).read_text().replace("#pragma once\n", "")
        return own.sub(lambda found: inlined(found[1]), text)

    return inlined("embedded.h")


class _Text:
    """Write recorded launches as the body of a C++ function."""

    def __init__(self, recorded: Recorded):
        self.plan, self.symbols = recorded
        used = {self.plan.root(x) for launch in self.plan.launches for x in tensors_in(launch.args)}
        given = self.plan.given
        kept = [n for n in range(given, len(self.plan.roots)) if n in used]
        self.roots = {n: at for at, n in enumerate((*range(given), *kept))}  # the numbers of pointers
        self.made = tuple(self.plan.roots[n] for n in kept)
        self.code: dict[str, str] = {}
        self.alignments: dict[int, int] = {}
        self.lines: list[str] = []

    def run(self) -> Embedded:
        """Write the checks and launches of the plan. Raises NotEmbedded if a launch has no C++ form."""
        for launch in self.plan.launches:
            try:
                (self.cuda if isinstance(launch.kernel.launcher, CudaLauncher) else self.cpu)(launch)
            except LaunchError as problem:
                raise NotEmbedded(str(problem)) from problem
        checks = [
            f'tile::require(pointers[{root}] % {n} == 0, "tensors that begin at multiples of {n} bytes");'
            for root, n in sorted(self.alignments.items())
            if n > 1
        ]
        theirs = {ours: each for each, ours in self.symbols.here.items()}
        for condition in self.symbols.asked():
            shown = str(condition.subs(theirs)).replace("\\", "").replace('"', "")
            checks.append(f'tile::require({self.printed(condition)}, "sizes with {shown}");')
        body = "".join(f"  {line}\n" for line in [*checks, *self.lines])
        made = tuple(
            Workspace(_renamed(x.shape, theirs), _renamed(x.stride(), theirs), x.dtype, x.device) for x in self.made
        )
        is_gpu = any(isinstance(launch.kernel.launcher, CudaLauncher) for launch in self.plan.launches)
        return Embedded(body, self.code, made, tuple(theirs.values()), is_gpu)

    # -- one kernel ----------------------------------------------------------------------------------------------------
    def pointer(self, tensor: torch.Tensor) -> int:
        """Return the number of the pointer to a tensor's root."""
        root = self.plan.root(tensor)
        assert root is not None  # the recorder has checked this
        return self.roots[root]

    def cpu(self, launch: launch_plan.Launch) -> None:
        """Write a call of a shared library's entry."""
        launcher, (tensors, sizes, scalars) = launch.kernel.launcher, _bound(launch)
        assert isinstance(launcher, Launcher) and launcher.library is not None
        name = self.define(launcher.library.read_bytes(), _LIBRARY)
        buffers = [f"(void*)(pointers[{self.pointer(t)}] + {self.text(self.plan.offset(t))})" for t in tensors]
        numbers = [sizes[v] for v in launcher.sizes]
        numbers += [v if isinstance(v, torch.SymInt) else bits_of(p, v) for p, v in scalars.items()]
        assertions = ", ".join(_string(message or "condition is false") for message, _ in launcher.asserts)
        self.lines += [
            "{",
            f"  void* const buffers[] = {{{', '.join(buffers)}}};",
            f"  const int64_t sizes[] = {{{', '.join(map(self.text, numbers)) or '0'}}};",
            f"  tile::run({name}(), buffers, sizes, {_string(launcher.program.name)}, {{{assertions}}});",
            "}",
        ]

    def cuda(self, launch: launch_plan.Launch) -> None:
        """Write a plan of the launches of a cubin's entries."""
        launcher, (tensors, sizes, scalars) = launch.kernel.launcher, _bound(launch)
        assert isinstance(launcher, CudaLauncher)
        self.require_alignments(launcher, tensors)
        name = self.define(launcher.cubin, _CUBIN)
        places = [self.pointer(t) + self.plan.offset(t) * PLACE for t in tensors]
        slots = [v if isinstance(v, torch.SymInt) else slot_of(p, v) for p, v in scalars.items()]
        launches, functions = [], []
        for entry in launcher.source.entries:
            given, forms = launcher.arguments(entry, sizes)
            values = {TENSOR: (TENSOR, places), SCALAR: (NUMBER, slots)}
            arguments = tuple(
                (values[kind][0], values[kind][1][n]) if kind in values else (kind, n) for kind, n in given
            )
            maps = tuple(_AtPlace(form._replace(position=places[form.position])) for form in forms)
            grid = grid_of(entry, {**sizes, **scalars})
            functions.append(f"{name}.function({_string(entry.name)}, {entry.shared_bytes})")
            launches.append(
                Launch(_Verbatim(functions[-1]), grid, entry.threads, entry.shared_bytes, arguments, maps,  # type: ignore[arg-type]
                       entry.cluster, entry.early)
            )  # fmt: skip
        folds = ", ".join("true" if entry.folds else "false" for entry in launcher.source.entries)
        words = Plan(0, 0, tuple(launches)).words()
        self.lines += [
            "{",
            f"  alignas(64) int64_t plan[] = {{{', '.join(map(self.text, words))}}};",
            f"  tile::run(plan, {{{folds}}}, pointers, stream);",
            "}",
        ]

    def require_alignments(self, launcher: CudaLauncher, tensors: Sequence[torch.Tensor]) -> None:
        """Require alignments of addresses, where those of the tensor are not known."""
        for param, tensor in zip(launcher.buffers, tensors, strict=True):
            wanted = launcher.alignments[param]
            if self.plan.offset(tensor) % wanted != 0 or self.plan.low_bits_of(tensor) % wanted != 0:
                raise NotEmbedded(f"`{param.name}` may begin at an address that is no multiple of {wanted} bytes")
            pointer = self.pointer(tensor)
            self.alignments[pointer] = max(self.alignments.get(pointer, 1), wanted)

    # -- text ----------------------------------------------------------------------------------------------------------
    def define(self, code: bytes, form: str) -> str:
        """Return the name of a piece of machine code."""
        digest = hashlib.sha256(code).hexdigest()[:16]
        name = f"tile_code_{digest}"
        if name not in self.code:
            self.code[name] = form.format(name=name, bytes=_bytes(code), size=len(code))
        return name

    def text(self, value: Any) -> str:
        """Return a number of 64 bits."""
        if isinstance(value, _Verbatim):
            return value
        if isinstance(value, torch.SymInt | torch.SymBool):
            return self.printed(value.node.expr)
        value = int(value)
        if not -(2**63) < value < 2**63:
            return f"(int64_t){value % 2**64}ull"
        return str(value) if abs(value) < 2**31 else f"{value}ll"

    def printed(self, expr: Any) -> str:
        """Return an expression of symbols as C++."""
        numbers = {ours: f"numbers[{n}]" for n, ours in enumerate(self.symbols.here.values())}
        return printed(expr, numbers.__getitem__)


class _Verbatim(str):
    """C++ among the words of a plan."""

    __slots__ = ()


class _AtPlace(NamedTuple):
    """A tensor map of a plan, as `Plan` looks at it."""

    form: Any


def _bound(launch: launch_plan.Launch) -> tuple[list[torch.Tensor], dict[Var, Any], dict[Var, Any]]:
    """Return the tensors, sizes and scalars of a launch."""
    launcher = launch.kernel.launcher
    binding = launcher.binding
    args = binding.in_order(launch.args)
    sizes = binding.sizes_of(args, launcher.kind)
    numbers = [(p, a) for p, a in zip(binding.given, args, strict=True) if isinstance(p, Var)]
    scalars = {p: a if isinstance(a, torch.SymInt) and p.dtype.is_integer else scalar(p, a) for p, a in numbers}
    return [a for p, a in zip(binding.given, args, strict=True) if isinstance(p, Buffer)], sizes, scalars


def _renamed(numbers: Sequence[Any], theirs: dict[Any, Any]) -> tuple[Any, ...]:
    """Return numbers in Inductor's symbols."""
    return tuple(n.node.expr.subs(theirs) if isinstance(n, torch.SymInt) else n for n in numbers)


def printed(expr: Any, name: Callable[[Any], str]) -> str:
    """Return an integer expression or a condition as C++. Raises NotEmbedded for what has no such form."""
    parts = [printed(each, name) for each in expr.args]
    if isinstance(expr, sympy.Symbol):
        return name(expr)
    if isinstance(expr, sympy.Integer):
        return f"{int(expr)}ll"
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return "(" + " * ".join([parts[0]] * int(expr.exp)) + ")"
    kind = type(expr).__name__
    if kind in _BETWEEN:
        return "(" + _BETWEEN[kind].join(parts) + ")"
    if kind in _FUNCTIONS:
        text = parts[0]
        for part in parts[1:]:
            text = f"tile::{_FUNCTIONS[kind]}({text}, {part})"
        return text
    if kind == "Not":
        return f"!{parts[0]}"
    raise NotEmbedded(f"{expr} has no form in C++")


_BETWEEN = {
    "Add": " + ", "Mul": " * ", "And": " && ", "Or": " || ", "Equality": " == ", "Unequality": " != ",
    "StrictLessThan": " < ", "LessThan": " <= ", "StrictGreaterThan": " > ", "GreaterThan": " >= ",
}  # fmt: skip
_FUNCTIONS = {
    "FloorDiv": "floor_div", "CleanDiv": "floor_div", "Mod": "floor_mod", "PythonMod": "floor_mod", "Max": "most",
    "Min": "least",
}  # fmt: skip

_LIBRARY = f"""// The library of a kernel for the CPU, whose entry is {ENTRY}.
static tile::Entry {{name}}() {{{{
  static const char code[] = {{bytes}};
  static const tile::Entry entry = tile::open_entry(code, {{size}});
  return entry;
}}}}
"""
_CUBIN = """// A cubin.
alignas(64) static const char {name}_bytes[] = {bytes};
static tile::Cubin {name}({name}_bytes);
"""
_TEXT = {n: chr(n) if 32 <= n < 127 and chr(n) not in '"\\?' else f"\\{n:03o}" for n in range(256)}


def _bytes(code: bytes) -> str:
    """Return a string literal."""
    lines = (code[at : at + _LINE] for at in range(0, len(code), _LINE))
    return "".join('\n  "' + "".join(map(_TEXT.__getitem__, line)) + '"' for line in lines)


def _string(text: str) -> str:
    """Write text as a C++ string literal."""
    return '"' + "".join(map(_TEXT.__getitem__, text.encode())) + '"'
