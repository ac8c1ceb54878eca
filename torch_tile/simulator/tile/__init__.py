# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel tile by tile. Its results define what a kernel means."""
