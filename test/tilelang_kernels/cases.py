# SPDX-License-Identifier: Apache-2.0
"""A kernel of a file that imports tilelang, its inputs and its reference, and how a test runs it."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torch_tile import compat

H, BF = torch.float16, torch.bfloat16
BOTH = ("cuda:sm_80", "cuda:sm_90a")
FILES = Path(__file__).parent / "files"


@cache
def load(name: str) -> Any:
    """A file of kernels, imported while tilelang is served."""
    compat.install()
    try:
        spec = importlib.util.spec_from_file_location(f"tilelang_kernels_{name}", FILES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        compat.uninstall()
    return module


@dataclass
class Case:
    """`file.function(**sizes)`, called with what `inputs()` gives, shall give `reference(*inputs)`.

    Without results the last arguments count. `targets` are those beside the CPU.
    """

    kernel: str
    sizes: dict[str, Any]
    inputs: Callable[[], list[Any]]
    reference: Callable[..., Any]
    tolerance: float = 1e-3
    targets: tuple[str, ...] = ("cuda:sm_80",)
    on_cpu: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel}-" + "-".join(f"{k}{v}" for k, v in self.sizes.items())


def floats(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def halves(*shape):
    return floats(*shape, dtype=torch.float16)


def listed(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def run(case: Case, target: str) -> None:
    file, _, function = case.kernel.partition(".")
    made = getattr(load(file), function).on(target)
    inputs = case.inputs()
    expected = listed(case.reference(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]))
    kernel = made.compile(**case.sizes) if made.is_lazy else made.compile(*inputs, **case.sizes)
    if target == "cpu":
        results = kernel(*inputs)
    else:
        findings = kernel.interpret(*inputs)
        assert not findings, findings.report()
        results = findings.outputs or None
    written = [x for x in inputs if isinstance(x, torch.Tensor)][-len(expected) :]
    got = written if results is None else listed(results)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=case.tolerance, atol=case.tolerance)
