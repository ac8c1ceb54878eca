# SPDX-License-Identifier: Apache-2.0
"""Odd forms of each op's tensors: expanded, sizes of 0 and 1, one tensor of another shape, one tensor in two places,
on meta, in inference mode; odd values of positions, lengths and offsets: an error that names the op (and the argument),
or the result.

The session's seed draws the ops, and a form of each. TORCH_TILE_ALL_FORMS=1 takes all, with a test for each op.
"""

import os
import random
import re

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import torch_tile  # noqa: F401
from torch_tile.ops.registration import SCHEMAS

ALL = bool(os.environ.get("TORCH_TILE_ALL_FORMS"))
OPS_DRAWN = 6
WITHOUT_GRADIENT = [op for op in SCHEMAS if re.search("quantize|scaled|fp8|index|select|schedule|_tokens|pages", op)]
WITHOUT_GRADIENT += [op for op in SCHEMAS if op.endswith("_backward")]  # whose arguments are results of a forward
DENSE = ("mla_decode_fp8",)  # a position of its cache is a run of bytes
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_op = pytest.mark.parametrize("op", sorted(SCHEMAS) if ALL else ["drawn"])


def outcome(op, args):
    """The results of a call, or its error, which must name the op or one of its family."""
    try:
        return tree_leaves(getattr(torch.ops.tile, op)(*args))
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        assert "tile." in str(problem), (op, problem)
        return problem


def step(dtype):
    """The distance of neighbours just above 1, which quantised results may differ by; 0 of other types."""
    return torch.finfo(dtype).eps if dtype.itemsize == 1 and dtype.is_floating_point else 0


def check(got, wanted, dtype):
    """Both are refused, or the results agree: where they are sums that cancel, by the largest of them."""
    assert isinstance(got, Exception) == isinstance(wanted, Exception), (got, wanted)
    for a, b in zip(got, wanted, strict=True) if isinstance(got, list) else ():
        assert a.shape == b.shape
        rtol = step(b.dtype)
        a, b = a.double(), b.double()
        largest = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0
        torch.testing.assert_close(a, b, rtol=rtol, atol=TOLERANCE[dtype] * max(1.0, largest), equal_nan=True)


def drawn(op, dtype, samples, seed, forms, but=()):
    """The op itself, or some that the seed draws, `but` left out: each with some of the forms of its samples.

    `forms(args)` gives the forms of one sample. Each result is the op, the sample's arguments and the form.
    """
    ops = [op] if ALL else random.Random(seed).sample(sorted(SCHEMAS), OPS_DRAWN)
    for each in ops:
        found = [(each, args, form) for args in samples(each, seed, dtype) for form in forms(args) if each not in but]
        yield from found if ALL else random.Random(f"{each} {seed}").sample(found, min(1, len(found)))


def with_own_results(op, args, kept):
    """The arguments of a backward with `out` and `lse` of its other arguments, unless one of the two is `kept`.

    With stale ones gradients are not defined: some kernels weigh by `lse` alone, some norm the weights once more.
    """
    forward = op.replace("_backward", "_lse")
    if forward == op or forward not in SCHEMAS:
        return args
    names, taken = ([a.name for a in getattr(torch.ops.tile, x).default._schema.arguments] for x in (op, forward))
    named = dict(zip(names, args, strict=False))
    results = outcome(forward, [named[name] for name in taken if name in named])
    if isinstance(results, Exception) or named["out"] is kept or named["lse"] is kept:
        return args
    return tuple((named | dict(zip(("out", "lse"), results, strict=True))).values())


def longer_dimensions(args):
    """Each dimension of more than one element of each tensor."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [(n, d) for n, x in enumerate(tensors) for d, size in enumerate(x.shape) if size > 1]


def first_elements(op, dtype, samples, seed):
    """Tensors of samples, cut to the first element of a longer dimension: the op, the dimension, the cut tensor, its
    shape before, and a function that calls the op with a tensor in its place.
    """
    for each, args, (n, d) in drawn(op, dtype, samples, seed, longer_dimensions, DENSE):
        leaves, spec = tree_flatten(args)
        at = [m for m, x in enumerate(leaves) if isinstance(x, torch.Tensor)][n]
        print(each, "tensor", n, "dimension", d)

        def call(x, op=each, leaves=leaves, spec=spec, at=at):
            args = tree_unflatten([*leaves[:at], x, *leaves[at + 1 :]], spec)
            return outcome(op, with_own_results(op, args, x))

        yield each, d, leaves[at].narrow(d, 0, 1), leaves[at].shape, call


@each_op
@dtypes
def test_expanded_tensors(op, dtype, samples, seed):
    """A dimension without a stride holds the same numbers as its copies."""
    for _, _, x, shape, call in first_elements(op, dtype, samples, seed):
        expanded = x.expand(shape)
        check(call(expanded), call(expanded.clone(memory_format=torch.contiguous_format)), dtype)


@each_op
@dtypes
def test_a_dimension_of_one_element_has_any_stride(op, dtype, samples, seed):
    """Nothing is read by the stride of a dimension of size 1."""
    for each, d, x, _, call in first_elements(op, dtype, samples, seed):
        x = x.clone(memory_format=torch.contiguous_format)
        stride = random.Random(f"{each} {seed} {d}").choice((0, 1, 7, 2 * x.numel() + 1))
        print("stride", stride)
        check(call(x.as_strided(x.shape, (*x.stride()[:d], stride, *x.stride()[d + 1 :]))), call(x), dtype)


def other_sizes(args):
    """Each size above 1 of the tensors, with 0 or 1 in its place."""
    sizes = {size for x in tree_leaves(args) if isinstance(x, torch.Tensor) for size in x.shape}
    return [(size, new) for size in sorted(sizes) for new in (0, 1) if size > 1]


def cut(x, size, new):
    """The tensor with `new` elements in each dimension that has `size`."""
    for d in range(x.dim()):
        x = x.narrow(d, 0, new) if x.shape[d] == size else x
    return x


@each_op
@dtypes
def test_sizes_of_0_and_1(op, dtype, samples, to_double, seed):
    """A size becomes 0 or 1 in all tensors that have it."""
    for each, args, (size, new) in drawn(op, dtype, samples, seed, other_sizes):
        print(each, "size", size, "becomes", new)

        cuts = tree_map_only(torch.Tensor, lambda x, size=size, new=new: cut(x, size, new), args)
        check(outcome(each, cuts), outcome(each, to_double(cuts)), dtype)


def gradients(op, args, wanted, seed):
    """The gradients of the tensors numbered `wanted`, by random gradients of the results; or the forward's error."""
    leaves, spec = tree_flatten(tree_map_only(torch.Tensor, lambda x: x.detach(), args))
    inputs = [leaves[n].requires_grad_() for n in wanted]
    results = outcome(op, tree_unflatten(leaves, spec))
    if isinstance(results, Exception):
        return results
    results = [x for x in results if x.requires_grad]
    draw = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in results]
    made = torch.autograd.grad(results, inputs, grads, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, made, strict=True)]


@each_op
@dtypes
def test_gradients_of_sizes_of_0_and_1(op, dtype, samples, to_double, seed):
    """What is computed has gradients, of any choice of the tensors that may want one."""

    def differentiable(*given):
        return samples(*given, requires_grad=True)

    for each, args, (size, new) in drawn(op, dtype, differentiable, seed, other_sizes, WITHOUT_GRADIENT):
        cuts = tree_map_only(torch.Tensor, lambda x, size=size, new=new: cut(x, size, new), args)
        may = [n for n, x in enumerate(tree_leaves(cuts)) if isinstance(x, torch.Tensor) and x.requires_grad]
        draw = random.Random(f"{each} {seed} {size} {new}")
        wanted = draw.sample(may, draw.randint(1, len(may)))
        print(each, "size", size, "becomes", new, "gradients of", wanted)
        check(gradients(each, cuts, wanted, seed), gradients(each, to_double(cuts), wanted, seed), dtype)


@pytest.mark.parametrize("op", ["gated_delta_rule", "gated_linear_attention", "rwkv7", "ssd_chunk_scan"])
def test_gradients_of_a_scan_of_no_tokens(op, samples):
    """Of all results and of each, where no state stood before that they could depend on."""
    args = tree_map_only(torch.Tensor, torch.Tensor.detach, samples(op, 3, torch.float32)[0])
    given = [x.narrow(1, 0, 0).requires_grad_() if isinstance(x, torch.Tensor) and x.dim() > 1 else x for x in args]
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    results = getattr(torch.ops.tile, op)(*given)
    for chosen in (results, results[:1], results[1:]):
        made = torch.autograd.grad(chosen, leaves, [torch.ones_like(x) for x in chosen], retain_graph=True)
        assert [x.shape for x in made] == [x.shape for x in leaves]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
def test_windows_of_any_length(step, padding, seed):
    """A convolution is refused where torch refuses it, and has torch's gradients elsewhere."""
    torch.manual_seed(seed)
    for size in range(5):
        x, weight = torch.randn(2, size, 4, requires_grad=True), torch.randn(3, 3, 4, requires_grad=True)
        if size + 2 * padding < 3:
            with pytest.raises(RuntimeError, match=r"tile\.conv: x's dimension 1 is shorter than the window"):
                torch.ops.tile.conv(x, weight, None, None, [step], [padding])
            continue
        got = torch.ops.tile.conv(x, weight, None, None, [step], [padding])
        wanted = torch.nn.functional.conv1d(x.mT, weight.mT, None, step, padding).mT
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        for a, b in zip(*(torch.autograd.grad(y.sin().sum(), [x, weight]) for y in (got, wanted)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def other_shapes(x):
    """The tensor with another number of dimensions, in another order, and longer or shorter in each dimension."""
    yield "one dimension more", x[None].expand(2, *x.shape)
    if x.dim() and x.numel():
        yield "one dimension less", x[0]
        yield "reversed", x.permute(*reversed(range(x.dim())))
    for d, size in enumerate(x.shape):
        if size:
            yield f"longer in {d}", torch.cat([x, x.narrow(d, 0, 1)], d)
            yield from ((f"{new} in {d}", x.narrow(d, 0, new)) for new in {0, 1, size - 1} - {size})


def in_other_shapes(args):
    """Each tensor of the arguments, in each of its other shapes: the form's name, and the new arguments."""
    leaves, spec = tree_flatten(args)
    for n, x in enumerate(leaves):
        for name, other in other_shapes(x) if isinstance(x, torch.Tensor) else ():
            yield f"tensor {n}, {name}", tree_unflatten([*leaves[:n], other, *leaves[n + 1 :]], spec)


def to_meta(args):
    return tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)


@each_op
@dtypes
def test_one_tensor_of_another_shape(op, dtype, samples, to_double, seed):
    """The call is refused, on meta as well, or agrees with float64, and meta knows the form of the results."""
    for each, _, (form, other) in drawn(op, dtype, samples, seed, in_other_shapes):
        print(each, form)
        got, of_meta = outcome(each, other), outcome(each, to_meta(other))
        check(got, outcome(each, to_double(other)), dtype)
        if isinstance(got, Exception):
            # Meta tensors have no values, for which a call may be refused: then the error names a tensor of integers.
            names = [getattr(torch.ops.tile, each).default._schema.arguments[n].name for n in integers_of(other)]
            assert isinstance(of_meta, Exception) or any(re.search(rf"\b{name}\b", str(got)) for name in names), got
        else:
            assert [(a.shape, a.dtype) for a in of_meta] == [(b.shape, b.dtype) for b in got]


def twins(args):
    """Each pair of tensors of one form."""
    tensors = [n for n, x in enumerate(tree_leaves(args)) if isinstance(x, torch.Tensor)]
    form = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in tree_leaves(args)]
    return [(n, m) for n in tensors for m in tensors if n < m and form[n] == form[m]]


@each_op
@dtypes
def test_one_tensor_in_two_places(op, dtype, samples, seed):
    """A tensor that is given twice counts as two with the same numbers, none of which is written."""
    for each, args, (n, m) in drawn(op, dtype, samples, seed, twins):
        print(each, "tensors", n, m)
        leaves, spec = tree_flatten(args)
        before = leaves[n].clone()
        twice = outcome(each, tree_unflatten([*leaves[:m], leaves[n], *leaves[m + 1 :]], spec))
        torch.testing.assert_close(leaves[n], before, rtol=0, atol=0, equal_nan=True)
        check(twice, outcome(each, tree_unflatten([*leaves[:m], before, *leaves[m + 1 :]], spec)), dtype)


@each_op
@dtypes
def test_meta_and_inference_mode(op, dtype, samples, seed):
    """Meta tensors give results of the same form, inference mode the same numbers."""
    for each, args, _ in drawn(op, dtype, samples, seed, lambda _: [None]):
        print(each)
        wanted = outcome(each, args)
        with torch.inference_mode():
            check(outcome(each, args), wanted, dtype)
        for a, b in zip(outcome(each, to_meta(args)), wanted, strict=True):
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
