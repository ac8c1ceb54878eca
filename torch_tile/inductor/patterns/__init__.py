# SPDX-License-Identifier: Apache-2.0
"""The families, in the order they work; each file is one family and exports functions of a `Context`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_tile.inductor.driver import Family
    from torch_tile.inductor.settings import Settings


def capture_families(settings: Settings) -> list[Family]:
    """Pre-grad: composite calls to tile ops, one to one, and RMSNorm written out, where its gradient is wanted."""
    from torch_tile.inductor.patterns.norm import capture_norm
    from torch_tile.inductor.patterns.pre_grad import inline_fused_layers, sdpa, specialize_scalars

    return [
        inline_fused_layers.write_out,
        specialize_scalars.specialise,
        sdpa.capture,
        *([capture_norm.capture_norms] if "norm" in settings.families else []),
    ]


def written_out_families(settings: Settings) -> list[Family]:
    """Forward and backward in one graph, before Inductor's own passes: attention written out."""
    from torch_tile.inductor.patterns.attention import joint as joint_attention

    return [joint_attention.match] if "attention" in settings.families else []


def joint_families(settings: Settings) -> list[Family]:
    """Forward and backward in one graph: what has to be said in both."""
    from torch_tile.inductor.patterns.attention import joint_masks

    return [joint_masks.share_heads, joint_masks.read_masks] if "attention" in settings.families else []


def refine_families(settings: Settings) -> list[Family]:
    """Post-grad: structure.

    What only asserts goes away. The decomposed softmax becomes an op first (it anchors attention); absorbed MLA is
    looked for before attention, of which it is a special case. Norms go before products so that no epilogue eats into
    one, and take a residual sum after it, if no gemm did. Last, what was captured is judged and what was not matched
    is reported.
    """
    from torch_tile.inductor.graph import inline as expand
    from torch_tile.inductor.patterns import asserted, input_sizes, unit_dims
    from torch_tile.inductor.patterns.attention import flex, mla, rewrite
    from torch_tile.inductor.patterns.gemm import dequant, gemm, grouped, push_through_chunk
    from torch_tile.inductor.patterns.norm import fused_norm, norm, softmax

    steps: list[tuple[str | None, Family]] = [
        (None, asserted.drop),
        (None, input_sizes.use),
        (None, unit_dims.skip),
        ("softmax", softmax.recognise),
        ("mla", mla.match),
        ("attention", flex.match),
        ("attention", rewrite.match),
        ("attention", rewrite.refine),
        ("norm", norm.match),
        ("norm", fused_norm.match),
        ("norm", norm.take_activation),
        ("dequant", dequant.match),
        (None, push_through_chunk.compute),
        ("grouped", grouped.match),
        ("gemm", gemm.match),
        ("norm", norm.take_residual),
        ("norm", fused_norm.take_front),
        (None, expand.settle),
        (None, expand.report_missed),
    ]
    return [step for family, step in steps if family is None or family in settings.families]
