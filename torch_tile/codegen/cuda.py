# SPDX-License-Identifier: Apache-2.0
"""Print a FLAT program as CUDA C++: one `__global__` function per kernel, the code of one thread.

Names are the author's, statements end with the author's line. Local arrays are indexed by constants once the loops
around them are unrolled, so that they stay in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_tile.codegen.c_text import Names, comment, foreign_lines, identifier, is_small, storage
from torch_tile.codegen.cuda_stmt import CudaStatements
from torch_tile.codegen.cuda_text import is_warpgroup
from torch_tile.codegen.cuda_wgmma import wgmma_functions
from torch_tile.codegen.tensors import disjoint_tensors, tensors_of, written_buffers
from torch_tile.compiler.context import Build
from torch_tile.compiler.sources import CudaSource, Entry, MapArg
from torch_tile.diagnostics.errors import error
from torch_tile.hardware import BULK_BYTES, GRID_LIMITS, LARGEST_SIZE, Target
from torch_tile.intrinsics import lookup
from torch_tile.intrinsics.memory import option
from torch_tile.ir import dtype as dtypes
from torch_tile.ir.bounds import Interval, Ranges
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Binary, Call, Const, Load, Var
from torch_tile.ir.idmap import IdMap, IdSet
from torch_tile.ir.node import Node, children, find, walk
from torch_tile.ir.stmt import Kernel, Program, Role, Store, dimensions

SHARED = "shared_memory"  # the name of the block's shared memory
MAP_ALIGNMENT = BULK_BYTES  # of a tensor that has a tensor map
LARGEST_GRID, MOST_BLOCKS = GRID_LIMITS[:2]  # in x, and in y and z
KINDS = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float32": "f", "float64": "d", "float16": "H", "bfloat16": "H", "float8_e4m3fn": "B",
    "float8_e5m2": "B",
}  # fmt: skip


def emit_cuda(program: Program, build: Build, source: Program | None = None) -> CudaSource:
    """Print a FLAT program as CUDA C++. `source` is the program before it was flattened, with all dimensions."""
    return _Cuda(program, build, source or program).run()


def long_dimensions(source: Program) -> IdSet[Var]:
    """Return the dimensions that may exceed 32 bits: those that appear in strides, and those declared so."""
    strides = [x for b in tensors_of(source) for s in b.strides or () for x in find(s, Var)]
    wide = [v for v in dimensions(source) if v.dtype.bits == 64]
    return IdSet((*strides, *wide))


def used_symbols(kernel: Kernel) -> IdSet[Buffer | Var]:
    """Return the variables and buffers of a kernel's body, without those that only tensor maps of its launcher need."""
    found: IdSet[Buffer | Var] = IdSet()
    waiting: list[Node] = [kernel.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Var):
            found.add(node)
        elif isinstance(node, Load | Address | Store):
            found.add(node.buffer)
        elif isinstance(node, Role) and kernel.thread is not None:
            found.add(kernel.thread)
        if not isinstance(node, TensorMap):
            waiting += children(node)
    return found


def check_calls(nodes: Sequence[Node], target: Target) -> None:
    """Raise TileError (`unsupported_on_target`) for a call among `nodes` that `target` does not have."""
    calls = [node for node in nodes if isinstance(node, Call)]
    missing = [call for call in calls if not lookup(call.name).exists_on(target.capability)]
    if missing:
        call = next((call for call in missing if call.span is not None), missing[0])  # the author's before our own
        raise error(
            "unsupported_on_target", call.span, what=f"`{call.name}`", target=str(target),
            fix=f"compile for {lookup(call.name).where}",
        )  # fmt: skip


def loaded_bits(nodes: Sequence[Node], written: IdSet[Buffer]) -> set[int]:
    """Return the sizes in bits of the elements that loads read of the written buffers."""
    found = {node.dtype.bits for node in nodes if isinstance(node, Load) and node.buffer in written}
    for call in (node for node in nodes if isinstance(node, Call) and not lookup(node.name).atomic):
        for access in lookup(call.name).effects(call):
            address = call.args[access.operand]
            if "r" in access.kind and not access.asynchronous and isinstance(address, Address):
                found |= {address.buffer.dtype.bits} if address.buffer in written else set()
    return found


def is_restricted(constant: bool, early: bool, chosen: bool) -> bool:
    """Return whether a kernel's pointer is `__restrict__`.

    Other threads write what this one reads, or overwrite what it stores: by a restricted pointer, loads may be dropped
    and stores moved across barriers. Where a kernel may start `early`, loads of constants may move before the wait for
    kernels that write them. They are `chosen` where loads of the same size read written memory: NVRTC makes one load of
    the two arms of a choice, through the cache of constants. That cache does not see what the kernel stored.
    """
    return constant and not early and not chosen


def most_blocks(kernel: Kernel, axis: int) -> int:
    """Return the limit of a grid's blocks along an axis: below 2^31 in x, which holds all blocks of a folded grid."""
    if axis == 0:
        return LARGEST_GRID
    others = math.prod(int(n.value) for i, n in enumerate(kernel.grid) if i != axis and isinstance(n, Const))
    return max(MOST_BLOCKS, LARGEST_GRID // others) if may_fold(kernel) else MOST_BLOCKS


def may_fold(kernel: Kernel) -> bool:
    """Return whether a grid may exceed the GPU's block limit in y or z, and is folded; clusters stay as they are."""
    large = any(not (isinstance(n, Const) and int(n.value) <= MOST_BLOCKS) for n in kernel.grid[1:])
    return large and kernel.cluster == (1, 1, 1)


class _Cuda:
    """Write the CUDA text of a program."""

    def __init__(self, program: Program, build: Build, source: Program):
        self.program, self.build = program, build
        self.sizes, self.long = dimensions(source), long_dimensions(source)
        self.tensors = tensors_of(program)
        self.scalars = [p for p in program.params if isinstance(p, Var)]
        self.facts = Ranges().launched(program)
        self.nodes = [list(walk(kernel.body)) for kernel in program.kernels]

    def run(self) -> CudaSource:
        """Return the text with its entries."""
        for nodes in self.nodes:
            check_calls(nodes, self.build.target)
        functions = [self.function(n, kernel) for n, kernel in enumerate(self.program.kernels)]
        headers = sorted({h for _, out in functions for h in out.text.headers} - {"cuda_types.h", "cuda_math.h"})
        lines = [f"// {comment(self.program.name)} for {self.build.target}"]
        if self.build.options.fast_math:
            lines.append("#define TILE_FAST_MATH")
        lines += [f'#include "{header}"' for header in ("cuda_types.h", "cuda_math.h", *headers)]
        lines.append(wgmma_functions(product for _, out in functions for product in out.products))
        lines += foreign_lines(self.nodes, is_cuda=True)
        lines += ["\n".join([*out.lines, ""]) for _, out in functions]
        entries, apart = tuple(entry for entry, _ in functions), disjoint_tensors(self.tensors, self.nodes)
        return CudaSource("\n".join(lines), entries, self.alignment(), apart)

    def function(self, number: int, kernel: Kernel) -> tuple[Entry, CudaStatements]:
        """Write one kernel; return its entry and text."""
        if kernel.cluster != (1, 1, 1) and not self.build.target.has_clusters:
            what, fix = "T.Kernel(cluster_dims=...)", "leave it out, or compile for sm_90 or later"
            raise error("unsupported_on_target", kernel.span, what=what, target=str(self.build.target), fix=fix)
        several = f"_{number}" if len(self.program.kernels) > 1 else ""
        name = identifier(f"{self.program.name}_kernel{several}")
        nodes = self.nodes[number]
        used, written = used_symbols(kernel), written_buffers(nodes)
        loaded = loaded_bits(nodes, IdSet(b for b in self.tensors if b in written))
        if may_fold(kernel):
            used |= IdSet(n for extent in kernel.grid[:2] for n in find(extent, Var))
        names = Names(reserved=(name, SHARED, "tile", "blockIdx", "threadIdx", "gridDim", "blockDim"))
        out = CudaStatements(names, SHARED, kernel)
        waits = any(isinstance(n, Call) and n.name == "grid_wait" for n in nodes)
        early = waits and self.build.target.has_early_start
        args: list[int | Var | MapArg] = []
        params, prologue, kinds = [], [], ""
        for position, buffer in enumerate(self.tensors):
            if buffer in used:
                args.append(position)
                constant = "" if buffer in written else "const "
                restrict = " __restrict__" if is_restricted(bool(constant), early, buffer.dtype.bits in loaded) else ""
                params.append(f"{constant}{storage(buffer.dtype)}*{restrict} {names.of(buffer)}")
                kinds += "P"
        for each, name_of_map in self.maps(nodes, out):
            args.append(each)
            params.append(f"const __grid_constant__ tile::TensorMap {name_of_map}")
            kinds += "M"
        for var in (*self.sizes, *self.scalars):
            if var in used:
                args.append(var)
                declared, unpacked = self.parameter(var, out)
                params.append(declared)
                prologue += unpacked
                kinds += ("q" if var in self.long else "i") if var.role == "dim" else KINDS[var.dtype.name]
        threads = 1
        for extent in kernel.threads:
            threads *= extent
        # As many blocks on an SM as are asked for, else one: without a number the assembler spills to fit more.
        out.line(f'extern "C" __global__ void __launch_bounds__({threads}, {kernel.min_blocks})')
        out.open(f"{name}({', '.join(params)})", kernel.span)
        for line in prologue:
            out.line(line)
        if kernel.shared_bytes:
            out.line(f"extern __shared__ __align__(1024) unsigned char {SHARED}[];")
        self.indices(kernel, threads, used, out)
        self.warpgroup(kernel.thread, nodes, out)
        out.body(kernel.body)
        out.close()
        launch = kernel.grid, threads, kernel.shared_bytes, kernel.span
        entry = Entry(name, tuple(args), *launch, kinds, may_fold(kernel), kernel.cluster, early)
        return entry, out

    def maps(self, nodes: Sequence[Node], out: CudaStatements) -> list[tuple[MapArg, str]]:
        """Return the tensor maps of a kernel, each once, with the names of their parameters."""
        for node in nodes:
            if isinstance(node, TensorMap):
                out.text.map_name(node)
        positions = IdMap((b, position) for position, b in enumerate(self.tensors))
        return [(_map_arg(each, positions[each.buffer]), name) for each, name in out.text.maps]

    def parameter(self, var: Var, out: CudaStatements) -> tuple[str, list[str]]:
        """Return the declaration of a dimension or scalar, and its definition in the function's first lines."""
        name = out.names.of(var)
        if var.role == "dim":
            long = var in self.long
            out.text.bind(var, self.facts.interval(var) & Interval(0, math.inf if long else LARGEST_SIZE))
            return f"const {'int64_t' if long else 'int'} {name}", []
        if is_small(var.dtype):
            return f"const {storage(var.dtype)} {name}_bits", [f"const float {name} = tile::widen({name}_bits);"]
        if var.dtype == dtypes.int32:
            out.text.bind(var, self.facts.interval(var))
        return f"const {storage(var.dtype)} {name}", []

    def indices(self, kernel: Kernel, threads: int, used: IdSet[Buffer | Var], out: CudaStatements) -> None:
        """Write the definitions of the thread's and the block's indices."""
        if kernel.thread is not None:
            out.text.bind(kernel.thread, Interval(0, threads - 1))
            if kernel.thread in used:
                out.line(f"const int {out.names.of(kernel.thread)} = threadIdx.x;")
        for axis, (var, extent) in enumerate(zip(kernel.blocks, kernel.grid, strict=True)):
            out.text.bind_block(var, extent, most_blocks(kernel, axis))
        place = [f"blockIdx.{axis}" for axis in "xyz"]
        if may_fold(kernel):
            out.text.headers.add("cuda_grid.h")
            extents = [out.text.assigned(extent, dtypes.int32) for extent in kernel.grid[: len(kernel.grid) - 1]]
            out.line(f"const tile::GridIndex grid_index = tile::unfolded({', '.join(extents)});")
            place = [f"grid_index.{axis}" for axis in "xyz"]
        if kernel.swizzle is not None and len(kernel.blocks) >= 2:
            self.swizzled(kernel, place, out)
            return
        for var, here in zip(kernel.blocks, place, strict=False):
            if var in used:
                out.line(f"const int {out.names.of(var)} = {here};")

    def warpgroup(self, thread: Var | None, nodes: Sequence[Node], out: CudaStatements) -> None:
        """Write the definition of the thread's warpgroup number, kept in a uniform register for wgmma descriptors."""
        if thread is None or not any(isinstance(n, Call) and n.name == "wgmma" for n in nodes):
            return
        if any(isinstance(n, Binary) and is_warpgroup(n, thread) for n in nodes):
            name = Var("warpgroup", dtypes.int32, "thread")
            out.text.warpgroup = thread, name
            out.line(f"const int {out.names.of(name)} = tile::warpgroup_index();")

    def swizzled(self, kernel: Kernel, place: list[str], out: CudaStatements) -> None:
        """Print T.use_swizzle: blocks that run at the same time share rows and columns."""
        assert kernel.swizzle is not None
        panel, order = kernel.swizzle
        out.text.headers.add("cuda_grid.h")
        x, y = (out.names.of(v) for v in kernel.blocks[:2])
        function = "swizzled_columns" if order.startswith("col") else "swizzled_rows"
        given = "grid_index" if may_fold(kernel) else ""
        out.line(f"const tile::BlockIndex block_index = tile::{function}<{panel}>({given});")
        out.line(f"const int {x} = block_index.x, {y} = block_index.y;")
        for var, here in zip(kernel.blocks[2:], place[2:], strict=False):
            out.line(f"const int {out.names.of(var)} = {here};")

    def alignment(self) -> tuple[int, ...]:
        """Return the alignment in bytes that each tensor needs: that of its widest access, or of a tensor map."""
        found = IdMap((b, b.dtype.itemsize) for b in self.tensors)
        for node in (n for nodes in self.nodes for n in nodes):
            if isinstance(node, TensorMap):
                found[node.buffer] = max(found[node.buffer], MAP_ALIGNMENT)
            elif isinstance(node, Call) and node.name in ("vector_copy", "atomic_add_vector", "cp_async"):
                for address in node.args:
                    if isinstance(address, Address) and address.buffer in found:
                        found[address.buffer] = max(found[address.buffer], option(node))
        return tuple(found[b] for b in self.tensors)


def _map_arg(node: TensorMap, position: int) -> MapArg:
    """Describe a tensor map argument of an entry."""
    dtype = node.buffer.dtype
    return MapArg(position, node.sizes, node.strides, node.box, node.swizzle, dtype.name, dtype.itemsize)
