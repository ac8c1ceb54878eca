# SPDX-License-Identifier: Apache-2.0
import torch_tile
import torch_tile.language as T


def test_lowering_gives_the_source():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            A[0] = 1.0

    for target, word in (("cuda:sm_80", "__global__"), ("cpu", "extern")):
        made = torch_tile.lower(kernel, target=target)
        assert word in made.kernel_source and [p.name for p in made.params] == ["A"]
