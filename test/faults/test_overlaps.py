# SPDX-License-Identifier: Apache-2.0
"""T.copy and T.transpose refuse a destination that may overlap the source, and take those that cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_tile
import torch_tile.language as T


def _kernel(move: Callable[[Any], None]) -> Any:
    @T.prim_func
    def main(A: T.Tensor((32, 16), "float32"), O: T.Tensor((32, 16), "float32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((32, 16), "float32")
            T.copy(A, s)
            move(s)
            T.copy(s, O)

    return main


@pytest.mark.parametrize(
    "move",
    [
        lambda s: T.transpose(s[0:16, :], s[0:16, :]),
        lambda s: T.transpose(s[0:16, :], s[8:24, :]),
        lambda s: T.copy(s[0:16, :], s[1:17, :]),
        lambda s: T.copy(s[8:24, 0:8], s[0:16, 4:12]),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_refused(move: Callable[[Any], None], target: str) -> None:
    with pytest.raises(torch_tile.TileError, match="may overlap the source") as caught:
        torch_tile.compile(_kernel(move), target=target)
    assert caught.value.code == "bad_argument" and caught.value.span is not None


def test_taken(way: Callable[..., None]) -> None:
    a, out = torch.arange(512.0).reshape(32, 16), torch.zeros(32, 16)
    way(_kernel(lambda s: T.transpose(s[0:16, :], s[16:32, :])), a, out)
    assert torch.equal(out, torch.cat([a[:16], a[:16].T]))
    way(_kernel(lambda s: T.copy(s[:, 0:8], s[:, 8:16])), a, out)
    assert torch.equal(out, a[:, :8].repeat(1, 2))
    way(_kernel(lambda s: T.copy(s, s)), a, out)
    assert torch.equal(out, a)
