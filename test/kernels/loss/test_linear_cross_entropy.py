# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tile.hardware import Target
from torch_tile.kernels.common import Machine
from torch_tile.kernels.loss.linear_cross_entropy import (
    MOST_CHUNKS,
    chunks,
    gradients_reference,
    linear_cross_entropy,
    linear_cross_entropy_gradients,
    reference,
)
from torch_tile.ops.registry import OPERATORS

OPTIONS = [(0.0, 0.0, None), (0.1, 0.0, 2.0), (0.0, 1e-2, None), (0.3, 1e-3, 5.0)]


def classes(problems, shape, n):
    found = torch.randint(0, n, shape, generator=problems.generator)
    ignored = torch.rand(shape, generator=problems.generator) < 0.2
    return torch.where(ignored, -100, found).to(problems.pick(torch.int64, torch.int32))


@pytest.mark.parametrize("label_smoothing, z_loss, softcap", OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_reference_is_torchs(biased, label_smoothing, z_loss, softcap, problems):
    hidden = problems.tensor(9, 6, dtype=torch.float64).detach().requires_grad_()
    weight = problems.tensor(13, 6, dtype=torch.float64).detach().requires_grad_()
    bias = problems.tensor(13, dtype=torch.float64).requires_grad_() if biased else None
    target, grad = classes(problems, (9,), 13).long(), torch.rand(9, dtype=torch.float64)
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    want = F.cross_entropy(logits, target, label_smoothing=label_smoothing, reduction="none")
    want = want + torch.where(target == -100, 0.0, z_loss * logits.logsumexp(-1).square())
    given = target, bias, None, -100, label_smoothing, z_loss, softcap
    torch.testing.assert_close(reference(hidden, weight, *given)[0], want)
    leaves = [hidden, weight, *([bias] if biased else [])]
    expected = torch.autograd.grad((grad * want).sum(), leaves)
    total, *found = gradients_reference(grad, hidden, weight, *given)
    torch.testing.assert_close(total, (grad * want).sum())
    torch.testing.assert_close(found[: len(leaves)], list(expected))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_random_problems(dtype, rounds, engine, problems, check):
    slow = engine in ("threads", "text")
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    for _ in rounds(3):
        label_smoothing, z_loss, softcap = problems.pick(*OPTIONS)
        shape = problems.pick((problems.size(40),), (problems.size(5), problems.size(9)))
        n, k = problems.size(70 if slow else 700), problems.size(40)
        # small products: their rounding to half precision is an error of the exponents
        hidden = problems.tensor(*shape, k, dtype=dtype) / k**0.5
        weight, bias = problems.tensor(n, k, dtype=dtype), problems.pick(None, problems.tensor(n, dtype=dtype))
        class_weight = problems.pick(None, torch.rand(n, generator=problems.generator))
        target = classes(problems, shape, n)
        chunk = problems.pick(None, 7, 16)
        options = -100, label_smoothing, z_loss, softcap
        what = f"{shape} {n} {k} {options} chunk {chunk} {bias is not None} {class_weight is not None}"
        wide = [None if x is None else x.double() for x in (bias, class_weight)]
        want, want_lse = reference(hidden.double(), weight.double(), target, *wide, *options)
        loss, lse = linear_cross_entropy(hidden, weight, target, bias, class_weight, *options, chunk=chunk)
        check(loss, want, what, dtype, own=True)
        check(lse, want_lse, what, dtype, own=True)
        grad = problems.tensor(*shape, dtype=sums, layout="dense")
        grad = problems.pick(grad, grad.flatten()[:1].expand(shape))
        needs = problems.pick((True, True), (True, False), (False, True))
        given = target, bias, class_weight, *options, *needs
        found = linear_cross_entropy_gradients(grad, hidden, weight, *given, chunk=chunk)
        expected = gradients_reference(grad.double(), hidden.double(), weight.double(), target, *wide, *options, *needs)
        for got, want, name in zip(found, expected, ("loss", "hidden", "weight", "bias"), strict=True):
            if want.numel():
                check(got, want, f"{name}: {what}", dtype, own=True)
            else:
                assert not got.numel(), name


def test_ignored_rows_give_zeros_and_unknown_classes_nan(engine):
    hidden, weight = torch.randn(5, 4), torch.randn(6, 4)
    hidden[0] = torch.nan
    target = torch.tensor([-1, 6, 2, -1, 5])
    loss, _ = linear_cross_entropy(hidden, weight, target, ignore_index=-1, chunk=2)
    assert torch.equal(loss.isnan(), torch.tensor([False, True, False, False, False]))
    _, dhidden, *_ = linear_cross_entropy_gradients(torch.ones(5), hidden, weight, target, ignore_index=-1, chunk=2)
    assert (dhidden[[0, 3]] == 0).all() and dhidden[1].isnan().all() and dhidden[[2, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sums_of_some_chunks_may_be_large(dtype, engine, problems):
    """Gradients of the head cancel: those of a chunk are beyond float16, as are the first sums, but not the total."""
    rows, n, k, chunk = 12, problems.size(9) + 1, problems.size(9), problems.pick(2, 3, 5)
    hidden = torch.full((rows, k), 60.0, dtype=dtype) + problems.tensor(rows, k, dtype=dtype) / 4
    weight, target = torch.zeros(n, k, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    grad = torch.full((rows,), 4096.0)
    grad[rows // 2 :] *= -1
    given = target, None, None, -100, 0.0, 0.0, None, True, True
    _, _, got, _ = linear_cross_entropy_gradients(grad, hidden, weight, *given, chunk=chunk)
    _, _, want, _ = gradients_reference(grad.double(), hidden.double(), weight.double(), *given)
    assert want.abs().max() < 65504 and got.isfinite().all()
    terms = grad.abs().sum().item() * hidden.abs().max().item()  # what is rounded before it cancels
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2 * torch.finfo(dtype).eps * terms)


@pytest.mark.parametrize("rows, n, k", [(0, 5, 3), (3, 5, 0), (1, 1, 1)])
def test_empty_and_smallest(rows, n, k):
    hidden, weight, target = torch.randn(rows, k), torch.randn(n, k), torch.zeros(rows).long()
    loss, _ = linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.mT, target, reduction="none"))
    total, dhidden, dweight, dbias = linear_cross_entropy_gradients(torch.ones(rows), hidden, weight, target)
    torch.testing.assert_close(total, loss.sum())
    assert dhidden.shape == hidden.shape and dweight.shape == weight.shape and dbias.shape == (0,)
    assert dweight.isfinite().all()


@pytest.mark.parametrize("rows, classes, itemsize", [(8192, 128256, 2), (65536, 128256, 2), (7, 32000, 4)])
def test_chunks_cover_all_rows_and_are_few(rows, classes, itemsize):
    found = list(chunks(rows, classes, itemsize, "cuda", None))
    assert found[0][0] == 0 and found[-1][1] == rows and len(found) <= MOST_CHUNKS
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    largest = max(end - start for start, end in found) * classes * itemsize
    assert largest <= max(256 << 20, rows * classes * itemsize // MOST_CHUNKS + 256 * classes * itemsize)


@pytest.mark.parametrize(("softcap", "dtype"), [(None, torch.bfloat16), (30.0, torch.bfloat16), (None, torch.float16)])
def test_no_more_than_a_quarter_of_a_gibibyte_above_inputs_and_gradients(softcap, dtype):
    """Of Llama 8B's head on a GPU, whose logits would take 2 GiB in half precision and 4 in float32.

    Sums of the head's gradient in float16 take 4 bytes per weight more.
    """
    with FakeTensorMode():
        hidden, weight = torch.empty(8192, 4096, dtype=dtype), torch.empty(128256, 4096, dtype=dtype)
        given = torch.empty(8192), hidden, weight, torch.empty(8192).long(), None, None, -100, 0.0, 0.0, softcap
    operator = OPERATORS["linear_cross_entropy_gradients"]
    plan = operator.plan((*given, True, True), Machine(Target("cuda", 90), 132))
    results = sum(x.nbytes for x in (hidden, weight)) + 4
    arguments = sum(x.nbytes for x in given if isinstance(x, torch.Tensor))
    made = sum(x.untyped_storage().nbytes() for x in plan.roots) - arguments - results
    made -= 4 * weight.numel() if dtype == torch.float16 else 0
    assert 0 < made < 1 << 28, made
    assert len(plan.launches) == 8 * 4 + 1 and not plan.torch_calls  # product, loss and two products of each chunk
    for launch in plan.launches:  # a GPU refuses a tensor that a kernel reads as one parameter and writes as another
        roots = [plan.root(x) for x in launch.args if isinstance(x, torch.Tensor)]
        assert len(roots) == len(set(roots)), launch.choice
