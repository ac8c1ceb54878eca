# SPDX-License-Identifier: Apache-2.0
"""Traits of an intrinsic, for passes and simulators: how it orders threads, among whom, and for which engine.

Each intrinsic declares its traits. No pass compares names: a new barrier is one for all passes at once.
"""

from __future__ import annotations

from enum import Enum


class Sync(Enum):
    """How a call orders threads: it arrives, waits, commits, drains, fences or is a barrier."""

    INIT = "makes a barrier"
    EXPECT = "adds bytes that a barrier waits for"
    ARRIVE = "counts at a barrier and goes on"
    WAIT = "waits until enough have arrived"
    BARRIER = "arrives and waits"
    COMMIT = "closes a group of asynchronous work"
    DRAIN = "waits for groups of asynchronous work, but for the newest, as many as the first option"
    FENCE = "orders accesses of the thread itself"
    PROXY_FENCE = "shows engines what the thread wrote, and lets them overwrite what it read"
    PIN = "keeps the assembler from moving registers across it"
    TURN = "is a step of warpgroups that take turns"
    REGISTERS = "moves registers between the warpgroups of a block"


class Scope(Enum):
    """The threads that a call orders."""

    WARP = "the threads of a warp"
    GROUP = "the threads that use a barrier by its number"
    MBARRIER = "whoever arrives or waits at an mbarrier"
    BLOCK = "all threads of a block"
    CLUSTER = "all threads of a cluster"
    GRID = "all blocks, or kernels of a stream"


class Engine(Enum):
    """A unit that works beside the threads. Its work is counted in groups of its own."""

    COPY = "copies of threads that are in flight (cp.async)"
    BULK = "bulk copies (TMA)"
    WGMMA = "products of warpgroups"

    @property
    def is_proxy(self) -> bool:
        """Return whether it accesses shared memory by another proxy than threads, so that these need a fence."""
        return self is not Engine.COPY
