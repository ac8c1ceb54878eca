# SPDX-License-Identifier: Apache-2.0
"""Cache built files on disk under the digest of all their inputs.

An entry is complete or absent. It is built under a temporary name in its own folder and renamed. A sidecar with its
name, size and SHA-256 then seals it. A missing, truncated, altered or renamed entry is built again. Entries are loaded
into the process as machine code, so an entry that another user could have written is refused. The file, its folder and
every folder above must belong to this user or to root. No other user may write there. Folders with the sticky bit are
the exception, because only owners can exchange names in them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

_SEAL = ".seal"
_TEMPORARY = ".tmp"
_LIBRARIES = (".so", ".cubin")  # which are never empty
_STALE_SECONDS = 24 * 3600
_locks: dict[str, threading.Lock] = {}  # by file name: one build of it at a time within a process
_chosen: dict[Path, Path] = {}  # by the default folder: what stands in for it, or itself
_choosing = threading.Lock()
_making = threading.Lock()
_trusted: set[Path] = set()  # folders of which all ancestors were checked
_used: dict[str, Path] = {}  # by file name: what this process has asked for
_listeners: list[Callable[[Path], None]] = []


class CacheError(RuntimeError):
    """Raised if the cache folder or one of its files cannot be used; the message tells the remedy."""


def cache_dir() -> Path:
    """Return `$TORCH_TILE_CACHE_DIR`, else `$XDG_CACHE_HOME/torch_tile`, else `~/.cache/torch_tile`, links resolved.

    A default that cannot be used gives way to a private temporary folder, with one warning.
    A folder that `TORCH_TILE_CACHE_DIR` names never does; it need not exist yet.
    """
    chosen = os.environ.get("TORCH_TILE_CACHE_DIR")
    if chosen:
        return Path(os.path.realpath(os.path.expanduser(chosen)))
    base = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")
    if base and os.path.isabs(base):  # the XDG specification says to ignore relative ones
        return _usable(Path(base) / "torch_tile")
    if not os.path.isabs(home):
        return _private_dir()
    return _usable(Path(home) / ".cache" / "torch_tile")


def _usable(root: Path) -> Path:
    """Return `root`, or a private temporary folder where libraries cannot be written to or loaded from `root`."""
    root = Path(os.path.realpath(root))
    with _choosing:
        if root in _chosen and _chosen[root].is_dir():
            return _chosen[root]
        fault = _fault(root)
        _chosen[root] = instead = root if fault is None else _private_dir()
    if fault is not None:
        warnings.warn(
            f"{fault} Kernels are kept in {instead} instead; TORCH_TILE_CACHE_DIR names another folder.",
            RuntimeWarning,
            stacklevel=3,
        )
    return instead


def _fault(root: Path) -> str | None:
    """Create `root` if it is missing; return why it cannot hold libraries, or None if it can."""
    try:
        _make(root)
        with tempfile.TemporaryFile(dir=root):
            pass
    except CacheError as error:
        return str(error)
    except OSError as error:
        return f"cannot write to the cache folder {root}: {error.strerror}."
    if hasattr(os, "statvfs") and os.statvfs(root).f_flag & os.ST_NOEXEC:
        return f"the cache folder {root} lies on a file system that is mounted noexec."
    return None


def _private_dir() -> Path:
    """Return a temporary folder that only this user can write; later processes find the same folder."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    root = Path(os.path.realpath(tempfile.gettempdir())) / f"torch_tile-{user}"
    if _fault(root) is None and not root.is_symlink():
        return root
    with _making:
        if root not in _chosen:  # another user took the name
            _chosen[root] = Path(os.path.realpath(tempfile.mkdtemp(prefix="torch_tile-")))
        return _chosen[root]


def key_of(*parts: str | bytes) -> str:
    """Compute the cache key of `parts`: SHA-256 over lengths and bytes, so that no two lists of parts share a key."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def get_or_build(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """Return the cached file of `key` with `suffix` (".so"); call `build(path)` if no sound file exists.

    Several threads and processes may ask at once. Threads wait, processes may each build, and the last rename wins.
    `build` may itself ask for another suffix of the key. Its exceptions pass through and leave nothing behind. Raises
    CacheError if another user could have written the folder or the entry, or if the folder is not writable.
    """
    with _locks.setdefault(key + suffix, threading.Lock()):
        folder = _folder(key)
        path = folder / (key + suffix)
        if not _is_sound(path):
            _remove_stale(folder)
            _build(path, build)
        if path.name not in _used:
            _used[path.name] = path
            for listener in _listeners:
                listener(path)
        return path


def is_kept(key: str, suffix: str) -> bool:
    """Return whether `get_or_build` would find the file."""
    return _is_sound(_folder(key) / (key + suffix))


def on_use(listener: Callable[[Path], None]) -> None:
    """Call `listener(path)` once for each entry that this process uses, now or later."""
    _listeners.append(listener)
    for path in list(_used.values()):
        listener(path)


def sealed(path: Path) -> bytes:
    """Pack a sound entry as bytes that `unsealed` can check: its name, size and digest, then its content."""
    return _seal_text(path).encode() + path.read_bytes()


def unsealed(data: bytes, name: str) -> bytes:
    """Return the content of the entry `name` in the bytes of `sealed`. Raises CacheError for damaged bytes."""
    seal, _, content = data.partition(b"\n")
    if seal + b"\n" != _seal_of_bytes(name, content).encode():
        raise CacheError("the entry is not what it was when it was saved")
    return content


def _folder(key: str) -> Path:
    """Make the folders of a key."""
    root = cache_dir()
    _make(root)
    _make(root / key[:2])
    return root / key[:2]


def _make(folder: Path) -> None:
    """Create `folder` if it is missing. Raises CacheError if that fails, or if other users can write the folder."""
    try:
        _make_parents(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise CacheError(
            f"cannot create the cache folder {folder}: {error.strerror}. "
            "Set TORCH_TILE_CACHE_DIR to a folder you can write."
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"{folder} is not a folder. Remove it, or set TORCH_TILE_CACHE_DIR to another folder.")
    _check_owner(folder, status)
    _check_ancestors(folder)


def _check_ancestors(folder: Path) -> None:
    """Raise CacheError if another user could replace `folder`, whose path has no links."""
    if not hasattr(os, "geteuid") or folder.parent in _trusted:
        return
    for ancestor in folder.parents:
        status = ancestor.stat()
        sticky = status.st_mode & stat.S_ISVTX
        if status.st_uid not in (os.geteuid(), 0, _unmapped_user()):
            raise CacheError(
                f"{ancestor}, above the cache folder, belongs to user id {status.st_uid}, who could exchange what is "
                "in it; code from it will not be loaded. Set TORCH_TILE_CACHE_DIR to a folder of your own."
            )
        others = stat.S_IWOTH if _is_private_group(status.st_gid) else stat.S_IWGRP | stat.S_IWOTH
        if status.st_mode & others and not sticky:
            raise CacheError(
                f"{ancestor}, above the cache folder, can be written by other users (mode "
                f"{stat.S_IMODE(status.st_mode):o}); code from it will not be loaded. "
                f"Run `chmod go-w {ancestor}`, or set TORCH_TILE_CACHE_DIR to another folder."
            )
    _trusted.add(folder.parent)


@functools.cache
def _unmapped_user() -> int:
    """Return the user id that owns root's files in a container without a root user."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return 0


@functools.cache
def _is_private_group(group: int) -> bool:
    """Return whether this user is a group's only member and has its name; many systems make such groups."""
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def _make_parents(folder: Path) -> None:
    """Create the missing parent folders; only this user may write them, whatever the umask is."""
    if not folder.exists():
        _make_parents(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise CacheError if a file belongs to another user or another user can write it."""
    if not hasattr(os, "geteuid"):  # Windows: the folder lies in the user's profile
        return
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"{path} belongs to user id {status.st_uid}, not to you ({os.geteuid()}); code from it will not be loaded. "
            "Remove it, or set TORCH_TILE_CACHE_DIR to a folder of your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}); code from it will not be "
            f"loaded. Run `chmod -R go-w {path}`, or set TORCH_TILE_CACHE_DIR to another folder."
        )


def _seal_of(path: Path) -> Path:
    """Return the path of a file's seal."""
    return path.with_name(path.name + _SEAL)


def _seal_text(path: Path) -> str:
    """Return the seal of a file: name, size and digest."""
    return _seal_of_bytes(path.name, path.read_bytes())


def _seal_of_bytes(name: str, data: bytes) -> str:
    """Return the seal of bytes under a name."""
    return f"{name} {len(data)} {hashlib.sha256(data).hexdigest()}\n"


def _is_sound(path: Path) -> bool:
    """Return whether a cached file is owned by this user and matches its seal."""
    seal = _seal_of(path)
    try:
        for each in (path, seal):
            status = each.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise CacheError(f"{each} is not a plain file. Remove it.")
            _check_owner(each, status)
        return seal.read_text() == _seal_text(path)
    except FileNotFoundError:
        return False
    except UnicodeDecodeError:
        return False


def _build(path: Path, build: Callable[[Path], None]) -> None:
    """Build a file under a temporary name, seal it, and move it into the cache."""
    temporary = _temporary_name(path)
    seal = _temporary_name(_seal_of(path))
    try:
        build(temporary)
        if path.suffix in _LIBRARIES and not (temporary.exists() and temporary.stat().st_size):
            raise CacheError(
                f"the compiler reported success but wrote nothing to {temporary}. Check the compiler that CXX or "
                "TORCH_TILE_NVRTC names, and the free space there."
            )
        os.chmod(temporary, 0o700)
        seal.write_text(_seal_of_bytes(path.name, temporary.read_bytes()))
        os.chmod(seal, 0o600)
        os.replace(temporary, path)
        os.replace(seal, _seal_of(path))
    except OSError as error:
        if error.filename is not None and Path(error.filename).parent != path.parent:
            raise  # of a file elsewhere, which the build names
        raise CacheError(
            f"cannot write {path}: {error.strerror}. Look at the free space, the limits of sizes and the permissions "
            "there, or set TORCH_TILE_CACHE_DIR to another folder."
        ) from error
    finally:
        for left in (temporary, seal):
            left.unlink(missing_ok=True)


def _temporary_name(path: Path) -> Path:
    """Create an empty temporary file for `path`; its name tells the machine and process."""
    # The suffix is kept at the end: compilers and linkers look at it.
    owner = f"{path.stem[:16]}.{_host()}-{os.getpid()}."
    try:
        handle, name = tempfile.mkstemp(_TEMPORARY + path.suffix, owner, path.parent)
    except OSError as error:
        raise CacheError(
            f"cannot write to the cache folder {path.parent}: {error.strerror}. "
            "Set TORCH_TILE_CACHE_DIR to a folder you can write."
        ) from error
    os.close(handle)
    return Path(name)


def _host() -> str:
    """Return this machine's name, in letters and digits."""
    return re.sub(r"\W", "", socket.gethostname())[:32]


def _remove_stale(folder: Path) -> None:
    """Remove the temporary files of killed builds: those of this machine at once, other machines' after a day."""
    now, ours = time.time(), re.compile(rf".*\.{_host()}-(\d+)\.")
    for path in folder.glob(f"*{_TEMPORARY}.*"):
        owner = ours.match(path.name)
        with contextlib.suppress(OSError):
            is_dead = owner is not None and not _is_alive(int(owner[1]))
            if is_dead or now - path.lstat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _is_alive(process: int) -> bool:
    """Return whether a process of this number runs on this machine."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
