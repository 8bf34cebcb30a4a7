"""FlatNdLinear in place of nn.Linear."""

import copy
import pickle

import pytest
import torch
from ndlinear_cases import encoder
from torch import nn

import ndlinear as nd


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_dense_layer_of_its_weight_and_bias(bias):
    layer = nd.FlatNdLinear((4, 5), (3, 2), bias=bias, dtype=torch.float64)
    x = torch.randn(7, 2, 20, dtype=torch.float64)
    want = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), want)
    assert layer(x[:0]).shape == (0, 2, 6) and layer(x[0, 0]).shape == (6,)
    assert (layer.in_features, layer.out_features) == (20, 6)
    assert layer.state_dict().keys() == nd.NdLinear((4, 5), (3, 2), bias=bias).state_dict().keys()
    torch.testing.assert_close(nd.to_linear(layer)(x), want)
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert torch.equal(again(x), layer(x)) and repr(again).startswith("FlatNdLinear((4, 5), (3, 2)")


def test_an_input_of_another_size_is_refused_in_words():
    with pytest.raises(ValueError, match=r"shape \(\.\.\., 20\), got \(7, 21\)"):
        nd.FlatNdLinear((4, 5), (3, 2))(torch.zeros(7, 21))


@pytest.mark.parametrize("training", [True, False])
def test_in_a_transformer_encoder_and_in_attention(training):
    torch.manual_seed(0)
    block = encoder()
    dense = copy.deepcopy(block)
    for name, layer in block.named_modules():
        if isinstance(layer, nd.FlatNdLinear):
            dense.set_submodule(name, nd.to_linear(layer))
    x = torch.randn(3, 5, 24)
    with torch.set_grad_enabled(training):
        y = block.train(training)(x)
        torch.testing.assert_close(y, dense.train(training)(x), atol=1e-5, rtol=1e-4)
    if training:
        y.square().sum().backward()
        assert all(p.grad is not None for p in block.self_attn.out_proj.parameters())


def test_fx_traces_it_mode_by_mode_or_as_a_leaf():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, nd.NdLinear) or super().is_leaf_module(module, name)

    model = nn.Sequential(nd.FlatNdLinear((4, 5), (3, 2)), nn.ReLU())
    for tracer in (torch.fx.Tracer(), Tracer()):
        traced = torch.fx.GraphModule(model, tracer.trace(model))
        for batch in (7, 2):
            x = torch.randn(batch, 20)
            torch.testing.assert_close(traced(x), model(x))
        seen = {node.target for node in traced.graph.nodes if node.op == "call_module"}
        assert "0" in seen or {"0.align_layers.0", "0.align_layers.1"} <= seen
    layer, x = nd.NdLinearSum((4, 5), (3, 2), 2), torch.randn(7, 4, 5)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer)(x), layer(x))


@pytest.mark.parametrize("kind", [nd.NdLinear, nd.FlatNdLinear, nd.NdLinearSum])
def test_conv1d_of_transformers(kind):
    """GPT-2's dense layer: its weight is (inputs, outputs)."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    conv = pytorch_utils.Conv1D(6, 20)
    nn.init.normal_(conv.weight)
    nn.init.normal_(conv.bias)
    linear = nn.Linear(20, 6)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    ours, theirs = (kind.from_linear(dense, (4, 5), (3, 2)) for dense in (conv, linear))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b)
    assert ours.approximation.weight_error == pytest.approx(theirs.approximation.weight_error)
