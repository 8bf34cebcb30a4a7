"""What a step costs when several processes train together: a model of it, its measurement, and gradient compression.

    python -m lab.chapters.scaling TASK RANK WORLD STORE

is one of WORLD processes that meet at the file STORE; process 0 prints what it found as JSON.
Bytes are those that one process sends; times are in seconds.
"""

from __future__ import annotations

import atexit
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import distributed, nn
from torch.nn import functional as F

from ndlinear import NdLinear

from .. import models, processes
from ..data import load
from ..modes import mode
from ..train.loop import seed_everything

FLOAT = 4  # bytes


# ------------------------------------------------------------------------------------------------------------- the model
class Link(NamedTuple):
    """A way between processes: seconds until a message arrives, and bytes per second after that."""

    latency: float
    bandwidth: float


def all_reduce_bytes(nbytes: float, workers: int) -> float:
    """What one process sends at least: in each of two rounds all parts but one are passed on."""
    return 2 * (workers - 1) / workers * nbytes


def rounds(workers: int) -> int:
    """Messages one after another until each process has heard from all others; exact for powers of two."""
    return math.ceil(math.log2(workers))


def halving_seconds(nbytes: float, workers: int, link: Link) -> float:
    """Halving and doubling: sums of ever smaller parts, then the parts back; two rounds of messages, and the fewest bytes."""
    messages = 2 * rounds(workers)
    return messages * link.latency + all_reduce_bytes(nbytes, workers) / link.bandwidth


def doubling_seconds(nbytes: float, workers: int, link: Link) -> float:
    """Recursive doubling: in each round a process exchanges its whole sum with a process further away; the fewest messages."""
    return rounds(workers) * (link.latency + nbytes / link.bandwidth)


def all_reduce_seconds(nbytes: float, workers: int, link: Link) -> float:
    """An all-reduce by the latency-bandwidth model, with the faster of the two algorithms above."""
    return min(way(nbytes, workers, link) for way in (halving_seconds, doubling_seconds))


def fit_link(sizes: list[float], seconds: list[float], workers: int) -> Link:
    """The link that explains measured all-reduces of these sizes best, in relative errors (least squares, neither number negative).

    The messages are those of halving and doubling; gloo's ring has as many between two processes. The bandwidth is infinite where
    the times do not grow with the size.
    """
    from scipy.optimize import nnls

    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([np.full_like(n, 2 * rounds(workers)), all_reduce_bytes(n, workers)], 1)
    latency, per_byte = nnls(columns / t[:, None], np.ones_like(t))[0]
    return Link(latency, 1 / per_byte if per_byte else math.inf)


CLUSTERS = {  # processes and link; from data sheets, as evidence 62 says
    "8 GPUs, one node": (8, Link(3e-6, 450e9)),
    "64 GPUs": (64, Link(1e-5, 50e9)),
    "1,024 GPUs": (1024, Link(1e-5, 50e9)),
    "8 on gigabit Ethernet": (8, Link(5e-5, 0.125e9)),
}


# ------------------------------------------------------------------------------------------------------------- networks
def _folded() -> nn.Sequential:
    layers = [NdLinear((32, 32), (32, 32)) for _ in range(2)]
    return nn.Sequential(
        nn.Unflatten(1, (32, 32)), *models.relu_between(layers), nn.Flatten(), nn.Linear(1024, 10)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "CNN, dense": (lambda: models.cnn("dense"), (3, 32, 32)),
    "CNN, NdLinear": (lambda: models.cnn("ndlinear"), (3, 32, 32)),
    "MLP, dense": (lambda: models.mlp(1024, 1024, 1024, 10), (1024,)),
    "MLP, NdLinear": (_folded, (1024,)),
}


def digit_network(arm: str) -> nn.Module:
    """From 8 x 8 digits to ten classes: "dense" 64 -> 256 -> 256 -> 10, or "ndlinear" with the shapes (8, 8) -> (16, 16) -> (16, 16)."""
    if arm == "dense":
        return nn.Sequential(nn.Flatten(), models.mlp(64, 256, 256, 10))
    layers = [NdLinear((8, 8), (16, 16)), NdLinear((16, 16), (16, 16))]
    return nn.Sequential(*models.relu_between(layers), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


# ------------------------------------------------------------------------------------------- what each process does
def stepper(name: str, batch: int, seed: int, shared: bool) -> Callable[[], None]:
    """A training step on random numbers with all gradients in one buffer, which is averaged over the processes if ``shared``."""
    seed_everything(seed)
    make, shape = NETWORKS[name]
    model, x = make().eval(), torch.randn(batch, *shape)  # no dropout: the work of a step is fixed
    y = torch.randint(10, (batch,))
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        buffer = torch.cat([p.grad.flatten() for p in model.parameters()])
        if shared:
            distributed.all_reduce(buffer)
        buffer /= distributed.get_world_size()
        parts = buffer.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts):
            p.grad = part.view_as(p)
        optimiser.step()

    return step


def slowest(call: Callable[[], object], repeat: int) -> float:
    """Seconds per call of the process that took longest, all starting together."""
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    taken = torch.tensor((time.perf_counter() - began) / repeat, dtype=torch.float64)
    distributed.all_reduce(taken, distributed.ReduceOp.MAX)
    return float(taken)


def times(task: dict) -> dict[str, list[float]]:
    """All-reduces of each size, and steps of each network alone and shared, in rounds of random order: name -> seconds."""
    calls = {}
    for size in task["sizes"]:
        buffer = torch.zeros(size)
        calls[f"all-reduce {size}"] = lambda buffer=buffer: distributed.all_reduce(buffer)
    for name in task["networks"]:
        calls[f"alone {name}"] = stepper(name, task["batch"], task["seed"], shared=False)
        calls[f"shared {name}"] = stepper(name, task["batch"], task["seed"], shared=True)
    found = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(task["seed"])  # the same order in every process
    for call in calls.values():
        call()
    for _ in range(task["rounds"]):
        shuffle.shuffle(order)
        for name in order:
            found[name].append(slowest(calls[name], task["repeat"]))
    return found


def compressed(model: nn.Module, rank: int) -> tuple[nn.Module, Callable[[], float]]:
    """A model whose gradients PowerSGD of this rank compresses (0: as they are), and the bytes that it sent in the mean step."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    wrapped = nn.parallel.DistributedDataParallel(model)
    whole = FLOAT * sum(p.numel() for p in model.parameters())
    if not rank:
        return wrapped, lambda: whole
    state = power.PowerSGDState(None, rank, start_powerSGD_iter=2, random_seed=0)
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    return wrapped, lambda: whole / state.compression_stats()[0]


def train(task: dict) -> list[dict]:
    """Digits, each process with its half of every batch; one result for each seed: test accuracy, bytes sent per step."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    data = load("digits")
    pictures, classes = torch.tensor(data.x).float().view(-1, 8, 8) / 16, torch.tensor(data.y)
    found = []
    for seed in task["seeds"]:
        seed_everything(seed)
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))
        held, seen = order[: len(order) // 5], order[len(order) // 5 :]
        model, sent = compressed(digit_network(task["arm"]), task["rank"])
        adam = torch.optim.Adam(model.parameters(), task["lr"])
        draw = torch.Generator().manual_seed(seed + 1)
        for _ in range(task["steps"]):
            batch = seen[torch.randint(len(seen), (task["batch"],), generator=draw)][rank::size]
            adam.zero_grad()
            F.cross_entropy(model(pictures[batch]), classes[batch]).backward()
            adam.step()
        with torch.no_grad():
            right = (model.module(pictures[held]).argmax(1) == classes[held]).double().mean()
        found.append({"accuracy": float(right), "bytes": sent()})
    return found


TASKS: dict[str, Callable[[dict], object]] = {"times": times, "train": train}


def main(task: dict, rank: int, world: int, store: str) -> object:
    """One of the processes.

    The group is kept until the process ends: the hook of PowerSGD leaves a reference to it with a thread of the group's own, and
    if that were the last one, the thread would wait for itself and take the process down.
    """
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    distributed.init_process_group("gloo", **rendezvous)
    atexit.register(id, distributed.group.WORLD)  # keeps it: see above
    try:
        return TASKS[task["task"]](task)
    finally:
        distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- the runs
def together(task: dict, world: int = 2, seconds: float = 900) -> object:
    """What process 0 of several finds for a task of `TASKS`; in smoke mode one process, this one, does the task alone."""
    if mode() != "smoke":
        command = ["-m", "lab.chapters.scaling", json.dumps(task)]
        return processes.together(command, world=world, seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        return main(task, 0, 1, f"{folder}/store")


def measured(config: dict) -> dict:
    """The run of a row of times: medians over the rounds, in microseconds."""
    names = {"sizes": [2**k for k in range(*config["powers"])], "networks": list(NETWORKS)}
    fixed = {key: config[key] for key in ("batch", "rounds", "repeat", "seed")}
    found = together({"task": "times"} | names | fixed)
    return {"metrics": {name: 1e6 * statistics.median(values) for name, values in found.items()}}


def trained(configs: list[dict]) -> list[dict]:
    """The run of all seeds of an arm on digits."""
    same = {key: configs[0][key] for key in ("arm", "rank", "lr", "steps", "batch")}
    found = together({"task": "train", "seeds": [c["seed"] for c in configs]} | same)
    count = models.size(digit_network(same["arm"]))
    return [{"metrics": metrics, "parameters": count} for metrics in found]


def predicted(
    times: pd.DataFrame, powers: tuple[int, int], workers: int = 2
) -> tuple[Link, pd.DataFrame]:
    """The link fitted to the all-reduces alone, and for each network the step that it predicts beside the measured one (µs).

    ``times``: rows of `measured`; the link is fitted to the medians over rows, and the spread of the errors over rows is given.
    """
    sizes = [2**k for k in range(*powers)]
    middle = times.median(numeric_only=True)
    seconds = [1e-6 * middle[f"all-reduce {n}"] for n in sizes]
    link = fit_link([FLOAT * n for n in sizes], seconds, workers)
    rows = []
    for name, (make, _) in NETWORKS.items():
        count = models.size(make())
        talk = 1e6 * halving_seconds(FLOAT * count, workers, link)
        alone, shared = middle[f"alone {name}"], middle[f"shared {name}"]
        rows.append((name, count, alone, talk, alone + talk, shared, (alone + talk) / shared - 1))
    names = ["network", "parameters", "alone", "communication", "predicted", "measured", "error"]
    return link, pd.DataFrame(rows, columns=names)


if __name__ == "__main__":
    task, rank, world, store = sys.argv[1:]
    print(json.dumps(main(json.loads(task), int(rank), int(world), store)))
