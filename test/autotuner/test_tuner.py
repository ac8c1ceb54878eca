# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.autotuner import AutoTuner
from torch_tile.diagnostics.errors import TileError


def plain(n=64, block=32):
    import torch_tile.language as T

    @T.prim_func
    def main(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            for i in T.Parallel(block):
                y[bx * block + i] = x[bx * block + i] + 1.0

    return main


def test_tilelangs_chain(clock):
    clock(2.0, 1.0)
    tuner = AutoTuner.from_kernel(plain, configs=[{"block": 32}, {"block": 64}])
    tuner.set_compile_args(out_idx=[-1], target="cpu", strict=False)
    found = tuner.set_profile_args(prune=None, ref_prog=lambda x: x + 1).run(warmup=1, rep=2)
    assert found.config == {"block": 64} and found.latency == 1.0 and tuner.settings.rep == 2
    x = torch.randn(64)
    torch.testing.assert_close(found.kernel(x), x + 1)
    assert found.kernel.config == found.config and found.kernel.latency == 1.0 and found.kernel.ref_latency == 1.0


def test_arguments_and_inputs(clock):
    clock(2.0, 1.0)
    tuner = AutoTuner.from_kernel(plain, [{"block": 32}, {"block": 64}]).set_compile_args([-1], "cpu")
    found = tuner.set_profile_args(prune=None).run(args=(96,), inputs=[torch.ones(96)])
    assert found.kernel(torch.ones(96)).shape == (96,)


def test_without_configurations():
    with pytest.raises(TileError, match="argument `configs` is empty"):
        AutoTuner.from_kernel(plain, [])
    with pytest.raises(TileError, match="did you mean warmup"):
        AutoTuner.from_kernel(plain, [{}]).set_profile_args(warmpu=3)


def test_settings_given_to_run(clock):
    clock(2.0, 1.0)
    tuner = AutoTuner.from_kernel(plain, [{"block": 32}, {"block": 64}]).set_compile_args([-1], "cpu")
    tuner.set_profile_args(prune=None, enable_grouped_compile=True)
    found = tuner.run(early_stop=False, early_stop_factor=2.0, enable_grouped_compile=True)
    assert found.config == {"block": 64}
    assert not tuner.settings.early_stop and tuner.settings.early_stop_factor == 2.0
    with pytest.raises(TileError, match="did you mean early_stop"):
        tuner.run(early_stopp=True)
