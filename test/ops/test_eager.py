# SPDX-License-Identifier: Apache-2.0
"""Ops called again and again: what is known of a form is used for no other, and nothing of a result is kept."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torch_tile  # noqa: F401
from torch_tile.ops import eager, matrix_units
from torch_tile.ops.eager import Eager
from torch_tile.ops.registration import SCHEMAS
from torch_tile.runtime.replay import LongWay

TURNS = 5  # one to meet a form, one to watch it, the others


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


class Counted(Eager):
    """`rms_norm`, with a count of the calls whose arguments are checked."""

    def __init__(self):
        super().__init__("rms_norm", self.make)
        self.checked = 0

    def make(self, x, *others):
        self.checked += 1
        return torch.empty_like(x, memory_format=torch.contiguous_format)


def test_a_known_form_is_not_checked_again():
    op, results = Counted(), []
    for turn in range(TURNS):
        x = torch.randn(3, 8)
        results.append(op(x, None, 1e-3))
        torch.testing.assert_close(results[-1], torch.nn.functional.rms_norm(x, (8,), eps=1e-3))
        assert op.checked == min(2, turn + 1)
    assert len({x.data_ptr() for x in results}) == TURNS


WEIGHT = torch.randn(8)
OTHERS = {
    "dtype": (torch.randn(3, 8).double(), WEIGHT, 1e-3),
    "size": (torch.randn(4, 8), WEIGHT, 1e-3),
    "dimensions": (torch.randn(3, 1, 8), WEIGHT, 1e-3),
    "strides": (torch.randn(8, 3).t(), WEIGHT, 1e-3),
    "strides of another": (torch.randn(3, 8), torch.randn(16)[::2], 1e-3),
    "a missing tensor": (torch.randn(3, 8), None, 1e-3),
    "a number": (torch.randn(3, 8), WEIGHT, 0.5),
    "a text": (torch.randn(3, 8), WEIGHT, 1e-3, "silu"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_differs_is_another_form(other):
    op, args = Counted(), (torch.randn(3, 8), WEIGHT, 1e-3)
    for turn in range(4):
        for given in (args, other):
            x, weight, eps, *activation = given
            want = torch.nn.functional.rms_norm(x, (8,), None if weight is None else weight.to(x.dtype), eps)
            want = torch.nn.functional.silu(want) if activation else want
            torch.testing.assert_close(op(*given), want)
        assert op.checked == 2 * min(2, turn + 1)


def test_what_is_wrong_stays_wrong():
    x, weight = torch.randn(3, 8), torch.randn(8)
    for _ in range(TURNS):
        torch.ops.tile.rms_norm(x, weight)
        with pytest.raises(RuntimeError, match="weight has size 7"):
            torch.ops.tile.rms_norm(x, weight[1:])
        with pytest.raises(TypeError, match="layout"):
            torch.ops.tile.rms_norm(x.to_sparse(), weight)


def test_values_are_looked_at_in_each_call():
    args = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8), None
    for _ in range(TURNS):
        torch.ops.tile.mla_decode(*args, torch.tensor([5, 2], dtype=torch.int32))
        with pytest.raises(RuntimeError, match="seq_lens has values from 2 to 6"):
            torch.ops.tile.mla_decode(*args, torch.tensor([6, 2], dtype=torch.int32))


def test_only_so_much_is_remembered(monkeypatch):
    monkeypatch.setattr(eager, "MOST_FORMS", 5)
    op = Counted()
    for _ in range(3):
        for rows in range(1, 9):
            op(torch.randn(rows, 8), None, 1.0 / rows)
            assert len(op.known) <= 5 and len(op.sites) <= 5


def test_tensors_are_not_kept():
    """Memory is that of the caller."""
    import weakref

    op, args = Counted(), [torch.randn(3, 8), torch.randn(8)]
    alive = [weakref.ref(x) for _ in range(TURNS) for x in (op(*args), *args)]
    args.clear()
    assert not any(each() is not None for each in alive)


COPIES = (
    "attention_block_sparse_backward",  # lists by keys are made by torch
    "conv",  # channels that are no multiple of 16 bytes get zeros behind them
    "lightning_index",  # torch chooses the largest scores
    "nsa_select",
    "mla_sparse",  # queries whose heads lie outermost
    "attention_paged",  # several queries of heads that share keys: rows are packed, whose heads do not lie together
    "attention_paged_lse",
    "gated_linear_attention_backward",
    "rwkv7",  # a time is two steps of the delta rule, which torch puts beside each other
    "rwkv7_backward",
    "rwkv7_step",
    "gated_delta_rule_backward",  # the gradient of initial states, which is stored wide first
    "ssd_chunk_scan_backward",
)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_only_launches_are_repeated(name, gpu, samples, monkeypatch):
    """On a stand-in for a GPU: the same kernels on as many blocks, and in the end no Python of ours between."""
    long_ways = []
    monkeypatch.setattr(matrix_units, "torch_has_matrix_units", lambda: False)  # the stand-in's tensors are of the CPU
    original = LongWay.__call__
    monkeypatch.setattr(LongWay, "__call__", lambda self, *args: long_ways.append(1) or original(self, *args))
    op = getattr(torch.ops.tile, name).default
    for args in samples(name, 5, torch.bfloat16)[:2]:
        dense = all(x.stride(-1) == 1 for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim())
        long_ways.clear()
        seen = []
        for _ in range(TURNS):
            gpu.launches()
            results = outputs(op(*args))
            seen.append(([(r.function, list(r.grid)) for r in gpu.launches()], [x.stride() for x in results]))
        assert all(each == seen[0] for each in seen) and seen[0][0]
        longest = 1 if dense and name not in COPIES else TURNS - 1  # tensors of other strides are copied first
        assert len(long_ways) in (1, longest)
