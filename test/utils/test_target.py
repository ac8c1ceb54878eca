# SPDX-License-Identifier: Apache-2.0
import torch

from torch_tile.hardware import Target
from torch_tile.utils import device, target


def test_targets():
    assert target.determine_target("cuda:sm_90", return_object=True) == Target("cuda", 90)
    assert Target.of(target.determine_target("cuda:sm_80")) == Target("cuda", 80)
    assert target.target_is_cuda("sm_80") and not target.target_is_cuda("cpu")
    assert target.target_is_ampere("sm_86") and target.target_is_hopper("sm_90") and target.target_is_sm120("sm_120")
    assert target.target_has_bulk_copy("sm_90") and not target.target_has_bulk_copy("sm_80")


def test_this_machine():
    assert device.get_current_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert target.check_cuda_availability() == device.IS_CUDA and device.get_available_cpu_count() > 0
    device.device_synchronize()
