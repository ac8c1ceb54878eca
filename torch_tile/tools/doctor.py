# SPDX-License-Identifier: Apache-2.0
"""`python -m torch_tile doctor`: what torch_tile needs and what it finds, each tried, not just looked for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator

from torch_tile.diagnostics.variables import problems

Check = Callable[[], str]


def doctor(selftest: bool = False) -> int:
    """Print one line for each thing. Returns 1 if something that is needed is missing.

    With `selftest`, also compile and run kernels of each family, and compare them with float64.
    """
    failures = 0
    for name, check, needed in [*CHECKS, *(_computing() if selftest else ())]:
        try:
            mark, text = "ok  ", check()
        except Exception as problem:  # whatever is wrong with this machine is the answer
            mark, text = (
                ("FAIL" if needed else "none"),
                (str(problem) if type(problem) is RuntimeError else f"{type(problem).__name__}: {problem}"),
            )
            failures += needed
        print(f"[{mark}] {name:<14} {text}")
    print("\neverything needed is there" if not failures else f"\n{failures} of the needed things failed")
    return 1 if failures else 0


def _computing() -> Iterator[tuple[str, Check, bool]]:
    """Yield the checks of selftest.py, which is imported only once torch was found."""
    from torch_tile.tools.selftest import checks

    for name, check in checks():
        yield name, check, True


def check_python() -> str:
    """Return the version of Python and the machine."""
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"


def check_torch() -> str:
    """Check the version of torch against the supported ones."""
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= version < (2, 16):
        raise RuntimeError(f"torch {torch.__version__}; torch_tile supports 2.11 to 2.15")
    return f"{torch.__version__}, {torch.get_num_threads()} threads"


def check_compiler() -> str:
    """Find the C++ compiler and its flags, and look for known miscompilations."""
    from torch_tile.runtime.host_compiler import find_compiler, miscompilations

    found = find_compiler()
    if wrong := miscompilations(found):
        raise RuntimeError(f"{found.name} miscompiles kernels: {'; '.join(wrong)}. Name another compiler in CXX")
    flags = shlex.join([*found.command, *(flag for flag in found.flags if flag.startswith("-m"))])
    return f"{flags}; no known miscompilation"


def check_openmp() -> str:
    """Find the OpenMP run time that kernels share with torch."""
    from torch_tile.runtime.host_compiler import find_compiler

    return shlex.join(find_compiler().link) or "linked by the compiler"


def check_cache() -> str:
    """Check that the folder of compiled kernels is writable."""
    from torch_tile.runtime.cache import cache_dir

    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder):
        pass
    sizes = {suffix: [path.stat().st_size for path in folder.rglob(f"*{suffix}")] for suffix in (".so", ".cubin")}
    counts = f"{len(sizes['.so'])} libraries, {len(sizes['.cubin'])} cubins"
    return f"{folder}: {counts}, {sum(map(sum, sizes.values())) / 2**20:.1f} MiB"


def check_kernel() -> str:
    """Compile and run a kernel, and compare it with torch."""
    import torch

    import torch_tile.ops

    x = torch.randn(7, 33, dtype=torch.float64).float()
    torch.testing.assert_close(torch_tile.ops.softmax(x), x.softmax(-1))
    return "a softmax was compiled, ran, and agrees with torch"


def check_backend() -> str:
    """Return whether torch.compile finds the backend, and whether without an import of torch_tile."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "tile" not in names:
        raise RuntimeError(
            'no entry point "tile": install the package (pip install -e .), or import torch_tile.inductor'
        )
    try:
        importlib.metadata.version("torch_tile")
    except importlib.metadata.PackageNotFoundError:
        return 'torch.compile(backend="tile") is registered by `import torch_tile`; the package is not installed'
    return 'torch.compile(backend="tile") is registered'


def check_transformers() -> str:
    """Return the version of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError('not installed; pip install "torch_tile[transformers]"')
    return importlib.metadata.version("transformers")


def check_nvrtc() -> str:
    """Find NVRTC, with which CUDA kernels are compiled; it needs no GPU."""
    from torch_tile.hardware import Target
    from torch_tile.runtime.nvrtc import compile_cubin, find_nvrtc, nvrtc_version

    cubin = compile_cubin('extern "C" __global__ void doctor() {}\n', Target.of("cuda"))
    version = "{}.{}".format(*nvrtc_version())
    return f"{version} at {find_nvrtc().path}; compiled {len(cubin.data)} bytes for {Target.of('cuda').arch}"


def check_launcher() -> str:
    """Build the native module through which launches take a microsecond; without it they go through Python."""
    from torch_tile.runtime.native_launch import native

    module = native()
    if module is None:
        raise RuntimeError("not built, so launches take some 10 us more: it needs Python.h and the C++ compiler")
    return str(module.__file__)


def check_driver() -> str:
    """Find NVIDIA's driver."""
    from torch_tile.runtime.driver import driver

    return "CUDA {}.{}".format(*driver().version())


def check_gpu() -> str:
    """Return the GPU's name and compute capability."""
    import torch

    from torch_tile.hardware import detected

    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise RuntimeError(f"{why}; kernels run on the CPU")
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return f"{', '.join(names)}, sm_{detected()}"


def check_cuda_kernel() -> str:
    """Compile and run a kernel on the GPU, and compare it with torch."""
    import torch

    import torch_tile.ops

    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to run one on")
    x = torch.randn(7, 33, device="cuda")
    torch.testing.assert_close(torch_tile.ops.softmax(x), x.softmax(-1))
    return "a softmax was compiled, ran, and agrees with torch"


def check_variables() -> str:
    """List the environment variables that matter."""
    names = ("CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
    found = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("TORCH_TILE_") or name in names
    ]
    if said := list(problems(os.environ)):
        raise RuntimeError("; ".join(said))
    if not found:
        raise RuntimeError("none is set")
    return " ".join(found)


# (name, check, whether torch_tile needs it)
CHECKS: list[tuple[str, Check, bool]] = [
    ("Python", check_python, True),
    ("torch", check_torch, True),
    ("C++ compiler", check_compiler, True),
    ("OpenMP", check_openmp, True),
    ("cache", check_cache, True),
    ("kernel", check_kernel, True),
    ("backend", check_backend, True),
    ("transformers", check_transformers, False),
    ("NVRTC", check_nvrtc, False),
    ("launcher", check_launcher, False),
    ("CUDA driver", check_driver, False),
    ("GPU", check_gpu, False),
    ("CUDA kernel", check_cuda_kernel, False),
    ("variables", check_variables, False),
]
