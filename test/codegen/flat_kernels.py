# SPDX-License-Identifier: Apache-2.0
"""FLAT kernels by hand, their text, and whether it compiles for every chip without spills."""

from torch_tile.codegen.cuda import emit_cuda
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.hardware import Target
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer
from torch_tile.ir.expr import Address, Expr, Load, Var, const
from torch_tile.ir.stmt import Block, For, Kernel, LoopKind, Program, Store
from torch_tile.ir.verify import Stage, verify
from torch_tile.lowering.common.flatten import flatten
from torch_tile.runtime.nvrtc import compile_cubin

ARCHES = ("sm_80", "sm_90a", "sm_120a")
UNROLLED, SERIAL = LoopKind.UNROLLED, LoopKind.SERIAL
bx, by, t = Var("bx", dt.int32, "block"), Var("by", dt.int32, "block"), Var("t", dt.int32, "thread")


def number(x, kind=dt.int32):
    return x if isinstance(x, Expr) else const(x, kind)


def tensor(name, shape, kind, scope="global", **more):
    return Buffer(name, tuple(map(number, shape)), dt.to_dtype(kind), scope, **more)


def at(buffer, *indices):
    return Address(buffer, tuple(map(number, indices)))


def load(buffer, *indices):
    return Load(buffer, tuple(map(number, indices)))


def put(buffer, *indices_and_value):
    *indices, value = indices_and_value
    return Store(buffer, tuple(map(number, indices)), number(value, buffer.dtype))


def loop(stop, body, kind=UNROLLED, name="i", start=0, step=1):
    var = Var(name, dt.int32, "loop")
    made = body(var)
    stmts = made if isinstance(made, tuple) else (made,)
    return For(kind, (var,), (number(start),), (number(stop),), Block(stmts), step)


def kernel(*body, grid=(1,), blocks=(bx,), threads=128, thread=t, **more):
    return Kernel(tuple(map(number, grid)), blocks, (threads,), Block(body), thread=thread, **more)


def program(params, *kernels, workspaces=(), outputs=()):
    return Program("demo", tuple(params), kernels, tuple(workspaces), tuple(outputs))


def emitted(source, capability=90, **options):
    flat = flatten(source)
    verify(flat, Stage.FLAT)
    return emit_cuda(flat, Build(Target("cuda", capability), PassOptions(**options)), source)


def compiles(source, arches=ARCHES, stack=0, **options):
    for arch in arches:
        target = Target.of(f"cuda:{arch}")
        cubin = compile_cubin(emitted(source, target.capability).text, target, PassOptions(**options))
        assert cubin.warnings == []
        for name, used in cubin.resources.items():
            assert (used.spills, used.stack) == (0, stack), (arch, name, used)


def body(source, **options):
    """The text of the functions."""
    return emitted(source, **options).text.split("\n\n", 1)[1]
