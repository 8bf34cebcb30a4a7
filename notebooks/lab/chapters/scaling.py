"""What an all-reduce of gradients costs: bytes are those that one process sends, times are in seconds."""

from __future__ import annotations

import math
from typing import NamedTuple


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
