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


def test_size_counts_shared_parameters_once_and_fixed_ones_on_demand():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    assert size(net) == 9 + 3 + 3
    net[0].bias.requires_grad_(False)
    assert size(net) == 12 and size(net, all=True) == 15


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


def test_dense_networks_have_relu_between_their_layers():
    x = torch.randn(5, 768)
    nets = [models.mlp(768, 9, 8, 3), models.text_head(hidden=16)]
    assert all(torch.allclose(net(x), relu_chain(net, x), atol=1e-5) for net in nets)
    for width, depth in ((16, 2), (32, 3)):
        net = models.radius_mlp("dense", width, depth)
        assert torch.allclose(net(x[:, :10]), relu_chain(net, x[:, :10]), atol=1e-5)
    net = models.tabular("Cardio Disease")
    assert torch.allclose(net(x[:, :11]), relu_chain(net, x[:, :11]), atol=1e-5)
    assert not any(p.shape == (9,) for p in models.mlp(768, 9, 3, bias=False).parameters())


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


@pytest.mark.parametrize("training", [True, False])
def test_recurrent_heads_are_the_formula(training):
    x = torch.randn(4, 24, 6)
    for method in ("Linear", "NdLinear"):
        net = models.recurrent(method).train(training)
        torch.manual_seed(2)
        found = net(x)
        torch.manual_seed(2)
        state = net.rnn(x)[0][:, -1]
        if method == "Linear":
            inner = state @ net.head[0].weight.T + net.head[0].bias
            inner = nn.functional.dropout(inner.clamp_min(0), 0.3, training)
            expected = inner @ net.head[3].weight.T + net.head[3].bias
        else:
            inner = einsum_nd(net.head[1], state[..., None]).clamp_min(0)
            expected = einsum_nd(net.head[4], nn.functional.dropout(inner, 0.3, training))[..., 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_vit_is_the_formula():
    net, images = models.ViT("Naive ViT", 24, 1, 5, hidden=7), torch.randn(2, 3, 224, 224)
    nn.init.normal_(net.positions), nn.init.normal_(net.token)
    rows = images.unflatten(3, (14, 16)).unflatten(2, (14, 16))  # B, 3, 14, 16, 14, 16
    patches = rows.permute(0, 2, 4, 1, 3, 5).reshape(2, 196, 768)
    x = torch.cat([net.token.expand(2, 1, 24), net.embed(patches)], 1) + net.positions
    block = net.blocks[0]
    q, k, v = block.qkv(block.norms[0](x)).reshape(2, 197, 3, 8, 64).permute(2, 0, 3, 1, 4)
    mixed = torch.softmax(q @ k.mT / 8, -1) @ v
    x = x + block.out(mixed.transpose(1, 2).reshape(2, 197, 512))
    inner, last = block.block[0], block.block[2]
    h = block.norms[1](x) @ inner.weight.T + inner.bias
    x = x + (h * (1 + torch.erf(h / math.sqrt(2))) / 2) @ last.weight.T + last.bias
    with torch.no_grad():
        torch.testing.assert_close(net(images), net.out(net.norm(x[:, 0])), rtol=1e-3, atol=1e-4)


def test_lora_is_the_sum_of_two_maps_and_starts_at_the_frozen_one():
    net, x = nn.ModuleDict({"q_proj": nn.Linear(6, 4)}), torch.randn(3, 6)
    before = net["q_proj"](x)
    models.apply_lora(net, rank=2)
    layer = net["q_proj"]
    assert torch.equal(layer(x), before) and size(net) == 2 * (6 + 4)
    nn.init.normal_(layer.up.weight)
    torch.testing.assert_close(layer(x), before + x @ layer.down.weight.T @ layer.up.weight.T)


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
