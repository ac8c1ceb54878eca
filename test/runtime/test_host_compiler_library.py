# SPDX-License-Identifier: Apache-2.0
import ctypes

import pytest

from torch_tile.runtime.host_compiler import compile_shared, load_entry


def test_load_entry():
    source = 'extern "C" long twice(void* const* p, const long* n) { *(long*)p[0] = n[0] + 1; return 2 * n[0]; }\n'
    entry = load_entry(compile_shared(source), "twice")
    out = ctypes.c_int64(0)
    pointers, numbers = (ctypes.c_void_p * 1)(ctypes.addressof(out)), (ctypes.c_int64 * 1)(2**40)
    assert entry(pointers, numbers) == 2**41  # results are 64 bits wide
    assert out.value == 2**40 + 1


def test_missing_entry():
    with pytest.raises(AttributeError, match="no_such"):
        load_entry(compile_shared('extern "C" int other() { return 1; }\n'), "no_such")
