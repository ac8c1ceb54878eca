# SPDX-License-Identifier: Apache-2.0
"""Contests run on numbers like those of the tensors that a graph is compiled with."""

import math

import pytest
import torch

from torch_tile.inductor import backend, compat
from torch_tile.inductor.graph.extract import FROZEN, NUMBERS, extract
from torch_tile.inductor.select import benchmark, decide, real_inputs

aten = torch.ops.aten


def product_of(tensors):
    """x @ weight.T of float32, as Inductor has it, and its placeholders."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "weight", "count")]
    for node, given in zip(nodes, tensors, strict=True):
        node.meta["val"] = torch.empty_like(given) if isinstance(given, torch.Tensor) else given
    turned = graph.call_function(aten.permute.default, (nodes[1], [1, 0]))
    turned.meta["val"] = nodes[1].meta["val"].t()
    made = graph.call_function(aten.mm.default, (nodes[0], turned))
    graph.output(made)
    return torch.fx.GraphModule({}, graph), nodes, made


def tensors(scale=7.0):
    return [torch.randn(16, 64) * 20 + 300, torch.nn.Parameter(torch.randn(32, 64) * scale), 5]


def test_examples_are_like_the_real_tensors_also_behind_views():
    given = tensors()
    module, _, made = product_of(given)
    with real_inputs.compiling_with(given):
        real_inputs.note(module.graph)
    part = extract([made], list(made.all_input_nodes))
    x, weight = part.graph.find_nodes(op="placeholder")
    assert weight.meta["val"].shape == (64, 32)
    for node, real in ((x, given[0]), (weight, given[1])):
        made_up = benchmark.example(node, *benchmark.numbers(node))
        torch.testing.assert_close(made_up.std(), real.detach().std(), rtol=0.2, atol=0.0)
        torch.testing.assert_close(made_up.mean(), real.detach().mean(), rtol=0.0, atol=6.0)
    text = decide._describe(part)
    weight.meta[NUMBERS] = (0.0, 900.0)
    assert decide._describe(part) != text  # outcomes for other numbers are others


def nothing_noted(given, inputs):
    module, nodes, _ = product_of(given)
    with real_inputs.compiling_with(inputs):
        real_inputs.note(module.graph)
    return not any(NUMBERS in node.meta for node in nodes)


def test_nothing_is_noted_of_other_tensors(monkeypatch):
    given = tensors()
    assert not nothing_noted(given, given)
    assert nothing_noted(given, ())
    assert nothing_noted(given, given[:2])
    assert nothing_noted(given, [given[1], given[0], given[2]])
    assert nothing_noted(given, [given[0].double(), *given[1:]])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # ranks hold different numbers
    assert nothing_noted(given, given)


@pytest.mark.parametrize(
    "given", [torch.tensor([1.0, math.nan]), torch.full((3,), math.inf), torch.zeros(0), torch.arange(4), 3, None]
)
def test_what_has_no_numbers(given):
    assert real_inputs.numbers_of(given) is None


def test_numbers_of_a_sample():
    assert real_inputs.numbers_of(torch.ones(3, dtype=torch.bfloat16)) == (1.0, 0.0)
    mean, deviation = real_inputs.numbers_of(torch.randn(300, 700).t() * 4 - 2)
    assert abs(mean + 2) < 0.2 and abs(deviation - 4) < 0.2


def test_one_rule_sizes_noted_and_frozen_tensors():
    noted, frozen, unknown = product_of(tensors())[1]
    noted.meta[NUMBERS], frozen.meta[FROZEN] = (3.0, 4.0), torch.tensor([7.0, -1.0])  # mean 3, deviation 4
    assert real_inputs.known_numbers(frozen) == (3.0, 4.0)
    assert real_inputs.order_of_magnitude(noted) == real_inputs.order_of_magnitude(frozen) != ""
    assert real_inputs.order_of_magnitude(unknown) == ""


def test_the_backend_gives_its_inputs(monkeypatch):
    seen, given = [], tensors()[:2]
    monkeypatch.setattr(compat, "compile_fx", lambda *_: seen.extend(real_inputs._inputs.get()))
    module, _, _ = product_of(tensors())
    backend.tile(module, given)
    assert seen[0] is given[0] and seen[1] is given[1] and not real_inputs._inputs.get()
