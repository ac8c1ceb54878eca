# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import textwrap

import pytest

from torch_tile.compiler.context import PassOptions
from torch_tile.diagnostics.errors import InternalError
from torch_tile.hardware import Target
from torch_tile.runtime import nvrtc as module
from torch_tile.runtime.cache import CacheError
from torch_tile.runtime.nvrtc import NoNvrtcError, Resources, compile_cubin, headers_of, nvrtc_version, resources_of

HOPPER = Target("cuda", 90)
TEXT = 'extern "C" __global__ void double_all(float* x) { x[threadIdx.x] *= 2.0f; }\n'
CROWDED = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* x, int n) {
  float kept[64];
#pragma unroll
  for (int i = 0; i < 64; i++) kept[i] = x[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) x[i * n + 1] = kept[63 - i] * kept[i];
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_every_chip(capability):
    cubin = compile_cubin(TEXT, Target("cuda", capability))
    assert cubin.data[:4] == b"\x7fELF" and cubin.path.read_bytes() == cubin.data
    assert cubin.path.with_suffix(".cu").read_text() == TEXT
    (found,) = cubin.resources.values()
    assert list(cubin.resources) == ["double_all"] and 4 <= found.registers <= 32
    assert found.spills == found.stack == found.shared == found.barriers == 0
    assert cubin.warnings == []


def test_spills_and_barriers_are_seen():
    cubin = compile_cubin(TEXT + CROWDED, HOPPER)
    assert set(cubin.resources) == {"double_all", "crowded"}
    crowded = cubin.resources["crowded"]
    assert crowded.registers == 32 and crowded.spills > 0 and crowded.stack > 0 and crowded.barriers == 1
    assert cubin.resources["double_all"].spills == 0


def test_garbage_may_be_moved():
    unset = """extern "C" __global__ void moved(float* x) {
  float tile[1];
  x[threadIdx.x] = tile[0];
  x[0] = 1.0f;
}
"""
    assert compile_cubin(unset, HOPPER).warnings == []


def test_logs_of_the_assembler():
    log = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'a'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 16 bytes cumulative stack size, 1024 bytes smem
kernel.cu(3): warning #177-D: variable "x" was declared but never referenced
"""
    assert resources_of(log) == {"a": Resources(40, 20, 16, 1024, 2)}
    warnings = module.Cubin(b"", log, {}, None).warnings
    assert len(warnings) == 2 and "C7510" in warnings[0] and "#177-D" in warnings[1]


def test_the_second_call_does_not_compile(monkeypatch):
    first = compile_cubin(TEXT + CROWDED, HOPPER)
    monkeypatch.setattr(module, "_nvrtc", None)
    assert compile_cubin(TEXT + CROWDED, HOPPER) == first


def test_the_key_is_everything_that_matters(monkeypatch, tmp_path):
    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(module, "csrc_dir", lambda: tmp_path / "csrc")
    inner, outer = tmp_path / "csrc/inner.h", tmp_path / "csrc/outer.h"
    outer.write_text('#pragma once\n  #include "inner.h"\n')
    inner.write_text("static __device__ float factor() { return 2.0f; }\n")
    text = '#include "outer.h"\n' + TEXT.replace("2.0f", "factor()")
    assert [name for name, _ in headers_of(text)] == ["inner.h", "outer.h"]
    paths = [compile_cubin(text, HOPPER).path, compile_cubin(text, Target("cuda", 80)).path]
    paths.append(compile_cubin(text, HOPPER, PassOptions(fast_math=True)).path)
    inner.write_text("static __device__ float factor() { return 3.5f; }\n")
    paths.append(compile_cubin(text, HOPPER).path)
    assert len(set(paths)) == 4
    assert compile_cubin(text, HOPPER).path == paths[-1]


def test_fast_math_changes_the_code():
    text = 'extern "C" __global__ void divide(float* x) { x[0] = x[1] / x[2]; }\n'
    exact, fast = (compile_cubin(text, HOPPER, PassOptions(fast_math=each)) for each in (False, True))
    assert len(fast.data) < len(exact.data)


def test_refused_text_shows_the_compilers_words():
    with pytest.raises(InternalError, match=r"(?s)NVRTC \d+\.\d+ refused.*kernel\.cu\(1\): error.*nonsense"):
        compile_cubin("nonsense;", HOPPER)
    with pytest.raises(InternalError, match=r"includes 'missing\.h', which is not in"):
        compile_cubin('#include "missing.h"\n', HOPPER)


def test_an_unknown_chip():
    assert nvrtc_version() >= (12, 0)
    with pytest.raises(NoNvrtcError, match="does not know the chip of --gpu-architecture=sm_33"):
        compile_cubin(TEXT, Target("cuda", 33))


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("suffix", [".cubin", ".log"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_repaired(damage, suffix):
    first = compile_cubin(CROWDED, HOPPER)
    DAMAGE[damage](first.path.with_suffix(suffix))
    assert compile_cubin(CROWDED, HOPPER) == first


def test_a_cubin_of_others_is_refused():
    path = compile_cubin(TEXT, HOPPER).path
    path.chmod(0o622)
    with pytest.raises(CacheError, match="can be written by other users"):
        compile_cubin(TEXT, HOPPER)


def test_a_cubin_of_another_owner_is_refused(monkeypatch):
    compile_cubin(TEXT, HOPPER)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="not to you"):
        compile_cubin(TEXT, HOPPER)


SCRIPT = """
import sys
from torch_tile.runtime import cache, nvrtc
from torch_tile.hardware import Target
if sys.argv[1] == "die":  # half of the file is written, then the process is gone
    def die(path):
        path.write_bytes(b"\\x7fELF half")
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    original = cache._build
    cache._build = lambda path, build: original(path, die if path.suffix == ".cubin" else build)
cubin = nvrtc.compile_cubin(sys.stdin.read(), Target("cuda", 90))
print(len(cubin.data), len(cubin.resources), "ctypes" in sys.modules and nvrtc._nvrtc.cache_info().currsize)
"""


def start(mode: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_compile_at_once_or_die_writing(folder):
    dying = start("die")
    dying.communicate(CROWDED, timeout=60)
    assert dying.returncode == -9
    assert not list(folder.rglob("*.cubin.seal"))
    both = [start("live"), start("live")]
    for each in both:
        each.stdin.write(CROWDED)
        each.stdin.close()
    sizes = [each.stdout.read().split() for each in both]
    assert all(each.wait(60) == 0 for each in both)
    assert sizes[0][:2] == sizes[1][:2] and sizes[0][1] == "1"
    third = start("live")
    assert third.communicate(CROWDED, timeout=60)[0].split() == [*sizes[0][:2], "0"]  # NVRTC was not even loaded
