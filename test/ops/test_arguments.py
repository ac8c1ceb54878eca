# SPDX-License-Identifier: Apache-2.0
"""Every tensor argument of every op on another device, with other strides, of another dtype: an error or the result."""

import copy
import re
from itertools import combinations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torch_tile
from torch_tile.diagnostics.arguments import renames
from torch_tile.ops.registration import SCHEMAS

SAMPLES_OF_EACH = 2  # the last ones, which have most arguments


def places(args):
    """Where tensors stand in the arguments: (position, None), or (position, place in a list)."""
    for n, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            yield n, None
        elif isinstance(x, list):
            yield from ((n, m) for m, each in enumerate(x) if isinstance(each, torch.Tensor))


def tensor_at(args, place):
    return args[place[0]] if place[1] is None else args[place[0]][place[1]]


def changed(args, place, value):
    made = [copy.copy(x) if isinstance(x, list) else x for x in args]
    if place[1] is None:
        made[place[0]] = value
    else:
        made[place[0]][place[1]] = value
    return made


def results(op, args):
    return tree_leaves(getattr(torch.ops.tile, op)(*args))


def assert_named(op, place, problem):
    """The error names the argument that was changed, or what it does not fit."""
    name = getattr(torch.ops.tile, op).default._schema.arguments[place[0]].name
    name += "" if place[1] is None else f"[{place[1]}]"
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(problem)), (name, problem)


def strided(x):
    """The same numbers with gaps, in another order, and from an odd element on."""
    if x.dim():
        gaps = torch.empty(*x.shape, 3, dtype=x.dtype)[..., 1].copy_(x)
        yield gaps
        yield x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if x.dim() > 1:
        yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("op", SCHEMAS)
def test_tensors_on_another_device_are_refused(op, samples, seed):
    for args in samples(op, seed, torch.float32)[-SAMPLES_OF_EACH:]:
        found = list(places(args))
        for place in found if len(found) > 1 else ():
            bad = changed(args, place, tensor_at(args, place).to("meta"))
            with pytest.raises((RuntimeError, TypeError, ValueError), match=r"is on|device|meta") as problem:
                results(op, bad)
            assert_named(op, place, problem.value)


@pytest.mark.parametrize("op", SCHEMAS)
def test_two_tensors_in_each_others_place(op, samples, seed):
    """A note names the pair, if the operator refuses it and one exchange alone is taken."""
    args = samples(op, seed, torch.float32)[-1]
    schema = getattr(torch.ops.tile, op).default._schema.arguments
    tensors = [n for n, m in places(args) if m is None]
    for a, b in combinations(tensors, 2):
        bad = changed(changed(args, (a, None), args[b]), (b, None), args[a])
        try:
            results(op, bad)
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            notes = [note for note in getattr(problem, "__notes__", ()) if "exchange" in note]
            pair = f"{schema[a].name} and {schema[b].name} fit in each other's place: exchange them"
            assert notes in ([pair], []), (notes, problem)


@pytest.mark.parametrize(
    ("op", "given", "pair"),
    [
        ("cross_entropy", lambda: (torch.tensor([1, 2]), torch.randn(2, 5)), "logits and target"),
        ("rms_norm", lambda: (torch.randn(64), torch.randn(5, 64)), "x and weight"),
        ("linear", lambda: (torch.randn(5, 64), torch.randn(32), torch.randn(32, 64)), "weight and bias"),
        ("cross_entropy", lambda: (torch.randn(2, 5), torch.rand(2, 5)), None),
        ("cross_entropy", lambda: (torch.randn(2, 5), torch.tensor([1, 7])), None),
        ("linear", lambda: (torch.randn(5, 64), torch.randn(32, 64, device="meta")), None),
    ],
)
@pytest.mark.parametrize("way", ["torch.ops.tile", "torch_tile.ops"])
def test_exchanges_that_are_told(op, given, pair, way):
    call = getattr(torch.ops.tile if way == "torch.ops.tile" else torch_tile.ops, op)
    with pytest.raises((RuntimeError, TypeError, IndexError)) as told:
        call(*given())
    notes = getattr(told.value, "__notes__", [])
    assert notes == ([] if pair is None else [f"{pair} fit in each other's place: exchange them"])


def test_functions_take_the_notes_along_under_their_own_names():
    @renames("dot", weight="w")
    def dot(x, w, bias=None):
        return torch.ops.tile.linear(x, w, bias)

    with pytest.raises(RuntimeError, match="dot: w has 1 dimensions") as told:
        dot(torch.randn(5, 64), torch.randn(32), torch.randn(32, 64))
    assert told.value.__notes__ == ["w and bias fit in each other's place: exchange them"]


@pytest.mark.parametrize("op", ["mla_decode", "mla_decode_lse", "mla_sparse"])
def test_latents_joined_with_their_rotary_part(op):
    q, rest = torch.randn(2, 1, 4, 48), (torch.randn(2, 1, 4, 16), torch.randn(2, 9, 32), torch.randn(2, 9, 16))
    places = (torch.zeros(2, 1, 8, dtype=torch.int32),) if op == "mla_sparse" else ()
    expected = r"expected 32: give q\[\.\.\., :32\] as q and q\[\.\.\., 32:\] as q_pe"
    with pytest.raises(RuntimeError, match=rf"tile.{'mla_decode' if 'lse' in op else op}: q has size 48.*{expected}"):
        getattr(torch.ops.tile, op)(q, *rest, *places)


DENSE = ("mla_decode_fp8",)  # a position of its cache is a run of bytes, which other strides would take apart


@pytest.mark.parametrize("op", SCHEMAS)
def test_strides_of_any_tensor_change_no_result(op, samples, seed):
    for args in samples(op, seed, torch.float32)[-SAMPLES_OF_EACH:]:
        want = results(op, args)
        for place in places(args):
            for other in strided(tensor_at(args, place)):
                try:
                    got = results(op, changed(args, place, other))
                except RuntimeError as problem:
                    assert op in DENSE and f"tile.{op}" in str(problem) and "strides" in str(problem)
                    continue
                for a, b in zip(got, want, strict=True):
                    if a.is_floating_point() and a.itemsize == 1:
                        a, b = a.float(), b.float()
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("op", SCHEMAS)
def test_other_dtypes_are_refused_or_computed(op, samples, seed):
    """What an op takes of another dtype counts as the same numbers of the usual one."""
    for args in samples(op, seed, torch.float32)[-SAMPLES_OF_EACH:]:
        for place in places(args):
            x = tensor_at(args, place)
            for dtype in {torch.complex64, torch.int64, torch.float8_e4m3fn} - {x.dtype}:
                other = x.to(dtype)
                try:
                    got = results(op, changed(args, place, other))
                except (TypeError, RuntimeError, ValueError) as problem:
                    assert "tile." in str(problem), problem
                    assert_named(op, place, problem)
                    continue
                want = results(op, changed(args, place, other.to(x.dtype)))
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a.to(b.dtype), b, rtol=0.03, atol=0.03, equal_nan=True)
