# SPDX-License-Identifier: Apache-2.0
"""Software pipelining: buffer versions, asynchronous copies, counted waits."""
