# SPDX-License-Identifier: Apache-2.0
"""Our kernels, in our language: one file per family, each with a plain-torch `reference` and its entry function."""
