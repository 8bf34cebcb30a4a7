"""The models of the paper's experiments against formulas and torch's own; evidence 70 judges their counts, golden runs their numbers."""

import pytest
import torch
from lab import LabError, models
from lab.models import size
from torch import nn


def test_cp_layer_is_a_sum_of_outer_products():
    layer, x = models.CPLinear(5, 4, rank=3).double(), torch.randn(6, 5).double()
    torch.nn.init.normal_(layer.bias), torch.nn.init.normal_(layer.weights)
    factors = zip(layer.weights, layer.left.T, layer.right.T)
    weight = sum(w * torch.outer(a, b) for w, a, b in factors)
    assert torch.allclose(layer(x), x @ weight.T + layer.bias)


def test_tt_layer_is_a_tensor_train_whose_ranks_are_cut_where_a_matrix_is_narrow():
    layer, x = models.TTLinear((2, 3), (3, 2), rank=4).double(), torch.randn(5, 6).double()
    shapes = [(1, 3, 3), (3, 2, 4), (4, 2, 3), (3, 3, 1)]
    assert [tuple(core.shape) for core in layer.cores] == shapes
    weight = torch.einsum("apb,bqc,crd,dse->pqrs", *layer.cores).reshape(6, 6)
    assert torch.allclose(layer(x), x @ weight.T + layer.bias)


def test_the_unused_block_of_the_forecaster_gets_no_gradient():
    net = models.forecaster("NdLinear")
    net(torch.randn(2, 24, 6)).sum().backward()
    reached = sum(p.numel() for p in net.parameters() if p.grad is not None)
    assert reached == size(net) - (33 * 2048 + 2049 * 32) == 7_088
    with pytest.raises(LabError, match="it is 'Linear' or 'NdLinear'"):
        models.forecaster("linear")


def features_by_hand(net, x):
    """The two convolutions with the statistics of the batch, as in training."""
    for block in (net[0][:5], net[0][5:]):
        conv, norm = block[0], block[1]
        x = nn.functional.conv2d(x, conv.weight, conv.bias, padding=1)
        mean, spread = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        x = (x - mean) / (spread + 1e-5).sqrt()
        x = x * norm.weight[:, None, None] + norm.bias[:, None, None]
        x = x.clamp_min(0).unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).amax((3, 5))
        x = nn.functional.dropout2d(x, 0.2)
    return x


@pytest.mark.parametrize("head", ["dense", "ndlinear"])
def test_cnns_are_the_formula_with_their_dropout(head):
    net, x = models.cnn(head, 7).train(), torch.randn(4, 3, 32, 32)
    torch.manual_seed(3)
    found = net(x)
    torch.manual_seed(3)
    out, layers = features_by_hand(net, x), net[1]
    if head == "dense":
        out = out.flatten(1) @ layers[1].weight.T + layers[1].bias
        out = nn.functional.dropout(out.clamp_min(0), 0.3)
    else:  # no activation, as released
        for axis, mode in enumerate(layers[0].align_layers, start=1):
            out = torch.tensordot(out, mode.weight, ([axis], [1])).movedim(-1, axis)
            out = out + mode.bias.reshape(-1, *[1] * (3 - axis))
    expected = out.flatten(1) @ layers[-1].weight.T + layers[-1].bias
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
