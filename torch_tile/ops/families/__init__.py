# SPDX-License-Identifier: Apache-2.0
"""The declarations of all operators, one file for each family. `ops/all_families.py` imports them."""
