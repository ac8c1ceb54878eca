# SPDX-License-Identifier: Apache-2.0
"""No copies around attention: in a graph taken away only where nothing suffers, in generated code gone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_tile.inductor.graph.nodes import Rewrite, aten, val
from torch_tile.inductor.graph.strip_copies import bare, remove_identical_copies

ATTENTION = torch.ops.tile.attention.default


@pytest.fixture
def traced():
    """`traced(f, *shapes)`: the graph of f on float16 tensors, and its attention node."""

    def run(f, *shapes):
        graph = make_fx(f)(*(torch.empty(shape, dtype=torch.float16) for shape in shapes)).graph
        (op,) = graph.find_nodes(op="call_function", target=ATTENTION)
        return graph, op

    with FakeTensorMode() as mode, V.set_fake_mode(mode):
        yield run


def copies(graph):
    return list(graph.find_nodes(op="call_function", target=aten.clone.default))


def without_copies(node):
    """Whether the operand `node` came out otherwise, and the number that was found."""
    (op,) = node.users
    new, scale = bare(Rewrite(op), node, scaled=True)
    assert val(new).shape == val(node).shape
    return new is not node, scale


def heads(x, contiguous=True):
    x = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return x.contiguous() if contiguous else x


@pytest.mark.parametrize(
    ("prepare", "shape", "taken"),
    [
        (heads, (2, 5, 64), True),
        (lambda x: heads(x, False), (2, 5, 64), False),  # there is none
        (lambda x: heads(x * 0.25), (2, 5, 64), True),
        (lambda x: heads(x / 4, False), (2, 5, 64), True),
        (
            lambda x: heads(x[:, :, :64]),
            (2, 5, 192),
            True,
        ),  # of a projection to q, k and v: rows are aligned all the same
        (lambda x: heads(x[:, :, 4:68]), (2, 5, 192), False),  # rows that start off the copy's 16 bytes
        (lambda x: heads(x), (2, 5, 4 * 12), True),  # the copy's do as well
        (lambda x: x.permute(0, 1, 3, 2).contiguous(), (2, 4, 16, 5), False),  # the last dimension would not be dense
        (lambda x: x.expand(2, 4, 5, 16).contiguous(), (1, 4, 5, 16), False),  # elements would be read again and again
        (lambda x: x.transpose(0, 1).reshape(2, 4, 5, 16), (2, 4, 5, 16), False),  # elements really move
    ],
)
def test_copies_in_front_are_taken_away_where_kernels_do_not_suffer(prepare, shape, taken, traced):
    width = 12 if shape[-1] == 48 else 16
    _, op = traced(lambda x, k: torch.ops.tile.attention(prepare(x), k, k), shape, (2, 4, 7, width))
    assert without_copies(op.args[0])[0] == taken


def test_numbers_are_found_through_views_and_copies(traced):
    def f(x, k):
        return torch.ops.tile.attention(heads((x * 0.5).transpose(0, 1).contiguous().transpose(0, 1) / 4), k, k)

    _, op = traced(f, (2, 5, 64), (2, 4, 7, 16))
    assert without_copies(op.args[0]) == (True, 0.125)


@pytest.mark.parametrize("factor", [lambda x: x * 0.0, lambda x: x * x.sum(), lambda x: x + 1.0])
def test_other_arithmetic_stays(factor, traced):
    _, op = traced(lambda x, k: torch.ops.tile.attention(heads(factor(x), False), k, k), (2, 5, 64), (2, 4, 7, 16))
    assert without_copies(op.args[0]) == (False, 1.0)


def test_a_scaled_tensor_that_others_read_stays(traced):
    def f(x, k):
        x = x * 0.25
        return torch.ops.tile.attention(heads(x, False), k, k), x

    _, op = traced(f, (2, 5, 64), (2, 4, 7, 16))
    assert without_copies(op.args[0]) == (False, 1.0)


def test_copies_behind_are_dropped_where_nothing_moves(traced):
    def f(q, k):
        q = q.transpose(1, 2)
        out = torch.ops.tile.attention(q, k, k)
        joined = out.transpose(1, 2).clone(memory_format=torch.contiguous_format).view(2, 5, 64)
        return joined + 1.0, out.clone(memory_format=torch.contiguous_format) + 1.0

    graph, op = traced(f, (2, 5, 4, 16), (2, 4, 7, 16))
    assert len(copies(graph)) == 2
    remove_identical_copies(op)
    (left,) = copies(graph)
    assert left.args[0] is op
    graph.lint()


def test_copies_that_are_returned_stay(traced):
    def f(q, k):
        out = torch.ops.tile.attention(q, k, k)
        return out, out.clone().view(2, 4, 80)

    graph, op = traced(f, (2, 4, 5, 16), (2, 4, 7, 16))
    remove_identical_copies(op)
    assert len(copies(graph)) == 1


class Block(nn.Module):
    """Projections and attention, as models write them."""

    def __init__(self, written_out, contiguous, scaled):
        super().__init__()
        self.written_out, self.contiguous, self.scaled = written_out, contiguous, scaled
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        q = self.q(x) * 0.25 if self.scaled else self.q(x)
        q, k, v = (heads(t, self.contiguous) for t in (q, self.k(x), self.v(x)))
        scale = 1.0 if self.scaled else 0.25
        if self.written_out:
            out = torch.softmax(q @ k.mT * scale, -1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.o(out.transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize(
    ("written_out", "contiguous", "scaled", "dynamic"),
    [(False, False, False, False), (False, True, True, True), (True, False, True, False), (True, True, False, True)],
)
def test_generated_code_has_no_kernel_but_ours(written_out, contiguous, scaled, dynamic):
    """Four products and attention; any other kernel would be a copy, or the scaling of q."""
    torch._dynamo.reset()
    block, x = Block(written_out, contiguous, scaled).eval(), torch.randn(2, 10, 64)
    with torch.no_grad():
        compiled = torch.compile(block, backend="tile", options={"select": "tile"}, dynamic=dynamic)
        got, (code,) = run_and_get_code(compiled, x)
        torch.testing.assert_close(got, block(x), rtol=1e-4, atol=1e-4)
    assert code.count(".attention(") == 1 and ".gemm(" in code
    assert "cpp_fused" not in code
