"""Times that can be compared: peers of one layer side by side, with the same weights, in one process.

`python -m lab bench` (``make bench``) measures the machine it runs on: it runs the cells of the evidence of chapter 60 that
carry the tag "bench", in full mode. The rows of another machine stay beside those that the book was written with.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndlinear

from .. import timing
from ..counts import sizes
from ..machine import module_digest, require
from ..modes import LabError, mode
from ..page.show import say
from ..released import release_folder, released

# What is left out: dense layers of more weights (no shape of the book lies between 60 and 67 million), and adapters of LoKr that
# make a matrix of more entries in every call
LARGEST_DENSE = 70_000_000
LARGEST_LOKR = 20_000_000
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
DTYPES["tf32"] = torch.float32


class Case(NamedTuple):
    """One layer and the batch it is timed with."""

    name: str
    dims: tuple[int, ...]
    hidden: tuple[int, ...]
    batch: int
    where: str
    # False: the modes are defined in the order N..1, as the released adapters do
    outer: bool = True

    @property
    def dense_weights(self) -> int:
        """Weights of the dense layer that computes the same map."""
        return math.prod(self.dims + self.hidden)


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
    fixed = {"case": case.name, "dims": dims, "hidden": hidden}
    return fixed | {"outer": case.outer, "batch": case.batch} | more


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


def small_configs(n: int, seed: int, **fixed) -> list[dict]:
    """Random small layers to hold beside Algorithm 1: two to four modes with sides of 1 to 64, one side in seven of length one.

    Batches are powers of two up to 4,096, half of the layers train, and four in seven compute in float32. What has more than
    2^20 numbers in its largest tensor, or more than 10^7 multiply-adds (10^6 of 16 bits), is drawn again.
    """
    draw, made = random.Random(seed), []

    def side() -> int:
        return 1 if draw.random() < 1 / 7 else round(2 ** draw.uniform(0, 6))

    while len(made) < n:
        modes = draw.choice((2, 2, 3, 4))
        dims, hidden = (tuple(side() for _ in range(modes)) for _ in "DH")
        batch, outer = 2 ** draw.randint(0, 12), draw.random() < 0.5
        dtype = draw.choice(("float32",) * 4 + ("float64", "bfloat16", "float16"))
        what = draw.choice(("forward", "training"))
        order = range(modes)[:: 1 if outer else -1]
        macs = batch * ndlinear.count_macs(dims, hidden, order)
        largest = batch * math.prod(map(max, zip(dims, hidden)))
        if largest <= 2**20 and macs <= (1e6 if dtype.endswith("16") else 1e7):
            case = Case(f"small{len(made)}", dims, hidden, batch, "random", outer)
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
        # only GPUs know the difference
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        self.dims, self.hidden, self.outer = tuple(dims), tuple(hidden), outer
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
    # from left to right, as where opt_einsum is not installed
    torch.backends.opt_einsum.enabled = False
    return p.peer(lambda x: torch.einsum(text, x, *weights), weights)


def _opt_einsum(p: Problem) -> Peer:
    text, weights = _subscripts(len(p.dims)), p.weights()
    shapes = [tuple(p.x.shape), *(tuple(w.shape) for w in weights)]
    # finds the path once, for this batch size
    expression = require("opt_einsum").contract_expression(text, *shapes)
    return p.peer(lambda x: expression(x, *weights), weights)


def _einmix(p: Problem) -> Peer:
    """One EinMix of einops per mode, with the bias of the mode."""
    mix, modes, steps = require("einops.layers.torch").EinMix, range(len(p.dims)), []
    for k in modes if p.outer else reversed(modes):
        before = " ".join(f"d{j}" for j in modes)
        shapes = {"weight_shape": f"h{k} d{k}", f"d{k}": p.dims[k], f"h{k}": p.hidden[k]}
        bias = p.layer.biases[k]
        if bias is not None:
            shapes["bias_shape"] = f"h{k}"
        step = mix(f"z {before} -> z {before.replace(f'd{k}', f'h{k}')}", **shapes).to(**p.options)
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
    entries = math.prod(p.dims + p.hidden)
    if entries > LARGEST_LOKR:
        raise LeftOut(f"LoKr makes a matrix of {entries:,} entries in every call")
    peft, rank = require("peft"), max(p.dims + p.hidden)
    with torch.device("meta"):  # the base layer only lends its shape
        base = nn.Sequential(nn.Linear(math.prod(p.dims), math.prod(p.hidden), bias=False))
    config = peft.LoKrConfig(r=rank, alpha=rank, target_modules=["0"])
    layer = peft.get_peft_model(base, config).base_model.model[0]
    factors = [layer.lokr_w1, layer.lokr_w2]
    folds = [tuple(factor["default"].shape) for factor in factors]
    if folds != [tuple(weight.shape) for weight in p.layer.weights]:
        raise LeftOut(f"peft folds these sizes into {folds}")
    for factor, weight in zip(factors, p.weights()):
        factor["default"] = nn.Parameter(weight.detach())
    own = [f["default"] for f in factors]
    return p.peer(lambda x: F.linear(x, layer.get_delta_weight("default")), own, flat=True)


def _dense(p: Problem) -> Peer:
    weights = math.prod(p.dims + p.hidden)
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
    rank = rank_of_equal_size(p.dims, p.hidden)
    first = nn.Linear(math.prod(p.dims), rank, bias=False, **p.options)
    second = nn.Linear(rank, math.prod(p.hidden), **p.options)
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


def peer(p: Problem, name: str) -> Peer:
    """A peer by name, ready to be timed; "graphed:NAME" is to be captured as a CUDA graph.

    Raises:
        LeftOut: this peer cannot be had here; the message says why.
    """
    how, _, base = name.rpartition(":")
    if how and p.x.device.type != "cuda":
        raise LeftOut("CUDA graphs need a GPU")
    made = PEERS[base](p)
    with torch.no_grad():
        made.gradient = torch.randn_like(made.forward())
    return made


def problem(config: dict) -> Problem:
    """The problem of a configuration: dims, hidden, batch, outer, dtype, device and seed."""
    options = {name: config[name] for name in ("batch", "outer", "dtype", "device", "seed")}
    return Problem(sizes(config["dims"]), sizes(config["hidden"]), **options)


def assemble(p: Problem, names) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be had here, and why the others are left out."""
    found, left_out = {}, {}
    for name in names:
        try:
            found[name] = peer(p, name)
        except LeftOut as reason:
            left_out[name] = str(reason)
    return found, left_out


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


@contextlib.contextmanager
def one_thread():
    """A single thread inside a with block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(peers: dict[str, Peer], config: dict, left_out: dict | None = None, **more) -> dict:
    """The row of a configuration: the peers, and ``more`` calls, in ``rounds`` of its ``pass`` on its ``device``."""
    calls = {name: step(made, config["pass"], name) for name, made in peers.items()} | more
    with torch.set_grad_enabled(config["pass"] == "training"):
        how = {"seed": config["seed"], "device": config["device"]}
        return result(timing.rounds(calls, config["rounds"], **how), left_out)


def result(seconds: dict[str, list[float]], left_out: dict | None = None) -> dict:
    """What goes into a record: median microseconds by peer, all rounds as the curve, the file that was timed, who is missing."""
    curve = {name: [float(f"{1e6 * v:.4g}") for v in values] for name, values in seconds.items()}
    medians = {name: float(np.median(values)) for name, values in curve.items()}
    row = {"metrics": medians, "curve": curve}
    return row | {"module": module_digest(), "left_out": left_out or {}}


def yardsticks(p: Problem, size: int = 1024) -> dict[str, Callable]:
    """What the machine can do: a matrix product of 2 ``size``^3 FLOPs, and a copy that moves as many bytes as X and Y have."""
    a, b = (torch.randn(size, size, **p.options) for _ in "ab")
    half = (p.x.numel() + p.x.shape[0] * math.prod(p.hidden)) // 2
    source, target = torch.randn(half, **p.options), torch.empty(half, **p.options)
    return {"gemm": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}
