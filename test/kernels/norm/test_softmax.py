# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_tile.kernels.norm.softmax import _as_outer_inner_n, reference, run, softmax
from torch_tile.kernels.norm.tiling import Config


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 5), (0, 3), (3, 0)])
def test_every_dimension_is_torchs(shape):
    x = torch.randn(shape, dtype=torch.float64)
    for dim in range(-max(len(shape), 1), max(len(shape), 1)):
        torch.testing.assert_close(reference(x, dim), torch.softmax(x, dim))


def test_dtypes():
    x = torch.randn(5, 300).bfloat16()
    assert reference(x).dtype == torch.bfloat16
    torch.testing.assert_close(reference(x, -1, torch.float32), torch.softmax(x.float(), -1))
    assert reference(x, -1, torch.float64).dtype == torch.float64
    wide = torch.randn(5, 300) * 40
    torch.testing.assert_close(reference(wide, -1, torch.float16), torch.softmax(wide, -1).half())


def test_large_and_infinite_scores():
    x = torch.tensor([[1e4, 0.0], [-torch.inf, 0.0]])
    torch.testing.assert_close(reference(x), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert reference(torch.full((1, 3), -torch.inf)).isnan().all()  # like torch's


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "float64")]
)
@pytest.mark.parametrize("whole", [True, False])
def test_random_problems(dtypes, whole, rounds, problems, check):
    dtype, out_dtype = (getattr(torch, name) for name in dtypes)
    config = Config(rows=4, width=64, whole=True) if whole else Config(rows=2, width=32, whole=False)
    for _ in rounds(9):
        rank = problems.pick(1, 2, 3, 4)
        x = problems.tensor(*(problems.size(20 if rank < 3 else 6) for _ in range(rank)), dtype=dtype) * problems.pick(
            1, 20
        )
        dim = problems.random.randrange(-rank, rank)
        if problems.pick(True, False):
            x = x.repeat_interleave(3, dim)
        if problems.pick(True, False):
            x = x.masked_fill(torch.rand(x.shape, generator=problems.generator) < 0.3, -torch.inf)
        out = torch.empty(x.shape, dtype=out_dtype)
        run(x, dim, out, config)
        check(out, torch.softmax(x.double(), dim), f"{tuple(x.shape)} {x.stride()} {dim}", dtype)


@pytest.mark.parametrize(
    "shape, dim", [((), 0), ((0, 3), 1), ((3, 0), 1), ((3, 0), 0), ((3, 20_001), -1), ((40, 3), 0)]
)
def test_chosen_tiles(shape, dim, problems, check):
    x = problems.tensor(*shape, layout="dense")
    check(softmax(x, dim), torch.softmax(x.double(), dim), str(shape))


def test_special_values(engine):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[1e4, 0.0, -inf], [-inf, -inf, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0]])
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1), equal_nan=True)
    late = torch.tensor([-inf] * 40 + [2.0, 3.0])
    out = torch.empty(42)
    run(late, 0, out, Config(rows=1, width=8, whole=False))
    torch.testing.assert_close(out, torch.softmax(late, 0))


def test_a_tensor_without_memory_is_copied_where_no_view_does():
    """What a package is planned with refuses a view by another error than tensors do."""
    x = torch.empty(5, 40, 300).mT
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for tensor in (x, mode.from_tensor(x)):
            assert _as_outer_inner_n(tensor, 2) is None
            assert _as_outer_inner_n(tensor.contiguous(), 2).shape == (1, 1500, 40)
