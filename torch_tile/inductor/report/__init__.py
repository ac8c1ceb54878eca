# SPDX-License-Identifier: Apache-2.0
"""Report to users: the table of replacements, the HTML page, `explain`."""

REPLACED, KEPT, MISSED = "replaced", "kept", "missed"
"""What became of a subgraph; see `rows.Row`."""
