# SPDX-License-Identifier: Apache-2.0
"""Text kept on disk: what is found is what would be made, whatever happens to the file."""

import subprocess
import sys

import pytest

import torch_tile
import torch_tile.language as T
from torch_tile import lowering
from torch_tile.compiler import source_cache
from torch_tile.compiler.context import Build, PassOptions
from torch_tile.compiler.sources import CudaSource, Entry, MapArg
from torch_tile.diagnostics.errors import TileError
from torch_tile.hardware import Target
from torch_tile.ir.dtype import int32
from torch_tile.ir.expr import Const
from torch_tile.ir.node import alike, equal
from torch_tile.ir.stmt import dimensions
from torch_tile.runtime.cache import CacheError

HOPPER = Target("cuda", 90)
pytestmark = pytest.mark.usefixtures("folder")


def scale(block: int = 16):
    m = T.dynamic("m", multiple_of=2)

    @T.prim_func
    def kernel(x: T.Tensor((m, 24), "float16"), y: T.Tensor((m, 24), "float16"), by: T.float32, parts: T.int32):
        with T.Kernel(T.ceildiv(m, block), parts, threads=64) as (i, _):
            tile = T.alloc_shared((block, 24), "float16")
            T.copy(x[i * block, 0], tile)
            for r, c in T.Parallel(block, 24):
                tile[r, c] = tile[r, c] * by
            T.copy(tile, y[i * block, 0])

    return kernel


def runs(monkeypatch) -> list[str]:
    """Names of the programs that are lowered from here on."""
    found: list[str] = []
    original = lowering.lower

    def lower(program, passes):
        found.append(program.name)
        return original(program, passes)

    monkeypatch.setattr(lowering, "lower", lower)
    return found


def compiled(program, target=HOPPER, options=None):
    build = Build(target, options or PassOptions())
    source, lowered = source_cache.cuda_source(program, build)
    return source, lowered, build


def test_what_is_found_is_what_was_made(monkeypatch):
    lowerings, program = runs(monkeypatch), scale().program
    first, lowered, report = compiled(program)
    again, lazily, found = compiled(program)
    assert lowerings == ["kernel"]
    assert (again.text, again.alignment) == (first.text, first.alignment)
    assert (report.remarks, report.placements) == (found.remarks, found.placements) and report.placements
    for a, b in zip(first.entries, again.entries, strict=True):
        assert (a.name, a.threads, a.shared_bytes, a.span, a.kinds, a.folds) == (
            b.name, b.threads, b.shared_bytes, b.span, b.kinds, b.folds,
        )  # fmt: skip
        assert all(x is y for x, y in zip(a.args, b.args, strict=True))
        assert all(equal(x, y) for x, y in zip(a.grid, b.grid, strict=True))
    assert alike(lazily(), lowered()) and lowerings == ["kernel", "kernel"]
    assert lazily() is lazily() and len(lowerings) == 2


def test_tensor_maps_are_kept():
    program = scale().program
    (m,) = dimensions(program)
    wanted = MapArg(1, (m, Const(24, int32)), (m * 24, Const(1, int32)), (64, 8), 32, "float16", 2)
    entry = Entry("kernel", (0, wanted, m), (m,), 64, 0, None, "PMi", False, (2, 1, 1), True)
    text = source_cache.packed(CudaSource("", (entry,), (2, 16), ((0, 1),)), Build(HOPPER), program)
    (found,) = source_cache.unpacked(text, Build(HOPPER), program).entries
    assert source_cache.unpacked(text, Build(HOPPER), program).disjoint == ((0, 1),)
    _, got, _ = found.args
    assert isinstance(got, MapArg) and found[3:] == entry[3:]
    for mine, given in zip(got, wanted, strict=True):
        if isinstance(mine, tuple) and not isinstance(mine[0], int):
            assert all(equal(x, y) for x, y in zip(mine, given, strict=True))
        else:
            assert mine == given


def test_the_report_is_kept():
    program = scale().program
    source, _, build = compiled(program)
    build.remark(program.kernels[0].span, "T.gemm", "mma", 'too "small"')
    build.remark(None, "assembler", "slower code")
    read = Build(HOPPER)
    source_cache.unpacked(source_cache.packed(source, build, program), read, program)
    assert (read.remarks, read.placements) == (build.remarks, build.placements) and read.remarks[0].span is not None


def test_a_program_traced_again_is_found(monkeypatch):
    """Its entries are in terms of its own variables."""
    compiled(scale().program)
    lowerings, program = runs(monkeypatch), scale().program
    entry = compiled(program)[0].entries[0]
    assert not lowerings
    assert {v for v in entry.args if not isinstance(v, int)} <= set(source_cache._symbols(program))


def test_the_key_is_everything_that_matters(monkeypatch):
    lowerings, program = runs(monkeypatch), scale().program
    compiled(program)
    compiled(scale(32).program)
    compiled(program, Target("cuda", 80))
    compiled(program, options=PassOptions(fast_math=True))
    assert len(lowerings) == 4
    monkeypatch.setattr(source_cache, "source_digest", lambda *parts: "other passes")
    compiled(program)
    assert len(lowerings) == 5
    compiled(program)
    assert len(lowerings) == 5


def test_text_for_the_cpu_is_kept_too(monkeypatch):
    def program():
        @T.prim_func
        def kernel(x: T.Tensor((8,), "float32"), y: T.Tensor((8,), "float32")):
            with T.Kernel(1):
                for i in T.Parallel(8):
                    T.device_assert(x[i] > 0, "x is positive")
                    y[i] = x[i]

        return kernel.program

    lowerings = runs(monkeypatch)
    first, lowered = source_cache.cpu_source(program(), Build(Target("cpu")))
    second, again = source_cache.cpu_source(program(), Build(Target("cpu")))
    assert first == second and "x is positive" in first.asserts[0][0] and len(lowerings) == 1
    assert alike(again(), lowered()) and len(lowerings) == 2


@pytest.mark.parametrize("name, value", [("TORCH_TILE_VERIFY", "1"), ("TORCH_TILE_DUMP", "stages")])
def test_whoever_watches_sees_the_passes(monkeypatch, tmp_path, name, value):
    program = scale().program
    compiled(program)
    monkeypatch.setenv(name, value if value == "1" else str(tmp_path / value))
    lowerings = runs(monkeypatch)
    source = compiled(program)[0]
    assert lowerings == ["kernel"]
    monkeypatch.delenv(name)
    assert source.text == compiled(program)[0].text


def test_mistakes_are_not_kept(folder):
    @T.prim_func
    def wrong(x: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            a, b = T.alloc_shared((8, 8), "float32"), T.alloc_shared((8, 4), "float32")
            T.copy(x, a)
            T.copy(a, b)

    for _ in range(2):
        with pytest.raises(TileError):
            compiled(wrong.program)
    assert not list(folder.rglob("*.json*"))


def file_of(folder):
    (found,) = folder.rglob("*.json")
    return found


@pytest.mark.parametrize(
    "damage",
    [lambda p: p.write_bytes(p.read_bytes()[:-8]), lambda p: p.write_text(""), lambda p: p.unlink()],
    ids=["truncated", "empty", "gone"],
)
def test_damage_is_repaired(folder, damage):
    program = scale().program
    text = compiled(program)[0].text
    damage(file_of(folder))
    assert compiled(program)[0].text == text


def test_what_others_could_have_written_is_refused(folder, monkeypatch):
    program = scale().program
    compiled(program)
    file_of(folder).chmod(0o622)
    with pytest.raises(CacheError, match="can be written by other users"):
        compiled(program)
    file_of(folder).chmod(0o600)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="not to you"):
        compiled(program)


SCRIPT = """
import sys
import torch_tile, torch_tile.language as T
from torch_tile.runtime import cache, nvrtc
if sys.argv[1] == "die":  # half of the file is written, then the process is gone
    def die(path):
        path.write_text('{"text": "half')
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    original = cache._build
    cache._build = lambda path, build: original(path, die if path.suffix == ".json" else build)
@T.prim_func
def f(a: T.Tensor((32, 8), "float16"), b: T.Tensor((32, 8), "float16")):
    with T.Kernel(4, threads=32) as i:
        tile = T.alloc_shared((8, 8), "float16")
        T.copy(a[i * 8, 0], tile)
        T.copy(tile, b[i * 8, 0])
kernel = torch_tile.compile(f, target="cuda:sm_90a")
sizes = len(kernel.source), len(kernel.cubin.data), len(kernel.schedule.remarks)
imported = ["torch_tile." + name in sys.modules for name in ("lowering", "codegen.cuda")]
print(*sizes, sum(imported), nvrtc._nvrtc.cache_info().currsize)
"""


def start(script, mode: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, script, mode], stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_at_once_or_die_writing(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    dying = start(script, "die")
    dying.communicate(timeout=60)
    assert dying.returncode == -9 and not list(folder.rglob("*.json.seal"))
    both = [start(script, "live"), start(script, "live")]
    told = [each.communicate(timeout=60)[0].split() for each in both]
    assert all(each.returncode == 0 for each in both) and told[0][:3] == told[1][:3]
    third = start(script, "live").communicate(timeout=60)[0].split()
    assert third == [*told[0][:3], "0", "0"]  # neither passes were imported nor NVRTC loaded


def test_a_kernel_from_the_disk_can_be_interpreted():
    import torch

    def kernel():
        return torch_tile.compile(scale(), target=HOPPER)

    first, second = kernel(), kernel()
    assert repr(first.schedule) == repr(second.schedule) and first.resources == second.resources
    x = torch.randn(20, 24).half()
    y = torch.empty_like(x)
    assert not second.interpret(x, y, 2.0, 1)
    torch.testing.assert_close(y, x * 2)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_warnings_are_kept(monkeypatch, target):
    """Each process warns of what is hardly meant, not only the one that lowers the program."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 4), "float32"), B: T.Tensor((64, 4), "float32")):
        with T.Kernel(1, threads=64) as _:
            for i in T.Parallel(64):
                B[i, 0] = A[64, 1]

    lowerings = runs(monkeypatch)
    texts = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="outside") as told:
            torch_tile.compile(kernel, target=target)
        texts.append([str(each.message) for each in told])
    assert texts[0] == texts[1] and len(texts[0]) == 1 and "B[i, 0] = A[64, 1]" in texts[0][0]
    assert len(lowerings) <= 1
