# SPDX-License-Identifier: Apache-2.0
import torch_tile.language as T
from torch_tile.lowering.common.simplify import simplify_program


def test_dead_code_and_known_conditions(becomes):
    @T.prim_func
    def before(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(8) as b:
            for i in T.serial(4):
                if i < 4:
                    x[b * 8 + i + 0] = 1.0
                if b > 7:
                    x[0] = 5.0
            for i in T.serial(3, 3):
                x[i] = 2.0
            for i in T.serial(n):
                if i < 0:
                    x[i] = 2.0

    @T.prim_func
    def after(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(8) as b:
            for i in T.serial(4):
                x[b * 8 + i] = 1.0

    becomes(simplify_program, before, after)


def test_nothing_to_do(keeps):
    @T.prim_func
    def kernel(x: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(8) as b:
            for i in T.serial(n):
                if b * 8 + i < 64:
                    x[b * 8 + i] = 1.0

    keeps(simplify_program, kernel)
