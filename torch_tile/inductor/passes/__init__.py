# SPDX-License-Identifier: Apache-2.0
"""The families, in the order they work; each file is one family and exports functions of a `Context`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_tile.inductor.passes.manager import Family
    from torch_tile.inductor.settings import Settings


def capture_families(settings: Settings) -> list[Family]:
    """Pre-grad: composite calls to tile ops, one to one, and RMSNorm written out, where its gradient is wanted."""
    from torch_tile.inductor.passes import capture, capture_norm, numbers, opaque

    return [
        opaque.write_out,
        numbers.specialise,
        capture.capture,
        *([capture_norm.capture_norms] if "norm" in settings.families else []),
    ]


def written_out_families(settings: Settings) -> list[Family]:
    """Forward and backward in one graph, before Inductor's own passes: attention written out."""
    from torch_tile.inductor.passes import joint_attention

    return [joint_attention.match] if "attention" in settings.families else []


def joint_families(settings: Settings) -> list[Family]:
    """Forward and backward in one graph: what has to be said in both."""
    from torch_tile.inductor.passes import joint

    return [joint.share_heads, joint.read_masks] if "attention" in settings.families else []


def refine_families(settings: Settings) -> list[Family]:
    """Post-grad: structure.

    What only asserts goes away. The decomposed softmax becomes an op first (it anchors attention); absorbed MLA is
    looked for before attention, of which it is a special case. Norms go before products so that no epilogue eats into
    one, and take a residual sum after it, if no gemm did. Last, what was captured is judged and what was not matched
    is reported.
    """
    from torch_tile.inductor.passes import (
        around_norm,
        asserted,
        attention,
        dequant,
        expand,
        flex,
        gemm,
        grouped,
        input_sizes,
        mla,
        norm,
        parted,
        softmax,
        unit_dims,
    )

    steps: list[tuple[str | None, Family]] = [
        (None, asserted.drop),
        (None, input_sizes.use),
        (None, unit_dims.skip),
        ("softmax", softmax.recognise),
        ("mla", mla.match),
        ("attention", flex.match),
        ("attention", attention.match),
        ("attention", attention.refine),
        ("norm", norm.match),
        ("norm", around_norm.match),
        ("norm", norm.take_activation),
        ("dequant", dequant.match),
        (None, parted.compute),
        ("grouped", grouped.match),
        ("gemm", gemm.match),
        ("norm", norm.take_residual),
        ("norm", around_norm.take_front),
        (None, expand.settle),
        (None, expand.report_missed),
    ]
    return [step for family, step in steps if family is None or family in settings.families]
