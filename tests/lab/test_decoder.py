"""The decoder against its definition written out, and the learned activation against autograd and the layer itself."""

import lab.decoder as decoder
import pytest
import torch
from lab.decoder import Decoder, FeedForward, NdFeedForward
from torch import nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("chunk", [10, 64, 1 << 14])
def test_the_block_is_two_ndlinear_layers_and_has_their_gradients_in_any_chunks(monkeypatch, chunk):
    """So its learned activation, which computes its own gradients, has those of autograd."""
    monkeypatch.setitem(decoder.CHUNKS, "cpu", chunk)
    block = NdFeedForward(6, 10, 4)
    x = torch.randn(2, 7, 6, requires_grad=True)
    for p in block.parameters():
        nn.init.normal_(p)
    defined = block.fc2(F.relu(block.fc1(x[..., None])))[..., 0]
    torch.testing.assert_close(block(x), defined)
    inputs = [x, *block.parameters()]
    found, expected = (torch.autograd.grad(y.square().sum(), inputs) for y in (block(x), defined))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_the_decoder_is_opt_of_the_transformers_library():
    """With the same weights the same logits; the library's positions have two rows for padding in front."""
    transformers = pytest.importorskip("transformers")
    model = Decoder(11, 6, 8, 2, 2, lambda: FeedForward(8, 16))
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 6, "vocab_size": 11}
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes)).eval()
    theirs = {"tokens": "embed_tokens", "norm": "final_layer_norm"}
    weights = {"embed_positions.weight": F.pad(model.positions.weight, (0, 0, 2, 0))}
    for name, weight in model.state_dict().items():
        room, _, rest = name.replace("block.", "").partition(".")
        if room != "positions":
            weights[f"{theirs.get(room, room)}.{rest}"] = weight
    opt.model.decoder.load_state_dict(weights)
    tokens = torch.randint(11, (3, 5))
    torch.testing.assert_close(opt(tokens).logits, model(tokens))
