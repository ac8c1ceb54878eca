# SPDX-License-Identifier: Apache-2.0
"""Ranks that compile the same subgraph choose alike: the first one decides, the others take its word.

The word goes through the store of torch.distributed, not through a collective: ranks may compile different graphs, or
the same in another order, and none may wait for one that never comes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from torch_tile.inductor import compat
from torch_tile.inductor.report.rows import log

PATIENCE = datetime.timedelta(minutes=2)
"""How long a rank waits for another one's word before it decides itself."""


def agreed(key: str, decide: Callable[[], str]) -> str:
    """What the first rank that asks for `key` decides; `decide()` where there are no other ranks."""
    store = compat.distributed_store()
    if store is None:
        return decide()
    name = f"torch_tile/{key}"
    try:
        if store.add(f"{name}/asked", 1) > 1:
            store.wait([name], PATIENCE)
            word = str(store.get(name), "utf-8")
            return word or decide()
    except RuntimeError as error:  # of torch.distributed: waited too long, or a store that cannot do this
        log.warning("ranks may choose differently: %s", error)
        return decide()
    word = ""
    try:
        word = decide()
    finally:
        store.set(name, word)  # nothing, if this failed: the others find out themselves
    return word
