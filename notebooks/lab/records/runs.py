"""Recorded runs: a grid of configurations, of which each is run once and kept.

A row is appended and fsynced the moment its run ends, under a lock that keeps a second writer out. A killed run loses at most
the run in flight; the next one goes on where it stopped. Nothing is ever overwritten: a torn last line is moved to
<experiment>.jsonl.torn, and a run of an earlier version stays in the file beside its successor.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pandas as pd

from .. import modes
from ..machine import device, peak_memory_mb, progress, versions
from ..modes import mode, new_rows_folder
from . import budget, cluster, golden, store
from .store import RecordError, canonical, key, only_writer, parse


@dataclass(frozen=True)
class Experiment:
    """What the rows of one record have in common: the arguments of `record`."""

    name: str
    run: Callable = field(repr=False)
    data: tuple[str, ...] | Callable[[dict], tuple[str, ...]] = ()
    together: bool = False

    def sets(self, config: dict) -> tuple[str, ...]:
        """The data sets of a configuration."""
        return self.data(config) if callable(self.data) else tuple(self.data)


def record(
    name: str,
    grid: list[dict],
    run: Callable,
    *,
    smoke: dict | None = None,
    smoke_seeds: int = 2,
    data: tuple[str, ...] | Callable[[dict], tuple[str, ...]] = (),
    together: bool = False,
    timed: bool = False,
) -> pd.DataFrame:
    """The results of ``run`` on every configuration of a grid, one row each, in the grid's order.

    replay reads results/<name>.jsonl and refuses missing rows and those of earlier versions; full runs what the file lacks and
    appends; smoke runs a small grid (``smoke`` overrides, first ``smoke_seeds`` seeds) and compares it with the golden file.

    Args:
        name: experiment, the file's name.
        grid: flat JSON configurations, each with an integer ``seed``.
        run: config -> dict with ``metrics`` (name -> number) and, where they make sense, ``parameters``, ``macs`` (multiply-adds
            per sample), ``curve``. It must depend on nothing but its configuration and what the notebook and the lab define.
        data: data sets used, or configuration -> those that it uses; their checksums go into the row.
        together: ``run`` trains all seeds of a configuration at once: it gets the list of the configurations that differ in
            nothing but the seed and are still missing, and returns the list of their results. One row each, as always;
            ``seconds`` is the group's time over its size, and a killed run loses the group in flight.
        timed: the metrics are times or memory: a smoke run says nothing of them.
    """
    _check_grid(name, grid)
    experiment = Experiment(name, run, data, together)
    if mode() == "replay":
        _run_again(experiment, grid)
        return frame(_select(name, golden.read(name), grid))
    if mode() == "full":
        return frame(complete(new_rows_folder() / f"{name}.jsonl", experiment, grid))
    with tempfile.TemporaryDirectory() as folder:
        small = _smoke_grid(grid, smoke or {}, smoke_seeds)
        rows = complete(pathlib.Path(folder, f"{name}.jsonl"), experiment, small)
    if not timed and (taken := os.environ.get("NDL_GOLDEN_TO", "")):  # by `lab golden`
        store.append(pathlib.Path(taken, f"{name}.jsonl"), *rows)
    elif not timed:
        golden.check(name, rows)
    return frame(rows)


def grid(**choices) -> list[dict]:
    """Configurations with each combination of values, the last name changing fastest."""
    each = [v if isinstance(v, (list, tuple, range)) else [v] for v in choices.values()]
    return [dict(zip(choices, values)) for values in itertools.product(*each)]


# --------------------------------------------------------------------------------------------------------------- running
def run_group(experiment: Experiment, configs: list[dict], run_mode: str) -> list[dict]:
    """Run configurations: the result of each with seconds, memory, device and versions. Errors of a run come back as data.

    Without ``together`` the group is one configuration and ``run`` gets it; with it, ``run`` gets the list and returns a list.
    """
    import torch

    from ..data import checksum
    from ..train.loop import seed_everything

    os.environ["NDL_MODE"] = run_mode
    seed_everything(configs[0]["seed"])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    outs = _outcomes(experiment, configs)
    memory, of = peak_memory_mb()
    shared = {
        "seconds": round((time.perf_counter() - began) / len(configs), 3),  # shared by a group
        "peak_memory_mb": round(memory, 1),
        "peak_memory_of": of,
        "device": device(),
        "versions": versions(),
        "data": {name: checksum(name) for name in experiment.sets(configs[0])},
    }
    if torch.cuda.is_available():
        shared["tf32"] = torch.backends.cuda.matmul.allow_tf32
    if experiment.together:
        shared["together"] = len(configs)
    return [out | shared for out in outs]


def _outcomes(experiment: Experiment, configs: list[dict]) -> list[dict]:
    """What the training function returns for each configuration, or the error it ended with."""
    try:
        if experiment.together:
            results = experiment.run([dict(c) for c in configs])
        else:
            results = [experiment.run(dict(configs[0]))]
        if len(results) != len(configs):
            raise RecordError(f"{len(results)} results for {len(configs)} configurations")
        results = json.loads(canonical(results))  # as they will be read
        return [{"status": "ok", **result, "metrics": result["metrics"]} for result in results]
    except Exception as error:  # recorded, reported at the end, tried again next time
        failed = {"status": "failed", "error": f"{type(error).__name__}: {error}", "metrics": {}}
        return [dict(failed) for _ in configs]


def complete(path: pathlib.Path, experiment: Experiment, grid: list[dict]) -> list[dict]:
    """Run what the records lack, append each row to ``path`` as it ends, and return the rows of the grid."""
    with only_writer(path):
        known = _known(path)
        done = golden.current(experiment.name, known)
        missing = [c for c in grid if canonical(c) not in done]
        left, waiting = len(missing), groups(missing, experiment.together)
        fixed = {"experiment": path.stem, "code": golden.version(experiment.name)}
        found, shown = _outcomes_of(experiment, waiting, known), mode() == "full"
        for group, outcomes in progress(found, experiment.name, shown, total=len(waiting)):
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            fixed |= {"time": now}
            for config, outcome in zip(group, outcomes):
                own = {"key": canonical(config), "config": config, "seed": config["seed"]}
                known += store.append(path, outcome | fixed | own)
            left -= len(group)
            _sign(path, known)
        _sign(path, known)
    if left:
        print(
            f"{experiment.name}: NDL_BUDGET_S is spent; {left} runs are left for the next time. "
            "What has finished is on disk."
        )
        raise SystemExit(0)
    return _select(experiment.name, known, grid)


def _outcomes_of(experiment: Experiment, waiting: list, recorded: list[dict]) -> Iterator:
    """(group, its outcomes) one after the other in this process, or as they finish on the workers of NDL_CLUSTER."""
    run = functools.partial(run_group, experiment, run_mode=mode())
    if os.environ.get("NDL_CLUSTER", "").strip() and waiting:
        return cluster.spread(run, waiting)
    return ((group, run(group)) for group in budget.within(waiting, recorded))


def groups(configs: list[dict], together: bool) -> list[list[dict]]:
    """Each configuration by itself, or those that differ in nothing but the seed together."""
    found: dict[str, list[dict]] = {}
    for config in configs:
        found.setdefault(key(config, ("seed",) if together else ()), []).append(config)
    return list(found.values())


def _check_grid(name: str, grid: list[dict]) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise RecordError(f"experiment name {name!r}: use lower-case words joined by '-'")
    for config in grid:
        if not isinstance(config.get("seed"), int):
            raise RecordError(f"each configuration needs an integer 'seed', got {config}")
    if len({canonical(c) for c in grid}) != len(grid):
        raise RecordError(f"{name}: a configuration stands twice in the grid")


def _smoke_grid(grid: list[dict], overrides: dict, seeds: int) -> list[dict]:
    """The grid with overrides and the first seeds only: small, but through every arm."""
    first = sorted({c["seed"] for c in grid})[:seeds]
    small = {canonical(c | overrides): c | overrides for c in grid if c["seed"] in first}
    return list(small.values())


def _run_again(experiment: Experiment, grid: list[dict]) -> None:
    """For `lab again`: run what the file NDL_AGAIN lists once more, into its folder; after the last of it the notebook ends."""
    listed = pathlib.Path(os.environ.get("NDL_AGAIN", os.devnull))
    asked = json.loads(listed.read_text(encoding="utf-8") or "{}")
    wanted = [c for c in grid if canonical(c) in asked.get(experiment.name, ())]
    if not wanted:
        return
    os.environ["NDL_MODE"] = "full"
    complete(listed.parent / f"{experiment.name}.jsonl", experiment, wanted)
    os.environ["NDL_MODE"] = "replay"
    left = set(asked.pop(experiment.name)) - set(map(canonical, wanted))
    asked |= {experiment.name: sorted(left)} if left else {}
    listed.write_text(json.dumps(asked), encoding="utf-8")
    if not asked:
        raise SystemExit(0)


# ------------------------------------------------------------------------------------------------------------ the rows
def _known(path: pathlib.Path) -> list[dict]:
    """What counts as run before rows go to a file: the project's record, and the rows of another folder behind them.

    Small runs and those of `lab again` go to folders that know of no record.
    """
    ours = path.parent in (modes.RESULTS, new_rows_folder())
    recorded = golden.read(path.stem, unsealed=True) if ours else []
    return recorded if path.parent == modes.RESULTS else recorded + parse(path)


def _sign(path: pathlib.Path, rows: list[dict]) -> None:
    """Seal the project's record; rows elsewhere are sealed when they are merged."""
    if path.parent == modes.RESULTS:
        golden.sign(path.stem, rows)


def recorded_part(name: str, grid: list[dict], run: Callable, **options) -> list[dict]:
    """The rows of a grid that are recorded and current, in its order, without those that are missing; called as `record` is."""
    _run_again(Experiment(name, run, options.get("data", ()), options.get("together", False)), grid)
    return _chosen(name, golden.read(name), grid)


def _chosen(name: str, rows: list[dict], grid: list[dict]) -> list[dict]:
    newest = golden.current(name, rows)
    found = [newest[canonical(c)] for c in grid if canonical(c) in newest]
    check_origin(name, found)
    return found


def _select(name: str, rows: list[dict], grid: list[dict]) -> list[dict]:
    """The rows of a grid, or an error that says what to run."""
    chosen = _chosen(name, rows, grid)
    if len(chosen) == len(grid):
        return chosen
    absent = {canonical(c) for c in grid} - golden.current(name, rows).keys()
    theirs = {row["key"]: row for row in rows if row["key"] in absent}.values()  # the last of each
    failed = [row["error"] for row in theirs if row["status"] == "failed"]
    stale = {row["code"] for row in theirs if row["status"] == "ok"}
    why = "they were never run"
    if failed:
        why = f"{len(failed)} failed, the first with {failed[0]!r}"
    elif stale:
        why = f"version {golden.version(name)} counts, and theirs are {', '.join(sorted(stale))}"
    raise RecordError(
        f"results/{name}.jsonl lacks {len(absent)} of {len(grid)} rows, e.g. {min(absent)}; {why}. "
        "Run the notebook with NDL_MODE=full: it trains only these rows."
    )


def check_origin(name: str, rows: list[dict]) -> None:
    """Refuse rows of another experiment, of different data under one name, or of another series of the layer's versions."""
    others = {row["experiment"] for row in rows} - {name}
    if others:
        raise RecordError(f"{name}: rows of {', '.join(sorted(others))} stand in its file")
    seen: dict[str, str] = {}
    for data, checksum in (pair for row in rows for pair in row["data"].items()):
        if seen.setdefault(data, checksum) != checksum:
            raise RecordError(
                f"{name}: rows made with different forms of {data} ({seen[data]} and {checksum}) stand together; "
                "run all of them with one form of the data"
            )
    series = versions()["ndlinear"].rpartition(".")[0]
    made = {row["versions"].get("ndlinear", "?") for row in rows}
    for version in (v for v in made if v.rpartition(".")[0] != series):
        raise RecordError(
            f"{name}: a row was made with ndlinear {version}, this is {versions()['ndlinear']}; run it again"
        )


def frame(rows: list[dict]) -> pd.DataFrame:
    """One line per run: configuration, metrics, counts, cost."""
    kept = ("parameters", "macs", "seconds", "peak_memory_mb", "device", "curve")
    return pd.DataFrame(
        [{**r["config"], **r["metrics"], **{k: r[k] for k in kept if k in r}} for r in rows]
    )
