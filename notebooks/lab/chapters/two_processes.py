"""One of two gloo processes that train a small model of a layer class; `lab.chapters.behaviour` starts both.

    python two_processes.py FILE RANK WORLD STORE

FILE defines the class NdLinear, STORE is a file both processes meet at. Process 0 prints, as JSON, for each way to share
the work how far the gradients are from those of one process, or the error. Needs torch only, so that it starts fast; and as a
file of its own it also starts from a notebook and from a script made of one.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import torch
from torch import distributed, nn

if __name__ == "__main__":
    del sys.path[0]  # the modules beside this file are not libraries


def load(file: str) -> type:
    """The class NdLinear that a Python file defines."""
    spec = importlib.util.spec_from_file_location("layer_under_test", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.NdLinear


def build(layer_class: type) -> nn.Sequential:
    """Two layers in float64, the same numbers in every process."""
    torch.manual_seed(0)
    layers = layer_class((4, 6), (8, 3)), nn.Tanh(), layer_class((8, 3), (2, 5))
    return nn.Sequential(*layers).double()


def wrap(model: nn.Module, how: str) -> nn.Module:
    """The model with its gradients ("ddp") or also its parameters ("fsdp") shared among the processes."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import fully_shard

    for part in (model[0], model[2]):
        fully_shard(part)
    return fully_shard(model)


def gap(layer_class: type, how: str, rank: int) -> float:
    """Two steps of SGD on the whole batch here and on half of it in each process: the largest difference of a gradient."""
    alone, shared, largest = build(layer_class), wrap(build(layer_class), how), 0.0
    noise = torch.Generator().manual_seed(1)
    x, target = (torch.randn(8, *size, generator=noise).double() for size in ((4, 6), (2, 5)))
    mine = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        (alone(x) - target).square().mean().backward()
        (shared(x[mine]) - target[mine]).square().mean().backward()
        for one, two in zip(alone.parameters(), shared.parameters()):
            grad = two.grad.full_tensor() if hasattr(two.grad, "full_tensor") else two.grad
            largest = max(largest, (grad - one.grad).abs().max().item())
        for model in (alone, shared):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
    return largest


def main(file: str, rank: int, world: int, store: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    distributed.init_process_group("gloo", **rendezvous)
    results: dict[str, float | str] = {}
    for how in ("ddp", "fsdp"):
        try:
            results[how] = gap(load(file), how, rank)
        except Exception as error:
            results[how] = f"{type(error).__name__}: {error}"
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    file, rank, world, store = sys.argv[1:]
    main(file, int(rank), int(world), store)
