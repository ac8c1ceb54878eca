# SPDX-License-Identifier: Apache-2.0
"""The arguments of linear attention, with and without the delta rule, spelled once for kernels and operators.

Imports nothing but torch: the declaration of the operators asks for it before any kernel is imported.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import torch

V = TypeVar("V")

GRADIENTS = "q", "k", "v", "g", "beta", "initial_state"
"""The arguments that have gradients, in the order of the results."""


class GatedDeltaRuleArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gated_delta_rule`, which its documentation explains; V stands for a tensor."""

    q: V
    k: V
    v: V
    g: V
    beta: V
    initial_state: V | None = None
    cu_seqlens: V | None = None
    scale: float | None = None
    use_qk_l2norm: bool = False


class GatedDeltaRuleBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gated_delta_rule_backward`: gradients of the results, then those of the rule."""

    grad: V
    grad_state: V | None
    q: V
    k: V
    v: V
    g: V
    beta: V
    initial_state: V | None = None
    cu_seqlens: V | None = None
    scale: float | None = None
    use_qk_l2norm: bool = False

    @property
    def forward(self) -> GatedDeltaRuleArgs[V]:
        """Return the arguments of the rule."""
        return GatedDeltaRuleArgs(*self[2:])


class GatedDeltaRuleStepArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gated_delta_rule_step`."""

    state: V
    q: V
    k: V
    v: V
    g: V
    beta: V
    scale: float | None = None
    use_qk_l2norm: bool = False


LINEAR_GRADIENTS = "q", "k", "v", "g", "initial_state"
"""The arguments of linear attention without the delta rule that have gradients, in the order of the results."""


class GatedLinearAttentionArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gated_linear_attention`, which its documentation explains; V stands for a tensor."""

    q: V
    k: V
    v: V
    g: V
    initial_state: V | None = None
    cu_seqlens: V | None = None
    scale: float | None = None

    @property
    def rule(self) -> GatedDeltaRuleArgs[Any]:
        """Return the arguments of the rule that corrects nothing: its beta is None."""
        return GatedDeltaRuleArgs(*self[:4], None, *self[4:])


class GatedLinearAttentionBackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gated_linear_attention_backward`: gradients of the results, then those of the attention."""

    grad: V
    grad_state: V | None
    q: V
    k: V
    v: V
    g: V
    initial_state: V | None = None
    cu_seqlens: V | None = None
    scale: float | None = None

    @property
    def forward(self) -> GatedLinearAttentionArgs[V]:
        """Return the arguments of the attention."""
        return GatedLinearAttentionArgs(*self[2:])

    @property
    def rule(self) -> GatedDeltaRuleBackwardArgs[Any]:
        """Return the arguments of the gradient of the rule that corrects nothing."""
        return GatedDeltaRuleBackwardArgs(*self[:2], *self.forward.rule)


class GatedLinearAttentionStepArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.gated_linear_attention_step`."""

    state: V
    q: V
    k: V
    v: V
    g: V
    scale: float | None = None

    @property
    def rule(self) -> GatedDeltaRuleStepArgs[Any]:
        """Return the arguments of the rule that corrects nothing: its beta is None."""
        return GatedDeltaRuleStepArgs(*self[:5], None, self.scale)


RWKV7_GRADIENTS = "q", "k", "v", "g", "a", "b", "initial_state"
"""The arguments of RWKV-7 that have gradients, in the order of the results."""


class Rwkv7Args(NamedTuple, Generic[V]):
    """Arguments of `tile.rwkv7`, which its documentation explains; V stands for a tensor."""

    q: V
    k: V
    v: V
    g: V
    a: V
    b: V
    initial_state: V | None = None
    cu_seqlens: V | None = None
    scale: float = 1.0


class Rwkv7BackwardArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.rwkv7_backward`: gradients of the results, then those of the recurrence."""

    grad: V
    grad_state: V | None
    q: V
    k: V
    v: V
    g: V
    a: V
    b: V
    initial_state: V | None = None
    cu_seqlens: V | None = None
    scale: float = 1.0

    @property
    def forward(self) -> Rwkv7Args[V]:
        """Return the arguments of the recurrence."""
        return Rwkv7Args(*self[2:])


class Rwkv7StepArgs(NamedTuple, Generic[V]):
    """Arguments of `tile.rwkv7_step`."""

    state: V
    q: V
    k: V
    v: V
    g: V
    a: V
    b: V
    scale: float = 1.0

    @property
    def recurrence(self) -> Rwkv7Args[V]:
        """Return the arguments of the recurrence that begins with the state, over the same tokens."""
        return Rwkv7Args(*self[1:7], self.state, None, self.scale)


def scale_of(args: Any) -> float:
    """Return the factor of queries: as given, or one over the root of the size of keys."""
    return float(args.scale if args.scale is not None else max(1, int(args.q.shape[-1])) ** -0.5)


def sequences_of(args: Any) -> int:
    """Return the number of sequences: those of the batch, or those packed into one."""
    count: int = args.v.shape[0] if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    return count


def empty_gradients(args: Any, names: tuple[str, ...] = GRADIENTS) -> tuple[torch.Tensor, ...]:
    """Allocate the results of the gradient; that of a state which is not given is empty."""
    given = (getattr(args, name) for name in names)
    return tuple(args.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)
