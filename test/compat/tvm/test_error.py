# SPDX-License-Identifier: Apache-2.0
import pytest

import torch_tile.language as T
from torch_tile.compat import tvm


def test_errors_of_kernels_are_tvms():
    for kind in (tvm.TVMError, tvm.error.InternalError, tvm.error.OpError, tvm.error.DiagnosticError):
        with pytest.raises(kind, match="outside"):
            T.sync_threads()
