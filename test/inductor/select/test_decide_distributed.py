# SPDX-License-Identifier: Apache-2.0
import datetime
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed

from torch_tile.inductor import compat
from torch_tile.inductor.select import decide
from torch_tile.inductor.select.decide import agreed


@pytest.fixture
def store(monkeypatch):
    """What several ranks, here threads, have in common."""
    shared = torch.distributed.HashStore()
    monkeypatch.setattr(compat, "distributed_store", lambda: shared)
    return shared


def test_alone_everybody_decides():
    assert compat.distributed_store() is None
    assert [agreed("key", lambda: "a"), agreed("key", lambda: "b")] == ["a", "b"]


def test_the_first_decides_for_all(store):
    start, decided = threading.Barrier(4), []

    def rank(number):
        start.wait()
        return agreed("key", lambda: decided.append(number) or f"rank {number}")

    with ThreadPoolExecutor(4) as ranks:
        words = list(ranks.map(rank, range(4)))
    assert len(decided) == 1 and words == [f"rank {decided[0]}"] * 4
    assert agreed("other", lambda: "anew") == "anew"


def test_nobody_waits_for_one_that_failed(store):
    def fail():
        raise LookupError

    with pytest.raises(LookupError):
        agreed("key", fail)
    assert agreed("key", lambda: "mine") == "mine"


def test_nobody_waits_for_ever(store, monkeypatch, caplog):
    monkeypatch.setattr(decide, "PATIENCE", datetime.timedelta(milliseconds=50))
    store.add("torch_tile/key/asked", 1)  # a rank that never answers
    assert agreed("key", lambda: "mine") == "mine"
    assert "ranks may choose differently" in caplog.text


def test_a_store_that_cannot(monkeypatch, caplog):
    class Poor:
        def add(self, *args):
            raise RuntimeError("not implemented")

    monkeypatch.setattr(compat, "distributed_store", Poor)
    assert agreed("key", lambda: "mine") == "mine" and "not implemented" in caplog.text


def test_finds_the_store_of_several_ranks(tmp_path):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert compat.distributed_store() is not None
    finally:
        torch.distributed.destroy_process_group()
