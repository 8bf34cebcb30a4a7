"""Times that can be compared: candidates side by side, in rounds of random order, and ratios within rounds."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch


# ------------------------------------------------------------------------------------------------------------ the times
def time_calls(
    call: Callable[[], object], repeat: int, device: str = "cpu", clock=time.perf_counter
) -> float:
    """Seconds per call, averaged over ``repeat`` calls in a row."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    began = clock()
    for _ in range(repeat):
        call()
    wait()
    return (clock() - began) / repeat


def rounds(
    calls: dict[str, Callable],
    n: int,
    *,
    seed=0,
    at_least=2e-3,
    device="cpu",
    clock=time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of every candidate in each of ``n`` rounds.

    Each round times all candidates once, in a new random order, so that whatever disturbs the machine hits them alike. A fast one is
    called so often in a row that a timing takes ``at_least`` seconds, after one call that does not count. With ``clock=time.process_time``
    the seconds are those that this process computed, whatever else runs on the machine.
    """
    repeat = {}
    for name, call in calls.items():
        once = time_calls(call, 1, device, clock)
        if once < 10 * at_least:  # else one call is warm-up enough
            once = min(time_calls(call, 1, device, clock) for _ in range(4))
        repeat[name] = max(1, math.ceil(at_least / max(once, 1e-9)))
    order, shuffle, found = list(calls), random.Random(seed), {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(n):
            shuffle.shuffle(order)
            for name in order:
                if repeat[name] > 1:
                    calls[name]()
                found[name].append(time_calls(calls[name], repeat[name], device, clock))
    finally:
        gc.enable()
    return found


# ----------------------------------------------------------------------------------------------------------- statistics
def median_interval(values) -> tuple[float, float, float]:
    """Median with the interval between two order statistics that holds the true median with at least 95 %, whatever the
    distribution (the sign test turned round). Fewer than six values decide nothing: (-inf, inf)."""
    values = np.sort(np.asarray(values, dtype=float))
    from scipy.stats import binom  # takes a second to import, and few pages need it

    k = int(binom.ppf(0.025, values.size, 0.5))
    low, high = (values[k - 1], values[-k]) if k > 0 else (-np.inf, np.inf)
    return float(np.median(values)), float(low), float(high)


def ratios(runs: pd.DataFrame, baseline: str = "released", by=("case", "pass")) -> pd.DataFrame:
    """How many times faster than ``baseline`` each peer is: medians of the ratios within rounds, over all rounds of all repeats.

    Args:
        runs: rows with ``curve``, the seconds of every round by peer. by: the columns that tell problems apart.

    Returns:
        One row per problem and peer: ``peer``, ``us`` (median microseconds), ``ratio``, ``ratio_low``, ``ratio_high``, ``rounds``.
    """
    rows, by = [], list(by)
    for key, group in runs.groupby(by, sort=False):
        curves = list(group["curve"])
        for name in curves[0]:
            times = np.concatenate([c[name] for c in curves])
            row = dict(zip(by, key)) | {"peer": name}
            row |= {"us": float(np.median(times)), "rounds": times.size}
            if baseline in curves[0]:
                quotient = np.concatenate([np.divide(c[baseline], c[name]) for c in curves])
                row |= dict(zip(("ratio", "ratio_low", "ratio_high"), median_interval(quotient)))
            rows.append(row)
    return pd.DataFrame(rows)


def speedup(frame: pd.DataFrame, slow: str, fast: str) -> pd.DataFrame:
    """How many times faster ``fast`` is than ``slow``, from the medians of `ratios`: one row per case, one column per pass."""
    us = frame.pivot(index=["case", "pass"], columns="peer", values="us")
    found = (us[slow] / us[fast]).dropna().unstack("pass")
    return found.reindex([case for case in frame["case"].unique() if case in found.index])


def increases(runs: pd.DataFrame, baseline: str, by) -> pd.DataFrame:
    """`ratios` with the increase of the time over the baseline in percent: ``time``, ``time_low``, ``time_high``."""
    found = ratios(runs, baseline, by)
    ends = {"time": "ratio", "time_low": "ratio_high", "time_high": "ratio_low"}
    return found.assign(**{name: 100 * (1 / found[ratio] - 1) for name, ratio in ends.items()})
