# SPDX-License-Identifier: Apache-2.0
"""The arguments of latent attention, spelled once for kernels and operators.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class MlaDecodeArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.mla_decode`."""

    q: V
    q_pe: V
    kv: V
    k_pe: V
    block_table: V | None = None
    seq_lens: V | None = None
    scale: float | None = None
    num_splits: int = 0
    schedule: V | None = None


class MlaDecodeFp8Args(NamedTuple, Generic[V]):
    """Arguments of `tile.mla_decode_fp8`."""

    q: V
    q_pe: V
    cache: V
    block_table: V | None = None
    seq_lens: V | None = None
    indices: V | None = None
    scale: float | None = None
    num_splits: int = 0


class MlaSparseArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.mla_sparse`."""

    q: V
    q_pe: V
    kv: V
    k_pe: V
    indices: V
    block_table: V | None = None
    seq_lens: V | None = None
    scale: float | None = None
    num_splits: int = 0


class IndexScoresArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.index_scores`."""

    q: V
    k: V
    weights: V


class LightningIndexArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.lightning_index`."""

    q: V
    k: V
    weights: V
    top: int
    seq_lens: V | None = None


class MlaScheduleArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.mla_schedule`."""

    seq_lens: V
    rows: int
    units: int = 0
