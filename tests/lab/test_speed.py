"""Timing and peers: every peer computes what it says, rounds are fair, statistics are those of independent formulas."""

import ast
import builtins
import functools
import itertools
import json
import math
import time

import numpy as np
import pytest
import torch
from lab import LabError, timing
from lab.chapters import speed as bench
from lab.modes import NOTEBOOKS
from lab.tools.bench import times
from scipy import stats

import ndlinear

SAME = [name for name in bench.PEERS if name not in ("released", "low-rank", "lokr")]


@pytest.mark.parametrize(
    "dims, hidden", [((4, 5), (3, 6)), ((3, 1, 4), (2, 5, 1)), ((2, 3, 2, 4), (3, 2, 4, 1))]
)
@pytest.mark.parametrize("outer", [True, False], ids=["1..N", "N..1"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_peers_compute_the_same_function_and_gradients(dims, hidden, outer, bias):
    p = bench.Problem(dims, hidden, 3, outer, dtype="float64", bias=bias)
    names = [n for n in SAME if not (bias and n in bench.WITHOUT_BIASES)]
    peers, left_out = bench.assemble(p, names)
    assert not left_out and len(peers) >= 4
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


def test_lokr_is_the_same_map():
    p = bench.Problem((4, 6), (4, 6), 3, dtype="float64", bias=False)
    made = bench.peer(p, "lokr")
    torch.testing.assert_close(made.forward(), p.layer(p.x).flatten(1), atol=1e-10, rtol=1e-10)
    assert len(made.training()) == 3
    for problem in (bench.Problem((2, 2, 2), (2, 2, 2), 1), bench.Problem((2, 12), (4, 6), 1)):
        assert "lokr" in bench.assemble(problem, ["lokr"])[1]


def test_low_rank_has_at_most_as_many_parameters():
    for case in bench.CASES.values():
        rank = bench.rank_of_equal_size(case.dims, case.hidden)
        ends, out = math.prod(case.dims) + math.prod(case.hidden), math.prod(case.hidden)
        own = ndlinear.count_parameters(case.dims, case.hidden)
        assert rank == 1 or rank * ends + out <= own < (rank + 1) * ends + out


def test_what_is_too_large_or_absent_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(bench, "LARGEST_DENSE", 10)
    monkeypatch.setattr(bench, "LARGEST_LOKR", 10)
    monkeypatch.setattr(bench, "released", lambda install=False: None)
    p = bench.Problem((4, 6), (4, 6), 2)
    found, why = bench.assemble(p, ["ndlinear", "dense", "lokr", "released", "graphed:ndlinear"])
    assert list(found) == ["ndlinear"] and issubclass(bench.LeftOut, LabError)
    reasons = {"dense": "576 weights", "lokr": "576 entries", "released": "package"}
    for name, reason in (reasons | {"graphed:ndlinear": "GPU"}).items():
        assert reason in why[name]


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


def test_times_are_taken_by_the_tagged_cells_in_full_mode(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NDL_MODE", "smoke")
    monkeypatch.setenv("NDL_BENCH", "")  # put back afterwards
    sources = {
        "x = 2\nprint('mode', lab.mode(), x)": ["bench"],
        "raise SystemExit('judged')": [],
        "import os; print('last', x + 1, os.environ['NDL_BENCH'])": ["hide-input", "bench"],
    }
    cells = [{"source": [s], "metadata": {"tags": tags}} for s, tags in sources.items()]
    (tmp_path / "60.ipynb").write_text(json.dumps({"cells": cells}))
    times(tmp_path / "60.ipynb")
    out = capsys.readouterr().out
    assert "mode full 2" in out and "last 3 1" in out


@pytest.mark.parametrize("chapter", ["60_speed", "64_benchmark"])
def test_bench_cells_need_no_others(chapter):
    """Names that the tagged cells read are made by tagged cells, and no claim is judged there."""
    path = NOTEBOOKS / "evidence" / f"{chapter}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    tagged = [c for c in cells if "bench" in c["metadata"].get("tags", [])]
    nodes = list(ast.walk(ast.parse("\n\n".join("".join(c["source"]) for c in tagged))))
    names = [n for n in nodes if isinstance(n, ast.Name)]
    made = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {"lab", *dir(builtins)}
    made |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    made |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    made |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    made |= {(n.asname or n.name).split(".")[0] for n in nodes if isinstance(n, ast.alias)}
    assert {n.id for n in names} <= made
    assert not {"verdict", "finding"} & {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu():
    p = bench.Problem((4, 6), (3, 2), 8, device="cuda")
    names = ["ndlinear", "graphed:ndlinear"]
    peers, _ = bench.assemble(p, names)
    calls = {name: bench.step(peers[name], "training", name) for name in names}
    assert {len(v) for v in timing.rounds(calls, 2, device="cuda").values()} == {2}
