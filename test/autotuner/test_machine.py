# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch

from torch_tile.autotuner import machine
from torch_tile.hardware import Target

HOPPER = Target("cuda", 90)


@pytest.fixture
def gpu(monkeypatch):
    """An H200 that is only a name."""
    monkeypatch.setattr(machine, "detected", lambda: 90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(multi_processor_count=131))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_what_is_here(gpu, monkeypatch):
    assert machine.can_measure(HOPPER) and machine.can_measure(Target("cpu"))
    assert not machine.can_measure(Target("cuda", 80))
    assert machine.num_sms_of(HOPPER) == 131 and machine.num_sms_of(Target("cuda", 80)) == 108
    assert machine.device_name(HOPPER) == "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not machine.can_measure(HOPPER)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(machine, "detected", lambda: 0)
    assert not machine.can_measure(HOPPER) and machine.num_sms_of(HOPPER) == 132
    assert machine.num_sms_of(Target("cpu")) == torch.get_num_threads()
    assert str(torch.get_num_threads()) in machine.device_name(Target("cpu"))
    machine.synchronize(Target("cpu"))
    with machine.on_device([torch.ones(1), 3]):
        pass


def test_surroundings():
    cpu, gpu = machine.surroundings(Target("cpu")), machine.surroundings(HOPPER)
    assert cpu[0] == "cpu" and gpu[0] == "cuda:sm_90a" and cpu[1] != gpu[1] and cpu[2] == gpu[2] == machine.own_text()
