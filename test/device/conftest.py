# SPDX-License-Identifier: Apache-2.0
"""Random problems on the GPU, in every layout of memory, amid NaN; fresh tensors are poisoned.

Everything here is skipped where there is no GPU. TORCH_TILE_DEVICE_PROBLEMS says how many problems each test draws.
"""

import os
import random

import pytest
import torch

# Largest error, as a share of the result's root mean square (or of 0.1, if that is less).
TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
OPERANDS = (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Problems:
    """Draws sizes and tensors from a seed: `count` problems for each test."""

    count = int(os.environ.get("TORCH_TILE_DEVICE_PROBLEMS", "100"))

    def __init__(self, seed, device):
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator(device).manual_seed(seed)

    def pick(self, *options):
        return self.random.choice(options)

    def dtype(self):
        return self.pick(*OPERANDS)

    def size(self, most):
        """One, a round number, a multiple of 8, or any number up to `most`."""
        any_size = self.random.randint(1, most)
        return min(most, self.pick(1, 16, 64, 128, 8 * self.random.randint(1, max(1, most // 8)), any_size, any_size))

    def tensor(self, *shape, dtype=torch.float32, layout=None):
        """Normal values; dense, a slice of something that holds NaN, turned in its last dimensions, or with gaps."""
        layout = layout or self.pick("dense", "dense", "aligned slice", "slice", "turned", "gaps")
        layout = "dense" if layout == "turned" and len(shape) < 2 else layout
        stored, index = {
            "dense": (shape, tuple(slice(0, n) for n in shape)),
            "aligned slice": (tuple(n + 8 for n in shape), tuple(slice(0, n) for n in shape)),
            "slice": (tuple(n + 3 for n in shape), tuple(slice(1, n + 1) for n in shape)),
            "turned": ((*shape[:-2], *shape[:-3:-1]), tuple(slice(0, n) for n in (*shape[:-2], *shape[:-3:-1]))),
            "gaps": (tuple(2 * n for n in shape), tuple(slice(0, 2 * n, 2) for n in shape)),
        }[layout]
        whole = torch.full(stored, float("nan"), dtype=dtype, device=self.device)
        x = whole[index]
        x.copy_(torch.randn(x.shape, generator=self.generator, dtype=torch.float32, device=self.device))
        return x.mT if layout == "turned" else x


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def problems(seed, device):
    return Problems(seed, device)


@pytest.fixture
def poisoned():
    """Fresh tensors hold NaN, so an element that no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def check():
    """`check(got, want, what)`: shape, and no error beyond the tolerance of got's dtype; infinities and NaN must agree.

    `dtype` names a coarser dtype that took part.
    """

    def compare(got, want, what, dtype=None):
        assert got.shape == want.shape, what
        tolerance = max(TOLERANCE[d] for d in (got.dtype, dtype or got.dtype))
        got, want = got.double(), want.double()
        assert torch.equal(got.isfinite(), want.isfinite()), f"{what}: values that are not finite"
        rest = ~want.isfinite()
        torch.testing.assert_close(got[rest], want[rest], rtol=0, atol=0, equal_nan=True, msg=what)
        got, want = got[~rest], want[~rest]
        if got.numel():
            scale = want.square().mean().sqrt().clamp(min=0.1)
            error = float((got - want).abs().max() / scale)
            assert error <= tolerance, f"{what}: error {error:.2e} > {tolerance:.0e}"

    return compare
