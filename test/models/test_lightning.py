# SPDX-License-Identifier: Apache-2.0
"""Train a compiled model by lightning's Trainer, and compare its weights with eager training in float64."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning")


class Regression(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = torch.compile(model, backend="tile", options={"select": "tile"})

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_compiled_model_trains_under_lightning(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(19, 33), torch.nn.GELU(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 7)
    )
    reference = copy.deepcopy(model).double()
    x, y = torch.randn(39, 19), torch.randn(39, 7)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=13)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Regression(model), batches)

    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        for part_x, part_y in zip(x.double().split(13), y.double().split(13), strict=True):
            torch.nn.functional.mse_loss(reference(part_x), part_y).backward()
            expected.step()
            expected.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
