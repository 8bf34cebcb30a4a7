"""Times that can be compared: peers of one layer side by side, in rounds of random order, in one process.

`python -m lab.chapters.speed` (``make bench``) measures the machine it runs on: it runs the cells of the evidence of
chapter 60 that carry the tag "bench", in full mode. The rows of another machine stay beside those that the book was written with.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import pathlib
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import ndlinear

from .. import memory, timing
from ..counts import sizes
from ..data import folder
from ..machine import module_digest, require
from ..modes import NOTEBOOKS, LabError, mode
from ..page.figures import colour, key, label, legend, marker
from ..page.show import say, table
from ..records import golden, read
from ..records.runs import frame
from ..released import release_folder, released
from ..timing import ratios

LARGEST_DENSE = 70_000_000  # weights; a larger dense layer is left out; no shape of the book lies between 60 and 67 million
LARGEST_LOKR = (
    20_000_000  # entries of the matrix that LoKr makes in every call; a larger one is left out
)
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "autocast": torch.float32,
    "float64": torch.float64,
}


class Case(NamedTuple):
    """One layer and the batch it is timed with."""

    name: str
    dims: tuple[int, ...]
    hidden: tuple[int, ...]
    batch: int
    where: str
    outer: bool = (
        True  # False: the modes are defined in the order N..1, as the released adapters do
    )


CASES = {
    case.name: case
    for case in (
        Case("cnn64", (64, 8, 8), (64, 8, 8), 64, "CNN head"),
        Case("cnn128", (64, 8, 8), (128, 4, 4), 64, "CNN head"),
        Case("cnn256", (64, 8, 8), (256, 2, 2), 64, "CNN head"),
        Case("bert", (96, 8), (2, 2), 32, "text head"),
        Case("tab11_1", (11, 1), (11, 64), 32, "tabular"),
        Case("tab11_64", (11, 64), (11, 64), 32, "tabular"),
        Case("tab14_1", (14, 1), (32, 64), 32, "tabular"),
        Case("tab32_64", (32, 64), (32, 64), 32, "tabular"),
        Case("rad_in", (2, 5), (32, 32), 1000, "radius bump"),
        Case("rad_out", (32, 32), (1, 1), 1000, "radius bump"),
        Case("opt_fc1", (768, 1), (2800, 8), 512, "OPT"),
        Case("opt_fc2", (2800, 8), (768, 1), 512, "OPT"),
        Case("optm_fc1", (1024, 1), (4000, 4), 512, "OPT"),
        Case("optm_fc2", (4000, 4), (1024, 1), 512, "OPT"),
        Case("lora_q", (32, 64), (32, 64), 512, "adapter"),
        Case("lora_up", (32, 64), (64, 96), 512, "adapter"),
        Case("lora_dn", (64, 96), (32, 64), 512, "adapter"),
        Case("lora8_up", (64, 64), (112, 128), 256, "adapter"),
        Case("lora8_dn", (112, 128), (64, 64), 256, "adapter"),
        Case("vit200", (200, 1), (200, 1), 12672, "ViT"),
        Case("vit400", (400, 1), (400, 1), 12672, "ViT"),
        Case("img", (28, 28, 3), (64, 64, 6), 32, "README"),
        Case("vol32", (32, 32, 32), (32, 32, 32), 16, "volume"),
        Case("d4", (16, 16, 16, 16), (16, 16, 16, 16), 8, "four modes"),
        Case("d5", (8, 8, 8, 8, 8), (8, 8, 8, 8, 8), 4, "five modes"),
    )
}
CASES |= {
    f"{c.name}_rev": c._replace(name=f"{c.name}_rev", outer=False)
    for c in CASES.values()
    if c.where == "adapter"
}


def config(case: Case, **more) -> dict:
    """A case as a flat configuration for `lab.record`."""
    dims, hidden = ("x".join(map(str, part)) for part in (case.dims, case.hidden))
    return {
        "case": case.name,
        "dims": dims,
        "hidden": hidden,
        "outer": case.outer,
        "batch": case.batch,
    } | more


def described(case: Case) -> str:
    """A case for a reader: where it is from, and its shapes."""
    shapes = ("×".join(map(str, sizes)) for sizes in (case.dims, case.hidden))
    return f"{case.where}, {' to '.join(shapes)}"


def cubes(most: dict[int, int]) -> list[Case]:
    """Layers whose axes are all equally long: for each side from one axis up to so many."""
    return [
        Case(f"{side}^{n}", (side,) * n, (side,) * n, 16, "cube")
        for side, modes in most.items()
        for n in range(1, modes + 1)
    ]


def random_cases(n: int, seed: int) -> list[Case]:
    """Layers that nobody tuned for: two to four modes, sizes spread evenly on a logarithmic scale, batches from 8 to 256."""
    draw, made = random.Random(seed), []
    for i in range(n):
        modes = draw.choice((2, 2, 3, 3, 4))
        dims, hidden = (
            tuple(round(2 ** draw.uniform(0, 12 / modes)) for _ in range(modes)) for _ in "DH"
        )
        made.append(Case(f"random{i}", dims, hidden, 2 ** draw.randint(3, 8), "random"))
    return made


def small_configs(n: int, seed: int, **fixed) -> list[dict]:
    """Random small layers for `beside_algorithm_1`: two to four modes with sides of 1 to 64, one side in seven of length one.

    Batches are powers of two up to 4,096, half of the layers train, and four in seven compute in float32. What has more than
    2^20 numbers in its largest tensor, or more than 10^7 multiply-adds (10^6 of 16 bits), is drawn again.
    """
    draw, made = random.Random(seed), []
    while len(made) < n:
        modes = draw.choice((2, 2, 3, 4))
        dims, hidden = (
            tuple(
                1 if draw.random() < 1 / 7 else round(2 ** draw.uniform(0, 6)) for _ in range(modes)
            )
            for _ in "DH"
        )
        case = Case(
            f"small{len(made)}",
            dims,
            hidden,
            2 ** draw.randint(0, 12),
            "random",
            draw.random() < 0.5,
        )
        dtype = draw.choice(("float32",) * 4 + ("float64", "bfloat16", "float16"))
        what = draw.choice(("forward", "training"))
        macs = case.batch * ndlinear.count_macs(
            dims, hidden, range(modes)[:: 1 if case.outer else -1]
        )
        largest = case.batch * math.prod(map(max, zip(dims, hidden)))
        if largest <= 2**20 and macs <= (1e6 if dtype.endswith("16") else 1e7):
            made.append(config(case, dtype=dtype, seed=seed, **fixed, **{"pass": what}))
    return made


def baseline() -> str:
    """What ratios are to: the released package; in smoke mode, which installs nothing, Algorithm 1 where it is not at hand."""
    if mode() == "replay" or released(install=mode() == "full"):
        return "released"
    say(
        f"**The released package is not in {release_folder()}**, so ratios are to `sequential` here."
    )
    return "sequential"


# ---------------------------------------------------------------------------------------------------------- the peers
class LeftOut(LabError):
    """Why a peer is not measured."""


@dataclass
class Peer:
    """Something to time: ``call(x)``, the parameters that it trains, and the gradient of its output."""

    call: Callable[[Tensor], Tensor]
    parameters: list[Tensor]
    x: Tensor
    gradient: Tensor | None = None

    def forward(self) -> Tensor:
        return self.call(self.x)

    def training(self) -> tuple[Tensor, ...]:
        """Forward, then the gradients of the input and of every parameter."""
        return torch.autograd.grad(self.call(self.x), [self.x, *self.parameters], self.gradient)


class Problem:
    """An NdLinear layer with an input; what every peer is built from, with the same weights where it has them."""

    def __init__(
        self, dims, hidden, batch, outer=True, *, dtype="float32", device="cpu", seed=0, bias=True
    ):
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision(
            "high" if dtype == "tf32" else "highest"
        )  # only GPUs know the difference
        self.dims, self.hidden, self.outer = tuple(dims), tuple(hidden), outer
        self.autocast = dtype == "autocast"
        self.options = {"device": device, "dtype": DTYPES[dtype]}
        self.layer = ndlinear.NdLinear(dims, hidden, outer, bias, **self.options)
        self.x = torch.randn(batch, *dims, **self.options, requires_grad=True)

    def peer(self, module, parameters=None, *, flat=False) -> Peer:
        """A Peer from a module or function; ``flat`` gives it the input as one axis."""
        x = self.x.detach().flatten(1).requires_grad_() if flat else self.x
        own = list(module.parameters() if parameters is None else parameters)
        return Peer(module, [p for p in own if p.requires_grad], x)

    def with_weights_of_layer(self, module: nn.Module) -> Peer:
        module = module.to(**self.options)
        module.load_state_dict(self.layer.state_dict())
        return self.peer(module)

    def weights(self) -> list[Tensor]:
        return [w.detach().clone().requires_grad_() for w in self.layer.weights]


def _released(p: Problem) -> Peer:
    module = released(install=mode() == "full")
    if module is None:
        raise LeftOut(f"the released package is not in {release_folder()}")
    return p.with_weights_of_layer(module.NdLinear(p.dims, p.hidden, transform_outer=p.outer))


def _again(p: Problem, **execution) -> Peer:
    bias = p.layer.biases[0] is not None
    return p.with_weights_of_layer(ndlinear.NdLinear(p.dims, p.hidden, p.outer, bias, **execution))


def _subscripts(n: int) -> str:
    """n = 2: "zab,Aa,Bb->zAB"."""
    inner, outer = "abcdefgh"[:n], "ABCDEFGH"[:n]
    return ",".join([f"z{inner}", *(o + i for o, i in zip(outer, inner))]) + f"->z{outer}"


def _einsum(p: Problem) -> Peer:
    text, weights = _subscripts(len(p.dims)), p.weights()

    torch.backends.opt_einsum.enabled = (
        False  # as it is where opt_einsum is not installed: from left to right
    )
    return p.peer(lambda x: torch.einsum(text, x, *weights), weights)


def _opt_einsum(p: Problem) -> Peer:
    text, weights = _subscripts(len(p.dims)), p.weights()
    shapes = [tuple(p.x.shape), *(tuple(w.shape) for w in weights)]
    expression = require("opt_einsum").contract_expression(
        text, *shapes
    )  # finds the path once, for this batch size
    return p.peer(lambda x: expression(x, *weights), weights)


def _einmix(p: Problem) -> Peer:
    """One EinMix of einops per mode, with the bias of the mode."""
    mix, modes, steps = require("einops.layers.torch").EinMix, range(len(p.dims)), []
    for k in modes if p.outer else reversed(modes):
        before = " ".join(f"d{j}" for j in modes)
        pattern = f"z {before} -> z {before.replace(f'd{k}', f'h{k}')}"
        sizes, bias = {f"d{k}": p.dims[k], f"h{k}": p.hidden[k]}, p.layer.biases[k]
        step = mix(
            pattern,
            weight_shape=f"h{k} d{k}",
            bias_shape=None if bias is None else f"h{k}",
            **sizes,
        )
        step = step.to(**p.options)
        with torch.no_grad():
            step.weight.copy_(p.layer.weights[k].reshape(step.weight.shape))
            if bias is not None:
                step.bias.copy_(bias.reshape(step.bias.shape))
        steps.append(step)
    return p.peer(nn.Sequential(*steps))


def _tcl(p: Problem) -> Peer:
    layer = require("tltorch").TCL(p.dims, rank=p.hidden, bias=False).to(**p.options)
    with torch.no_grad():
        for factor, weight in zip(layer.factors, p.layer.weights):
            factor.copy_(weight)
    return p.peer(layer)


def _lokr(p: Problem) -> Peer:
    """The update of a LoKr adapter of peft with two full factors, without its base layer."""
    if len(p.dims) != 2:
        raise LeftOut("an adapter folds its axes in two")
    if math.prod(p.dims + p.hidden) > LARGEST_LOKR:
        raise LeftOut(
            f"LoKr makes a matrix of {math.prod(p.dims + p.hidden):,} entries in every call"
        )
    peft = require("peft")
    with torch.device("meta"):  # the base layer only lends its shape
        base = nn.Sequential(nn.Linear(math.prod(p.dims), math.prod(p.hidden), bias=False))
    config = peft.LoKrConfig(
        r=max(p.dims + p.hidden), alpha=max(p.dims + p.hidden), target_modules=["0"]
    )
    layer = peft.get_peft_model(base, config).base_model.model[0]
    factors = [layer.lokr_w1, layer.lokr_w2]
    for factor, weight in zip(factors, p.weights()):
        if factor["default"].shape != weight.shape:
            raise LeftOut(
                f"peft folds these sizes into {[tuple(f['default'].shape) for f in factors]}"
            )
        factor["default"] = nn.Parameter(weight.detach())
    own = [f["default"] for f in factors]
    return p.peer(lambda x: F.linear(x, layer.get_delta_weight("default")), own, flat=True)


def _dense(p: Problem) -> Peer:
    weights = math.prod(p.dims) * math.prod(p.hidden)
    if weights > LARGEST_DENSE:
        raise LeftOut(f"{weights:,} weights, more than {LARGEST_DENSE:,}")
    return p.peer(ndlinear.to_linear(p.layer).requires_grad_(), flat=True)


def rank_of_equal_size(dims, hidden) -> int:
    """Largest rank r with which x -> r -> y has at most as many parameters as NdLinear (with biases), but at least 1."""
    ends = math.prod(dims) + math.prod(hidden)
    return max(1, (ndlinear.count_parameters(dims, hidden) - math.prod(hidden)) // ends)


def fits_in_rank(case: Case) -> bool:
    """Whether a low-rank layer of rank one or more has at most as many parameters as NdLinear."""
    ends = math.prod(case.dims) + math.prod(case.hidden)
    return ends + math.prod(case.hidden) <= ndlinear.count_parameters(case.dims, case.hidden)


def _low_rank(p: Problem) -> Peer:
    rank, sizes = rank_of_equal_size(p.dims, p.hidden), (math.prod(p.dims), math.prod(p.hidden))
    first, second = (
        nn.Linear(sizes[0], rank, bias=False, **p.options),
        nn.Linear(rank, sizes[1], **p.options),
    )
    return p.peer(nn.Sequential(first, second), flat=True)


PEERS = {
    "released": _released,
    "ndlinear": lambda p: p.peer(p.layer),
    "control": _again,  # the same once more: what comes out as its ratio is noise
    "sequential": functools.partial(_again, execution="sequential"),  # Algorithm 1, literally
    "einsum": _einsum,
    "opt_einsum": _opt_einsum,
    "einmix": _einmix,
    "tcl": _tcl,
    "lokr": _lokr,
    "dense": _dense,
    "low-rank": _low_rank,
}
WITHOUT_BIASES = (
    "einsum",
    "opt_einsum",
    "tcl",
    "lokr",
)  # they compute the map alone, and so do less


def peer(p: Problem, name: str, backend: str = "inductor") -> Peer:
    """A peer by name, ready to be timed; "compiled:NAME" compiles it, "reduced:NAME" in the mode that lowers the overhead of calls,
    and "graphed:NAME" captures it as a CUDA graph.

    Raises:
        LeftOut: this peer cannot be had here; the message says why.
    """
    how, _, base = name.rpartition(":")
    if how == "graphed" and p.x.device.type != "cuda":
        raise LeftOut("CUDA graphs need a GPU")
    made = PEERS[base](p)
    if p.autocast:
        made = replace(made, call=_autocast(made.call, p.x.device.type))
    with torch.no_grad():  # not through the compiler, whose time is taken apart
        made.gradient = torch.randn_like(made.forward())
    if how in ("compiled", "reduced"):
        way = {"mode": "reduce-overhead"} if how == "reduced" and backend == "inductor" else {}
        compiled = torch.compile(made.call, fullgraph=True, dynamic=False, backend=backend, **way)
        made = replace(made, call=compiled)
    return made


# How a tensor that reaches a layer may lie in memory
LAYOUTS = {
    "dense": torch.randn_like,
    "of a sum": lambda y: torch.ones(()).expand_as(y),
    "of a mean over the last axis": lambda y: torch.rand(*y.shape[:-1], 1).expand_as(y),
    "batch last": lambda y: torch.randn(*y.shape[1:], len(y)).movedim(-1, 0),
    "strided": lambda y: torch.randn(*y.shape[:-1], 2 * y.shape[-1])[..., ::2],
}
SLOW_ONCE = (  # shapes on which an earlier layer was slower than the loop, and three others
    ((2, 2, 2), (6, 6, 2)),
    ((2, 5), (32, 32)),
    ((8, 12), (16, 16)),
    ((14, 35), (6, 19)),
    ((5, 2), (32, 32)),
    ((4, 2), (16, 64)),
    ((24, 32), (48, 64)),
    ((1, 1, 64), (1, 1, 64)),
    ((64, 8, 8), (64, 8, 8)),
    ((160, 16), (160, 16)),
)


class Loop(nn.Module):
    """The loop over the modes that anyone would write: each axis is moved to the end, mapped and moved back."""

    def __init__(self, layer: ndlinear.NdLinear):
        super().__init__()
        self.align_layers = layer.align_layers

    def forward(self, x: Tensor) -> Tensor:
        for k, linear in enumerate(self.align_layers, start=-len(self.align_layers)):
            x = linear(x.movedim(k, -1)).movedim(-1, k)
        return x


def beside_the_loop(config: dict) -> dict[str, Callable[[], object]]:
    """Calls of a layer and of the loop over its modes, on an input, or with a gradient of the output, of one layout."""
    made, lie = problem(config), LAYOUTS[config["layout"]]
    modules = {"ndlinear": made.layer, "loop": Loop(made.layer)}
    if config["pass"] == "forward":
        x = lie(made.x.detach())
        return {name: functools.partial(module, x) for name, module in modules.items()}
    inputs = [made.x, *made.layer.parameters()]
    gradient = lie(made.layer(made.x).detach())
    return {
        name: lambda module=module: torch.autograd.grad(module(made.x), inputs, gradient)
        for name, module in modules.items()
    }


def in_functions(layer: ndlinear.NdLinear) -> Callable[[Tensor], Tensor]:
    """Algorithm 1 as a loop of F.linear, without modules, checks or copies of the result."""
    steps = [(k - len(layer.order), layer.align_layers[k]) for k in layer.order]

    def loop(x):
        for axis, linear in steps:
            x = F.linear(x.movedim(axis, -1), linear.weight, linear.bias).movedim(-1, axis)
        return x

    return loop


def beside_algorithm_1(config: dict) -> dict:
    """How many times as long as a layer `execution="sequential"` and a loop of F.linear compute, in processor time of one thread.

    Each ratio is the median of those within rounds; all is measured twice.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _beside_algorithm_1(config)
    finally:
        torch.set_num_threads(threads)


def _beside_algorithm_1(config: dict) -> dict:
    p = problem(config)
    peers = {name: peer(p, name) for name in ("ndlinear", "sequential")}
    peers["loop"] = replace(peers["ndlinear"], call=in_functions(p.layer))
    calls = {name: step(made, config["pass"]) for name, made in peers.items()}
    metrics = {}
    with torch.set_grad_enabled(config["pass"] == "training"):
        for again in (1, 2):
            options = {"seed": again, "at_least": 1e-4, "clock": time.process_time}
            seconds = timing.rounds(calls, config["rounds"], **options)
            for name in ("sequential", "loop"):
                ratios = np.divide(seconds[name], seconds["ndlinear"])
                metrics[f"{name} {again}"] = float(f"{np.median(ratios):.4g}")
            metrics[f"us {again}"] = float(f"{1e6 * np.median(seconds['ndlinear']):.4g}")
    return {"metrics": metrics, "module": module_digest()}


# Libraries whose subject is the product with a Kronecker product of small matrices; without biases
KRONECKER_LIBRARIES = ("pyfastkron", "linear_operator")
KRONECKER_CASES = (
    Case("32^3", (32,) * 3, (32,) * 3, 64, "Kronecker"),
    Case("64^2", (64,) * 2, (64,) * 2, 1024, "Kronecker"),
    Case("64x8x8", (64, 8, 8), (64, 8, 8), 64, "Kronecker"),
    Case("32x64", (32, 64), (64, 96), 512, "Kronecker"),
    Case("128^2", (128,) * 2, (128,) * 2, 256, "Kronecker"),
    Case("16^4", (16,) * 4, (16,) * 4, 64, "Kronecker"),
    Case("8^5", (8,) * 5, (8,) * 5, 64, "Kronecker"),
)


def _fastkron(p: Problem) -> Peer:
    """FastKron takes each matrix as inputs by outputs, in contiguous memory."""
    multiply = require("pyfastkron.fastkrontorch").gemkm
    weights = [w.detach().T.contiguous().requires_grad_() for w in p.weights()]
    return p.peer(lambda x: multiply(x, weights), weights, flat=True)


def _linear_operator(p: Problem) -> Peer:
    """The operator of GPyTorch; it multiplies from the left, so the samples are its columns."""
    operator = require("linear_operator.operators").KroneckerProductLinearOperator
    weights = p.weights()
    return p.peer(lambda x: (operator(*weights) @ x.T).T, weights, flat=True)


KRONECKER_PEERS = {
    "ndlinear": lambda p: p.peer(p.layer),
    "control": _again,
    "sequential": functools.partial(_again, execution="sequential"),
    "fastkron": _fastkron,
    "linear_operator": _linear_operator,
}


def kronecker_peers(p: Problem) -> dict[str, Peer]:
    """The layer without biases and the two libraries, with the same weights, ready to be timed."""
    made = {name: build(p) for name, build in KRONECKER_PEERS.items()}
    for one in made.values():
        with torch.no_grad():
            one.gradient = torch.randn_like(one.forward())
    return made


def has_kronecker_libraries() -> bool:
    """Whether both libraries are installed; they are large, so nothing asks for them by itself."""
    return all(importlib.util.find_spec(name) for name in KRONECKER_LIBRARIES)


def problem(config: dict) -> Problem:
    """The problem of a configuration: dims, hidden, batch, outer, dtype, device and seed."""
    options = {name: config[name] for name in ("dtype", "device", "seed")}
    return Problem(
        sizes(config["dims"]), sizes(config["hidden"]), config["batch"], config["outer"], **options
    )


def assemble(
    p: Problem, names, backend: str = "inductor"
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be had here, and why the others are left out."""
    found, left_out = {}, {}
    for name in names:
        try:
            found[name] = peer(p, name, backend)
        except LeftOut as reason:
            left_out[name] = str(reason)
    return found, left_out


def _autocast(call: Callable, device: str) -> Callable:
    def wrapped(x):
        with torch.autocast(device, torch.bfloat16):
            return call(x)

    return wrapped


def step(made: Peer, what: str, name: str = "") -> Callable[[], object]:
    """The thing to call again and again: "forward" or "training" (forward, and the gradients of input and parameters)."""
    call = made.forward if what == "forward" else made.training
    if not name.startswith("graphed:"):
        return call
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.set_grad_enabled(what == "training"):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.set_grad_enabled(what == "training"):
        kept = call()
    return lambda: (graph.replay(), kept)


def result(
    seconds: dict[str, list[float]], left_out: dict[str, str], more: dict | None = None
) -> dict:
    """What goes into a record: median microseconds by peer, all rounds as the curve, the file that was timed, who is missing."""
    curve = {
        name: [float(f"{1e6 * value:.4g}") for value in values] for name, values in seconds.items()
    }
    medians = {name: float(np.median(values)) for name, values in curve.items()}
    return {
        "metrics": medians | (more or {}),
        "curve": curve,
        "module": module_digest(),
        "left_out": left_out,
    }


def inventory(made: Peer) -> dict[str, float]:
    """Without a clock: multiply-adds and peak bytes of the forward pass, bytes kept for backward, peak bytes of training."""
    x, device = made.x.detach(), made.x.device
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            made.call(x)
        forward = memory.peak_bytes(lambda: made.call(x), device)
    kept, training = (
        memory.saved_bytes(made.forward, made.parameters),
        memory.peak_bytes(made.training, device),
    )
    return {
        "macs": counter.get_total_flops() // 2,
        "forward": forward,
        "saved": kept,
        "training": training,
    }


def yardsticks(p: Problem, size: int = 1024) -> dict[str, Callable]:
    """What the machine can do: a matrix product of 2 ``size``^3 FLOPs, and a copy that moves as many bytes as X and Y have."""
    a, b = (torch.randn(size, size, **p.options) for _ in "ab")
    half = (p.x.numel() + p.x.shape[0] * math.prod(p.hidden)) // 2
    source, target = torch.randn(half, **p.options), torch.empty(half, **p.options)
    return {"gemm": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}


def gpu_widths() -> pd.DataFrame:
    """Of the rows of `gpu-width`, if there are any: width, modes, dtype, and how many times as fast as dense, forward."""
    rows = list(golden.current("gpu-width", read("gpu-width")).values())
    if not rows:
        return pd.DataFrame(columns=["width", "modes", "dtype", "ratio"])
    by = ["case", "modes", "dtype", "pass"]
    found = ratios(frame(rows), "dense", by=by).query("peer == 'ndlinear' and `pass` == 'forward'")
    return found.assign(width=found["case"].astype(int))


def min_macs(dims, hidden) -> int:
    """Multiply-adds per sample in the cheapest order."""
    return ndlinear.count_macs(dims, hidden, ndlinear.cheapest_order(dims, hidden))


def ratio_tables(frame: pd.DataFrame, columns, baseline: str, dtype: str = "float32") -> None:
    """Show a table of ratios for each pass, those of ndlinear with their intervals, and the microseconds of the baseline."""
    for what in ("forward", "training"):
        part = frame[frame["pass"] == what]
        wide = part.pivot(index="case", columns="peer", values="ratio")
        wide = wide.reindex(part["case"].unique())
        ours = part[part["peer"] == "ndlinear"].set_index("case")
        ours = ours[["ratio", "ratio_low", "ratio_high"]].to_numpy()
        wide["ndlinear"] = [f"{r:.2f} [{low:.2f}, {high:.2f}]" for r, low, high in ours]
        head = f"{baseline}, µs"
        wide[head] = part[part["peer"] == baseline].set_index("case")["us"]
        shown = [head, "ndlinear", *(name for name in columns if name in wide)]
        formats = {head: "{:,.0f}"} | dict.fromkeys(shown[2:], "{:.2f}")
        caption = f"{what.capitalize()}, {dtype}: how many times faster than {label(baseline)}. Empty: left out"
        table(wide[shown].reset_index(), formats, caption)


def case_table(cases) -> None:
    """Show cases with their shapes and sizes."""
    rows = [
        {
            "case": c.name,
            "where": c.where,
            "shapes": f"{c.dims} → {c.hidden}".replace(" ", "\N{NO-BREAK SPACE}"),
            "batch": c.batch,
            "parameters": ndlinear.count_parameters(c.dims, c.hidden),
            "dense weights": math.prod(c.dims) * math.prod(c.hidden),
        }
        for c in cases
    ]
    table(pd.DataFrame(rows), dict.fromkeys(["batch", "parameters", "dense weights"], "{:,}"))


# ------------------------------------------------------------------------------------------------------------ figures
def draw_against(axis, against: pd.DataFrame, cases: list[Case], what: str) -> None:
    """How many times as fast as nn.Linear and as a low-rank layer NdLinear is, one row per case, with intervals.

    Args:
        against: `timing.ratios` to "ndlinear". A low-rank layer with more parameters than NdLinear has an open mark.
    """
    part = against[against["pass"] == what].set_index(["peer", "case"])
    part = 1 / part[["ratio", "ratio_high", "ratio_low"]]
    for name in ("dense", "low-rank"):
        for place, case in enumerate(cases):
            if (name, case.name) not in part.index:
                continue
            ratio, low, high = part.loc[(name, case.name)]
            full = name == "dense" or fits_in_rank(case)
            look = {"color": colour(name), "markerfacecolor": colour(name) if full else "none"}
            axis.hlines(place, low, high, color=colour(name), linewidth=1)
            axis.plot(ratio, place, marker(name), markersize=5, **look)
    axis.axvline(1, color="0.5", linewidth=1)
    axis.set(xscale="log", xlabel=f"{what}: NdLinear is so many times as fast")
    axis.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axis.minorticks_off()


def first_large(cases: list[Case]) -> int:
    """The place of the first case whose dense layer has more than 100,000 weights, in cases sorted by them."""
    return sum(math.prod(case.dims) * math.prod(case.hidden) <= 100_000 for case in cases)


def legend_against(figure) -> None:
    """The marks of `draw_against`, above the panels."""
    more = key("low-rank") | {"markerfacecolor": "none"}
    keys = {"nn.Linear": key("dense"), "low rank": key("low-rank")}
    legend(figure, keys | {"rank one, with more parameters": more})


def draw_growth(axis, times: pd.DataFrame, shapes: list[Case], batch: int) -> None:
    """Time of a training step against the multiply-adds that it needs, and the matrix product of the same run as a line."""
    for name, text in {"dense": "nn.Linear", "ndlinear": "NdLinear"}.items():
        points = times[(times["peer"] == name) & (times["pass"] == "training")].set_index("case")
        work = {
            c.name: math.prod(c.dims) ** 2 if name == "dense" else min_macs(c.dims, c.hidden)
            for c in shapes
        }
        macs = [3 * batch * work[case] for case in points.index]
        look = {"color": colour(name), "linestyle": "none"}
        axis.plot(macs, points["us"], marker(name), label=text, **look)
    ends = np.array([3e6, 1e9])
    product = times[times["peer"] == "gemm"]["us"].median()
    name = "matrix product 1024³"
    axis.plot(ends, ends / 1024**3 * product, color="0.5", linewidth=1, label=name)
    axis.set(xscale="log", yscale="log", xlabel="multiply-adds of a step", ylabel="microseconds")
    axis.legend()


# --------------------------------------------------------------------------------------------------------- make bench
def main(arguments: list[str]) -> None:
    """Take the times of the chapters that have some."""
    for chapter in ("evidence/60_speed", "evidence/64_structured_layers"):
        bench(NOTEBOOKS / f"{chapter}.ipynb")


def bench(notebook: pathlib.Path) -> None:
    """Run the cells of a chapter that are tagged "bench", in full mode and without judging claims."""
    os.environ["NDL_MODE"] = "full"
    os.environ["NDL_BENCH"] = "1"  # times of other chapters are taken by this command only
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["import lab\n\nlab.start()"]
    code += ["".join(c["source"]) for c in cells if "bench" in c["metadata"].get("tags", [])]
    script = (
        pathlib.Path(folder()) / "bench.py"
    )  # a file: the records look up the source of the functions in it
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("\n\n".join(code), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("bench_of_this_machine", script)
    module = sys.modules["bench_of_this_machine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
