# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from torch_tile.nn import GatedMLP


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")]
)
def test_agrees_with_transformers(bias: bool, activation: str, theirs: str, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    stock = LlamaMLP(
        transformers.LlamaConfig(
            hidden_size=36, num_attention_heads=6, intermediate_size=50, hidden_act=theirs, mlp_bias=bias
        )
    )
    ours = GatedMLP(36, 50, activation, bias)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 7, 36)
    torch.testing.assert_close(ours(x).double(), stock.double()(x.double()), rtol=1e-4, atol=1e-5)
