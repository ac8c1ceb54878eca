# SPDX-License-Identifier: Apache-2.0
"""Stand in for random programs that take their process with them; processes import it by its name."""

import os
import signal
import time

from grammar_processes import COMPILING, GIBIBYTE


def run(seeds, watch):
    """Seed 3 hangs, 5 kills its process, 8 takes memory, and 11 hangs the compiler of all that come with it."""
    found = []
    for seed in seeds:
        watch.at(seed, "way")
        if seed == 3:
            time.sleep(1000)
        if seed == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        if seed == 8:
            held = bytearray(GIBIBYTE // 2)
            held[:] = b"x" * len(held)
            time.sleep(1000)
        found.append(seed)
    watch.at(seeds[0], "way" + COMPILING)
    if 11 in seeds:
        time.sleep(1000)
    return found
