"""Chapter 64: residual networks of structured layers, their rates by rule, and the training of many seeds at once."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlinear_guide import layers, schedule

from ..data import load, split
from ..decoder import Decoder
from ..page import figures
from ..stats import above, below, interval
from ..timing import rounds
from ..train import Split, many
from ..train.scores import accuracy

SQUARE = {64: (8, 8), 144: (12, 12), 256: (16, 16)}  # width: two modes
CUBE = {64: (4, 4, 4), 144: (4, 6, 6), 256: (8, 8, 4)}
BASE = 64  # the width of the dense layer whose rate is the base rate
WORST = 1e6  # what is recorded in place of a number that is larger or none


# ------------------------------------------------------------------------------------------------------------- the arms
def _tied(width: int, groups: int | None, rank: int = 1) -> layers.Structured:
    return layers.BlockTensorTrain(SQUARE[width], SQUARE[width], rank, groups)


ARMS: dict[str, Callable[[int], layers.Structured]] = {
    "dense": lambda d: layers.Dense(d, d),
    "low-rank": lambda d: layers.LowRank(d, d, math.isqrt(d)),
    "low-rank-1": lambda d: layers.LowRank(d, d, 1),
    "blocks": lambda d: layers.BlockDiagonal(d, d, math.isqrt(d)),
    "blocks-of-2": lambda d: layers.BlockDiagonal(d, d, d // 2),
    "ndlinear": lambda d: layers.Kronecker(SQUARE[d], SQUARE[d]),
    "ndlinear-3": lambda d: layers.Kronecker(CUBE[d], CUBE[d]),
    "ndlinear-sum": lambda d: layers.Kronecker(SQUARE[d], SQUARE[d], terms=2),
    "tied-4": lambda d: _tied(d, 4),
    "monarch": lambda d: _tied(d, None),
    "btt-2": lambda d: _tied(d, None, rank=2),
}


class Block(nn.Module):
    """x + B(relu(A(norm(x)))), A and B of one kind; the last matrix of B starts at zero."""

    def __init__(self, arm: str, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = ARMS[arm](width)
        self.second = ARMS[arm](width)
        for weight in self.second.last():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(self.norm(x))))


class Residual(nn.Module):
    """A dense embedding (none where ``inputs`` is the width), three residual blocks, a norm and a dense read-out."""

    def __init__(self, arm: str, inputs: int, width: int, outputs: int, blocks: int = 3):
        super().__init__()
        self.embed = nn.Identity() if inputs == width else layers.Dense(inputs, width)
        self.blocks = nn.Sequential(*[Block(arm, width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.read_out = layers.Dense(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.read_out(self.norm(self.blocks(self.embed(x))))


def size(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(p.numel() for p in model.parameters())


def multiply_adds(model: nn.Module) -> int:
    """Multiply-adds of the linear layers for one sample."""
    found = [m for m in model.modules() if isinstance(m, layers.Structured)]
    return sum(layer.multiply_adds() for layer in found)


NARROW = {"dense-params": (size, "ndlinear"), "dense-macs": (multiply_adds, "monarch")}


@functools.cache
def narrow(arm: str, inputs: int, width: int, outputs: int) -> int:
    """The width of a dense network that has no more of something than another arm of ``width``: the parameters of the NdLinear
    network ("dense-params"), or the multiply-adds of the Monarch network ("dense-macs")."""
    count, like = NARROW[arm]
    with torch.random.fork_rng():  # the sizes matter, the numbers are drawn for nothing
        limit = count(Residual(like, inputs, width, outputs))
        fits = [w for w in range(1, width) if count(Residual("dense", inputs, w, outputs)) <= limit]
    return fits[-1]


def network(arm: str, inputs: int, width: int, outputs: int) -> Residual:
    """The network of an arm; two arms are dense networks that are narrower than ``width``."""
    if arm in NARROW:
        return Residual("dense", inputs, narrow(arm, inputs, width, outputs), outputs)
    return Residual(arm, inputs, width, outputs)


# ---------------------------------------------------------------------------------------------------------------- rates
def rates(model: nn.Module, lr: float, how: str) -> dict[str, float]:
    """The rate of each parameter by name, for a base rate that is meant for a dense layer of 64 numbers.

    "rule": a matrix that reads n numbers and is one of s in a row gets lr * 64 / (n s). "one rate": all matrices of a layer get
    what a dense layer of its size would get, lr * 64 / D. The embedding reads the same inputs at every width: it, biases and
    norms get lr.
    """
    found = dict.fromkeys(dict(model.named_parameters()), lr)
    names = {id(p): name for name, p in model.named_parameters()}
    for path, layer in model.named_modules():
        if not isinstance(layer, layers.Structured) or path == "embed":
            continue
        for weight, inputs, _ in layer.matrices():
            reads = inputs * layer.steps if how == "rule" else layer.in_features
            found[names[id(weight)]] = lr * BASE / reads
    return found


# ------------------------------------------------------------------------------------------------------------- training
def squared_error(out: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of one output against targets (n,)."""
    return (out.squeeze(-1) - target).square().mean()


# ---------------------------------------------------------------------------------------------------- task A: a teacher
@functools.lru_cache(maxsize=8)
def teacher(seed: int, count: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Gaussian inputs of 8 numbers and the answers of a random ReLU network of width 128 with four matrices, one for each seed;
    answers of mean 0 and deviation 1."""
    draw = torch.Generator().manual_seed(7_000 + seed)
    tests = min(count, 8192)
    sizes = (8, 128, 128, 128, 1)
    x = torch.randn(count + tests, sizes[0], generator=draw)
    y = x
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        weight = torch.randn(outputs, inputs, generator=draw) * math.sqrt(2 / inputs)
        y = (y.relu() if i else y) @ weight.T
    y = y[:, 0]
    y = (y - y.mean()) / y.std()
    return {"train": (x[:count], y[:count]), "test": (x[count:], y[count:])}


def teacher_parts(seeds: Sequence[int], count: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """The teachers of several seeds: each part of all of them."""
    found = [teacher(seed, count) for seed in seeds]
    return {part: [own[part] for own in found] for part in ("train", "test")}


def fit(
    make: Callable[[], nn.Module],
    parts: dict,
    *,
    seeds: Sequence[int],
    rate: Callable[[nn.Module], dict[str, float]],
    loss: Callable,
    scores: dict[str, Callable],
    steps: int,
    batch: int,
    checks: int = 0,
) -> list[dict[str, float]]:
    """Train a network for each seed with rates of its parameters and a schedule; what each does on the test part.

    Args:
        parts: as in `lab.train.many.fit`. checks: how often to look at the validation part; the weights with the lowest loss
            there are tested. 0: the last weights are.
    """
    options = {"schedule": schedule, "looks": checks, "finite": False}
    plan = many.Plan(steps=steps, batch=batch, lr=rate, **options)
    fitted = many.fit(make, parts, plan, seeds=seeds, loss=loss)
    rows = []
    for low, tested in zip(fitted.lowest, fitted.score(parts["test"], {"loss": loss, **scores})):
        row = {f"test_{name}": value for name, value in tested.items()}
        row |= {"val_loss": low} if checks else {}
        row["diverged"] = float(not math.isfinite(tested["loss"]))
        rows.append({n: value if value <= WORST else WORST for n, value in row.items()})
    return rows


TEACHER_BATCH = 128


@functools.cache
def steps_for(flops: float, arm: str, width: int) -> int:
    """Training steps that a budget of operations allows: six for each multiply-add of the linear layers and each sample."""
    macs = multiply_adds(network(arm, 8, width, 1))
    return max(1, round(flops / (6 * macs * TEACHER_BATCH)))


def train_teacher(configs: list[dict]) -> list[dict]:
    """Task A for all seeds of a configuration: arm, width, how, lr, steps, pool."""
    c, seeds = configs[0], [config["seed"] for config in configs]
    make = functools.partial(network, c["arm"], 8, c["width"], 1)
    found = fit(
        make,
        teacher_parts(seeds, c["pool"]),
        seeds=seeds,
        rate=functools.partial(rates, lr=c["lr"], how=c["how"]),
        loss=squared_error,
        scores={},
        steps=c["steps"],
        batch=TEACHER_BATCH,
    )
    return [{"metrics": metrics, **costs(make())} for metrics in found]


def costs(model: Residual) -> dict[str, int]:
    """Parameters, and multiply-adds for one sample."""
    return {"parameters": size(model), "macs": multiply_adds(model)}


# ------------------------------------------------------------------------------------------------- task C: few samples
def share(name: str, seed: int, part: float) -> Split:
    """A random split of a data set of pictures or series as flat vectors; ``part`` of the 60 % of the cases that there are to
    train on, 10 % to validate, the rest to test."""
    data = load(name)
    x = data.x.reshape(len(data.x), -1)
    width = next(d for d in SQUARE if d >= x.shape[1])
    left = (width - x.shape[1]) // 2
    x = np.pad(x, ((0, 0), (left, width - x.shape[1] - left)), mode="edge")
    train = 0.6 * part
    return split(x, data.y, seed=seed, parts=(train, 0.1, 0.9 - train), standardise="all")


def train_share(configs: list[dict]) -> list[dict]:
    """Task C for all seeds of a configuration: data, arm, part, lr, steps."""
    c, seeds = configs[0], [config["seed"] for config in configs]
    splits = [share(c["data"], seed, c["part"]) for seed in seeds]
    width = splits[0].train[0].shape[1]
    classes = int(max(s.test[1].max() for s in splits)) + 1
    make = functools.partial(network, c["arm"], width, width, classes)
    parts = many.parts_of(splits)
    found = fit(
        make,
        parts,
        seeds=seeds,
        rate=functools.partial(rates, lr=c["lr"], how="rule"),
        loss=F.cross_entropy,
        scores={"accuracy": accuracy},
        steps=c["steps"],
        batch=64,
        checks=10,
    )
    return [{"metrics": metrics, **costs(make())} for metrics in found]


# --------------------------------------------------------------------------- task B: pictures, pixels in place or shuffled
@functools.lru_cache(maxsize=1)
def grey() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """CIFAR-10 as grey pictures of 16 x 16: the mean of the three colours and of two by two pixels; (n, 256) and labels."""
    data = load("cifar10")
    blocks = data.x.reshape(-1, 3, 16, 2, 16, 2)
    x = blocks.mean((1, 3, 5), dtype=np.float32).reshape(len(data.x), -1)
    return {part: (x[data.splits[part]], data.y[data.splits[part]]) for part in ("train", "test")}


def pictures(seed: int, part: float, order: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Grey pictures for one seed: a tenth of the training pictures to validate, ``part`` of the others to train, the official test
    part. ``order``: pixels "in place", or "shuffled", by one permutation for all pictures of the seed."""
    draw = np.random.default_rng(9_000 + seed)
    (x, y), test = grey()["train"], grey()["test"]
    drawn = draw.permutation(len(x))
    held_out = len(x) // 10
    chosen = drawn[held_out : held_out + round(part * (len(x) - held_out))]
    parts = {
        "train": (x[chosen], y[chosen]),
        "val": (x[drawn[:held_out]], y[drawn[:held_out]]),
        "test": test,
    }
    pixels = draw.permutation(x.shape[1]) if order == "shuffled" else np.arange(x.shape[1])
    mean, deviation = x[chosen].mean(), x[chosen].std()
    return {
        name: (torch.from_numpy((x[:, pixels] - mean) / deviation), torch.from_numpy(y))
        for name, (x, y) in parts.items()
    }


def train_pictures(configs: list[dict]) -> list[dict]:
    """Task B for all seeds of a configuration: order, arm, part, lr, steps."""
    c, seeds = configs[0], [config["seed"] for config in configs]
    drawn = [pictures(seed, c["part"], c["order"]) for seed in seeds]
    parts = {name: [own[name] for own in drawn] for name in drawn[0]}
    make = functools.partial(network, c["arm"], 256, 256, 10)
    found = fit(
        make,
        parts,
        seeds=seeds,
        rate=functools.partial(rates, lr=c["lr"], how="rule"),
        loss=F.cross_entropy,
        scores={"accuracy": accuracy},
        steps=c["steps"],
        batch=128,
        checks=10,
    )
    samples = {"samples": len(parts["train"][0][1])}
    return [{"metrics": metrics | samples, **costs(make())} for metrics in found]


# --------------------------------------------------------------------------------------------------- task D: characters
VOCABULARY = 96  # the commonest characters, and one number for all others
CONTEXT = 64
WINDOWS = {"train": 2**16, "valid": 512, "test": 1024}  # at most so many, evenly spaced


@functools.lru_cache(maxsize=1)
def characters() -> dict[str, tuple[Tensor, Tensor]]:
    """WikiText-2 in windows of 64 characters: their numbers, and those of the characters that follow; (windows, 64) each."""
    data = load("wikitext2")
    texts = {part: "\n".join(data.x[data.splits[part]]) for part in WINDOWS}
    common = collections.Counter(texts["train"]).most_common(VOCABULARY - 1)
    numbers = np.full(0x110000, VOCABULARY - 1)
    for i, (character, _) in enumerate(common):
        numbers[ord(character)] = i
    return {
        "val" if part == "valid" else part: _windows(
            torch.from_numpy(numbers[np.frombuffer(text.encode("utf-32-le"), np.uint32)]),
            WINDOWS[part],
        )
        for part, text in texts.items()
    }


def _windows(numbers: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most so many windows of a text, side by side without overlap, and the same one character later."""
    count = (len(numbers) - 1) // CONTEXT
    kept = torch.linspace(0, count - 1, min(most, count)).round().long()
    first, later = (
        numbers[shift : shift + count * CONTEXT].view(count, CONTEXT)[kept] for shift in (0, 1)
    )
    return first, later


class FeedForward(nn.Module):
    """B(relu(A(x))), A and B of one kind; the last matrix of B starts at zero."""

    def __init__(self, first: layers.Structured, second: layers.Structured):
        super().__init__()
        self.first = first
        self.second = second
        for weight in second.last():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


WIDER: dict[str, Callable[..., layers.Structured]] = {  # two tables (8, 8), (16, 16), either way
    "dense": lambda t, u: layers.Dense(math.prod(t), math.prod(u)),
    "low-rank": lambda t, u: layers.LowRank(math.prod(t), math.prod(u), 9),
    "blocks": lambda t, u: layers.BlockDiagonal(math.prod(t), math.prod(u), 8),
    "blocks-64": lambda t, u: layers.BlockDiagonal(math.prod(t), math.prod(u), 64),
    "ndlinear": lambda t, u: layers.Kronecker(t, u),
    "ndlinear-3": lambda t, u: layers.Kronecker(FOLDED[t], FOLDED[u]),
    "tied-4": lambda t, u: layers.BlockTensorTrain(t, u, groups=4),
    "monarch": lambda t, u: layers.BlockTensorTrain(t, u),
}
FOLDED = {(8, 8): (4, 4, 4), (16, 16): (8, 8, 4)}


def feed_forward(arm: str) -> FeedForward:
    """The feed-forward block of an arm, from 64 numbers to 256 and back; two are dense blocks with fewer than 256."""
    if arm in NARROW:
        return dense_block(narrow_block(arm))
    up, down = WIDER[arm]((8, 8), (16, 16)), WIDER[arm]((16, 16), (8, 8))
    return FeedForward(up, down)


def dense_block(hidden: int) -> FeedForward:
    """A dense feed-forward block."""
    return FeedForward(layers.Dense(64, hidden), layers.Dense(hidden, 64))


@functools.cache
def narrow_block(arm: str) -> int:
    """How many hidden numbers a dense block can have for the parameters of the NdLinear block ("dense-params") or the
    multiply-adds of the Monarch block ("dense-macs")."""
    count, like = NARROW[arm]
    with torch.random.fork_rng():  # the sizes matter, the numbers are drawn for nothing
        limit = count(feed_forward(like))
        fits = [hidden for hidden in range(1, 256) if count(dense_block(hidden)) <= limit]
    return fits[-1]


def decoder(arm: str) -> Decoder:
    """Two layers of width 64 with four heads, the output tied to the embedding; every feed-forward block is that of an arm."""
    block = functools.partial(feed_forward, arm)
    model = Decoder(VOCABULARY, CONTEXT, 64, layers=2, heads=4, block=block)
    for embedding in (model.tokens, model.positions):
        nn.init.normal_(embedding.weight, std=64**-0.5)
    return model


def next_character(out: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of logits (windows, 64, vocabulary) in nats for each character."""
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def train_characters(configs: list[dict]) -> list[dict]:
    """Task D for all seeds of a configuration: arm, lr, steps. The multiply-adds are those of the feed-forward blocks."""
    c, seeds = configs[0], [config["seed"] for config in configs]
    make = functools.partial(decoder, c["arm"])
    found = fit(
        make,
        characters(),
        seeds=seeds,
        rate=functools.partial(rates, lr=c["lr"], how="rule"),
        loss=next_character,
        scores={},
        steps=c["steps"],
        batch=16,
        checks=1,
    )
    return [{"metrics": metrics, **costs(make())} for metrics in found]


# ------------------------------------------------------------------------------------------------------ reading records
def log_ratio(
    runs: pd.DataFrame, arm: str, other: str, metric: str = "test_loss"
) -> tuple[float, float, float]:
    """Mean and 95 % interval of the difference of two arms' log losses, paired by seed: negative where ``arm`` is better."""
    wide = np.log(runs.pivot(index="seed", columns="arm", values=metric))
    return interval((wide[arm] - wide[other]).dropna())


def gain_in_place(runs: pd.DataFrame, arm: str, other: str) -> tuple[float, float, float]:
    """Rule R4: by how much more the log loss of ``arm`` than that of ``other`` is lower with the pixels in place than shuffled;
    mean and 95 % interval, paired by seed."""
    logs = np.log(runs.pivot(index="seed", columns=["arm", "order"], values="test_loss"))
    gain = {a: logs[a]["shuffled"] - logs[a]["in place"] for a in (arm, other)}
    return interval((gain[arm] - gain[other]).dropna())


WORDS = {True: "worse", False: "better", None: "not told apart"}


def word(found: tuple[float, float, float]) -> str:
    """What an interval of `log_ratio` says about its first arm."""
    return WORDS[above(found)]


def reversal(first: tuple, last: tuple) -> bool | None:
    """Rule R3: whether two intervals exclude zero and lie on different sides; None if one holds zero."""
    signs = above(first), above(last)
    return None if None in signs else signs[0] != signs[1]


def better_width(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of each arm at its width of the lowest mean log loss."""
    means = np.log(runs["test_loss"]).groupby([runs["arm"], runs["width"]]).mean()
    chosen = dict(means.groupby("arm").idxmin().to_list())
    return runs[runs["width"] == runs["arm"].map(chosen)]


def winner(runs: pd.DataFrame, arms: Sequence[str]) -> dict:
    """The answer of a scenario: the arm with the lowest mean log loss, those not told apart from it, and the interval against
    the next one."""
    logs = np.log(
        runs[runs["arm"].isin(arms)].pivot(index="seed", columns="arm", values="test_loss")
    )
    order = logs.mean().sort_values().index
    first = order[0]
    against = {arm: log_ratio(runs, first, arm) for arm in order[1:]}
    near = [arm for arm, found in against.items() if below(found) is not True]
    return {"best": first, "near": near, "next": order[1], "interval": against[order[1]]}


def answer(found: dict) -> str:
    """The answer in words."""
    names = ", ".join(name(arm) for arm in [found["best"], *found["near"]])
    return f"not told apart: {names}" if found["near"] else names


NAMES = {  # where the figures' style has another name, or none
    "low-rank": "low rank √d",
    "low-rank-1": "low rank 1",
    "blocks": "√d blocks",
    "blocks-of-2": "blocks of 2",
    "blocks-64": "64 blocks",
    "tied-4": "four groups",
    "monarch": "Monarch",
    "btt-2": "BTT, rank 2",
    "ndlinear-3": "NdLinear, three modes",
    "ndlinear-sum": "NdLinear, two terms",
    "dense-params": "narrow dense, equal parameters",
    "dense-macs": "narrow dense, equal operations",
}


def name(arm: str) -> str:
    """What a reader calls an arm of chapter 64."""
    return NAMES.get(arm, figures.label(arm))


def named(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the name of their layer in a column ``layer``, counts and rate in words."""
    words = {"macs": "multiply-adds", "lr": "rate"}
    return runs.assign(layer=runs["arm"].map(name)).rename(columns=words)


# -------------------------------------------------------------------------------------------------- scenarios and answers
EQUAL_MACS = ["dense", "low-rank", "blocks", "ndlinear", "ndlinear-3", "ndlinear-sum"]
EQUAL_MACS += ["tied-4", "monarch", "btt-2"]
EQUAL_PARAMETERS = ["low-rank-1", "blocks-of-2", "dense-params"]  # as many as NdLinear, or fewer
TREE = {
    "operations": "blocks",
    "parameters": "ndlinear",
    "": "dense",
}  # what is scarce -> its advice


class Scenario(NamedTuple):
    """What someone has and may spend: which layers are admitted, the runs, and what the decision tree is asked."""

    name: str
    budget: str
    arms: list[str]
    runs: pd.DataFrame
    limit: str  # what is scarce: the question of the decision tree


def teacher_scenarios(runs: pd.DataFrame) -> list[Scenario]:
    """Task A: at each budget of operations, every layer at its better width; and at each width those of equal parameters."""
    found = []
    for budget, part in runs.groupby("budget", sort=False):
        text = f"{budget:.0e} operations".replace("e+", "e")
        equal = better_width(part[part["arm"].isin(EQUAL_MACS)])
        found.append(Scenario("teacher", text, EQUAL_MACS, equal, "operations"))
    arms = ["ndlinear", *EQUAL_PARAMETERS]
    largest = runs[runs["budget"] == runs["budget"].max()]
    if not set(arms) <= set(largest["arm"]):
        return found
    for width, part in largest.groupby("width"):
        size = part.loc[part["arm"] == "ndlinear", "parameters"].iloc[0]
        text = f"{size:,} parameters, width {width}"
        found.append(Scenario("teacher", text, arms, part, "parameters"))
    return found


def share_scenarios(data: str, runs: pd.DataFrame, samples: int) -> list[Scenario]:
    """Task C: for each share of the ``samples`` three budgets, no more operations than Monarch, no more parameters than NdLinear,
    and none."""
    counts = runs.groupby("arm")[["parameters", "macs"]].first()
    limits = {
        "operations": counts.index[counts["macs"] <= counts.loc["monarch", "macs"]],
        "parameters": counts.index[counts["parameters"] <= counts.loc["ndlinear", "parameters"]],
        "": counts.index,
    }
    found = []
    for part, own in runs.groupby("part"):
        count = round(part * samples)
        for limit, arms in limits.items():
            text = f"equal {limit}" if limit else "no limit"
            title = f"{data}, {count:,} samples"
            found.append(Scenario(title, text, list(arms), own, limit))
    return found


def picture_scenarios(runs: pd.DataFrame) -> list[Scenario]:
    """Task B: for each order of the pixels and number of samples the three budgets of task C."""
    found = []
    for order, own in runs.groupby("order"):
        most = int(own["samples"].max())
        found += share_scenarios(f"pixels {order}", own, most)
    return found


def character_scenarios(runs: pd.DataFrame) -> list[Scenario]:
    """Task D: the three budgets; the samples are windows of 64 characters."""
    windows = 16 * int(runs["steps"].iloc[0])
    return share_scenarios("characters", runs.assign(part=1.0), windows)


def answers(scenarios: Sequence[Scenario]) -> pd.DataFrame:
    """One row for each scenario: the answer, by how many percent the best layer's loss is below the next one's, what the tree
    advises, and whether that is the best layer or not told apart from it."""
    rows = []
    for scenario in scenarios:
        found = winner(scenario.runs, scenario.arms)
        best = found["best"], *found["near"]
        advised = TREE[scenario.limit]
        below_next = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*map(percent, found["interval"]))
        rows.append(
            {
                "scenario": scenario.name,
                "budget": scenario.budget,
                "answer": answer(found),
                "best minus next, %": below_next,
                "advised": name(advised),
                "agrees": advised in best,
            }
        )
    return pd.DataFrame(rows)


def right(scenarios: Sequence[Scenario]) -> pd.DataFrame:
    """In how many scenarios of each budget a layer has the lowest mean log loss of those admitted, or is not told apart from it."""
    counts = collections.Counter()
    for scenario in scenarios:
        found = winner(scenario.runs, scenario.arms)
        counts.update((scenario.limit, arm) for arm in (found["best"], *found["near"]))
    return pd.Series(counts).unstack(fill_value=0)


def percent(log: float) -> float:
    """A difference of logarithms as a change in percent."""
    return 100 * math.expm1(log)


def in_seconds(runs: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Task A over seconds of layers: one row for each timed layer, width and budget.

    Args:
        runs: of task A. times: microseconds of one layer, rows of `time_layers`; the medians of the training pass at the
            batch of task A are taken.

    Returns:
        ``seconds`` of the six structured layers in all steps of a run, each alone; ``loss``, the geometric mean; ``beaten``,
        whether another row takes no more seconds and has a lower loss, by the 95 % interval paired by seed.
    """
    like = (times["batch"] == TEACHER_BATCH) & (times["pass"] == "training")
    each = times[like].groupby("width")[TIMED].median()
    rows = []
    for (arm, width, budget), own in runs.groupby(["arm", "width", "budget"]):
        if arm in TIMED:
            seconds = 6 * own["steps"].iloc[0] * each.loc[width, arm] / 1e6
            row = {"arm": arm, "width": width, "budget": budget, "seconds": seconds}
            rows.append(row | {"logs": np.log(own.set_index("seed")["test_loss"])})
    for row in rows:
        quick = [other for other in rows if other["seconds"] <= row["seconds"]]
        ahead = [below(interval((other["logs"] - row["logs"]).dropna())) for other in quick]
        row["beaten"] = any(found is True for found in ahead)
        row["loss"] = math.exp(row["logs"].mean())
    return pd.DataFrame(rows).drop(columns="logs")


# ----------------------------------------------------------------------------------------------------------------- time
TIMED = [
    "dense",
    "low-rank",
    "blocks",
    "monarch",
    "btt-2",
    "ndlinear",
    "ndlinear-3",
    "ndlinear-sum",
]
THREE = {64: (4, 4, 4), 256: (8, 8, 4), 1024: (16, 8, 8), 4096: (16, 16, 16)}


def timed_layer(arm: str, width: int) -> layers.Structured:
    """The layer of an arm at a width that is a square, as in `ARMS`."""
    two = (math.isqrt(width),) * 2
    return {
        "dense": lambda: layers.Dense(width, width),
        "low-rank": lambda: layers.LowRank(width, width, two[0]),
        "blocks": lambda: layers.BlockDiagonal(width, width, two[0]),
        "monarch": lambda: layers.BlockTensorTrain(two, two),
        "btt-2": lambda: layers.BlockTensorTrain(two, two, rank=2),
        "ndlinear": lambda: layers.Kronecker(two, two),
        "ndlinear-3": lambda: layers.Kronecker(THREE[width], THREE[width]),
        "ndlinear-sum": lambda: layers.Kronecker(two, two, terms=2),
    }[arm]()


def time_layers(config: dict) -> dict:
    """Microseconds of one layer of each kind, side by side: width, batch, pass ("forward" or "training": forward and the
    gradients of the input and of all parameters), rounds, seed."""
    x = torch.randn(config["batch"], config["width"], requires_grad=True)
    gradient = torch.randn_like(x)
    calls = {}
    for arm in TIMED:
        layer = timed_layer(arm, config["width"])
        wanted = [x, *layer.parameters()]
        if config["pass"] == "forward":
            calls[arm] = torch.no_grad()(functools.partial(layer, x))
        else:
            calls[arm] = functools.partial(_step, layer, x, wanted, gradient)
    seconds = rounds(calls, config["rounds"], seed=config["seed"])
    curve = {arm: [float(f"{1e6 * v:.4g}") for v in values] for arm, values in seconds.items()}
    return {"metrics": {arm: float(np.median(v)) for arm, v in curve.items()}, "curve": curve}


def _step(layer: nn.Module, x: Tensor, wanted: list[Tensor], gradient: Tensor) -> None:
    torch.autograd.grad(layer(x), wanted, gradient)


# -------------------------------------------------------------------------------------------------------------- figures
def gaps(groups: dict[str, pd.DataFrame], arms: Sequence[str], other: str) -> pd.DataFrame:
    """By how many percent the loss of some arms lies above that of another one, in each group of runs that has both."""
    rows = []
    for title, runs in groups.items():
        for arm in arms:
            if {arm, other} <= set(runs["arm"]):
                mean, low, high = map(percent, log_ratio(runs, arm, other))
                rows.append({"group": title, "arm": arm, "mean": mean, "low": low, "high": high})
    return pd.DataFrame(rows)


def draw_gaps(axis, found: pd.DataFrame) -> None:
    """One row for each group, one mark with its interval for each arm; the arm that all are compared with is the line at zero."""
    groups = list(dict.fromkeys(found["group"]))
    arms = list(dict.fromkeys(found["arm"]))
    for i, arm in enumerate(arms):
        own = found[found["arm"] == arm]
        shift = 0.7 * ((i + 0.5) / len(arms) - 0.5)
        at = [groups.index(title) + shift for title in own["group"]]
        figures.intervals(axis, at, own[["mean", "low", "high"]], arm, ms=5, label=name(arm))
    figures.rows(axis, groups)


def draw_seconds(axis, found: pd.DataFrame) -> None:
    """Rows of `in_seconds`, a line for each layer and width, its wider layer with hollow marks; a ring around those that no other
    beats."""
    for (arm, width), own in found.sort_values("seconds").groupby(["arm", "width"]):
        look = {"color": figures.colour(arm), "marker": figures.marker(arm), "linewidth": 0.8}
        if width > BASE:
            look |= {"markerfacecolor": "none", "linestyle": ":"}
        axis.plot(own["seconds"], own["loss"], label=name(arm) if width == BASE else None, **look)
    front = found[~found["beaten"]]
    ring = {"s": 150, "facecolors": "none", "edgecolors": "0.5"}
    axis.scatter(front["seconds"], front["loss"], **ring)
    axis.set(xscale="log", yscale="log", xlabel="seconds of the structured layers")


def losses_by_order(runs: pd.DataFrame) -> pd.DataFrame:
    """Task B: by how many percent the loss of each layer is higher with shuffled pixels, for each number of samples."""
    rows = []
    for (samples, arm), own in runs.groupby(["samples", "arm"]):
        change = log_ratio(own.assign(arm=own["order"]), "shuffled", "in place")
        mean, low, high = map(percent, change)
        row = {"layer": arm, "samples": samples, "mean": mean, "low": low, "high": high}
        rows.append(row)
    return pd.DataFrame(rows)


def draw_orders(axis, found: pd.DataFrame) -> None:
    """Rows of `losses_by_order`: a row for each layer, a mark with its interval for each number of samples."""
    order = found.groupby("layer")["mean"].max().sort_values().index.tolist()
    for shift, (samples, own) in zip((-0.15, 0.15), found.groupby("samples")):
        at = [order.index(arm) + shift for arm in own["layer"]]
        found, look = own[["mean", "low", "high"]], "dense" if shift < 0 else "ndlinear"
        figures.intervals(axis, at, found, look, ms=5, label=f"{samples:,.0f} samples")
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set_yticks(range(len(order)), [name(arm) for arm in order])
