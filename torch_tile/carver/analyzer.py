# SPDX-License-Identifier: Apache-2.0
"""Analyze a kernel without compiling or running it: flops, bytes of global memory, and the time that these bound."""

from __future__ import annotations

from dataclasses import dataclass

from torch_tile.carver.arch import TileDevice
from torch_tile.compiler.cost_model import estimate
from torch_tile.ir.stmt import Program
from torch_tile.language.program import PrimFunc


@dataclass(frozen=True)
class AnalysisResult:
    """The work of a kernel: flops of its products, bytes between global memory and blocks, and their time in seconds.

    `expected_tflops` (of products of 16-bit operands) and `expected_bandwidth_GBps` are the machine's rates.
    """

    total_flops: int
    total_global_bytes: int
    estimated_time: float
    expected_tflops: float
    expected_bandwidth_GBps: float  # TileLang's name


class Analyzer:
    """Count the work of a traced kernel: `Analyzer.analysis(kernel.get_tir(...), CUDA("cuda"))`."""

    def __init__(self, fn: PrimFunc | Program, device: TileDevice):
        self.fn: PrimFunc | Program = fn
        self.device: TileDevice = device

    def calculate(self) -> AnalysisResult:
        """Return the work, as that of a typical block times the number of blocks. Nothing overlaps a rate's limit."""
        program = self.fn if isinstance(self.fn, Program) else self.fn.program
        target, sms = self.device.target, self.device.compute_max_core
        work, rates = estimate(program, target, sms), target.rates
        seconds = max(work.flops / (rates.product * sms), work.bytes / rates.memory)
        return AnalysisResult(
            round(work.product_flops), round(work.bytes), seconds, rates.product * sms / 1e12, rates.memory / 1e9
        )

    @classmethod
    def analysis(cls, fn: PrimFunc | Program, device: TileDevice) -> AnalysisResult:
        """Return the work of `fn` on `device`, one of `torch_tile.carver.arch`."""
        return cls(fn, device).calculate()


__all__ = ["AnalysisResult", "Analyzer"]
