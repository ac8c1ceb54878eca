# SPDX-License-Identifier: Apache-2.0
"""Train a compiled model under accelerate, and compare its weights with eager training in float64."""

import copy

import pytest
import torch

accelerate = pytest.importorskip("accelerate")


def test_compiled_model_trains_under_accelerate(seed: int) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(19, 33), torch.nn.GELU(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 7)
    )
    reference = copy.deepcopy(model).double()
    x, y = torch.randn(13, 19), torch.randn(13, 7)

    accelerator = accelerate.Accelerator(cpu=True)
    compiled = torch.compile(model, backend="tile", options={"select": "tile"})
    prepared, optimizer = accelerator.prepare(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        accelerator.backward(torch.nn.functional.mse_loss(prepared(x), y))
        torch.nn.functional.mse_loss(reference(x.double()), y.double()).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()

    trained = accelerator.unwrap_model(prepared)
    for ours, theirs in zip(trained.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
