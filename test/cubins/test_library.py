# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the library becomes machine code for every chip that we name, without spills or complaints.

`pytest test/cubins -k "sm_90a and gemm"` picks some.
"""

import importlib
import pkgutil

import pytest
import torch

from benchmarks.library import catalogue, launches
from torch_tile import kernels
from torch_tile.hardware import Target
from torch_tile.ir.node import walk
from torch_tile.ir.stmt import calls
from torch_tile.jit import JITFunction

READ_EARLY = {"combine_pieces"}  # its schedule, which is there before the kernel ahead of it begins
CASES = {case.name: case for case in catalogue()}
CHOICES = [
    ("pairs of tiles", "paired"), ("pairs of tiles", "halved"), ("persistent", "persistent"),
    ("tiles in turn", "in_order"), ("own keys", "own_keys"),
]  # fmt: skip
CHIPS = {Target("cuda", capability).arch: Target("cuda", capability) for capability in (80, 90, 120)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip, name):
    found = launches(CASES[name], CHIPS[chip])
    if not found:
        pytest.skip("runs as plain torch there")
    for launch in found:
        kernel = launch.kernel
        refuse_overlaps(launch)
        refuse_early_uses(kernel.prim_func)
        assert kernel.cubin.data[:4] == b"\x7fELF" and kernel.target == CHIPS[chip]
        assert set(kernel.resources) == {entry.name for entry in kernel.launcher.source.entries}
        spilled = {entry: found.spills for entry, found in kernel.resources.items() if found.spills}
        assert not spilled, f"{kernel.__name__}: {spilled}\n{kernel.schedule}"
        assert not kernel.cubin.warnings, kernel.cubin.warnings
        in_order = [remark for remark in kernel.schedule.slow if remark.became.endswith("in order, in one thread")]
        assert not in_order, f"a loop of {kernel.__name__} that one thread of all runs: {in_order}"
        shared = max(entry.shared_bytes for entry in kernel.launcher.source.entries)
        assert shared <= CHIPS[chip].shared_limit


def test_every_kernel_has_a_case():
    """A kernel without one is compiled for no GPU here, and has no footprint that is compared."""
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(kernels.__path__, "torch_tile.kernels.")]
    known = {f.function for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
    launched = {each.function.function for case in CASES.values() for each in launches(case, CHIPS["sm_90a"])}
    assert len(known) > 50 and not {f"{f.__module__}.{f.__name__}" for f in known - launched}


@pytest.mark.parametrize(("case", "field"), CHOICES)
def test_cases_take_the_kernels_that_they_name(case, field):
    """The first three only without a log-sum-exp."""
    (launch,) = launches(CASES[f"attention fp16 {case}"], CHIPS["sm_90a"])
    assert getattr(launch.choice[0], field)


def refuse_overlaps(launch):
    """A GPU refuses a tensor that a kernel takes for constant, and that shares memory with one that it writes."""
    tensors = [x for x in launch.args if isinstance(x, torch.Tensor)]
    for read, written in launch.kernel.launcher.source.disjoint:
        one, other = tensors[read], tensors[written]
        if one.untyped_storage()._cdata == other.untyped_storage()._cdata:
            spans = sorted(span(x) for x in (one, other))
            assert spans[0][1] <= spans[1][0], f"{launch.kernel.__name__} reads {one.shape} while it writes it"


def refuse_early_uses(program):
    """A kernel that starts early waits before it touches a tensor, which kernels ahead may still read or write."""
    tensors = {id(x) for x in (*program.params, *program.outputs, *program.workspaces, *program.views)}
    for kernel in program.kernels:
        if any(calls(one, "grid_wait") for one in walk(kernel.body)):
            first = next(n for n, one in enumerate(kernel.body.stmts) if calls(one, "grid_wait"))  # in no branch
            used = any(id(x) in tensors for one in kernel.body.stmts[:first] for x in walk(one))
            assert used == (program.name in READ_EARLY), f"{program.name} uses a tensor before T.pdl_sync"


def span(x):
    """The first byte of a tensor in its storage, and the byte behind its last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.element_size(), (x.storage_offset() + last + 1) * x.element_size()
