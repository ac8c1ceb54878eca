# SPDX-License-Identifier: Apache-2.0
"""Probabilities of attention, computed again from log-sum-exps where gradients are, and what scores change them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch_tile.language as T
from torch_tile.kernels.attention import score_mod as score_text
from torch_tile.kernels.attention.operands import Held, Rows
from torch_tile.kernels.attention.spec import Form
from torch_tile.kernels.common import LOG2_E


def probability(form: Form, score: Any, unit: Any, peak: Any, *mask: Any) -> Any:
    """`exp(unit * score - log-sum-exp)` under the mask's element, if there is a mask; `peak` is the log-sum-exp, in
    powers of two where that loses nothing.
    """
    if form.lows:
        return T.exp2((form.masked(score * unit, *mask) - peak) * LOG2_E)
    seen = T.exp2(score * (unit * LOG2_E) - peak)
    return T.if_then_else(mask[0] != 0, seen, 0.0) if mask else seen


@T.macro
def weigh(
    form: Form, product: Any, scale: Any, peak: Any, held: Sequence[Held], here: Rows, i: Any, j: Any, first: Any
) -> Any:
    """The probability of row i and key j of those from `first` on, and its products with a form's slopes."""
    mask, aux = held[: form.mask is not None], held[form.mask is not None :]
    bias = [x.element(here, i, j, first) for x in mask]
    if not form.score:
        seen = probability(form, product, scale, peak, *bias)
        return seen, [seen]
    sloped = form.sloped
    values = score_text.values_of(sloped.program, product * scale, aux, here, i, j, first)
    chance = probability(form, values[sloped.program.result], form.unit(scale), peak, *bias)
    weighted = []
    for slope in form.slopes:
        term = chance if slope == 1.0 else chance * (values[slope] if isinstance(slope, str) else slope)
        weighted.append(T.if_then_else(chance == 0.0, 0.0, term) if sloped.may_be_infinite(slope) else term)
    return chance, weighted
