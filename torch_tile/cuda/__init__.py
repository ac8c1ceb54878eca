# SPDX-License-Identifier: Apache-2.0
"""Modules of TileLang's CUDA dialect, by their names there."""
