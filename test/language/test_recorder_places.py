# SPDX-License-Identifier: Apache-2.0
"""Assignments to what is no name: elements that are swapped, variables in lists and attributes, parameters of T.Ref."""

import pytest
import torch

import torch_tile.language as T
from torch_tile.diagnostics.errors import TileError


def test_elements_are_read_before_any_is_stored(way):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            own = T.alloc_local((3,), "int32")
            at = T.alloc_var("int32", 0)
            for i in T.serial(4):
                A[i], A[7 - i] = A[7 - i], A[i]
            for i in T.serial(3):
                own[i] = i
            for _ in T.serial(2):
                (own[0], own[1]), own[2] = (own[1], own[2]), own[0]
            at, B[at] = 2, own[0]  # from left to right, as Python does it
            [B[0], B[1]] = own[1], own[2]

    a, b = torch.arange(8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    way(kernel, a, b)
    assert a.tolist() == [7, 6, 5, 4, 3, 2, 1, 0] and b.tolist() == [0, 1, 2, 0]


def test_swaps_in_parallel(way):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((64,), "float32")
            T.copy(A, tile)
            for i in T.Parallel(32):
                if tile[2 * i] > tile[2 * i + 1]:
                    tile[2 * i], tile[2 * i + 1] = tile[2 * i + 1], tile[2 * i]
            T.copy(tile, A)

    a = torch.randn(64)
    want = a.view(32, 2).sort(1).values.flatten()
    way(kernel, a)
    assert torch.equal(a, want)


class Counter:
    """Holds a variable of the device, and a number of Python's."""

    def __init__(self, start):
        self.value = T.alloc_var("int32", start)
        self.steps = 0

    @T.macro
    def add(self, number):
        self.steps += 1
        self.value += number
        self.last = self.value * 10


def test_variables_in_lists_and_attributes(way):
    seen = {}

    @T.prim_func
    def kernel(A: T.Tensor((9,), "int32")):
        with T.Kernel(1, threads=32):
            several = [T.alloc_var("int32", i) for i in range(3)]
            named = {"x": T.alloc_var("int32", 5), "n": 0}
            one = Counter(1)
            for i in T.serial(4):
                several[0] = several[0] + several[1]
                several[2] += i
                named["x"] = named["x"] * 2
                named["n"] += 1
                one.value = one.value + 3
            one.add(100)
            A[0], A[1], A[2], A[3], A[4] = several[0], several[2], named["x"], one.value, one.last
            one.value = 7
            A[5], A[6] = one.last, one.value
            several[1] = T.alloc_var("int32", 40)
            several[1] += 2
            A[7] = several[1]
            A[8] = [several[1], 3][1]
            seen.update(n=named["n"], steps=one.steps)

    a = torch.zeros(9, dtype=torch.int32)
    way(kernel, a)
    assert a.tolist() == [4, 2 + 6, 80, 113, 1130, 1130, 7, 42, 3]
    assert seen == {"n": 1, "steps": 1}  # Python ran the loop's body once


@T.meta_class
class Tiles:
    """A scheduler of the author's own: its methods run on the device, where a kernel is traced."""

    def __init__(self, count, step):
        self.count, self.step = count, step
        self.at = T.alloc_var("int32", 0)

    def is_left(self):
        return self.at < self.count

    def go_on(self):
        if self.at % 2 == 0:
            self.at += self.step
        else:
            self.at = self.at + 1

    @T.inline
    def mark(self, A, value):
        A[self.at] = value


def test_classes_of_macros(way):
    @T.prim_func
    def kernel(A: T.Tensor((12,), "int32")):
        with T.Kernel(1, threads=32):
            tiles = Tiles(12, 3)
            while tiles.is_left():
                tiles.mark(A, tiles.at + 1)
                tiles.go_on()

    a = torch.zeros(12, dtype=torch.int32)
    way(kernel, a)
    assert a.tolist() == [1, 0, 0, 4, 5, 0, 0, 8, 9, 0, 0, 12]


def test_references_to_elements(way):
    @T.macro
    def add(place: T.Ref, number):
        place += number
        place = place * 2

    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((4,), "int32")
            v = T.alloc_var("int32", 1)
            T.clear(tile)
            for i in T.serial(3):
                add(tile[i], i)
                add(v, 1)
            add(A[3], 5)
            for i in T.serial(3):
                A[i] = tile[i] + v

    a = torch.zeros(4, dtype=torch.int32)
    way(kernel, a)
    assert a.tolist() == [22, 24, 26, 10]


def test_wrong_places():
    def count(A):
        A[0], A[1] = 1, 2, 3

    def kind(A):
        A[0], A[1] = 1, "x"

    def handle(A):
        A.name = "B"

    for body, error in ((count, ValueError), (kind, TileError), (handle, TileError)):
        body = T.macro(body)
        with pytest.raises(error):

            @T.prim_func
            def kernel(A: T.Tensor((4,), "int32")):
                with T.Kernel(1):
                    body(A)  # noqa: B023
