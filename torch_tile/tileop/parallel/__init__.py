# SPDX-License-Identifier: Apache-2.0
"""T.Parallel: loop nests whose iterations run side by side."""
