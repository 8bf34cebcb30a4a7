"""Exact memory: what autograd keeps, and every allocation of a piece of code."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import tempfile

import torch


def saved_bytes(function, parameters=()) -> int:
    """Bytes that autograd keeps for the backward pass of ``function()``: distinct storages, those of ``parameters`` left out."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = function()  # while the graph lives, no address is used twice
    total = sum(kept.values())
    del alive
    return total


def allocations(function) -> list[int]:
    """Bytes allocated since the start of ``function()``, after each event of the CPU allocator; what it returns stays alive.

    The profiler reports every allocation and release of tensor memory exactly, also inside operations. Scratch memory that
    a mathematics library takes from the operating system by itself is not reported.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else a line at each start and stop
    processor = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=processor, profile_memory=True) as profile:
        alive = function()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    del alive
    events = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    events.sort(key=lambda e: e["ts"])
    return list(itertools.accumulate(e["args"]["Bytes"] for e in events))


def peak_bytes(function) -> int:
    """Largest number of bytes allocated during ``function()`` beyond what was allocated before."""
    return max([0, *allocations(function)])
