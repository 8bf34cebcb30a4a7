"""The models of the paper's experiments, built from plain torch.nn and NdLinear at the sizes that
give its printed counts.

Evidence 70 counts them; other evidence trains those that are small. The
settings come from the text of the paper, from its released code, or, where neither says, from the
printed counts; each docstring says which. Large models (`opt`, `decoder`, `dit`) are bodies to be
counted: build them under ``torch.device("meta")``, they hold no numbers and have no forward pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear import NdLinear, cheapest_order, mode_product

from .modes import LabError


def size(model: nn.Module) -> int:
    """Numbers that are trained; a parameter that is used twice counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class AsReleased(NdLinear):
    """NdLinear executed as the released package does: mode after mode in the defined order,
    whatever it costs."""

    steps = property(lambda self: self.order)

    def forward(self, x: Tensor) -> Tensor:
        for k in self.steps:
            mode = self.align_layers[k]
            x = mode_product(x, mode.weight, k - len(self.order), mode.bias)
        return x


class Cheapest(AsReleased):
    """The same modes one after the other in the cheapest order, to be counted; the biases are those
    of that order."""

    steps = property(lambda self: cheapest_order(self.input_dims, self.hidden_size))


# ----------------------------------------------------------------------- image classification (CNN)
def cnn_features() -> nn.Sequential:
    """Two convolutions with batch norm and pooling, (3, 32, 32) -> (64, 8, 8), 19,584 parameters.
    From the released code."""
    layers = []
    for channels, filters in ((3, 32), (32, 64)):
        conv = nn.Conv2d(channels, filters, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(filters), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2)]
    return nn.Sequential(*layers)


class CPLinear(nn.Module):
    """A dense map whose weight is a sum of ``rank`` outer products, rebuilt at every call: rank (D
    + H + 1) + H numbers."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.left = nn.Parameter(torch.randn(outputs, rank) / math.sqrt(rank))
        self.right = nn.Parameter(torch.randn(inputs, rank) / math.sqrt(inputs))
        self.weights, self.bias = nn.Parameter(torch.ones(rank)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.left * self.weights) @ self.right.T, self.bias)


class TTLinear(nn.Module):
    """A dense map whose weight, as a tensor of axes (H, D), is a tensor train, rebuilt core by core
    at every call. No rank exceeds the sizes on its left or on its right."""

    def __init__(self, input_dims: tuple[int, ...], hidden_size: tuple[int, ...], rank: int):
        super().__init__()
        axes = (*hidden_size, *input_dims)
        ends = [(math.prod(axes[:k]), math.prod(axes[k:])) for k in range(len(axes) + 1)]
        ranks = [min(rank, *both) for both in ends]
        shapes = zip(ranks[:-1], axes, ranks[1:])
        self.cores = nn.ParameterList(
            torch.randn(*shape) / math.sqrt(shape[0] * shape[1]) for shape in shapes
        )
        self.bias = nn.Parameter(torch.zeros(math.prod(hidden_size)))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.cores[0].flatten(0, 1)
        for core in self.cores[1:]:
            weight = (weight @ core.flatten(1)).view(-1, core.shape[-1])
        return F.linear(x, weight.view(len(self.bias), -1), self.bias)


def cnn_head(
    head: str, classes: int | None, hidden=(64, 8, 8), width: int = 256, layer=NdLinear
) -> nn.Sequential:
    """What follows the features (64, 8, 8): the part in which the networks of the comparison
    differ.

    Args:
        head: "dense", Linear(4096, width) with ReLU and dropout; "ndlinear", NdLinear to ``hidden``
            without an activation, as released; "affine", nothing but the classifier; "cp" and "tt",
            a 4096x4096 map of rank 64 in these formats.
        classes: size of the classifier at the end, None for no classifier.
    """
    flat, n = nn.Flatten(), 64 * 8 * 8
    middle = {
        "dense": lambda: [flat, nn.Linear(n, width), nn.ReLU(), nn.Dropout(0.3)],
        "ndlinear": lambda: [layer((64, 8, 8), hidden), flat],
        "affine": lambda: [flat],
        "cp": lambda: [flat, CPLinear(n, n, rank=64)],
        "tt": lambda: [flat, TTLinear((64, 8, 8), (64, 8, 8), rank=64)],
    }[head]()
    inputs = {"dense": width, "ndlinear": math.prod(hidden)}.get(head, n)
    return nn.Sequential(*middle, *([nn.Linear(inputs, classes)] if classes else []))


def cnn(head: str = "dense", classes: int | None = 10, **options) -> nn.Sequential:
    """The CNN of the CIFAR experiments: 1,070,986 parameters with the dense head, 64,858 with
    NdLinear (10 classes)."""
    return nn.Sequential(cnn_features(), cnn_head(head, classes, **options))


# ------------------------------------------------------------------------------- networks over time
def feed_forward(
    width: int, hidden: int, terms: int | None = None, act=nn.ReLU, layer=NdLinear
) -> nn.Sequential:
    """The block width -> hidden -> width. With ``terms``, NdLinear (width, 1) -> (hidden, terms) ->
    (width, 1) in its place."""
    if terms is None:
        return nn.Sequential(nn.Linear(width, hidden), act(), nn.Linear(hidden, width))
    outside, inside = (width, 1), (hidden, terms)
    pair = layer(outside, inside), act(), layer(inside, outside)
    return nn.Sequential(nn.Unflatten(-1, outside), *pair, nn.Flatten(-2))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward block, each added and then normalised, as in
    torch.nn.TransformerEncoderLayer."""

    def __init__(self, width: int, heads: int, block: nn.Module):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms, self.block = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)]), block

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        return self.norms[1](x + self.block(x))


class Encoder(nn.Module):
    """(B, steps, channels) -> (B, outputs): a linear embedding, one encoder layer, the mean over
    time, a linear map.

    Neither the pooling nor the number of heads is printed; they change no count.
    """

    def __init__(self, channels: int, width: int, outputs: int, block: nn.Module, heads: int):
        super().__init__()
        self.embed, self.layer = nn.Linear(channels, width), EncoderLayer(width, heads, block)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(x)).mean(1))


# channels, width, outputs, terms of the NdLinear block: the one family that gives all 18 printed
# counts
UCR = {
    "ECGFiveDay": (1, 16, 3, 8),
    "HeartBeat": (61, 16, 3, 4),
    "Chlorine Conc.": (1, 32, 4, 16),
    "ECG5000": (1, 32, 6, 32),
    "LSST": (6, 48, 15, 32),
    "Sleep": (1, 32, 6, 32),
}


def _dense(method: str, name: str = "Linear") -> bool:
    """Whether a method is the dense one, called ``name``, or NdLinear."""
    if method not in (name, "NdLinear"):
        raise LabError(f"method={method!r}: it is {name!r} or 'NdLinear'")
    return method == name


def series_classifier(dataset: str, method: str) -> Encoder:
    """The classifiers of the UCR table: "Base Model" (block of 4 widths), "Base Model*" (of one
    width), "NdLinear".

    No code is released; widths and numbers of terms are solved from the counts. Any number of heads
    gives the same count. The outputs are the classes plus one, as labels counted from 1 would ask
    for.
    """
    channels, width, outputs, terms = UCR[dataset]
    hidden, m = {
        "Base Model": (4 * width, None),
        "Base Model*": (width, None),
        "NdLinear": (width, terms),
    }[method]
    return Encoder(channels, width, outputs, feed_forward(width, hidden, m), heads=4)


def forecaster(method: str = "Linear") -> Encoder:
    """The ETT Transformer, 6 channels, width 32, 12 steps ahead. "Linear" has the default block of
    2,048 hidden units: 138,124 parameters.

    "NdLinear" has (32, 1) -> (32, 1) twice; as in the released code it keeps the dense block beside
    it, ``unused``, which no gradient reaches: 140,240 parameters, of which 7,088 are trained. Sizes
    from the released code; it has two heads and reads the last step where this one has four and the
    mean, which changes no count (`lab.forecast` does as it does).
    """
    dense = feed_forward(32, 2048, act=nn.GELU)
    if _dense(method):
        return Encoder(6, 32, 12, dense, heads=4)
    model = Encoder(6, 32, 12, feed_forward(32, 32, 1, act=nn.GELU), heads=4)
    model.layer.unused = dense
    return model


class Recurrent(nn.Module):
    """(B, steps, channels) -> (B, horizon): torch.nn.RNN, then a head on the last state."""

    def __init__(self, inputs: int, hidden: int, head: nn.Module):
        super().__init__()
        self.rnn, self.head = nn.RNN(inputs, hidden, batch_first=True), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def recurrent(
    method: str = "Linear", inputs: int = 6, hidden: int = 96, layer=NdLinear
) -> Recurrent:
    """The ETT RNN, 12 steps ahead: state of 96 units, two linear layers, 20,460 parameters;
    "NdLinear" replaces these two by one-column ones.

    No code is released; activation and dropout between the two are our choice. The printed count of
    the NdLinear network is not met by any such model with 96 units.
    """
    dense = [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden, 12)]
    if _dense(method):
        return Recurrent(inputs, hidden, nn.Sequential(*dense))
    first, last = layer((hidden, 1), (hidden, 1)), layer((hidden, 1), (12, 1))
    parts = nn.Unflatten(-1, (hidden, 1)), first, *dense[1:3], last, nn.Flatten()
    return Recurrent(inputs, hidden, nn.Sequential(*parts))


# -------------------------------------------------------------------------- tabular data, text head
def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*relu_between(nn.Linear(a, b, bias=bias) for a, b in pairs))


def relu_between(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers in their order, with ReLU between each two."""
    followed = [part for layer in layers for part in (layer, nn.ReLU())]
    return followed[:-1]


TABULAR = {
    "Cardio Disease": (11, (11, 64), 2),
    "Delivery Time": (14, (32, 64), 1),
}  # inputs, hidden shape, outputs


def tabular(dataset: str, method: str = "Linear") -> nn.Sequential:
    """The tabular models: inputs-128-128-outputs, or (inputs, 1) to the hidden shape, to itself,
    and a linear layer."""
    inputs, hidden, outputs = TABULAR[dataset]
    if _dense(method):
        return mlp(inputs, 128, 128, outputs)
    first, second = NdLinear((inputs, 1), hidden), NdLinear(hidden, hidden)
    layers = nn.Unflatten(-1, (inputs, 1)), first, nn.ReLU(), second, nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(hidden), outputs))


def text_head(method: str = "Linear", hidden: int = 2) -> nn.Sequential:
    """The head on 768 BERT features: 768-2-2 with 1,544 parameters, or (96, 8) -> (2, 2), then 4-2,
    with 222.

    The order of the two factors of 768 is that of the released code; the other one has the same
    count. The activation before the last layer is our choice; the released head has none (chapter
    44 compares). ``hidden`` is the size of the dense head's hidden layer: 2 gives the printed
    count, the text says 128.
    """
    if _dense(method):
        return mlp(768, hidden, 2)
    layer = NdLinear((96, 8), (2, 2))
    return nn.Sequential(nn.Unflatten(-1, (96, 8)), layer, nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))


def radius_mlp(
    method: str, width: int | tuple[int, ...], depth: int, bias: bool = True, layer=NdLinear
) -> nn.Sequential:
    """The Radius Bump networks on 10 coordinates, (n, 10) -> (n, 1): ``depth`` linear layers with
    ReLU between.

    "dense": 10-width-...-1; "NdLinear": (2, 5) to the hidden shape, ..., to (1, 1). The input shape
    comes from the released code. ``width``: of the dense layers; NdLinear then has the hidden shape
    (width / 4, width / 4), unless the shape itself is given.
    """
    if _dense(method, "dense"):
        return mlp(10, *[width] * (depth - 1), 1, bias=bias)
    hidden = (width // 4, width // 4) if isinstance(width, int) else tuple(width)
    shapes = [(2, 5), *[hidden] * (depth - 1), (1, 1)]
    layers = [layer(a, b, bias=bias) for a, b in itertools.pairwise(shapes)]
    return nn.Sequential(nn.Unflatten(-1, (2, 5)), *relu_between(layers), nn.Flatten())


# ----------------------------------------------------------------- large models, to be counted only
# as in the released configurations; the size of the embeddings is the default of the configuration
# class, which they leave as it is
SHARED = {"vocabulary": 50272, "embed": 768}
OPT = {
    "OPT-Small": {"layers": 12, "width": 768, "hidden": 3072, "positions": 512} | SHARED,
    "OPT-Mid": {"layers": 24, "width": 1024, "hidden": 4096, "positions": 1024} | SHARED,
}
# NdLinear between the two layers of a block
OPT_INSIDE = {"OPT-Small": (2800, 8), "OPT-Mid": (4000, 4)}
DECODERS = {  # layers, width, hidden, width of keys: config.json of Qwen/Qwen3-1.7B-Base and meta-llama/Meta-Llama-3-8B
    "Qwen3-1.7B": (28, 2048, 6144, 1024),
    "LLaMA3-8B": (32, 4096, 14336, 1024),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def opt(layers, width, hidden, positions, vocabulary, embed, inside=None) -> nn.ModuleDict:
    """An OPT decoder, output tied to the embedding. ``inside`` puts NdLinear (width, 1) -> inside
    -> (width, 1) in the block.

    Token embeddings of another size than ``width`` come with two projections without biases, under
    "project".
    """
    blocks = (feed_forward(width, *(inside or (hidden,))) for _ in range(layers))
    body = {
        "tokens": nn.Embedding(vocabulary, embed),
        "positions": nn.Embedding(positions + 2, width),  # two rows are reserved in OPT
        "layers": nn.ModuleList(EncoderLayer(width, 1, block) for block in blocks),
        "norm": nn.LayerNorm(width),
    }
    if embed != width:
        body["project"] = nn.ModuleList(
            [nn.Linear(embed, width, bias=False), nn.Linear(width, embed, bias=False)]
        )
    return nn.ModuleDict(body)


def decoder(layers: int, width: int, hidden: int, keys: int) -> nn.ModuleList:
    """The linear maps in the layers of a LLaMA-like language model under their usual names: all that adapters change."""
    shapes = {
        "q_proj": (width, width),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (width, width),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    return nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        for _ in range(layers)
    )


class LoRA(nn.Module):
    """A frozen linear layer plus a trained update of rank ``rank``, zero at the start: rank (D + H) numbers."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        like = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base_layer = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, **like)
        # zeros need no random numbers: the layers that are made next start as if this one drew none
        self.up = nn.utils.skip_init(nn.Linear, rank, base.out_features, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def dit(nd_blocks: int = 0) -> nn.ModuleDict:
    """DiT-XL/2 on latents of 4 x 32 x 32 and 1,000 classes, its positions fixed.

    ``nd_blocks``: so many of its 28 blocks have NdLinear (width, 1) -> (width, 1) twice in place of
    the MLP of four widths, and so has the timestep embedder, if there are any.
    """
    width = 1152
    time = mlp(256, width, width)
    if nd_blocks:
        time = nn.ModuleList([NdLinear((256, 1), (width, 1)), NdLinear((width, 1), (width, 1))])

    def block(k):
        inside = feed_forward(width, width, 1) if k < nd_blocks else feed_forward(width, 4 * width)
        attention = nn.MultiheadAttention(width, 16)
        return nn.ModuleDict(
            {"attention": attention, "block": inside, "modulation": nn.Linear(width, 6 * width)}
        )

    body = {
        "patches": nn.Conv2d(4, width, 2, stride=2),
        "time": time,
        "labels": nn.Embedding(1001, width),
        "blocks": nn.ModuleList(block(k) for k in range(28)),
        "modulation": nn.Linear(width, 2 * width),
        "out": nn.Linear(width, 2 * 2 * 8),
    }
    return nn.ModuleDict(body)
