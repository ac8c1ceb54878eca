# SPDX-License-Identifier: Apache-2.0
"""Arguments that are saved for a gradient come back as they were, with tensors in the schema's order."""

import types

import pytest
import torch

from torch_tile.kernels.attention.args import AttentionArgs, PagedArgs
from torch_tile.kernels.gemm.args import GroupedDequantGemmArgs
from torch_tile.ops.saved_args import needs_of, restored_args, save_args, tensor_fields


def context():
    """A stand-in for a context of autograd."""
    made = types.SimpleNamespace(saved_tensors=())
    made.save_for_backward = lambda *tensors: setattr(made, "saved_tensors", tensors)
    return made


def tensors(count):
    return [torch.full((1,), float(n)) for n in range(count)]


@pytest.mark.parametrize("aux", [None, [], [torch.ones(2), torch.ones(3)]], ids=["none", "empty", "two"])
def test_arguments_come_back_with_results(aux):
    q, k, v, table, lengths, k_scale, out = tensors(7)
    args = PagedArgs(q, k, v, table, lengths, aux=aux, score="s", k_scale=k_scale)
    ctx = context()
    save_args(ctx, args, out)
    found, (result,) = restored_args(ctx)
    assert result is out and found.score == "s" and found.v_scale is None and found.cu_seqlens_q is None
    assert all(getattr(found, name) is getattr(args, name) for name in ("q", "k_pages", "block_tables", "k_scale"))
    assert found.aux == aux if not aux else all(a is b for a, b in zip(found.aux, aux, strict=True))
    # Operands of scores stand before the scales of keys, as in the schema.
    assert [id_ for id_, t in enumerate(ctx.saved_tensors) if t is k_scale] == [6 + len(aux or ())]


def test_other_tensors_take_the_places_of_the_saved_ones():
    ctx, (q, k, v, mask, grad) = context(), tensors(5)
    save_args(ctx, AttentionArgs(q, k, v, mask, causal=True), grad)
    doubled = [2 * t for t in ctx.saved_tensors]
    found, (last,) = restored_args(ctx, doubled)
    assert found.causal and found.mask is doubled[3] and last is doubled[4] and found.aux is None


def test_tensor_fields_are_those_of_the_schema():
    names = ["a", "bs", "scales", "zeros", "offsets", "aux"]
    assert list(tensor_fields(GroupedDequantGemmArgs)) == names
    assert [n for n, is_list in tensor_fields(GroupedDequantGemmArgs).items() if not is_list] == ["a", "offsets"]


def test_arguments_left_to_defaults_need_no_gradient():
    ctx = types.SimpleNamespace(needs_input_grad=(True, False))
    needs = needs_of(ctx, AttentionArgs)
    assert needs.q and not needs.k and needs.aux is None
