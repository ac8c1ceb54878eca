# SPDX-License-Identifier: Apache-2.0
"""Groups of columns that share a scale, step by step."""

import itertools

import pytest

from test.kernels.gemm.stored_weights import GROUPS, form_of


@pytest.mark.parametrize("block_k", [64, 128, 512])
@pytest.mark.parametrize("group", GROUPS)
def test_groups_are_those_of_the_columns(block_k, group):
    storage = form_of(4, group).storage
    if group and block_k % group and group % block_k:
        pytest.skip("steps hold whole groups or lie in one")
    for step, column in itertools.product(range(5), range(0, block_k, group or block_k)):
        assert storage.first_group(step, block_k, column) == ((step * block_k + column) // group if group else 0)
