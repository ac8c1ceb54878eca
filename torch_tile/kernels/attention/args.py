# SPDX-License-Identifier: Apache-2.0
"""The arguments of attention and of its backward, spelled once for kernels, operators and graphs.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

V = TypeVar("V")


class AttentionArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention`, which its documentation explains; V stands for a tensor."""

    q: V
    k: V
    v: V
    mask: V | None = None
    causal: bool = False
    scale: float | None = None
    window: int = 0
    q_offset: int | torch.SymInt = 0
    aux: Sequence[V] | None = None
    score: str = ""

    def backward(self, grad: V, out: V, lse: V, keep: str = "") -> AttentionBackwardArgs[V]:
        """Return the arguments of the backward for the forward call that returned `out` and `lse`."""
        return AttentionBackwardArgs(grad=grad, out=out, lse=lse, keep=keep, **self._asdict())


class AttentionBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_backward`: arguments and results of the forward, and the gradient of its result.

    keep: which operands want the gradients of scores, `mask` or `x0`, `x1`, ..., joined by commas.
    """

    grad: V
    q: V
    k: V
    v: V
    out: V
    lse: V
    mask: V | None = None
    causal: bool = False
    scale: float | None = None
    window: int = 0
    q_offset: int | torch.SymInt = 0
    keep: str = ""
    aux: Sequence[V] | None = None
    score: str = ""

    @property
    def forward(self) -> AttentionArgs[V]:
        """Return the arguments of the forward."""
        return AttentionArgs(*(getattr(self, name) for name in AttentionArgs._fields))


def dense_args(q: V, k: V, v: V, args: NamedTuple) -> AttentionArgs[V]:
    """Return the arguments of `tile.attention` for q, k and v with all options that another attention's `args` have."""
    options = {name: getattr(args, name) for name in AttentionArgs._fields[3:] if name in args._fields}
    return AttentionArgs(q, k, v, **options)


class VarlenArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_varlen`, which its documentation explains."""

    q: V
    k: V
    v: V
    cu_seqlens_q: V
    cu_seqlens_k: V
    max_seqlen_q: int | torch.SymInt
    max_seqlen_k: int | torch.SymInt
    causal: bool = False
    scale: float | None = None
    window: int = 0
    aux: Sequence[V] | None = None
    score: str = ""

    def backward(self, grad: V, out: V, lse: V) -> VarlenBackwardArgs[V]:
        """Return the arguments of the backward for the forward call that returned `out` and `lse`."""
        return VarlenBackwardArgs(grad=grad, out=out, lse=lse, **self._asdict())


class VarlenBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_varlen_backward`: those and the results of the forward, and the gradient."""

    grad: V
    q: V
    k: V
    v: V
    out: V
    lse: V
    cu_seqlens_q: V
    cu_seqlens_k: V
    max_seqlen_q: int | torch.SymInt
    max_seqlen_k: int | torch.SymInt
    causal: bool = False
    scale: float | None = None
    window: int = 0
    aux: Sequence[V] | None = None
    score: str = ""

    @property
    def forward(self) -> VarlenArgs[V]:
        """Return the arguments of the forward."""
        return VarlenArgs(*(getattr(self, name) for name in VarlenArgs._fields))


class PagedArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_paged`, which its documentation explains."""

    q: V
    k_pages: V
    v_pages: V
    block_tables: V
    lengths: V
    cu_seqlens_q: V | None = None
    max_seqlen_q: int | torch.SymInt = 0
    causal: bool = True
    scale: float | None = None
    window: int = 0
    num_splits: int = 0
    aux: Sequence[V] | None = None
    score: str = ""
    k_scale: V | None = None
    v_scale: V | None = None


class AppendArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.append_to_pages`, which its documentation explains."""

    k: V
    v: V
    k_pages: V
    v_pages: V
    block_tables: V
    lengths: V
    cu_seqlens: V | None = None
    max_seqlen: int | torch.SymInt = 0
    k_scale: V | None = None
    v_scale: V | None = None


class AttentionFp8Args(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_fp8`, which its documentation explains."""

    q: V
    k: V
    v: V
    q_scale: V | None = None
    k_scale: V | None = None
    v_scale: V | None = None
    causal: bool = False
    scale: float | None = None
    window: int = 0
    q_offset: int | torch.SymInt = 0
    dtype: torch.dtype | None = None


class NsaSelectArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.nsa_select`, which its documentation explains."""

    q: V
    k_cmp: V
    lse: V
    keys: int | torch.SymInt
    top: int
    block: int = 64
    length: int = 64
    stride: int = 64
    initial: int = 1
    local: int = 2
    scale: float | None = None


class BlockSparseArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_block_sparse`, which its documentation explains."""

    q: V
    k: V
    v: V
    kv_num_blocks: V
    kv_indices: V
    full_kv_num_blocks: V | None = None
    full_kv_indices: V | None = None
    block_q: int = 128
    block_kv: int = 128
    causal: bool = False
    scale: float | None = None
    window: int = 0
    q_offset: int | torch.SymInt = 0
    aux: Sequence[V] | None = None
    score: str = ""

    def backward(self, grad: V, out: V, lse: V) -> BlockSparseBackwardArgs[V]:
        """Return the arguments of the backward for the forward call that returned `out` and `lse`."""
        return BlockSparseBackwardArgs(grad=grad, out=out, lse=lse, **self._asdict())


class BlockSparseBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.attention_block_sparse_backward`: those and results of the forward, and the gradient."""

    grad: V
    q: V
    k: V
    v: V
    out: V
    lse: V
    kv_num_blocks: V
    kv_indices: V
    full_kv_num_blocks: V | None = None
    full_kv_indices: V | None = None
    block_q: int = 128
    block_kv: int = 128
    causal: bool = False
    scale: float | None = None
    window: int = 0
    q_offset: int | torch.SymInt = 0
    aux: Sequence[V] | None = None
    score: str = ""

    @property
    def forward(self) -> BlockSparseArgs[V]:
        """Return the arguments of the forward."""
        return BlockSparseArgs(*(getattr(self, name) for name in BlockSparseArgs._fields))
