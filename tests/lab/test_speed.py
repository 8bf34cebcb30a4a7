"""Timing and peers: every peer computes what it says, rounds are fair, statistics are those of independent formulas."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from lab import timing
from lab.chapters import speed as bench
from lab.modes import NOTEBOOKS
from lab.tools import bench as tools_bench
from scipy import stats

import ndlinear

SAME = [name for name in bench.PEERS if name not in ("released", "low-rank")]


@pytest.mark.parametrize(
    "dims, hidden",
    [((4, 5), (3, 6)), ((2, 12), (4, 6)), ((3, 1, 4), (2, 5, 1)), ((2, 3, 2, 4), (3, 2, 4, 1))],
)
@pytest.mark.parametrize("outer", [True, False], ids=["1..N", "N..1"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_peers_compute_the_same_function_and_gradients(dims, hidden, outer, bias):
    p = bench.Problem(dims, hidden, 3, outer, dtype="float64", bias=bias)
    names = [n for n in SAME if not (bias and n in ("einsum", "opt_einsum", "tcl", "lokr"))]
    peers, left_out = bench.assemble(p, names)
    folded = dims == (4, 5)  # as peft folds these sizes; others it takes in another way, or not
    assert set(left_out) == (set() if bias or folded else {"lokr"}) and len(peers) >= 4
    order = range(len(dims)) if outer else range(len(dims))[::-1]
    y = ndlinear.ndlinear(p.x, p.layer.weights, p.layer.biases, list(order))
    gradient = torch.randn_like(y)
    expected = torch.autograd.grad(y, [p.x, *p.layer.weights], gradient)
    near = functools.partial(torch.testing.assert_close, atol=1e-10, rtol=1e-10)
    for name, made in peers.items():
        near(made.forward().reshape(y.shape), y, msg=name)
        made.gradient = gradient.reshape(made.forward().shape)
        x, *of_parameters = made.training()
        near(x.reshape(p.x.shape), expected[0], msg=name)
        assert len(of_parameters) == len(made.parameters) >= (1 if name == "dense" else len(dims))


def test_low_rank_has_at_most_as_many_parameters():
    for case in bench.CASES.values():
        rank = bench.rank_of_equal_size(case.dims, case.hidden)
        ends, out = math.prod(case.dims) + math.prod(case.hidden), math.prod(case.hidden)
        own = ndlinear.count_parameters(case.dims, case.hidden)
        assert rank == 1 or rank * ends + out <= own < (rank + 1) * ends + out


def test_rounds_are_fair():
    """Everyone once in every round, in changing order, and fast calls often enough in a row."""
    log = []
    calls = {name: lambda name=name: log.append(name) for name in "abcd"}
    calls["slow"] = lambda: (log.append("slow"), time.sleep(0.003))
    found = timing.rounds(calls, 6, at_least=1e-3, seed=3)
    assert {len(times) for times in found.values()} == {6} and list(found) == list(calls)
    assert min(found["slow"]) > 0.002 > max(np.median(found[n]) for n in "abcd")
    turns = [name for name, _ in itertools.groupby(log)]
    turns = turns[len(calls) :]  # without the calls before the first round
    assert len(log) > 6 * 4 * 50
    orders = [tuple(turns[i : i + 5]) for i in range(0, len(turns) - 4, 5)]
    assert len(set(orders)) > 1


def test_processor_time_does_not_count_sleep_and_a_very_slow_call_is_not_made_twice():
    made = []
    slept = {"sleep": lambda: (made.append(1), time.sleep(0.03))}
    assert timing.rounds(slept, 2, at_least=1e-3)["sleep"][0] > 0.02 and len(made) == 3
    assert timing.rounds(slept, 1, clock=time.process_time)["sleep"][0] < 0.01


def test_median_interval_is_that_of_the_sign_test():
    draw = np.random.default_rng(0)
    for n in (6, 12, 20, 25, 51):
        values = np.sort(draw.normal(size=n))
        median, low, high = timing.median_interval(values)
        assert median == np.median(values)
        k = int(np.searchsorted(values, low)) + 1
        assert values[n - k] == high
        assert 2 * stats.binom.cdf(k - 1, n, 0.5) <= 0.05 < 2 * stats.binom.cdf(k, n, 0.5)
    assert timing.median_interval([1, 2, 3, 4, 5])[1:] == (-np.inf, np.inf)


@pytest.mark.parametrize("chapter", ["60_speed", "64_benchmark"])
def test_times_are_taken_by_tagged_cells_that_need_no_others(monkeypatch, chapter):
    """Names that the tagged cells read are made by tagged cells, and no claim is judged there."""
    for name in ("NDL_MODE", "NDL_BENCH"):
        monkeypatch.setenv(name, "")  # put back afterwards
    run = []
    monkeypatch.setattr(tools_bench, "exec", lambda code, space: run.append(code), raising=False)
    tools_bench.times(NOTEBOOKS / "evidence" / f"{chapter}.ipynb")
    assert os.environ["NDL_MODE"] == "full" and "lab.record(" in run[0]
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(check, input=run[0], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not re.search(r"\b(verdict|finding)\(", run[0])
