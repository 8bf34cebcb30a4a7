"""What an all-reduce of gradients costs, and two processes that train together with and without compression.

    python -m lab.chapters.scaling TASK RANK WORLD STORE

is one of WORLD processes that meet at the file STORE; process 0 prints what it found as JSON.
Bytes are those that one process sends; times are in seconds.
"""

from __future__ import annotations

import atexit
import json
import math
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

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


def all_reduce_seconds(nbytes: float, workers: int, link: Link) -> float:
    """An all-reduce of a power of two of processes by the latency-bandwidth model, in the faster of two ways.

    Halving and doubling passes on sums of ever smaller parts, then the parts back: the fewest bytes, in twice as many messages.
    Recursive doubling exchanges the whole sum with a process ever further away: the fewest messages.
    """
    rounds = math.log2(workers)
    halving = 2 * rounds * link.latency + 2 * (workers - 1) / workers * nbytes / link.bandwidth
    doubling = rounds * (link.latency + nbytes / link.bandwidth)
    return min(halving, doubling)


CLUSTERS = {  # processes and link; from data sheets, as evidence 61 says
    "8 GPUs, one node": (8, Link(3e-6, 450e9)),
    "8 on gigabit Ethernet": (8, Link(5e-5, 0.125e9)),
}


# ----------------------------------------------------------------------------------------- what each process does
def digit_network(arm: str) -> nn.Module:
    """From 8 x 8 digits to ten classes: "dense" 64 -> 256 -> 256 -> 10, or "ndlinear" with the shapes (8, 8) -> (16, 16) -> (16, 16)."""
    if arm == "dense":
        return nn.Sequential(nn.Flatten(), models.mlp(64, 256, 256, 10))
    layers = [NdLinear((8, 8), (16, 16)), NdLinear((16, 16), (16, 16))]
    return nn.Sequential(*models.relu_between(layers), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


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


def main(task: dict, rank: int, world: int, store: str) -> list[dict]:
    """One of the processes.

    The group is kept until the process ends: the hook of PowerSGD leaves a reference to it with a thread of the group's own, and
    if that were the last one, the thread would wait for itself and take the process down.
    """
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    distributed.init_process_group("gloo", **rendezvous)
    atexit.register(id, distributed.group.WORLD)  # keeps it: see above
    try:
        return train(task)
    finally:
        distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- the runs
def together(task: dict) -> list[dict]:
    """What process 0 of two finds; in smoke mode one process, this one, does the task alone."""
    if mode() != "smoke":
        command = ["-m", "lab.chapters.scaling", json.dumps(task)]
        return processes.together(command, seconds=900)
    with tempfile.TemporaryDirectory() as folder:
        return main(task, 0, 1, f"{folder}/store")


def trained(configs: list[dict]) -> list[dict]:
    """The run of all seeds of an arm on digits."""
    same = {key: configs[0][key] for key in ("arm", "rank", "lr", "steps", "batch")}
    found = together({"seeds": [c["seed"] for c in configs]} | same)
    count = models.size(digit_network(same["arm"]))
    return [{"metrics": metrics, "parameters": count} for metrics in found]


if __name__ == "__main__":
    task, rank, world, store = sys.argv[1:]
    print(json.dumps(main(json.loads(task), int(rank), int(world), store)))
