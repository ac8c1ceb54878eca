# SPDX-License-Identifier: Apache-2.0
"""Describe the machines that kernels are compiled for: chips, boards, limits and rates, each number once.

Other modules ask a `Target` for a feature by name (`has_wgmma`); none compares capabilities or spells a limit. Rates
are those of data sheets, rounded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch_tile.diagnostics.errors import TileError, error

if TYPE_CHECKING:
    import torch

CPU_SPELLINGS = ("cpu", "c", "llvm", "host")
AMPERE, HOPPER = 80, 90  # capabilities that introduced an intrinsic's hardware
FALLBACK_ARCH = HOPPER  # the meaning of "cuda" on a machine without a GPU: kernels can be compiled, not run
LEAST_ARCH = AMPERE  # whose tensor cores and asynchronous copies every kernel of the library may use

# Limits of every chip.
WARP, WARPGROUP = 32, 128  # threads
MOST_BLOCKS = 32  # of a multiprocessor
MOST_THREADS = 1024  # of a block
MOST_BLOCKS_OF_CLUSTER = 8  # for which every chip with clusters has room
GRID_LIMITS = (2**31 - 1, 65535, 65535)  # blocks of a grid in x, y and z
LARGEST_SIZE = 2**31 - 2**16  # of a dimension passed in 32 bits: rounding it up to whole tiles does not overflow
RESERVED = 1024  # bytes of shared memory that each block takes beside its own
SHARED_WITHOUT_ASKING = 48 * 1024  # bytes of dynamic shared memory that every function may have
VECTOR_BYTES = 16  # of the widest access of a thread; its address is a multiple of them
BULK_BYTES = 16  # that sizes and addresses of bulk copies and strides of tensor maps are multiples of
REGISTERS = 65536  # of a multiprocessor, 4 bytes each
PER_THREAD = 255  # registers that a thread can have
UNIT = 8  # registers: threads are given multiples of it
REGISTERS_OF_ROLES = range(24, 256 + UNIT, UNIT)  # that the threads of a role may ask for
LARGEST_BOX, MOST_RANK = 256, 5  # of a tensor map: elements of a box in one dimension, and dimensions


@dataclass(frozen=True)
class Board:
    """A product with a chip. Rates are in 1e12 dense operations per second by operand type, and 1e12 bytes per second.

    `half` is for 16-bit operands on tensor cores, `single` for float32 on the ordinary units, `double` for float64.
    """

    half: float
    single: float
    double: float
    bandwidth: float

    @property
    def flops(self) -> Mapping[str, float]:
        """Return the operations per second by the operands' dtype name."""
        rates = {"bfloat16": self.half, "float16": self.half, "float32": self.single, "float64": self.double}
        return {name: rate * 1e12 for name, rate in rates.items()}


@dataclass(frozen=True)
class Rates:
    """Rates of a machine per second: flops and bytes of one SM (or core), and bytes of its memory as a whole.

    `product` is for products of 16-bit operands by tensor cores. `shared` is bytes between shared memory and registers.
    `step` is the seconds that an iteration waits for its loads unless other work covers them; `launch` is those of a
    launch.
    """

    product: float
    scalar: float
    traffic: float
    shared: float
    memory: float
    step: float
    launch: float


CORE = Rates(8e10, 2e10, 8e9, 3e10, 4e10, 0.0, 3e-6)  # of a CPU
STEP, LAUNCH = 6e-7, 3e-6  # seconds that a GPU's loads and launches take

BOARDS = {
    "NVIDIA A100-SXM4-40GB": Board(312, 19.5, 19.5, 1.555),
    "NVIDIA A100-SXM4-80GB": Board(312, 19.5, 19.5, 2.039),
    "NVIDIA A100 80GB PCIe": Board(312, 19.5, 19.5, 1.935),
    "NVIDIA H100 PCIe": Board(756, 51.2, 51.2, 2.0),
    "NVIDIA H100 80GB HBM3": Board(989.4, 66.9, 66.9, 3.35),
    "NVIDIA H200": Board(989.4, 66.9, 66.9, 4.8),
}
"""By the name that the driver gives."""


@dataclass(frozen=True)
class Chip:
    """The chip of one compute capability.

    Attributes:
        arch: what the assembler calls it; with an "a" if the chip's own instructions are wanted.
        board: the typical product with it, whose rates stand for the chip's.
        sms: multiprocessors of that product.
        shared_limit: bytes of shared memory that one block may ask for.
        thread_limit: threads that a multiprocessor runs at the same time.
        l2_bytes: bytes of the second-level cache.
        l2_rate: bytes per second that a multiprocessor reads of it.
        shared_rate: bytes per second between shared memory and registers of a multiprocessor.
        features: names of what it has beyond its predecessors; see the properties of `Target`.
    """

    arch: str
    board: Board
    sms: int
    shared_limit: int
    thread_limit: int
    l2_bytes: int
    l2_rate: float
    shared_rate: float
    features: frozenset[str] = field(default_factory=frozenset)


_KB, _MB = 1024, 1 << 20
_ADA = frozenset({"fp8"})
OWN = frozenset({"wgmma", "tcgen05", "register_moves"})  # what the assembler knows by names with an "a" only
_BLOCKWISE = _ADA | {"stmatrix", "clusters", "tma", "early_start"}  # what Hopper has and later chips kept
_NAMED = _BLOCKWISE | {"register_moves"}
CHIPS = {
    80: Chip("sm_80", BOARDS["NVIDIA A100-SXM4-80GB"], 108, 163 * _KB, 2048, 40 * _MB, 4.5e10, 1.8e11),
    86: Chip("sm_86", Board(143, 37, 0.6, 0.94), 84, 99 * _KB, 1536, 6 * _MB, 2.5e10, 2.2e11),
    89: Chip("sm_89", Board(362, 91.6, 1.4, 0.96), 142, 99 * _KB, 1536, 96 * _MB, 3.5e10, 3.0e11, _ADA),
    90: Chip("sm_90a", BOARDS["NVIDIA H200"], 132, 227 * _KB, 2048, 50 * _MB, 5.0e10, 2.2e11, _NAMED | {"wgmma"}),
    100: Chip(
        "sm_100a", Board(2250, 80, 40, 8.0), 148, 227 * _KB, 2048, 126 * _MB, 7.0e10, 2.4e11, _NAMED | {"tcgen05"}
    ),
    120: Chip("sm_120a", Board(503, 126, 2.0, 1.79), 188, 99 * _KB, 1536, 128 * _MB, 4.0e10, 3.0e11, _NAMED),
}
"""By compute capability, 90 for 9.0."""


def equal_share(threads: int, blocks: int = 1) -> int:
    """Return the registers that each thread may have at its start if so many blocks must fit on a multiprocessor."""
    return REGISTERS // blocks // (-(-threads // WARPGROUP) * WARPGROUP) // UNIT * UNIT


def registers_at_start(threads: int, blocks: int = 1) -> int:
    """Return the registers that each thread of a block with roles is started with: as many as a thread can have."""
    return min(equal_share(threads, blocks), -(-PER_THREAD // UNIT) * UNIT)


def most_blocks(threads: int, registers: int) -> int:
    """Return how many blocks fit on a multiprocessor, given the registers of each thread at its start."""
    return REGISTERS // (-(-threads // WARPGROUP) * WARPGROUP * (-(-registers // UNIT) * UNIT))


def chip_of(capability: int) -> Chip:
    """Return the chip of a capability; an unlisted one gives its listed predecessor with a generic name."""
    if capability in CHIPS:
        return CHIPS[capability]
    like = CHIPS[max((known for known in CHIPS if known < capability), default=min(CHIPS))]
    return replace(like, arch=f"sm_{capability}", features=like.features - OWN)


def runs_on(compiled: int, found: int) -> bool:
    """Return whether a cubin for one capability runs on another; those with an "a" run on their own only."""
    return compiled == found or (compiled < HOPPER and compiled // 10 == found // 10 and compiled < found)


_around: ContextVar[tuple[Target, ...]] = ContextVar("targets", default=())


@dataclass(frozen=True)
class Target:
    """A machine to compile for: `kind` is "cpu" or "cuda"; `capability` is 80, 89, 90, 120, ... for CUDA.

    In `with Target.of("cuda:sm_80"):` it is what target="auto" means.
    "sm_90" means sm_90a: without the "a" the chip's own instructions are missing.
    """

    kind: str = "cpu"
    capability: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda") or not isinstance(self.capability, int):
            why, fix = f"is {self.kind!r}, {self.capability!r}", "write Target.of('cpu'), or Target.of('cuda:sm_90a')"
            raise error("bad_argument", None, op="Target", name="kind", why=why, fix=fix)

    @classmethod
    def of(cls, target: object = "auto") -> Target:
        """Parse a target: "auto" (a GPU if any), "cpu", "cuda", "cuda:sm_90a", "cuda -arch=sm_80", "sm_120".

        Raises TileError for names of other machines.
        """
        if isinstance(target, Target):
            return target
        target = spelled(target)
        text = str(target).strip().lower()
        if text in ("", "auto"):
            if (around := cls.current()) is not None:
                return around
            found = detected()
            return cls("cuda", found) if found else cls("cpu")
        if text.split()[0] in CPU_SPELLINGS:
            return cls("cpu")
        if re.fullmatch(r"(cuda|nvidia)([ :,/].*)?|sm_.*", text):
            _check_chip(text)
            return cls("cuda", _capability(text) or detected() or FALLBACK_ARCH)
        if text.startswith(("hip", "metal", "webgpu", "cutedsl")):
            fix = "compile for target='cuda' or target='cpu'"
            raise error("unsupported_on_target", None, what="code generation", target=text, fix=fix)
        raise _bad_target(target, "give 'cpu', 'cuda', 'cuda:sm_90a' or 'auto'")

    @classmethod
    def current(cls) -> Target | None:
        """Return the target of the enclosing `with`, to which "auto" refers there."""
        around = _around.get()
        return around[-1] if around else None

    def __enter__(self) -> Target:
        _around.set((*_around.get(), self))
        return self

    def __exit__(self, *problem: object) -> None:
        _around.set(_around.get()[:-1])

    @classmethod
    def of_device(cls, device: torch.device) -> Target:
        """Return the target for a torch device: its own chip's for a GPU, else the CPU's.

        Fake tensors may lie on a GPU that this machine lacks: they have the target of the text "cuda".
        """
        if device.type != "cuda":
            return cls("cpu")
        return cls("cuda", _capability_of(device.index)) if _is_here(device.index) else cls.of("cuda")

    @property
    def chip(self) -> Chip:
        """Return the chip of the GPU; for the CPU, the chip of `FALLBACK_ARCH`."""
        return chip_of(self.capability or FALLBACK_ARCH)

    @property
    def arch(self) -> str:
        """Return the assembler's name of the architecture, "sm_90a"; "" for the CPU."""
        return self.chip.arch if self.kind == "cuda" else ""

    def _has(self, feature: str) -> bool:
        """Return whether the chip has a feature."""
        return self.kind == "cuda" and feature in self.chip.features

    @property
    def is_supported(self) -> bool:
        """Return whether the library's kernels can be compiled for this target: a CPU, or a GPU from Ampere on."""
        return self.kind == "cpu" or self.capability >= LEAST_ARCH

    @property
    def has_fp8(self) -> bool:
        """Return whether fp8 conversions and mma.sync on fp8 exist."""
        return self._has("fp8")

    @property
    def has_stmatrix(self) -> bool:
        """Return whether stmatrix exists."""
        return self._has("stmatrix")

    @property
    def has_clusters(self) -> bool:
        """Return whether blocks form clusters that reach each other's shared memory."""
        return self._has("clusters")

    @property
    def has_tma(self) -> bool:
        """Return whether tensor maps and bulk copies exist."""
        return self._has("tma")

    @property
    def has_early_start(self) -> bool:
        """Return whether a kernel may start before its predecessor ends (programmatic dependent launch)."""
        return self._has("early_start")

    @property
    def has_wgmma(self) -> bool:
        """Return whether warpgroups multiply asynchronously (wgmma), Hopper's own."""
        return self._has("wgmma")

    @property
    def has_register_moves(self) -> bool:
        """Return whether warpgroups of a block give each other registers (setmaxnreg)."""
        return self._has("register_moves")

    @property
    def has_tcgen05(self) -> bool:
        """Return whether tensor memory and its products (tcgen05) exist, Blackwell's own."""
        return self._has("tcgen05")

    @property
    def sms(self) -> int:
        """Return how many multiprocessors the typical product has."""
        return self.chip.sms

    @property
    def l2_bytes(self) -> int:
        """Return the size of the second-level cache in bytes."""
        return self.chip.l2_bytes

    @property
    def bandwidth(self) -> float:
        """Return the bandwidth of the typical product's memory in bytes per second."""
        return self.chip.board.bandwidth * 1e12

    def flops(self, dtype: str) -> float:
        """Return the typical product's operations per second on operands of a dtype name; 0 if unknown."""
        return self.chip.board.flops.get(dtype, 0.0)

    @property
    def rates(self) -> Rates:
        """Return the rates of one multiprocessor or core. A GPU of the typical product shares its rates equally."""
        if self.kind == "cpu":
            return CORE
        product, scalar = (self.flops(dtype) / self.sms for dtype in ("float16", "float32"))
        return Rates(product, scalar, self.chip.l2_rate, self.chip.shared_rate, self.bandwidth, STEP, LAUNCH)

    @property
    def shared_limit(self) -> int:
        """Return how many bytes of shared memory one block may ask for."""
        return self.chip.shared_limit

    @property
    def thread_limit(self) -> int:
        """Return how many threads a multiprocessor runs at the same time."""
        return self.chip.thread_limit

    def blocks_at_once(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Return the occupancy: how many blocks of so many threads and registers run on a multiprocessor."""
        by_shared = (self.shared_limit + RESERVED) // (shared_bytes + RESERVED)
        by_registers = most_blocks(threads, registers)
        return min(by_shared, by_registers, self.thread_limit // threads, MOST_BLOCKS)

    def __str__(self) -> str:
        return f"cuda:{self.arch}" if self.kind == "cuda" else self.kind


def spelled(target: object) -> object:
    """Return a target, TileLang's `{"kind": "cuda", "arch": "sm_90"}` as a text: "cuda:sm_90"."""
    if not isinstance(target, dict):
        return target
    return f"{target.get('kind', 'auto')}:{target.get('arch', '')}".rstrip(":")


def _bad_target(target: object, fix: str) -> TileError:
    """Build the error for a text that names no machine."""
    return error("bad_argument", None, op="Target", name="target", why=f"is {target!r}", fix=fix)


def _check_chip(text: str) -> None:
    """Raise TileError for a chip before `LEAST_ARCH`, and for what follows "cuda" and names neither chip nor device."""
    if "sm_" in text:
        if not re.search(r"sm_\d{2,3}[af]?\b", text) or _capability(text) < LEAST_ARCH:
            raise _bad_target(text, f"give a chip from sm_{LEAST_ARCH} on, as 'cuda:sm_{LEAST_ARCH}' or 'cuda:sm_90a'")
        return
    rest = re.sub(r"^(cuda|nvidia)[ :,/]*", "", text)
    if rest and not re.fullmatch(r"\d", rest) and not rest.startswith("-") and "/" not in text:
        raise _bad_target(text, "give 'cuda' for the GPU here, or a chip, as 'cuda:sm_90a'")


def _capability(text: str) -> int:
    """Return the number of `sm_NN` in a text, 0 without one."""
    found = re.search(r"sm_(\d+)", text)
    return int(found[1]) if found else 0


@functools.cache
def _is_here(index: int | None) -> bool:
    """Return whether this machine has the GPU of this index."""
    import torch

    return (index or 0) < torch.cuda.device_count()


@functools.cache
def _capability_of(index: int | None) -> int:
    """Return the compute capability of a GPU of this machine."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def detected() -> int:
    """Return the compute capability of the current GPU as one number (90 for 9.0); 0 if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return _capability_of(torch.cuda.current_device())
