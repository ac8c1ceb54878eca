# SPDX-License-Identifier: Apache-2.0
"""A tile op in a C++ wrapper (cpp_wrapper, AOTInductor): a function of the wrapper's own, machine code included.

What the op launches is recorded as it is lowered, when the layouts of its inputs are settled. Where that cannot be
written down, the op is Inductor's again (`lower_reference`): a package never needs our Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_tile.inductor import compat
from torch_tile.inductor.codegen.cpp_text import Embedded, embedded, headers
from torch_tile.inductor.codegen.symbolic_launch import Form, NotEmbedded, Outline, Symbols, record
from torch_tile.inductor.graph.nodes import val
from torch_tile.inductor.report import rows as report
from torch_tile.ops import launchers
from torch_tile.ops.reference import reference

Unflatten = Callable[[list[Any], list[Any]], Any]

# How the wrapper's handles become what the functions take.
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
    name: str, tensors: Sequence[Form], outs: Sequence[Form], constants: Sequence[Any], unflatten: Unflatten, env: Any
) -> Embedded:
    """The C++ of `direct.<name>` on tensors of these forms. Raises NotEmbedded where there is none.

    unflatten: tensors and constants to (args, kwargs). env: where the symbols in constants and forms come from.
    """
    symbols = Symbols(env)
    given = [symbols.number(c) if isinstance(c, torch.SymInt) else c for c in constants]

    def call(outlines: list[Outline]) -> None:
        args, kwargs = unflatten(list(outlines[: len(tensors)]), given)
        results = outlines[len(tensors) :]
        getattr(launchers, name)(*args, **kwargs, out=results[0] if len(outs) == 1 else tuple(results))

    return embedded(record(call, [*tensors, *outs], symbols))


def with_copies(made: Callable[[], Embedded], count: int, copy: Callable[[int], None]) -> Embedded:
    """`made()`, once `copy(n)` has put a contiguous copy in the place of each of `count` tensors that it would copy."""
    copied: set[int] = set()
    while True:
        try:
            return made()
        except NotEmbedded as why:
            if why.copies is None or why.copies in copied or why.copies >= count:
                raise
            copied.add(why.copies)
            copy(why.copies)


def why_not(node: Node) -> str:
    """Why the call of a tile op that a node of a graph makes cannot be in a C++ wrapper; empty if it can."""
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
    forms, made = ([Form(x.dtype, x.device, x.shape, x.stride()) for x in each] for each in (tensors, outs))
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
    """What Inductor makes of an op that cannot be embedded: its reference in plain torch, lowered in its place."""
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
    """The statement that makes the call; what it calls is written into the wrapper if it is not there yet."""
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
