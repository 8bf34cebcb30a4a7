"""What the tests of ndlinear.py share: random shapes, and the layer written a second time, as one einsum and one formula."""

import contextlib
import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ndlinear as nd
from ndlinear_lora import NdLinearLoRA

QUICK = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SIZES = st.integers(1, 7)


@st.composite
def shapes(draw, most=5, entries=3000):
    """(input_dims, hidden_size) with up to `most` modes of size 1 to 7 and matrices small enough to write down."""
    n = draw(st.integers(1, most))
    dims, hidden = ([draw(SIZES) for _ in range(n)] for _ in range(2))
    while (
        math.prod(dims) * math.prod(hidden) > entries
    ):  # shrink the largest, keep the kind of shape
        widest = max((dims, hidden), key=max)
        widest[widest.index(max(widest))] -= 1
    return tuple(dims), tuple(hidden)


@st.composite
def layers(draw, most=5):
    """A float64 NdLinear with random weights, any order, with or without biases."""
    dims, hidden = draw(shapes(most))
    outer, bias = draw(st.booleans()), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layer = nd.NdLinear(dims, hidden, outer, bias, dtype=torch.float64)
    return randomise(layer)


@st.composite
def sums(draw):
    """A float64 NdLinearSum with random weights."""
    dims, hidden = draw(shapes(4))
    rank, bias = draw(st.integers(1, 3)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 2**16)))
    return randomise(nd.NdLinearSum(dims, hidden, rank, bias, dtype=torch.float64))


batches = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3).map(tuple)


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


@contextlib.contextmanager
def refused(model, words, errors=(ValueError, TypeError)):
    """What is done inside fails in these words; the model, what of it is trained and the random numbers are as before."""

    def seen():
        held = [*model.named_parameters(), *model.named_buffers()]
        kinds = [(name, type(module)) for name, module in model.named_modules()]
        full = [v for _, v in held if not nn.parameter.is_lazy(v) and not v.is_meta]
        numbers = [value.detach().clone().nan_to_num() for value in full]
        return [*kinds, *((name, value.requires_grad) for name, value in held)], numbers

    before, drawn = seen(), torch.get_rng_state()
    with pytest.raises(errors, match=words):
        yield
    after = seen()
    assert after[0] == before[0] and torch.equal(torch.get_rng_state(), drawn)
    assert all(map(torch.equal, after[1], before[1]))


def encoder():
    """In evaluation without gradients it reads `weight` instead of calling its layers; its attention always does."""
    block = nn.TransformerEncoderLayer(24, 2, 24, dropout=0.0, batch_first=True)
    sizes = ((4, 6), (6, 4))
    block.linear1 = nd.FlatNdLinear.from_linear(block.linear1, *sizes)
    block.linear2 = nd.FlatNdLinear.from_linear(block.linear2, *sizes)
    block.self_attn.out_proj = nd.FlatNdLinear.from_linear(block.self_attn.out_proj, *sizes)
    return block


class Conv1D(nn.Module):
    """As transformers has it in GPT-2: a linear map whose weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


VIEWS = ("view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "detach", "alias")


class Log(TorchDispatchMode):
    """What is computed: name, sizes and dtype of each tensor that an operation makes, views and empty memory left out."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            name = func.overloadpacket.__name__
            if isinstance(tensor, torch.Tensor) and name not in (*VIEWS, "empty"):
                self.operations.append((name, tuple(tensor.shape), tensor.dtype))
        return made


def by_einsum(x, weights):
    """Y[..., h_1..h_N] = sum over d of X[..., d_1..d_N] prod_k W_k[h_k, d_k], in one einsum."""
    n, batch = len(weights), x.ndim - len(weights)
    operands = [x, [*range(batch), *(batch + k for k in range(n))]]
    for k, weight in enumerate(weights):
        operands += [weight, [batch + n + k, batch + k]]
    return torch.einsum(*operands, [*range(batch), *(batch + n + k for k in range(n))])


def bias_by_formula(weights, biases, order):
    """beta = sum_k [ones on modes executed before k] x b_k x [row sums on modes executed after k], each on its own axis."""
    n = len(weights)
    total = torch.zeros([w.shape[0] for w in weights], dtype=weights[0].dtype)
    for t, k in enumerate(order):
        factors = [torch.ones(w.shape[0], dtype=w.dtype) for w in weights]
        factors[k] = biases[k]
        for later in order[t + 1 :]:
            factors[later] = weights[later].sum(1)
        operands = [part for j, f in enumerate(factors) for part in (f, [j])]
        total = total + torch.einsum(*operands, list(range(n)))
    return total


def expected(layer, x):
    """What an NdLinear must give, by the einsum and the closed form of its bias."""
    y, n = by_einsum(x, layer.weights), len(layer.input_dims)
    if all(bias is None for bias in layer.biases):
        return y
    held = zip(layer.biases, layer.weights)
    biases = [weight.new_zeros(len(weight)) if bias is None else bias for bias, weight in held]
    order = range(n) if layer.transform_outer else reversed(range(n))
    return y + bias_by_formula(layer.weights, biases, list(order))


# ------------------------------------------------------------------------------------- all kinds of layers, one formula
def one_bias():
    layer = nd.NdLinear((4, 5, 6), (8, 5, 3))
    layer.align_layers[1].bias = None
    return layer


def tied():
    """One matrix in two modes: gradients add up."""
    layer = nd.NdLinear((4, 4, 6), (4, 4, 3))
    layer.align_layers[1].weight = layer.align_layers[0].weight
    return layer


KINDS = {  # how it is made, and the sizes of an input
    "as defined": (lambda: nd.NdLinear((4, 5, 6), (4, 5, 6)), (3, 2, 4, 5, 6)),
    "reordered": (lambda: nd.NdLinear((4, 5, 6), (8, 5, 3)), (5, 4, 5, 6)),
    "backwards": (lambda: nd.NdLinear((4, 5, 6), (4, 10, 3), False), (3, 2, 4, 5, 6)),
    "no bias": (lambda: nd.NdLinear((4, 5, 6), (8, 5, 3), bias=False), (3, 2, 4, 5, 6)),
    "one bias": (one_bias, (3, 2, 4, 5, 6)),
    "tied": (tied, (3, 2, 4, 4, 6)),
    "flat": (lambda: nd.FlatNdLinear((4, 6), (3, 5)), (3, 2, 24)),
    "sum": (lambda: nd.NdLinearSum((4, 6), (3, 5), 2), (3, 2, 4, 6)),
    "adapter": (lambda: NdLinearLoRA(nn.Linear(24, 15), alpha=2.0, bias=True), (3, 2, 24)),
    "encoder": (encoder, (2, 3, 24)),
}


def made(kind, dtype=torch.float64):
    """A layer of a kind whose modes do something, and an input."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model = make().to(dtype)
    for layer in model.modules():
        if isinstance(layer, nd.NdLinear):
            randomise(layer)
    return model, torch.randn(shape, dtype=dtype)


def modes_of(model):
    layers = [m for m in model.modules() if isinstance(m, nd.NdLinear)]
    return [mode for layer in layers for mode in layer.align_layers]


def reference(model, x):
    """What a layer of any kind must give; of an encoder, what it gives with dense layers."""
    if isinstance(model, nd.FlatNdLinear):
        return expected(model, x.unflatten(-1, model.input_dims)).flatten(-len(model.input_dims))
    if isinstance(model, nd.NdLinear):
        return expected(model, x)
    if isinstance(model, nd.NdLinearSum):
        y = sum(by_einsum(x, term.weights) for term in model.terms)
        return y if model.bias is None else y + model.bias
    if isinstance(model, NdLinearLoRA):
        adapter = model.adapter
        update = expected(adapter, x.unflatten(-1, adapter.input_dims))
        return model.base_layer(x) + model.alpha * update.flatten(-len(adapter.hidden_size))
    dense = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nd.FlatNdLinear):
            dense.set_submodule(name, nd.to_linear(layer))
    return dense(x)
