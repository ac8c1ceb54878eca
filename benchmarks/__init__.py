# SPDX-License-Identifier: Apache-2.0
"""Speed of the library against its rivals: a module for each family of kernels, over one timer."""
