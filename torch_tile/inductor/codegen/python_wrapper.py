# SPDX-License-Identifier: Apache-2.0
"""A tile op in Inductor's IR: a call that writes into buffers of Inductor's own memory plan.

In generated Python each different call becomes one object. Its text is made of literals, so a module from a cache makes
it too, when it is loaded. Its arguments are buffers and run-time sizes only; it makes views of the buffers once. In C++
each different call is one function: cpp_wrapper.py. This module uses torch's private parts, like compat.py.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from torch_tile.inductor.codegen.cpp_wrapper import (
    Embedded,
    Workspace,
    cpp_call,
    lower_reference,
    recorded_call,
    with_copies,
)
from torch_tile.inductor.codegen.symbolic_launch import NotEmbedded, TensorMeta

PREFIX = "_torch_tile"
IMPORT = f"import torch_tile.ops.launchers as {PREFIX}"


def lower(op: torch._ops.OpOverload, name: str, args: Any, kwargs: Any) -> Any:
    """Lower `op` to a call of `launchers.<name>`, or to its launches if the wrapper is in C++."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    with V.graph.fake_mode:
        result, tensors, constants, unflatten = processed(ir.ExternKernel.process_kernel(op, *args, **kwargs))
    results = result if isinstance(result, tuple) else (result,)
    made = None
    if V.graph.cpp_wrapper:
        layouts = [ir.FallbackKernel.tensor_to_layout(each) for each in results]
        outs = [TensorMeta(each.dtype, each.device, each.size, each.stride) for each in layouts]
        env = V.graph.sizevars.shape_env

        def record() -> Embedded:
            return recorded_call(name, [meta_of(x) for x in tensors], outs, constants, unflatten, env)

        def copy(n: int) -> None:
            tensors[n] = ir.ExternKernel.realize_input(ir.ExternKernel.require_contiguous(tensors[n]))

        try:
            made = with_copies(record, len(tensors), copy)
        except NotEmbedded as why:
            return lower_reference(op, args, kwargs, str(why))
    call = node_class()(op, name, tensors, constants, unflatten, results, made)
    first = ir.TensorBox.create(call)
    return (first, *call.others[: len(results) - 1]) if isinstance(result, tuple) else first


def meta_of(x: Any) -> TensorMeta:
    """Return the form of an input."""
    from torch._inductor.virtualized import V

    found = strided_view(x)
    base, layout = (x, None) if found is None else found
    view = None if layout is None else (layout.size, layout.stride, layout.offset)
    low = x.get_dtype().itemsize if base.get_name() in V.graph.unaligned_buffers else 0
    return TensorMeta(x.get_dtype(), x.get_device(), base.get_size(), base.get_stride(), low, view)


class Processed(NamedTuple):
    """What Inductor's `process_kernel` returns of a call; the fields have the names of torch 2.15."""

    example_output: Any
    tensor_args: Any
    non_tensor_args: Any
    unflatten_args: Any


def processed(found: Any) -> Processed:
    """Name the result of `process_kernel`: a tuple up to torch 2.14, an object with names since."""
    if isinstance(found, tuple):
        return Processed(*found[:4])
    return Processed(*(getattr(found, name) for name in Processed._fields))


@functools.cache
def node_class() -> type:
    """Return the class of the nodes. It is made late, since importing Inductor takes long."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def workspace_layout(x: Workspace) -> Any:
        return ir.FixedLayout(x.device, x.dtype, list(x.size), list(x.stride))

    class TileCall(ir.ExternKernelOut):
        """The first output is the node's own buffer; others are empty buffers that it changes, as C++ workspaces."""

        def __init__(
            self,
            op: torch._ops.OpOverload,
            name: str,
            tensors: Any,
            constants: Any,
            unflatten: Any,
            results: Any,
            made: Embedded | None = None,
        ):
            layout, *layouts = (ir.FallbackKernel.tensor_to_layout(t) for t in results)
            layouts += [] if made is None else [workspace_layout(x) for x in made.workspaces]
            self.others = [
                lowering.empty_strided(x.size, x.stride, dtype=x.dtype, device=x.device) for x in layouts
            ]  # fmt: skip
            super().__init__(
                layout,
                [*tensors, *self.others],
                tuple(constants),
                python_kernel_name=f"{PREFIX}.{name}",
                op_overload=op,
            )
            self.tile_name, self.unflatten = name, unflatten
            self.made, self.results = made, len(results)
            self.mutation_outputs = [
                ir.MutationOutput(ir.NoneLayout(device=x.get_device()), x, self) for x in self.others
            ]  # fmt: skip

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and before its first use the called object or function."""
            self.codegen_comment(wrapper)
            is_unused = self.get_name() in V.graph.removed_buffers  # but other outputs are used
            if is_unused:
                wrapper.writeline(wrapper.make_buffer_allocation(self))
            wrapper.writeline(self.in_cpp(wrapper) if V.graph.cpp_wrapper else self.in_python(wrapper))
            if is_unused:
                wrapper.writeline(wrapper.make_buffer_free(self))

        def in_python(self, wrapper: Any) -> str:
            """Write the call of an object that the module makes when it is loaded."""
            count = len(self.inputs) - len(self.others)
            text = CallText(wrapper)
            tensors = [text.tensor(x) for x in self.inputs[:count]]
            args, kwargs = self.unflatten(tensors, [text.constant(c) for c in self.constant_args])
            outs = [text.parameter("y", x.codegen_reference()) for x in (self, *self.others[: self.results - 1])]
            site = text.site(self.tile_name, args, kwargs, outs)
            name = wrapper.src_to_kernel.get(site)
            if name is None:
                name = wrapper.src_to_kernel[site] = f"tile_{self.tile_name}_{wrapper.next_kernel_suffix()}"
                wrapper.add_import_once(IMPORT)
                wrapper.define_kernel(name, site, gpu=False)
            return f"{name}({', '.join(text.given())})"

        def in_cpp(self, wrapper: Any) -> str:
            """Write the call of a function that makes the launches."""
            count = len(self.inputs) - len(self.others)
            bases = [(strided_view(x) or (x,))[0] for x in self.inputs[:count]]
            tensors = [x.codegen_reference() for x in (*bases, self, *self.others)]
            assert self.made is not None  # as it was lowered for this
            return cpp_call(wrapper, self.tile_name, self.made, tensors)

    return TileCall


class Verbatim(str):
    """Text whose repr is itself."""

    __repr__ = str.__str__


class CallText:
    """Build the text of one call: a function of tensors, outputs and numbers, and its arguments."""

    number_kinds: str

    def __init__(self, wrapper: Any):
        self.wrapper = wrapper
        self.parameters: dict[str, dict[str, str]] = {"x": {}, "y": {}, "n": {}}
        self.number_kinds = ""

    def parameter(self, letter: str, given: str) -> Verbatim:
        """Return the parameter for the argument `given`."""
        named = self.parameters[letter]
        return Verbatim(named.setdefault(given, f"{letter}{len(named)}"))

    def tensor(self, x: Any) -> Verbatim:
        """Return the text of a tensor: a parameter, or a view of one."""
        found = strided_view(x)
        if found is None:
            return self.parameter("x", x.codegen_reference())
        base, layout = found
        size, stride = (tuple(map(self.number, each)) for each in (layout.size, layout.stride))
        whole = self.parameter("x", base.codegen_reference())
        return Verbatim(f"{PREFIX}.view({whole}, {size}, {stride}, {self.number(layout.offset)})")

    def constant(self, value: Any) -> Any:
        """Return the text of a constant: a number, possibly symbolic, or anything else by its repr."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.number(value.node.expr)
        return Verbatim(f"float('{value}')") if isinstance(value, float) and value - value != 0 else value

    def number(self, expr: Any) -> Any:
        """Return the text of a number of Inductor's."""
        if getattr(expr, "is_number", True):
            return Verbatim(expr)
        count = len(self.parameters["n"])
        name = self.parameter("n", self.wrapper.val_to_arg_str(expr))
        if len(self.parameters["n"]) > count:
            self.number_kinds += "d" if expr.is_integer is False else "q"
        return name

    def site(self, name: str, args: Any, kwargs: Any, outs: list[Verbatim]) -> str:
        """Return the text that makes the object."""
        parts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        parts.append(f"out={outs[0] if len(outs) == 1 else tuple(outs)!r}")
        names = [n for each in self.parameters.values() for n in each.values()]
        kinds = "t" * (len(names) - len(self.number_kinds)) + self.number_kinds
        return f"{PREFIX}.site({kinds!r}, lambda {', '.join(names)}: {PREFIX}.{name}({', '.join(parts)}))"

    def given(self) -> list[str]:
        """Return the arguments of the object's call."""
        return [given for each in self.parameters.values() for given in each]


def strided_view(x: Any) -> Any:
    """Return the buffer and layout of a view that changes only sizes, strides and offset; None for other views."""
    from torch._inductor import ir

    if not isinstance(x, ir.ReinterpretView):
        return None
    base = x.data
    while isinstance(base, ir.MutableBox):
        base = base.data
    if not isinstance(base, ir.Buffer) or base.get_dtype() != x.layout.dtype or base.get_layout().offset != 0:
        return None
    return base, x.layout
