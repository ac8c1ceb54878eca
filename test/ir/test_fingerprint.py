# SPDX-License-Identifier: Apache-2.0
"""Digests of programs: equal where the author wrote the same at the same place, different wherever anything differs."""

import copy
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from torch_tile.diagnostics.errors import InternalError, Span
from torch_tile.ir import dtype as dt
from torch_tile.ir.buffer import Buffer, TensorMap
from torch_tile.ir.expr import Address, Binary, Const, Var, const
from torch_tile.ir.fingerprint import fingerprint
from torch_tile.ir.layout import Layout
from torch_tile.ir.node import Node
from torch_tile.ir.stmt import Alloc, Assert, Block, Do, For, Let, LoopKind, Role, Store

HERE = Span("a.py", 3, 3, 4, 9)


def body(**changes: object) -> Block:
    """A loop over a buffer, with one thing changed."""
    given = {
        "name": "i", "type": dt.int32, "stop": 8, "shape": 8, "dtype": dt.float32, "layout": "[8:1m]", "other": False,
        "kind": LoopKind.SERIAL, "value": 1.0, "span": HERE, "message": "m", "op": "+", "step": 1,
    } | changes  # fmt: skip
    i, j = (Var(n, given["type"], "loop") for n in (given["name"], "j"))
    buffer = Buffer(
        "b", (const(given["shape"], dt.int32),), given["dtype"], "shared", layout=Layout.parse(given["layout"])
    )
    index = Binary(given["op"], j if given["other"] else i, const(0, i.type), span=given["span"])
    store = Store(buffer, (index,), Const(given["value"], dt.float32))
    inner = Block((store, Assert(Const(True, dt.bool_), given["message"])))
    loop = For(given["kind"], (i,), (const(0, dt.int32),), (const(given["stop"], dt.int32),), inner, step=given["step"])
    return Block((Let(j, const(1, j.type)), Alloc(buffer), loop))


def test_the_same_twice():
    assert fingerprint(body()) == fingerprint(body())
    assert len(fingerprint(body())) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"name": "k"}, {"type": dt.int64}, {"stop": 9}, {"shape": 9}, {"dtype": dt.float16}, {"layout": "[8:2m]"},
        {"other": True}, {"kind": LoopKind.UNROLLED}, {"value": -1.0}, {"value": 0.0}, {"value": -0.0}, {"span": None},
        {"span": Span("b.py", 3, 3, 4, 9)}, {"span": Span("a.py", 4, 4, 4, 9)}, {"message": "n"}, {"op": "-"},
        {"step": 2},
    ],
    ids=str,
)  # fmt: skip
def test_everything_counts(change):
    assert fingerprint(body(**change)) != fingerprint(body())


def test_kinds_of_numbers_and_signs_of_zero_differ():
    values = [Const(True, dt.bool_), Const(1, dt.int32), Const(1.0, dt.float32), Const(0.0, dt.float32)]
    values += [Const(-0.0, dt.float32), Const(float("nan"), dt.float32), Const(1, dt.int64)]
    assert len({fingerprint(v) for v in values}) == len(values)


def test_sharing_does_not_matter():
    """A node used twice is the same as two alike; a variable used twice is not the same as two alike."""
    one, x, y = const(3, dt.int32), Var("x"), Var("x")
    assert fingerprint(Binary("+", one, one)) == fingerprint(Binary("+", copy.copy(one), const(3, dt.int32)))
    assert fingerprint(Binary("+", x, x)) != fingerprint(Binary("+", x, y))
    shared, apart = Binary("+", one, one), Binary("+", copy.copy(one), one)
    following = [Binary("*", Binary("+", e, x), y) for e in (shared, apart)]
    assert fingerprint(following[0]) == fingerprint(following[1])


def test_what_hopper_adds():
    """Every field of roles, mbarriers and tensor maps counts."""
    a = Buffer("A", (const(64, dt.int32),) * 2, dt.float16, "global")
    seen = TensorMap(a, a.shape, (const(64, dt.int32), const(1, dt.int32)), (64, 64), 128)
    maps = [seen, replace(seen, box=(32, 64)), replace(seen, swizzle=64), replace(seen, sizes=a.shape[:1])]
    role = Role(0, 128, Block(()))
    roles = [role, replace(role, first=128), replace(role, count=256), replace(role, registers=24)]
    ready = Buffer("ready", (const(2, dt.int32),), dt.uint64, "barrier", arrivals=1)
    barriers = [Alloc(b) for b in (ready, replace(ready, arrivals=2))]
    allocated = [Block((each, Do(Address(each.buffer, (const(0, dt.int32),))))) for each in barriers]
    for values in (maps, roles, allocated):
        assert len({fingerprint(v) for v in values}) == len(values)


def test_where_an_address_would_decide():
    @dataclass(frozen=True, eq=False, repr=False)
    class Odd(Node):
        what: object

    with pytest.raises(InternalError, match="every process"):
        fingerprint(Odd(object()))
    assert fingerprint(Odd("x")) != fingerprint(replace(Odd("x"), what="y"))


SCRIPT = """
from torch_tile.ir.fingerprint import fingerprint
from torch_tile.kernels.norm import softmax
import torch_tile, torch_tile.language as T
@T.prim_func
def f(a: T.Tensor((32, 8), "float16"), b: T.Tensor((32, 8), "float16")):
    with T.Kernel(4, threads=32) as i:
        tile = T.alloc_shared((8, 8), "float16")
        T.copy(a[i * 8, 0], tile)
        for j, k in T.Parallel(8, 8):
            tile[j, k] = T.exp(tile[j, k])
        T.copy(tile, b[i * 8, 0])
print(fingerprint(f.program))
"""


def test_another_process_finds_the_same(tmp_path):
    """Whatever the order of its sets and the addresses of its objects."""
    script = tmp_path / "kernel.py"
    script.write_text(SCRIPT)
    found = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
        found.add(done.stdout)
    assert len(found) == 1


def test_folders_of_files_do_not_count_but_are_named_again(tmp_path, monkeypatch):
    """The text of a kernel is found again where its file lies elsewhere; errors and reports name the file as it is."""
    import torch_tile
    from torch_tile.compiler import source_cache

    text = (
        "import torch_tile.language as T\n"
        "@T.prim_func\n"
        "def f(X: T.Tensor((64,), 'float32')):\n"
        "    with T.Kernel(1, threads=64):\n"
        "        a = T.alloc_fragment((64,), 'float32')\n"
        "        T.copy(X, a)\n"
        "        assert X[0] == 1\n"
        "        T.copy(a, X)\n"
    )
    made = []
    for folder in ("here", "there"):
        path = tmp_path / folder / "kernel.py"
        path.parent.mkdir()
        path.write_text(text)
        space = {}
        exec(compile(text, str(path), "exec"), space)
        made.append((path, space["f"]))
    assert len({fingerprint(f.program) for _, f in made}) == 1
    built = []
    monkeypatch.setattr(source_cache, "is_watched", lambda: False)
    get = source_cache.get_or_build
    monkeypatch.setattr(
        source_cache, "get_or_build", lambda key, end, make: get(key, end, lambda out: built.append(key) or make(out))
    )
    for path, f in made:
        for target in ("cuda:sm_80", "cpu"):
            kernel = torch_tile.compile(f, target=target)
            assert "kernel.py:6" in kernel.source and str(path.parent) not in kernel.source
        assert str(path) in str(kernel.launcher.asserts[0][1])
    assert len(built) <= 2
