# SPDX-License-Identifier: Apache-2.0
"""The cache under everything that may happen to it: crashes, races, damage, other users."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from torch_tile.runtime import cache
from torch_tile.runtime.cache import CacheError, cache_dir, get_or_build, is_kept, key_of
from torch_tile.runtime.host_compiler import load_library

KEY = key_of("some source", b"some compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Writes `data` and counts how often it had to."""

    def __init__(self, data: bytes = b"machine code" * 1000):
        self.data, self.calls = data, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        path.write_bytes(self.data)


def everything(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_key_keeps_parts_apart():
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of("a", "") != key_of("a")
    assert key_of("é") == key_of("é".encode())
    assert len(KEY) == 64


def test_where(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("TORCH_TILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "torch_tile"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_dir() == tmp_path / "home" / ".cache" / "torch_tile"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nobody knows this user
    assert cache_dir().is_absolute()


def test_builds_once(folder):
    builder = Builder()
    assert not is_kept(KEY, ".so")
    path = get_or_build(KEY, ".so", builder)
    assert is_kept(KEY, ".so") and not is_kept(KEY, ".cpp")
    assert path.read_bytes() == builder.data
    assert path.name == KEY + ".so"
    assert get_or_build(KEY, ".so", builder) == path
    assert get_or_build(KEY, ".cpp", builder) != path
    assert builder.calls == 2
    assert everything(folder) == {KEY + s for s in (".so", ".so.seal", ".cpp", ".cpp.seal")}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, seal: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, seal: path.write_bytes(b""),
        lambda path, seal: path.write_bytes(b"M" + path.read_bytes()[1:]),
        lambda path, seal: seal.unlink(),
        lambda path, seal: seal.write_text(""),
        lambda path, seal: seal.write_bytes(b"\xff\xfe"),
        lambda path, seal: path.unlink(),
    ],
    ids=["truncated", "empty", "altered", "no seal", "empty seal", "seal of bytes", "no file"],
)
def test_damage_is_repaired(damage):
    builder = Builder()
    path = get_or_build(KEY, ".so", builder)
    damage(path, path.with_name(path.name + ".seal"))
    assert not is_kept(KEY, ".so")
    assert get_or_build(KEY, ".so", builder) == path
    assert path.read_bytes() == builder.data
    assert builder.calls == 2


def test_a_failed_build_leaves_nothing(folder):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        get_or_build(KEY, ".so", fail)
    assert everything(folder) == set()
    builder = Builder()
    get_or_build(KEY, ".so", builder)
    assert builder.calls == 1


def test_a_build_may_ask_for_a_sibling():
    def build(path: Path) -> None:
        path.write_bytes(get_or_build(KEY, ".cpp", Builder(b"text")).read_bytes())

    assert get_or_build(KEY, ".so", build).read_bytes() == b"text"


def test_threads_build_once():
    builder, barrier, paths = Builder(), threading.Barrier(8), []

    def slow(path: Path) -> None:
        time.sleep(0.05)
        builder(path)

    def ask() -> None:
        barrier.wait()
        paths.append(get_or_build(KEY, ".so", slow))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builder.calls == 1
    assert len(set(paths)) == 1


PROCESS = """
import sys, time
from pathlib import Path
from torch_tile.runtime.cache import get_or_build
key, rounds, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
data = b"0123456789" * 100_000
def build(path):
    with path.open("wb") as file:
        for start in range(0, len(data), 100_000):
            file.write(data[start:start + 100_000])
            file.flush()
            print("writing", flush=True)
            time.sleep(pause)
for i in range(rounds):
    path = get_or_build(key[:2] + str(i) + key[3:], ".so", build)
    assert path.read_bytes() == data
print("done", flush=True)
"""


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROCESS, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_processes_at_once(folder):
    """Both finish, neither sees a half-written file, and no rubbish stays."""
    processes = [start(KEY, 5, 0.001) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output.endswith("done\n")
    assert len(everything(folder)) == 10


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_killed_while_writing(folder):
    process = start(KEY, 1, 0.2)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "writing\n"
    process.kill()
    process.communicate(timeout=60)
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert left and all(".tmp" in path.name for path in left)
    other = start(KEY, 1, 0)
    assert other.communicate(timeout=60)[0].endswith("done\n")
    # The next build in that folder removes what the killed one left.
    get_or_build(KEY, ".other", Builder())
    assert not any(path.exists() for path in left)


def test_what_another_machine_left_goes_after_a_day(folder):
    place = get_or_build(KEY, ".so", Builder()).parent
    old, new = place / "a.elsewhere-1.xyz.tmp.so", place / "b.elsewhere-1.xyz.tmp.so"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - 10 * 24 * 3600,) * 2)
    get_or_build(KEY, ".other", Builder())
    assert not old.exists() and new.exists()


def test_an_entry_in_the_place_of_another_is_refused(folder):
    """A sound file under another key's name is not what that key stands for."""
    path = get_or_build(KEY, ".so", Builder())
    other = get_or_build(key_of("another"), ".so", Builder())
    for suffix in ("", ".seal"):
        other.with_name(other.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    builder = Builder()
    get_or_build(key_of("another"), ".so", builder)
    assert builder.calls == 1


needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs file owners")


@needs_owners
@pytest.mark.parametrize("which", ["root", "folder", "file", "seal"])
@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "world"])
def test_writable_by_others(which, mode, folder):
    path = get_or_build(KEY, ".so", Builder())
    place = {"root": folder, "folder": path.parent, "file": path, "seal": path.with_name(path.name + ".seal")}[which]
    place.chmod(place.stat().st_mode | mode)
    with pytest.raises(CacheError, match=r"can be written by other users.*chmod -R go-w"):
        get_or_build(KEY, ".so", Builder())


@needs_owners
@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["root", "folder", "file", "seal"])
def test_owned_by_another(which, folder):
    path = get_or_build(KEY, ".so", Builder())
    place = {"root": folder, "folder": path.parent, "file": path, "seal": path.with_name(path.name + ".seal")}[which]
    os.chown(place, 12345, -1)
    with pytest.raises(CacheError, match="belongs to user id 12345"):
        get_or_build(KEY, ".so", Builder())


@needs_owners
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777], ids=oct)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_ancestors_that_others_can_write(depth, mode, tmp_path, monkeypatch):
    """Who can write a folder above can exchange all that lies below between a check and a load."""
    root = tmp_path / "a" / "b" / "c"
    root.mkdir(parents=True)
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(root / "cache"))
    ancestor = (root, *root.parents)[depth]
    ancestor.chmod(mode)
    monkeypatch.setattr(cache, "_is_private_group", lambda group: False)
    with pytest.raises(CacheError, match=f"{ancestor}, above the cache folder, can be written by other users"):
        get_or_build(KEY, ".so", Builder())
    ancestor.chmod(mode | 0o1000)  # as of /tmp: each name is its owner's
    get_or_build(KEY, ".so", Builder())


@needs_owners
def test_a_group_of_one_may_write_above(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "project").chmod(0o775)
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "project" / "cache"))
    monkeypatch.setattr(cache, "_is_private_group", lambda group: True)
    get_or_build(KEY, ".so", Builder())


@needs_owners
@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give files away")
def test_ancestors_of_another(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, -1)
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "theirs" / "cache"))
    with pytest.raises(CacheError, match="belongs to user id 12345, who could exchange"):
        get_or_build(KEY, ".so", Builder())


@needs_owners
def test_a_link_above_is_resolved(tmp_path, monkeypatch):
    """What counts is where the folder really lies."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "link" / "cache"))
    with pytest.raises(CacheError, match="above the cache folder"):
        get_or_build(KEY, ".so", Builder())


@needs_owners
def test_a_link_is_refused(tmp_path):
    """A link in the place of an entry could lead to any file."""
    path = get_or_build(KEY, ".so", Builder())
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(CacheError, match="not a plain file"):
        get_or_build(KEY, ".so", Builder())


@needs_owners
def test_generous_umask():
    """Entries made under umask 0 are still nobody else's to write."""
    old = os.umask(0)
    try:
        get_or_build(KEY, ".so", Builder())
        builder = Builder()
        get_or_build(KEY, ".so", builder)
        assert builder.calls == 0
    finally:
        os.umask(old)


def test_place_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "plain").write_text("")
    for place in (tmp_path / "plain", tmp_path / "plain" / "below"):
        monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(place))
        with pytest.raises(CacheError, match="TORCH_TILE_CACHE_DIR"):
            get_or_build(KEY, ".so", Builder())


def test_place_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", "/proc/torch_tile")
    with pytest.raises(CacheError, match="cannot create the cache folder"):
        get_or_build(KEY, ".so", Builder())


def refuse(path: Path) -> Path:
    path.write_text("a file")
    return path


def foreign(path: Path) -> Path:
    path.mkdir()
    os.chown(path, 65534, 65534)
    return path


def shared(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def default(tmp_path, monkeypatch):
    """The home folder of a user who names no cache folder; temporary files go to `tmp_path/tmp`."""
    monkeypatch.delenv("TORCH_TILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / ".cache").mkdir()
    return tmp_path / ".cache" / "torch_tile"


@pytest.mark.parametrize("spoil", [refuse, foreign, shared])
def test_an_unusable_default_gives_way(spoil, default, tmp_path):
    if spoil is foreign and os.geteuid():
        pytest.skip("only root gives folders away")
    spoil(default)
    with pytest.warns(RuntimeWarning, match="TORCH_TILE_CACHE_DIR") as warned:
        path = get_or_build(KEY, ".so", Builder())
        get_or_build(KEY, ".so", Builder())
    assert len(warned) == 1
    assert path.parent.parent.parent == tmp_path / "tmp"
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_a_missing_home_gives_way(default, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    with pytest.warns(RuntimeWarning, match="/proc/nonexistent"):
        assert cache_dir().parent == tmp_path / "tmp"


def test_noexec_gives_way(default, tmp_path, monkeypatch):
    real = os.statvfs

    class Flags:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: Flags if Path(path) == default else real(path))
    with pytest.warns(RuntimeWarning, match="noexec"):
        assert cache_dir().parent == tmp_path / "tmp"


def test_a_name_taken_among_temporaries(default, tmp_path):
    refuse(default)
    shared(tmp_path / "tmp" / f"torch_tile-{os.geteuid()}")
    with pytest.warns(RuntimeWarning):
        found = cache_dir()
    assert found.name != f"torch_tile-{os.geteuid()}"
    assert cache_dir() == found
    assert found.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_cache_that_root_filled(monkeypatch):
    """Another user with root's home computes, in a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        home, temporary = Path(name), Path(name) / "tmp"
        home.chmod(0o755)
        temporary.mkdir()
        temporary.chmod(0o1777)
        monkeypatch.delenv("TORCH_TILE_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", name)
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        get_or_build(KEY, ".so", Builder())
        child = os.fork()
        if not child:
            status = 1
            try:
                cache._chosen.clear()  # as in a process of their own
                os.setgid(65534)
                os.setuid(65534)
                with pytest.warns(RuntimeWarning):
                    path = get_or_build(KEY, ".so", Builder())
                status = int(path.parent.parent.parent != temporary or path.stat().st_uid != 65534)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_parents_are_made_private(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_TILE_CACHE_DIR", str(tmp_path / "a" / "b" / "cache"))
    old = os.umask(0)
    try:
        get_or_build(KEY, ".so", Builder())
    finally:
        os.umask(old)
    assert not (tmp_path / "a").stat().st_mode & 0o022


@pytest.mark.parametrize("suffix", [".so", ".cubin"])
def test_an_empty_library_is_never_sealed(suffix, folder):
    with pytest.raises(CacheError, match="wrote nothing"):
        get_or_build(KEY, suffix, Builder(b""))
    assert not everything(folder)


def test_a_compiler_that_removes_its_output(folder):
    with pytest.raises(CacheError, match="wrote nothing"):
        get_or_build(KEY, ".so", lambda path: path.unlink())
    assert not everything(folder)


def test_a_library_that_cannot_be_loaded(folder):
    path = get_or_build(KEY, ".so", Builder(b"of another machine"))
    with pytest.raises(CacheError, match=r"cannot be loaded: .*TORCH_TILE_CACHE_DIR"):
        load_library(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ESTALE], ids=errno.errorcode.get)
def test_a_full_disk(code, folder):
    def build(path):
        raise OSError(code, os.strerror(code))

    with pytest.raises(CacheError, match=rf"{os.strerror(code)}.*TORCH_TILE_CACHE_DIR"):
        get_or_build(KEY, ".so", build)
    assert not everything(folder)


def test_a_limit_of_sizes(folder, tmp_path):
    """The author's file elsewhere keeps its own error; the cache's own file has the cache's."""
    with pytest.raises(FileNotFoundError, match="missing"):
        get_or_build(KEY, ".so", lambda path: path.write_bytes((tmp_path / "missing").read_bytes()))
    code = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
    code += "from torch_tile.runtime.cache import get_or_build\n"
    code += f"get_or_build({KEY!r}, '.txt', lambda path: path.write_text('x' * 101))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "CacheError" in said and os.strerror(errno.EFBIG) in said
    assert not everything(folder)


def test_operators_without_a_home():
    """Eager and compiled operators compute, with one warning about the folder."""
    code = (
        "import torch, torch_tile; x = torch.randn(3, 5); f = torch.ops.tile.softmax;"
        "assert torch.allclose(f(x), x.softmax(-1));"
        "assert torch.allclose(torch.compile(f, fullgraph=True)(x), x.softmax(-1)); print('right')"
    )
    names = ("TORCH_TILE_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
    environment = {n: v for n, v in os.environ.items() if n not in names} | {"HOME": "/proc/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "right", done.stderr
    assert done.stderr.count("TORCH_TILE_CACHE_DIR") == 2  # in one warning: the reason, and what to do
