# SPDX-License-Identifier: Apache-2.0
"""Source to library: what is rebuilt, what errors say, and that torch's OpenMP run time is the only one."""

import ctypes
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from torch_tile.diagnostics.errors import InternalError
from torch_tile.runtime import host_compiler
from torch_tile.runtime.cache import CacheError
from torch_tile.runtime.host_compiler import NoCompilerError, compile_shared, find_compiler


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(value: int) -> str:
    return f'#include "cpu_math.h"\nextern "C" int value() {{ return tile::max({value}, {value} - 1); }}\n'


def count_runs(monkeypatch) -> list[list[str]]:
    runs: list[list[str]] = []
    run = host_compiler._run

    def counted(command: list[str]):
        runs.append(command)
        return run(command)

    host_compiler._warn_of_miscompilations(find_compiler())  # which compiles a text, once in a process
    monkeypatch.setattr(host_compiler, "_run", counted)
    return runs


def test_compiles_once(monkeypatch):
    runs = count_runs(monkeypatch)
    first = compile_shared(source(41))
    assert ctypes.CDLL(str(first)).value() == 41
    assert compile_shared(source(41)) == first
    assert len(runs) == 1
    assert compile_shared(source(42)) != first
    assert first.with_suffix(".cpp").read_text() == source(41)


def test_headers_are_part_of_the_key(monkeypatch):
    first = compile_shared(source(1))
    monkeypatch.setattr(host_compiler, "headers_digest", lambda: "other headers")
    assert compile_shared(source(1)) != first


def test_compiler_and_flags_are_part_of_the_key(monkeypatch):
    from dataclasses import replace

    first, found = compile_shared(source(1)), find_compiler()
    others = [replace(found, identity="another"), replace(found, flags=(*found.flags, "-DX")), replace(found, link=())]
    for other in others:
        monkeypatch.setattr(host_compiler, "find_compiler", lambda other=other: other)
        assert compile_shared(source(1)) != first


def test_flags_keep_ieee_arithmetic():
    flags = find_compiler().flags
    loose = {"-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only", "-fno-signed-zeros"}
    assert not loose & set(flags)
    assert {"-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"} <= set(flags)


@pytest.mark.parametrize("option", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_options_of_cxx_that_loosen_arithmetic_change_no_number(option, tmp_path):
    """With them gcc links a start-up that flushes subnormal numbers in the thread that loads a library."""
    program = (
        "import ctypes\n"
        "from torch_tile.runtime import host_compiler\n"
        "compiler = host_compiler.find_compiler()\n"
        f"assert compiler.command[-1] == {option!r} and host_compiler.miscompilations(compiler) == []\n"
        "text = 'extern \"C\" float half(float x) { return x * 0.5f; }'\n"
        "half = host_compiler.load_library(host_compiler.compile_shared(text)).half\n"
        "half.restype, half.argtypes = ctypes.c_float, [ctypes.c_float]\n"
        "assert half(2.0**-130) == 2.0**-131 and 2.0**-1060 * 0.5 == 2.0**-1061\n"
    )
    settings = {"CXX": f"{find_compiler().command[0]} {option}", "TORCH_TILE_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **settings}, check=True)


def test_threads(monkeypatch):
    runs = count_runs(monkeypatch)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(compile_shared(source(7)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 6 and len(set(paths)) == 1 and len(runs) == 1


def test_refused_source():
    """The message has the file, the compiler's words, how often they go on, and whose fault it is."""
    with pytest.raises(InternalError) as caught:
        compile_shared("int f() { return missing_name; }\n" + "".join(f"x{i};\n" for i in range(100)))
    message = str(caught.value)
    path = Path(message.split("refused ")[1].split(" (exit")[0])
    assert path.suffix == ".cpp" and path.read_text().startswith("int f()")
    assert "missing_name" in message
    assert "more lines" in message
    assert "bug in torch_tile" in message
    assert len(message.splitlines()) < 30


@pytest.mark.parametrize("said", ["/tmp/x.cpp:9:1: error: no such thing", "/usr/bin/ld: cannot find -lm"])
def test_warnings_do_not_hide_an_error(said, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text(
        f"#!/bin/sh\nfor n in $(seq 50); do echo x.h:1:1: warning: $n >&2; done\necho '{said}' >&2; exit 1\n"
    )
    broken.chmod(0o700)
    changed = replace(find_compiler(), command=(str(broken),))
    monkeypatch.setattr(host_compiler, "find_compiler", lambda: changed)
    with pytest.raises(InternalError) as caught:
        compile_shared(source(4))
    assert said in str(caught.value) and str(caught.value).count("warning:") < 2


CLANG = """#!/bin/sh
# A compiler that is clang without an OpenMP library.
case "$*" in *-dM*) echo "#define __clang__ 1";; *) echo "ld: cannot find -lomp" >&2; exit 1;; esac
"""


@pytest.mark.skipif(sys.platform == "win32", reason="runs a script")
def test_clang_without_an_openmp_library_is_passed_over(monkeypatch, tmp_path, fresh_compiler):
    """Its macros alone do not tell: it stops at each kernel, once it links."""
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    monkeypatch.setattr(host_compiler, "_openmp_link", lambda clang: ())
    clang = tmp_path / "clang++"
    clang.write_text(CLANG)
    clang.chmod(0o755)
    monkeypatch.setenv("CXX", str(clang))
    assert find_compiler().command != (str(clang),)
    find_compiler.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}:/nonexistent")
    with pytest.raises(NoCompilerError, match="libomp-dev"):
        find_compiler()


def test_no_compiler(monkeypatch, fresh_compiler):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    with pytest.raises(NoCompilerError, match=r"none of these works: g\+\+, clang\+\+.*apt install g\+\+.*CXX"):
        compile_shared(source(1))


def test_compiler_named_by_the_user(monkeypatch, tmp_path, fresh_compiler):
    """$CXX may carry arguments, and one that does not work is passed over."""
    command = find_compiler().command
    find_compiler.cache_clear()
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    monkeypatch.setenv("CXX", f"{' '.join(command)} -DBY_USER")
    assert find_compiler().command == (*command, "-DBY_USER")
    find_compiler.cache_clear()
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert find_compiler().command == ("g++",) or find_compiler().command == ("clang++",)
    find_compiler.cache_clear()
    monkeypatch.setenv("CXX", 'g++ "-O2')  # a quotation that does not end
    assert find_compiler().command == ("g++",) or find_compiler().command == ("clang++",)


def test_inductor_setting_is_followed(fresh_compiler):
    config = pytest.importorskip("torch._inductor.config")
    command = find_compiler().command
    find_compiler.cache_clear()
    # Inductor's own patch: pytest's would delete the setting when it is undone.
    with config.patch({"cpp.cxx": (None, f"{' '.join(command)} -DBY_INDUCTOR")}):
        assert find_compiler().command == (*command, "-DBY_INDUCTOR")


OPENMP = """
#include <stdint.h>
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();
extern "C" int team() {
  int size = 0;
#pragma omp parallel
  if (omp_get_thread_num() == 0) size = omp_get_num_threads();
  return size;
}
"""

CHILD = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch_tile.runtime.host_compiler import compile_shared
library = ctypes.CDLL(str(compile_shared(sys.stdin.read())))
torch.set_num_threads(3)
torch.randn(300, 300) @ torch.randn(300, 300)
print(library.team())
torch.set_num_threads(2)
print(library.team())
maps = open("/proc/self/maps").read().split()
print(len({word for word in maps if "/lib" in word and ("gomp" in word or "omp5" in word or "libomp" in word)}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_run_time():
    """Torch's thread count rules our kernels too, and the process holds a single OpenMP library."""
    if "clang" in find_compiler().command[-1]:
        pytest.skip("clang needs its own run time")
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parents[2])]
    result = subprocess.run(command, input=OPENMP, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["3", "2", "1"]


def test_needs_neither_torch_nor_inductor():
    """torch_tile itself may import torch; this module and what it imports must not."""
    probe = (
        "import sys, importlib.util, importlib.machinery; from pathlib import Path\n"
        "root = Path(sys.argv[1])\n"
        "for name in ('', '.runtime'):\n"
        "    spec = importlib.machinery.ModuleSpec('torch_tile' + name, None, is_package=True)\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    module.__path__ = [str(root / 'torch_tile' / name.lstrip('.'))]\n"
        "    sys.modules['torch_tile' + name] = module\n"
        "import torch_tile.runtime.host_compiler\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe, str(Path(__file__).parents[2])], check=True)


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        ("kill -9 $$", "memory"),
        ("echo 'fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "memory"),
        ("echo 'error writing to /tmp/x.s: No space left on device' >&2; exit 1", "Free some space"),
        ("echo 'collect2: fatal error: ld terminated with signal 25 [File size limit exceeded]' >&2; exit 1", "ulimit"),
        ("echo 'ld: cannot open output file: Read-only file system' >&2; exit 1", "can be written"),
        ("echo '/usr/bin/ld: cannot find -lomp: No such file or directory' >&2; exit 1", "libomp-dev"),
        ('rm -f "$OUT"; : > "$OUT"; exit 0', "wrote nothing"),
    ],
)
def test_a_failure_of_the_machine(script, remedy, monkeypatch, tmp_path, folder):
    """The error names the path and the remedy, and is no fault of the code generator's."""
    compiler = find_compiler()
    broken = tmp_path / "broken"
    broken.write_text(f'#!/bin/sh\nfor a; do [ "$p" = -o ] && OUT=$a; p=$a; done\n{script}\n')
    broken.chmod(0o700)
    changed = replace(compiler, command=(str(broken),))
    monkeypatch.setattr(host_compiler, "find_compiler", lambda: changed)
    with pytest.raises(CacheError, match=remedy) as caught:
        compile_shared(source(3))
    assert ".so" in str(caught.value)


def test_folders_are_no_part_of_the_key(monkeypatch):
    """Another machine's compiler and torch lie elsewhere; the library is the same."""
    from dataclasses import replace

    first, found = compile_shared(source(1)), find_compiler()
    link = tuple(part.replace("/lib", "/elsewhere/lib") for part in found.link)
    moved = replace(found, command=("/elsewhere/g++",), link=link)
    assert not link or link != found.link
    monkeypatch.setattr(host_compiler, "find_compiler", lambda: moved)
    assert compile_shared(source(1)) == first


def test_a_compiler_of_cxx_that_does_not_work_is_named(monkeypatch, fresh_compiler, caplog):
    """Another compiler is taken then, which the author did not choose."""
    monkeypatch.setenv("CXX", "g++-of-nobody -O3")
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)  # it read CXX at its import
    with caplog.at_level("WARNING", logger="torch_tile"):
        found = find_compiler()
    (record,) = caplog.records
    assert "CXX names 'g++-of-nobody -O3', which does not work here" in record.message
    assert found.command[0] in record.message


def test_a_compiler_of_cxx_that_works_is_taken_quietly(monkeypatch, fresh_compiler, caplog):
    found = find_compiler()
    find_compiler.cache_clear()
    monkeypatch.setenv("CXX", " ".join(found.command))
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    with caplog.at_level("WARNING", logger="torch_tile"):
        assert find_compiler().command == found.command
    assert not caplog.records


@pytest.fixture
def fresh_check():
    """Forget which compilers were checked, before and after."""
    host_compiler._warn_of_miscompilations.cache_clear()
    yield
    host_compiler._warn_of_miscompilations.cache_clear()


def miscompiler(folder, name, change):
    """A compiler that changes the text, by a command of sed, or adds options."""
    script = folder / name
    script.write_text(
        f"""#!/bin/bash
args=()
for a; do
    case "$a" in
    *miscompilations.cpp) sed "{change[0]}" "$a" > {folder}/changed.cpp; args+=({folder}/changed.cpp);;
    *) args+=("$a");;
    esac
done
exec {find_compiler().name} "${{args[@]}}" {change[1]}
"""
    )
    script.chmod(0o700)
    return script


CHANGES = {
    "branches": ("s/ - less;/ - more;/", ""),
    "rounded_products": ("s/ + sums.n.;/ + sums[n] + 0x1p-24f;/", ""),
    "special_numbers": ("", "-ffinite-math-only"),  # -ffast-math would link a start-up that flushes subnormal numbers
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_compiler_that_gets_kernels_wrong_is_named_once(
    what, monkeypatch, tmp_path, folder, fresh_compiler, fresh_check
):
    script = miscompiler(tmp_path, f"miscompiles_{what}", CHANGES[what])
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(host_compiler, "_candidates", lambda: iter([(str(script),)]))
    find_compiler.cache_clear()
    assert host_compiler.MISCOMPILATIONS[what] in host_compiler.miscompilations(find_compiler())
    with pytest.warns(RuntimeWarning) as caught:
        compile_shared(source(1))
        compile_shared(source(2))
    (text,) = (str(w.message) for w in caught)
    assert str(script) in text and host_compiler.MISCOMPILATIONS[what] in text and "CXX" in text
    assert len(list(folder.rglob("*.so"))) == 3  # two of these texts, and the check


def test_this_compiler_has_no_known_miscompilation_and_is_asked_once(monkeypatch, fresh_check):
    runs = count_runs(monkeypatch)
    host_compiler._warn_of_miscompilations.cache_clear()
    for value in range(3):
        compile_shared(source(value))
    assert len(runs) == 3  # count_runs has built the check
    host_compiler._warn_of_miscompilations.cache_clear()  # another process finds the check in the cache
    compile_shared(source(3))
    assert len(runs) == 4
    assert host_compiler.miscompilations(find_compiler()) == []


def test_each_miscompilation_is_a_function_of_the_check():
    text = (host_compiler.csrc_dir() / "miscompilations.cpp").read_text()
    assert set(re.findall(r'extern "C" int (\w+)', text)) == set(host_compiler.MISCOMPILATIONS) == set(CHANGES)


def test_an_internal_error_of_the_compiler_is_not_ours(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1:1: internal compiler error: in f, at g.cc:7' >&2; exit 1\n")
    broken.chmod(0o700)
    changed = replace(find_compiler(), command=(str(broken),))
    monkeypatch.setattr(host_compiler, "find_compiler", lambda: changed)
    with pytest.raises(NoCompilerError, match="CXX") as caught:
        compile_shared(source(5))
    assert str(broken) in str(caught.value) and "bug in torch_tile" not in str(caught.value)
