"""Full-batch training of small networks, several times faster than autograd on one core, exact up
to rounding.

For sequences of `nn.Linear` or `NdLinear` layers with ReLU between and one number as answer,
trained with Adam on the mean squared error. Three things make it fast. Samples are the *last* axis,
so every mode product is a matrix product over contiguous memory. The samples go through in chunks
that fit the processor's cache, into buffers that are allocated once. A layer with few units is
applied as the dense layer it equals. What depends on the weights alone (Kronecker products, total
biases) is computed once an epoch under autograd; the sums over the samples are written out here and
handed back to it. tests/lab/test_chunked.py compares the result with `lab.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from ndlinear import NdLinear

from ..modes import LabError
from .many import Fitted, Members, groups

CACHE = 1 << 18  # numbers in the largest buffer
FEWEST = 125  # so many samples may always go together
SKINNY = 3  # a multiply-add of a mode product costs about as much as three of a dense layer's
_relu_gradient = torch.ops.aten.threshold_backward.grad_input


class _Map:
    """One affine layer of all members, samples last, mode by mode.

    A mode takes (members * p, d, q * chunk) to (members * p, h, q * chunk).
    """

    def __init__(
        self, layer: nn.Module, names: list[tuple[str, str | None]], members: int, hidden: bool
    ):
        self.names = names  # of weight and bias of each mode
        self.members = members
        if isinstance(layer, NdLinear):
            dims, sizes = layer.input_dims, layer.hidden_size
        else:
            dims, sizes = (layer.in_features,), (layer.out_features,)
        self.inputs = math.prod(dims)
        self.units = math.prod(sizes)
        macs = sum(math.prod(sizes[: k + 1]) * math.prod(dims[k:]) for k in range(len(dims)))
        self.dense = len(dims) == 1 or SKINNY * macs >= self.inputs * self.units
        if self.dense:
            dims, sizes = (self.inputs,), (self.units,)
        self.modes = [
            (math.prod(sizes[:k]), dims[k], sizes[k], math.prod(dims[k + 1 :]))
            for k in range(len(dims))
        ]  # p, d, h, q
        self.hidden = hidden  # ReLU follows

    def allocate(self, chunk: int) -> None:
        self.outs = [torch.empty(self.members * p, h, q * chunk) for p, d, h, q in self.modes]

    def prepare(self, weights: dict[str, Tensor]) -> None:
        """What the samples meet in this epoch, by the weights: a matrix for each mode and one
        bias."""
        matrices = [weights[name] for name, _ in self.names]
        biases = [weights[name] for _, name in self.names if name]
        self.bias = None
        if biases:
            total = biases[0]
            for matrix, bias in zip(matrices[1:], biases[1:]):
                total = (total[:, :, None] * matrix.sum(2)[:, None] + bias[:, None]).flatten(1)
            self.bias = total.reshape(self.members * self.units // self.modes[-1][2], -1, 1)
        if self.dense:
            matrices = [reduce(_kronecker, matrices)]
        repeated = [m[:, None].expand(-1, p, -1, -1) for m, (p, *_) in zip(matrices, self.modes)]
        self.operands = [m.reshape(-1, *m.shape[2:]) for m in repeated]
        self.fixed = [m.detach() for m in self.operands]
        self.sums = [torch.zeros_like(m) for m in self.operands]
        self.bias_sum = None if self.bias is None else torch.zeros_like(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for (p, d, _, _), matrix, out in zip(self.modes, self.fixed, self.outs):
            x = x.view(self.members * p, d, -1)
            self.seen.append(x)
            if out is self.outs[-1] and self.bias is not None:
                x = torch.baddbmm(self.bias.detach(), matrix, x, out=out)
            else:
                x = torch.bmm(matrix, x, out=out)
        return x.clamp_min_(0) if self.hidden else x

    def backward(self, gradient: Tensor, free: list[Tensor], to_input: bool) -> Tensor:
        """Add the chunk's share to the operands' gradients; returns the gradient of the input.

        It lies in one of the two free buffers.
        """
        gradient = gradient.view_as(self.outs[-1])
        if self.hidden:
            _relu_gradient(gradient, self.outs[-1], 0, grad_input=gradient)
        if self.bias is not None:
            self.bias_sum += gradient.sum(2, keepdim=True)
        for k, (p, _d, h, _q) in reversed(list(enumerate(self.modes))):
            gradient = gradient.view(self.members * p, h, -1)
            x = self.seen[k]
            self.sums[k].baddbmm_(gradient, x.transpose(1, 2))
            if k or to_input:
                free.reverse()  # the other one holds `gradient`
                gradient = torch.bmm(
                    self.fixed[k].transpose(1, 2), gradient, out=free[0][: x.numel()].view(x.shape)
                )
        return gradient

    def hand_back(self) -> list[tuple[Tensor, Tensor]]:
        """(operand, gradient) for autograd."""
        pairs = list(zip(self.operands, self.sums))
        return pairs if self.bias is None else [*pairs, (self.bias, self.bias_sum)]


def _kronecker(a: Tensor, b: Tensor) -> Tensor:
    """Kronecker product of each member's matrices: (members, H, D) and (members, h, d) -> (members,
    H h, D d)."""
    product = a[:, :, None, :, None] * b[:, None, :, None, :]
    return product.reshape(len(a), a.shape[1] * b.shape[1], -1)


def maps_of(model: nn.Sequential, members: int) -> list[_Map]:
    """The affine layers of a sequence; ReLU must follow all but the last."""
    parts = [
        (n, m) for n, m in model.named_children() if not isinstance(m, (nn.Flatten, nn.Unflatten))
    ]
    layers = parts[::2]
    between = [m for _, m in parts[1::2]]
    known = all(isinstance(m, (nn.Linear, NdLinear)) for _, m in layers) and all(
        isinstance(m, nn.ReLU) for m in between
    )
    if not known or len(layers) != len(between) + 1:
        raise LabError(
            "chunked.fit trains nn.Sequential of nn.Linear or NdLinear with nn.ReLU between, "
            "and nothing else"
        )
    maps = []
    for name, layer in layers:
        modes = (
            [f"{name}.align_layers.{k}" for k in range(len(layer.input_dims))]
            if isinstance(layer, NdLinear)
            else [name]
        )
        biased = (layer.align_layers[0] if isinstance(layer, NdLinear) else layer).bias is not None
        names = [(f"{mode}.weight", f"{mode}.bias" if biased else None) for mode in modes]
        maps.append(_Map(layer, names, members, hidden=name != layers[-1][0]))
    if maps[-1].units != 1:
        raise LabError(f"chunked.fit: the network must answer one number, not {maps[-1].units}")
    return maps


def gradients(maps: list[_Map], x: Tensor, y: Tensor, free: list[Tensor], count: int) -> Tensor:
    """Sum of the squared errors of a chunk, per member.

    The gradients of their mean over ``count`` samples go to the maps.
    """
    for layer in maps:
        x = layer.forward(x)
    error = x.view_as(y).sub_(y)
    squares = torch.linalg.vector_norm(error, dim=1).square()
    gradient = error.mul_(2 / count)
    for layer in reversed(maps):
        gradient = layer.backward(gradient, free, to_input=layer is not maps[0])
    return squares


def chunk_of(count: int, per_sample: int) -> int:
    """The largest equal share of the samples whose largest buffer fits the cache, or the first of
    few samples."""
    shares = [count // k for k in range(1, count + 1) if count % k == 0]
    return next(s for s in shares if s * per_sample <= CACHE or s <= FEWEST)


def fit(
    make: Callable[[], nn.Sequential],
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    seeds: Sequence[int],
    epochs: int,
    lr: float | Callable,
    below: float | None = None,
) -> Fitted:
    """Train one network for each seed, all at once, with full batches and Adam on the mean squared
    error.

    Args:
        make: builds a network (inputs) -> (n,); called once for each seed, right after seeding.
        data: for each seed (x, y) of shapes (n, inputs...) and (n,).
        lr: of all parameters, or network -> rate of each by name.
        below: note the weights after the first epoch whose training loss, taken before its step, is
            below this number. Training goes on to the last epoch.

    Returns:
        The moments "stop" (the last epoch where the rule never said stop) and "end".
    """
    networks = Members(make, seeds)
    weights, members = networks.weights, len(seeds)
    count = len(data[0][1])
    maps = maps_of(networks.first, members)
    x = torch.stack([x.reshape(count, -1).T for x, _ in data])  # members, inputs, samples
    y = torch.stack([y for _, y in data])
    widest = members * max(p * h * q for layer in maps for p, _, h, q in layer.modes)
    chunk = chunk_of(count, widest)
    for layer in maps:
        layer.allocate(chunk)
    free = [torch.empty(widest * chunk) for _ in range(2)]
    parts = [
        (a.contiguous(), b.contiguous())
        for a, b in zip(x.split(chunk, dim=2), y.split(chunk, dim=1))
    ]
    adam = torch.optim.Adam(groups(weights, networks.first, lr), fused=True)
    losses = torch.empty(epochs, members)
    stops = [0] * members
    at_stop = {name: value.detach().clone() for name, value in weights.items()}
    for epoch in range(epochs):
        for layer in maps:
            layer.prepare(weights)
        with torch.no_grad():
            losses[epoch] = sum(gradients(maps, *part, free, count) for part in parts) / count
        pairs = [pair for layer in maps for pair in layer.hand_back()]
        adam.zero_grad(set_to_none=True)
        torch.autograd.backward(*zip(*pairs))
        adam.step()
        if below is not None and losses[epoch].min() < below:
            for i in (losses[epoch] < below).nonzero().flatten().tolist():
                if not stops[i]:
                    stops[i] = epoch + 1
                    _copy_member(at_stop, weights, i)
    if not losses.isfinite().all():
        raise LabError("a training loss is not finite; lower the rate or check the data")
    for i, stop in enumerate(stops):
        if not stop:
            _copy_member(at_stop, weights, i)
    kept = {"stop": at_stop, "end": {name: value.detach() for name, value in weights.items()}}
    when = {"stop": [s or epochs for s in stops], "end": [epochs] * members}
    curves = [
        [{"epoch": e + 1, "train_loss": v} for e, v in enumerate(column)]
        for column in losses.T.tolist()
    ]
    return Fitted(networks, kept, when, [s > 0 for s in stops], [], curves)


def _copy_member(to: dict[str, Tensor], source: dict[str, Tensor], i: int) -> None:
    for name, there in to.items():
        there[i] = source[name].detach()[i]
