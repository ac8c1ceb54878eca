# SPDX-License-Identifier: Apache-2.0
"""Register the capture of norms written out (norm/norm.py) as a step of the pre-grad stage."""

from __future__ import annotations

from torch_tile.inductor.context import family
from torch_tile.inductor.patterns.norm.norm import capture_norms

family("norm", "pre_grad", 40)(capture_norms)
