"""The models of the paper's experiments: forward passes against references. Chapter 70 judges their counts."""

import math

import lab
import pytest
import torch
from lab import models
from lab.models import AsReleased, size
from torch import nn

import ndlinear
from ndlinear import NdLinear


def test_size_counts_shared_parameters_once_and_fixed_ones_not():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert size(net) == 9 + 3 + 3
    net[0].bias.requires_grad_(False)
    assert size(net) == 12


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


@pytest.mark.parametrize("head", ["dense", "ndlinear", "affine", "cp", "tt"])
def test_cnns_are_the_formula_with_their_dropout(head):
    net, x = models.cnn(head, 7).train(), torch.randn(4, 3, 32, 32)
    torch.manual_seed(3)
    found = net(x)
    torch.manual_seed(3)
    out = features_by_hand(net, x)
    layers = net[1]
    if head == "dense":
        out = out.flatten(1) @ layers[1].weight.T + layers[1].bias
        out = nn.functional.dropout(out.clamp_min(0), 0.3)
    elif head == "ndlinear":
        for axis, mode in enumerate(layers[0].align_layers, start=1):
            out = torch.tensordot(out, mode.weight, ([axis], [1])).movedim(-1, axis)
            out = out + mode.bias.reshape(-1, *[1] * (3 - axis))
    elif head != "affine":  # tested below
        out = layers[1](out.flatten(1))
    expected = out.flatten(1) @ layers[-1].weight.T + layers[-1].bias
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert models.cnn_head(head, None)(torch.zeros(1, 64, 8, 8)).shape[1] in (256, 4096)


def relu_chain(net, x):
    """Linear layers with max(0, x) between them."""
    layers = [m for m in net if isinstance(m, nn.Linear)]
    for layer in layers[:-1]:
        x = (x @ layer.weight.T + layer.bias).clamp_min(0)
    return x @ layers[-1].weight.T + layers[-1].bias


def einsum_nd(layer, x):
    """NdLinear of two modes by one sum for each, biases after each."""
    (w1, w2), (b1, b2) = layer.weights, layer.biases
    x = torch.einsum("...ij,hi->...hj", x, w1) + b1[:, None]
    return torch.einsum("...hj,kj->...hk", x, w2) + b2


@pytest.mark.parametrize(
    ("net", "inputs"),
    [
        (models.mlp(768, 9, 8, 3), 768),
        (models.text_head(hidden=16), 768),
        (models.radius_mlp("dense", 16, 2), 10),
        (models.radius_mlp("dense", 32, 3), 10),
        (models.tabular("Cardio Disease"), 11),
    ],
)
def test_dense_networks_have_relu_between_their_layers(net, inputs):
    x = torch.randn(5, inputs)
    torch.testing.assert_close(net(x), relu_chain(net, x))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (models.radius_mlp("NdLinear", 16, 3), (2, 5)),
        (models.radius_mlp("NdLinear", (3, 6), 2), (2, 5)),
        (models.tabular("Cardio Disease", "NdLinear"), (11, 1)),
        (models.tabular("Delivery Time", "NdLinear"), (14, 1)),
        (models.text_head("NdLinear"), (96, 8)),
    ],
)
def test_networks_of_ndlinear_have_relu_between_their_layers(net, shape):
    x = torch.randn(5, math.prod(shape))
    layers, out = [m for m in net if isinstance(m, NdLinear)], x.reshape(5, *shape)
    for k, layer in enumerate(layers):
        out = einsum_nd(layer, out)
        if k + 1 < len(layers) or isinstance(net[-1], nn.Linear):
            out = out.clamp_min(0)
    out = out.flatten(1)
    if isinstance(net[-1], nn.Linear):
        out = out @ net[-1].weight.T + net[-1].bias
    torch.testing.assert_close(net(x), out, rtol=1e-4, atol=1e-5)


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


def test_cheapest_order_is_counted():
    shapes = (2800, 8), (768, 1)
    with torch.device("meta"):
        macs = lab.count_macs(models.Cheapest(*shapes), torch.empty(1, 2800, 8))
    assert macs == min(ndlinear.count_macs(*shapes, order) for order in ((0, 1), (1, 0)))


@pytest.mark.parametrize("outer", [True, False])
def test_as_released_is_the_same_function_at_the_defined_cost(outer):
    shapes = (2800, 8), (768, 1)
    with torch.device("meta"):
        sample, layer = torch.empty(1, *shapes[0]), AsReleased(*shapes, outer)
    order = (0, 1) if outer else (1, 0)
    assert lab.count_macs(layer, sample) == ndlinear.count_macs(*shapes, order)
    small, x = AsReleased((4, 5, 3), (3, 6, 2), outer).double(), torch.randn(7, 4, 5, 3).double()
    other = NdLinear((4, 5, 3), (3, 6, 2), outer).double()
    other.load_state_dict(small.state_dict())
    assert torch.allclose(small(x), other(x))


def test_encoder_layer_is_that_of_torch():
    width, heads, hidden = 12, 3, 20
    block = models.feed_forward(width, hidden)
    ours = models.EncoderLayer(width, heads, block).eval()
    theirs = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0, batch_first=True).eval()
    parts = (theirs.self_attn, theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2)
    for mine, source in zip(parts, (ours.attention, block[0], block[2], *ours.norms)):
        mine.load_state_dict(source.state_dict())
    x = torch.randn(2, 7, width)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


def test_the_unused_block_of_the_forecaster_gets_no_gradient():
    net = models.forecaster("NdLinear")
    net(torch.randn(2, 24, 6)).sum().backward()
    reached = sum(p.numel() for p in net.parameters() if p.grad is not None)
    assert reached == size(net) - (33 * 2048 + 2049 * 32) == 7_088
