# SPDX-License-Identifier: Apache-2.0
"""TileLang's language on its own compiler, PyTorch-native.

After `import torch_tile` the operators `torch.ops.tile.*` exist; what runs them is imported at their first call.
"""

from torch_tile import ops as ops
