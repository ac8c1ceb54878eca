# SPDX-License-Identifier: Apache-2.0
"""Maps and sets by identity, also of objects that compare by value. Only this module takes identities.

Nodes hash by identity, so a plain dictionary or set of nodes is one by identity, too. `==` on expressions builds a
comparison, so ask `in` of sets and dictionaries, never of tuples and lists.

Maps and sets keep their keys alive, so that no identity is used twice. Both keep the order of insertion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSet, Set
from typing import Any, TypeVar, overload

from torch_tile.ir.node import Node, symbols

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class IdMap(MutableMapping[K, V]):
    """A dictionary from objects, by identity."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[int, tuple[K, V]] = {id(key): (key, value) for key, value in items}

    def __getitem__(self, key: K) -> V:
        found = self._items.get(id(key))
        if found is None:
            raise KeyError(key)
        return found[1]

    def __setitem__(self, key: K, value: V) -> None:
        old = self._items.get(id(key))
        self._items[id(key)] = (key if old is None else old[0], value)

    def __delitem__(self, key: K) -> None:
        if self._items.pop(id(key), None) is None:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    @overload
    def get(self, key: K, default: None = None, /) -> V | None: ...
    @overload
    def get(self, key: K, default: V | D, /) -> V | D: ...
    def get(self, key: K, default: Any = None, /) -> Any:
        """Return the value of a key, or `default`."""
        found = self._items.get(id(key))
        return default if found is None else found[1]

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def clear(self) -> None:
        """Forget all."""
        self._items.clear()

    def __repr__(self) -> str:
        return f"IdMap({list(self._items.values())})"


class IdSet(MutableSet[K]):
    """A set of objects, by identity."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[K] = ()) -> None:
        self._items: dict[int, K] = {id(item): item for item in items}

    def __contains__(self, item: object) -> bool:
        return id(item) in self._items

    def __iter__(self) -> Iterator[K]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def add(self, value: K) -> None:
        """Put an object in."""
        self._items[id(value)] = value

    def discard(self, value: K) -> None:
        """Take an object out, if it is in."""
        self._items.pop(id(value), None)

    def update(self, items: Iterable[K]) -> None:
        """Put several objects in."""
        for item in items:
            self.add(item)

    def any_in(self, node: Node) -> bool:
        """Return whether a node mentions one of the symbols of this set."""
        return not symbols(node).isdisjoint(self._items.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Set) and len(self) == len(other) and all(item in other for item in self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IdSet({list(self)})"


def mentions(node: Node, symbol: Any) -> bool:
    """Return whether a variable or buffer occurs in a node."""
    return symbol in symbols(node)
