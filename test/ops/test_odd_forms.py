# SPDX-License-Identifier: Apache-2.0
"""Odd forms of each op's tensors: expanded, sizes of 0 and 1, on meta, in inference mode; odd values of positions,
lengths and offsets: an error that names the op (and the argument), or the result.

The session's seed draws the ops, and a form of each. TORCH_TILE_ALL_FORMS=1 takes all, with a test for each op.
"""

import os
import random
import re

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_tile  # noqa: F401
from torch_tile.ops.registration import SCHEMAS

ALL = bool(os.environ.get("TORCH_TILE_ALL_FORMS"))
OPS_DRAWN = 6
DENSE = ("mla_decode_fp8",)  # a position of its cache is a run of bytes
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_op = pytest.mark.parametrize("op", sorted(SCHEMAS) if ALL else ["drawn"])


def ops_of(op, seed):
    """The ops that a test takes: its own, or some that the seed draws."""
    return [op] if ALL else random.Random(seed).sample(sorted(SCHEMAS), OPS_DRAWN)


def outcome(op, args):
    """The results of a call, or its error, which must name the op or one of its family."""
    try:
        return tree_leaves(getattr(torch.ops.tile, op)(*args))
    except (RuntimeError, TypeError, ValueError) as problem:
        assert "tile." in str(problem), (op, problem)
        return problem


def check(got, wanted, dtype):
    """Both are refused, or the results agree: where they are sums that cancel, by the largest of them."""
    assert isinstance(got, Exception) == isinstance(wanted, Exception), (got, wanted)
    for a, b in zip(got, wanted, strict=True) if isinstance(got, list) else ():
        assert a.shape == b.shape
        a, b = a.double(), b.double()
        largest = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1.0, largest), equal_nan=True)


def drawn(op, dtype, samples, seed, forms):
    """Some of the forms of an op's samples; `forms(args)` gives those of one."""
    found = [(args, form) for args in samples(op, seed, dtype) for form in forms(args)]
    source = random.Random(f"{op} {seed}")
    return found if ALL else source.sample(found, min(1, len(found)))


def longer_dimensions(args):
    """Each dimension of more than one element of each tensor."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [(n, d) for n, x in enumerate(tensors) for d, size in enumerate(x.shape) if size > 1]


@each_op
@dtypes
def test_expanded_tensors(op, dtype, samples, seed):
    """A dimension without a stride holds the same numbers as its copies."""
    ops = [each for each in ops_of(op, seed) if each not in DENSE]
    forms = [(op, *form) for op in ops for form in drawn(op, dtype, samples, seed, longer_dimensions)]
    for op, args, (n, d) in forms:
        print(op, "tensor", n, "dimension", d)
        leaves, spec = torch.utils._pytree.tree_flatten(args)
        at = [m for m, x in enumerate(leaves) if isinstance(x, torch.Tensor)][n]
        leaves[at] = leaves[at].narrow(d, 0, 1).expand_as(leaves[at])
        got = outcome(op, torch.utils._pytree.tree_unflatten(leaves, spec))
        leaves[at] = leaves[at].clone(memory_format=torch.contiguous_format)
        check(got, outcome(op, torch.utils._pytree.tree_unflatten(leaves, spec)), dtype)


@each_op
@dtypes
def test_a_dimension_of_one_element_has_any_stride(op, dtype, samples, seed):
    """Nothing is read by the stride of a dimension of size 1."""
    ops = [each for each in ops_of(op, seed) if each not in DENSE]
    forms = [(op, *form) for op in ops for form in drawn(op, dtype, samples, seed, longer_dimensions)]
    for op, args, (n, d) in forms:
        leaves, spec = torch.utils._pytree.tree_flatten(args)
        at = [m for m, x in enumerate(leaves) if isinstance(x, torch.Tensor)][n]
        leaves[at] = x = leaves[at].narrow(d, 0, 1).clone(memory_format=torch.contiguous_format)
        wanted = outcome(op, torch.utils._pytree.tree_unflatten(leaves, spec))
        stride = random.Random(f"{op} {seed} {d}").choice((0, 1, 7, 2 * x.numel() + 1))
        print(op, "tensor", n, "dimension", d, "stride", stride)
        leaves[at] = x.as_strided(x.shape, (*x.stride()[:d], stride, *x.stride()[d + 1 :]))
        check(outcome(op, torch.utils._pytree.tree_unflatten(leaves, spec)), wanted, dtype)


def other_sizes(args):
    """Each size above 1 of the tensors, with 0 or 1 in its place."""
    sizes = {size for x in tree_leaves(args) if isinstance(x, torch.Tensor) for size in x.shape}
    return [(size, new) for size in sorted(sizes) for new in (0, 1) if size > 1]


@each_op
@dtypes
def test_sizes_of_0_and_1(op, dtype, samples, to_double, seed):
    """A size becomes 0 or 1 in all tensors that have it."""
    forms = [(op, *form) for op in ops_of(op, seed) for form in drawn(op, dtype, samples, seed, other_sizes)]
    for op, args, (size, new) in forms:
        print(op, "size", size, "becomes", new)

        def cut(x, size=size, new=new):
            for d in range(x.dim()):
                x = x.narrow(d, 0, new) if x.shape[d] == size else x
            return x

        cuts = tree_map_only(torch.Tensor, cut, args)
        check(outcome(op, cuts), outcome(op, to_double(cuts)), dtype)


@each_op
@dtypes
def test_meta_and_inference_mode(op, dtype, samples, seed):
    """Meta tensors give results of the same form, inference mode the same numbers."""
    forms = [(op, *form) for op in ops_of(op, seed) for form in drawn(op, dtype, samples, seed, lambda _: [None])]
    for op, args, _ in forms:
        print(op)
        wanted = outcome(op, args)
        with torch.inference_mode():
            check(outcome(op, args), wanted, dtype)
        for a, b in zip(outcome(op, tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)), wanted, strict=True):
            assert (a.device.type, a.shape, a.stride(), a.dtype) == ("meta", b.shape, b.stride(), b.dtype)


def odd_values(x):
    """Odd values of a tensor of positions, lengths or offsets, of other types and strides as well."""
    yield "int64" if x.dtype == torch.int32 else "int32", x.to(torch.int64 if x.dtype == torch.int32 else torch.int32)
    yield "strided", torch.stack([x, x - 77], -1)[..., 0]
    yield "empty", x[..., :0]
    yield "another dimension", x[None]
    yield "one less", x[..., :-1]
    yield "reversed", x.flip(-1)
    for name, at, by in (("first up", 0, 1), ("first down", 0, -7), ("last up", -1, 10**6), ("last down", -1, -1)):
        other = x.clone()
        other[..., at : at + 1 or None] += by
        yield name, other
    yield "least", torch.full_like(x, torch.iinfo(x.dtype).min)
    yield "greatest", torch.full_like(x, torch.iinfo(x.dtype).max)


def integers_of(args):
    """Where the arguments have positions, lengths or offsets: 32 or 64 bits, no words of packed numbers."""
    integers = [(n, x) for n, x in enumerate(args) if isinstance(x, torch.Tensor) and x.dim()]
    return [n for n, x in integers if x.dtype in (torch.int32, torch.int64)]


def ops_with_integers(samples):
    """The ops that take positions, lengths or offsets."""
    return [op for op in sorted(SCHEMAS) if any(integers_of(args) for args in samples(op, 0, torch.float32))]


@each_op
@dtypes
def test_odd_positions(op, dtype, samples, to_double, seed):
    """Offsets that fall, lengths below 0, pages that do not exist: an error with the argument's name, or the result."""
    ops = ops_with_integers(samples)
    for name in {op} & set(ops) if ALL else random.Random(f"{dtype} {seed}").sample(ops, 1):
        names = [argument.name for argument in getattr(torch.ops.tile, name).default._schema.arguments]
        for args in samples(name, seed, dtype)[0 if ALL else -1 :]:
            for n in integers_of(args):
                for form, x in odd_values(args[n]):
                    print(name, names[n], form, x.tolist())
                    odd = (*args[:n], x, *args[n + 1 :])
                    got = outcome(name, odd)
                    if isinstance(got, Exception):
                        assert re.search(rf"\b{names[n]}\b", str(got)), (names[n], form, got)
                    check(got, outcome(name, to_double(odd)), dtype)
