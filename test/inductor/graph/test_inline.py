# SPDX-License-Identifier: Apache-2.0
"""What is put back computes what the op does."""

import pytest
import torch

from torch_tile.inductor.graph.inline import captured

OPS = torch.ops.tile
CASES = [
    (OPS.attention.default, ((2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 6)), (None, True, 0.3, 0, 2)),
    (OPS.attention.default, ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 6)), (None, True, None, 3, 2)),
    (OPS.attention.default, ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8), (7, 7)), (True, None, 0, 0)),
    (OPS.attention.default, ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8)), ()),
    (OPS.rms_norm.default, ((3, 16), (16,)), (1e-5,)),
    (OPS.rms_norm.default, ((3, 16), (16,)), (1e-5, "none", 1.0, False)),
    (OPS.rms_norm.default, ((3, 16),), ()),
    (OPS.layer_norm.default, ((3, 16), (16,), (16,)), (1e-3,)),
    (OPS.softmax.default, ((3, 5, 16),), (1, torch.float64)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("op", "shapes", "rest"), CASES)
def test_reference_is_the_op(op, shapes, rest, dtype, generator):
    tensors = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    want = op(*tensors, *rest)
    node = torch.fx.Graph().call_function(op)
    got = captured(node)[1](*tensors, *rest)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [None, True])
def test_expansion_of_a_family_not_wanted(dynamic, light, generator):
    """softmax is captured for attention's sake; alone it goes back, and Inductor never sees our op."""
    x = torch.randn(4, 9, generator=generator)
    with torch.no_grad():
        got, report = light(lambda x: torch.softmax(x, -1) + 1, x, families=("attention",), dynamic=dynamic)
    torch.testing.assert_close(got, torch.softmax(x, -1) + 1)
    assert not report.rows


def test_a_softmax_that_is_nearly_attention_is_judged_as_a_softmax(light, generator):
    """What attention misses is still in the graph: as a kernel where softmax is wanted, else as Inductor's."""
    q, k, v = (torch.randn(2, 5, 8, generator=generator) for _ in range(3))

    def of_sines(q, k, v):
        return torch.softmax(torch.tan(q @ k.mT), -1) @ v

    with torch.no_grad():
        _, report = light(of_sines, q, k, v, families=("attention", "softmax"))
        assert [r.family for r in report.replaced()] == ["softmax"]
        got, report = light(of_sines, q, k, v, families=("attention",))
    assert len(report.missed("attention")) == 1
    assert not report.replaced()
    torch.testing.assert_close(got, of_sines(q, k, v))
