"""Recorded runs: a grid of configurations, of which each is run once and kept.

A row is appended and fsynced the moment its run ends, under a lock that keeps a second writer out. A killed run loses at most
the run in flight; the next one goes on where it stopped. Nothing is ever overwritten: a torn last line is moved to
<experiment>.jsonl.torn, and a run made with an older training function stays in the file beside its successor.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

from .. import modes
from ..machine import device, peak_memory_mb, progress, versions
from ..modes import mode, new_rows_folder
from . import budget, canary, fingerprint, profiles, store, where
from .store import RecordError, Writer, canonical, only_writer, parse, set_torn_aside
from .where import executor


# ------------------------------------------------------------------------------------------------------- one experiment
@dataclass(frozen=True)
class Experiment:
    """What the rows of one record have in common.

    Args:
        name: of the file. run: the training function; with ``together`` it gets the missing seeds of a configuration at once.
        data: names of the data sets used. timed: the rows measure time or memory, so they depend on the layer's code, too.
    """

    name: str
    run: object = field(repr=False)
    data: tuple[str, ...] = ()
    together: bool = False
    timed: bool = False

    def also(self) -> tuple:
        """What counts beside the training function: how the data sets are read."""
        from ..data import SOURCES

        return tuple(SOURCES[name] for name in self.data)

    @functools.cached_property
    def closure(self):
        """Everything that it reaches, as it was when first asked."""
        return fingerprint.closure(self.run, self.also(), layer=self.timed)

    def __getstate__(self) -> dict:
        """What a worker on another machine gets: it looks for itself what its code reaches."""
        return {name: value for name, value in vars(self).items() if name != "closure"}

    def code(self) -> str:
        """The fingerprint that its rows carry."""
        return self.closure.code()

    def facts(self) -> dict[str, object]:
        """What its code is, for the tools."""
        shape, numbers = self.closure.shape(), self.closure.numbers()
        return {"code": self.code(), "shape": shape, "numbers": sorted(numbers)}


# --------------------------------------------------------------------------------------------------------------- running
@dataclass(frozen=True)
class Origin:
    """What a worker on another machine must have alike: definitions of the lab, versions, checksums of data."""

    code: dict[str, str]
    versions: dict[str, str]
    data: dict[str, str]

    def differences(self) -> str:
        """Where this process is not alike, in words; "" if nowhere."""
        from ..data import checksum

        ours = fingerprint.here(self.code) | _versions_that_count()
        ours |= {name: checksum(name) for name in self.data}
        wanted = self.code | self.versions | self.data
        return "; ".join(
            f"{name} is {ours[name]} on the worker and {value} here"
            for name, value in sorted(wanted.items())
            if ours[name] != value
        )


def _versions_that_count() -> dict[str, str]:
    """Versions that change numbers: torch and ndlinear."""
    found = versions()
    return {name: found[name].partition("+")[0] for name in ("torch", "ndlinear")}


def run_group(
    experiment: Experiment, configs: list[dict], run_mode: str, origin: Origin | None = None
) -> list[dict]:
    """Run configurations, here or on a worker: the result of each with seconds, memory, device and versions.

    Errors of a run come back as data. Without ``together`` the group is one configuration and ``run`` gets it; with it, ``run``
    gets the list and returns a list. A worker that is not like ``origin`` returns the differences and runs nothing.
    """
    import torch

    from ..train.loop import seed_everything

    os.environ["NDL_MODE"] = run_mode
    found = origin.differences() if origin else ""
    if found:
        return [{"status": "refused", "error": found} for _ in configs]
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
        **profiles.facts(),
    }
    if experiment.together:
        shared["together"] = len(configs)
    return [out | shared for out in outs]


def _outcomes(experiment: Experiment, configs: list[dict]) -> list[dict]:
    """What the training function returns for each configuration, or the error it ended with."""
    run = experiment.run
    try:
        if experiment.together:
            results = run([dict(c) for c in configs])
        else:
            results = [run(dict(configs[0]))]
        if len(results) != len(configs):
            raise RecordError(f"{len(results)} results for {len(configs)} configurations")
        canonical(results)
        return [{"status": "ok", **result} for result in results]
    except Exception as error:  # recorded, reported at the end, tried again next time
        failed = {"status": "failed", "error": f"{type(error).__name__}: {error}", "metrics": {}}
        return [dict(failed) for _ in configs]


def map_groups(
    experiment: Experiment, groups: list[list[dict]], data: dict[str, str]
) -> Iterator[tuple[list, list]]:
    """(configurations, outcomes) of every group of runs, as they finish. Only the caller writes records.

    Raises:
        RecordError: a worker has other code, versions or data, or no worker is left.
    """
    with executor() as pool:
        if pool is None:  # lazily, so that each row is on disk before the next run
            allowed = budget.within(groups)
            finished = ((group, run_group(experiment, group, mode())) for group in allowed)
        else:
            finished = _as_completed(pool, experiment, groups, data)
        shown = mode() == "full"
        yield from progress(finished, experiment.name, shown, total=len(groups))


def _as_completed(pool, experiment: Experiment, groups, data) -> Iterator[tuple[list, list]]:
    origin = Origin(experiment.closure.in_lab(), _versions_that_count(), data)
    futures = {pool.submit(run_group, experiment, group, mode(), origin): group for group in groups}
    try:
        for future in where.as_completed(pool, futures):
            outcomes = future.result()
            refused = [out["error"] for out in outcomes if out["status"] == "refused"]
            if refused:
                raise RecordError(
                    f"{experiment.name}: a worker of NDL_CLUSTER is not like this process: {refused[0]}. "
                    "Start the workers from the same checkout, with the same versions and data"
                )
            yield futures[future], outcomes
    except concurrent.futures.CancelledError as error:
        raise RecordError(
            f"{experiment.name}: the scheduler of NDL_CLUSTER went away; the finished rows are kept, "
            "start it again and run once more"
        ) from error
    finally:
        for future in futures:
            future.cancel()


# ------------------------------------------------------------------------------------------------------------- the grid
def _groups(configs: list[dict], together: bool) -> list[list[dict]]:
    """Each configuration by itself, or those that differ in nothing but the seed together."""
    groups: dict[str, list[dict]] = {}
    for config in configs:
        kind = canonical({k: v for k, v in config.items() if k != "seed" or not together})
        groups.setdefault(kind, []).append(config)
    return list(groups.values())


def _check_grid(name: str, grid: list[dict]) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise RecordError(f"experiment name {name!r}: use lower-case words joined by '-'")
    for config in grid:
        if not isinstance(config.get("seed"), int):
            raise RecordError(f"each configuration needs an integer 'seed', got {config}")
        try:
            canonical(config)
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"a configuration holds JSON values only: {error} in {config}"
            ) from error
    if len({canonical(c) for c in grid}) != len(grid):
        raise RecordError(f"{name}: a configuration stands twice in the grid")


def _smoke_grid(grid: list[dict], overrides: dict, seeds: int) -> list[dict]:
    """The grid with overrides and the first seeds only: small, but through every arm."""
    first = sorted({c["seed"] for c in grid})[:seeds]
    small = {canonical(c | overrides): c | overrides for c in grid if c["seed"] in first}
    return list(small.values())


def record(
    name: str,
    grid: list[dict],
    run,
    *,
    smoke: dict | None = None,
    smoke_seeds: int = 2,
    data: tuple[str, ...] = (),
    together: bool = False,
    timed: bool = False,
) -> pd.DataFrame:
    """The results of ``run`` on every configuration of a grid, one row each, in the grid's order.

    replay reads results/<name>.jsonl and refuses missing or stale rows; full runs what the file lacks and appends; smoke runs a
    small grid (``smoke`` overrides, first ``smoke_seeds`` seeds) through the same code into a temporary file.

    Args:
        name: experiment, the file's name.
        grid: flat JSON configurations, each with an integer ``seed``.
        run: config -> dict with ``metrics`` (name -> number) and, where they make sense, ``parameters``, ``macs`` (multiply-adds
            per sample), ``curve``. It must depend on nothing but its configuration and what the notebook and the lab define.
        data: data sets used; their checksums go into the row, and how they are read into its fingerprint.
        together: ``run`` trains all seeds of a configuration at once (`lab.stacked`): it gets the list of the configurations that
            differ in nothing but the seed and are still missing, and returns the list of their results. One row each, as
            always; ``seconds`` is the group's time over its size, and a killed run loses the group in flight.
        timed: the rows measure time or memory: they are stale, too, when the code of the layer changes.
    """
    _check_grid(name, grid)
    experiment = Experiment(name, run, tuple(data), together, timed)
    only = budget.only_experiment()
    if only:
        return _reproduced(experiment, grid, only)
    if mode() == "replay":
        rows, _ = parse(modes.RESULTS / f"{name}.jsonl")
        _check_world(name)
        return frame(_select(name, rows, grid, canary.present(experiment)))
    if mode() == "full":
        rows = complete(new_rows_folder() / f"{name}.jsonl", experiment, grid)
        if not timed and not canary.kept(name):
            print(f"{name}: no canary speaks for these rows yet: `make canaries ONLY=NOTEBOOK`")
        return frame(rows)
    with tempfile.TemporaryDirectory() as folder:
        small = _smoke_grid(grid, smoke or {}, smoke_seeds)
        with canary.watched(experiment) as took:
            rows = complete(pathlib.Path(folder) / f"{name}.jsonl", experiment, small)
        took(rows)
        return frame(rows)


def _check_world(name: str) -> None:
    """Refuse to show rows where torch or the layer does other things than when they were made."""
    changed = canary.unset(canary.kept(name), canary.state())
    canary.answer(name, canary.shaken() + changed)


def _reproduced(experiment: Experiment, grid: list[dict], only: budget.Only) -> pd.DataFrame:
    """For `make reproduce` and `make gpu`: run the chosen configurations of one experiment and stop; read the others as they are."""
    if only.asks_for(experiment.name):
        keys = [canonical(config) for config in grid]
        only.note(experiment.name, keys, experiment.data, experiment.facts())
    if experiment.name == only.experiment:
        chosen = [config for config in grid if only.chosen(config)]
        place = only.folder / f"{experiment.name}.jsonl"
        definitions = [] if experiment.timed else experiment.closure.definitions
        with canary.Watch({d.file for d in definitions}) as watch:  # it would slow what is timed
            rows = complete(place, experiment, chosen)
        only.leave(experiment.name, canary.dark(definitions, watch.lines))
        raise budget.Done(len(rows))
    path = new_rows_folder() / f"{experiment.name}.jsonl"
    rows = _known(path, parse(path)[0])
    fields = {name for config in grid for name in config}  # not revisions that were raised by hand
    fields -= {"machine"}  # rows of another machine will do

    def key(config: dict) -> str:
        return canonical({k: v for k, v in config.items() if k in fields})

    newest = {key(row["config"]): row for row in rows if row["status"] == "ok"}
    return frame([newest[key(c)] for c in grid if key(c) in newest])


def complete(path: pathlib.Path, experiment: Experiment, grid: list[dict]) -> list[dict]:
    """Run what the records lack, append each row to ``path`` as it ends, and return the rows of the grid."""
    from ..data import checksum

    code, counts = experiment.code(), canary.present(experiment)
    with only_writer(path):
        rows, torn = parse(path)
        if torn:
            set_torn_aside(path, torn)
        writer = Writer(path)
        done = store.by_key(experiment.name, _known(path, rows), counts)
        missing = [c for c in grid if canonical(c) not in done]
        if missing and counts != code:
            canary.join(experiment.name, code, "its canary")
        data = {d: checksum(d) for d in experiment.data if missing}
        fixed = {"experiment": path.stem, "code": code, "data": data}
        number, of = budget.share()
        groups = _groups(missing, experiment.together)[number::of]
        for group, outcomes in map_groups(experiment, groups, data):
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            for config, outcome in zip(group, outcomes):
                known = {"key": canonical(config), "config": config, "seed": config["seed"]}
                writer.append({**fixed, **known, **outcome, "time": now})
        rows = _known(path, parse(path)[0])
    left = {canonical(c) for c in grid} - {r["key"] for r in rows}
    if left and (budget.LEFT_OUT or of > 1):
        raise budget.Ended(experiment.name, len(left))
    return _select(experiment.name, rows, grid, counts)


def _known(path: pathlib.Path, rows: list[dict]) -> list[dict]:
    """The rows of a file, after those of the project's record where the file lies in a folder named by NDL_RESULTS."""
    project = modes.RESULTS / path.name
    if path.parent == modes.RESULTS or path.parent != new_rows_folder():
        return rows
    return parse(project)[0] + rows


def recorded_part(experiment: Experiment, grid: list[dict]) -> list[dict]:
    """The rows of a grid that are recorded and current, in the grid's order; what is missing is left out."""
    path = new_rows_folder() / f"{experiment.name}.jsonl"
    rows = _known(path, parse(path)[0])
    found = store.by_key(experiment.name, rows, canary.present(experiment))
    chosen = [found[canonical(config)] for config in grid if canonical(config) in found]
    _check_origin(experiment.name, chosen)
    return chosen


def _select(name: str, rows: list[dict], grid: list[dict], code: str) -> list[dict]:
    """The rows of a grid, or an error that says what to run."""
    newest = store.by_key(name, rows, code)
    absent = [c for c in grid if canonical(c) not in newest]
    if not absent:
        chosen = [newest[canonical(c)] for c in grid]
        _check_origin(name, chosen)
        return chosen
    keys = {canonical(c) for c in absent}
    found = [(row, *made) for row, made in zip(rows, store.counted(name, rows))]
    theirs = [each for each in found if each[2] in keys]
    failed = [r["error"] for r, made, _ in theirs if r["status"] == "failed" and made == code]
    stale = {key for _, made, key in theirs if made != code}
    if failed:
        why = f"{len(failed)} failed, the first with {failed[0]!r}"
    elif stale:
        why = f"{len(stale)} of them were made by another version of the training function or of what it uses in the lab"
        why += "".join(f"; {reason}" for reason in canary.REASONS.get(name, ())[:3])
    else:
        why = "they were never run"
    raise RecordError(
        f"results/{name}.jsonl lacks {len(absent)} of {len(grid)} rows, e.g. {absent[0]}; {why}. "
        "Run the notebook with NDL_MODE=full: it trains only these rows"
        + (f", or `make reproduce EXPERIMENT={name} ADOPT=1`." if stale else ".")
    )


def _check_origin(name: str, rows: list[dict]) -> None:
    """Refuse rows of another experiment, of different data under one name, or of another series of the layer's versions."""
    others = {row["experiment"] for row in rows} - {name}
    if others:
        raise RecordError(f"{name}: rows of {', '.join(sorted(others))} stand in its file")
    seen: dict[str, str] = {}
    for row in rows:
        for data, checksum in row["data"].items():
            if seen.setdefault(data, checksum) != checksum:
                raise RecordError(
                    f"{name}: rows made with different forms of {data} ({seen[data]} and {checksum}) stand together; "
                    "run all of them with one form of the data"
                )
    series = versions()["ndlinear"].rpartition(".")[0]
    for row in rows:
        made = row["versions"].get("ndlinear", "?")
        if made.rpartition(".")[0] != series:
            raise RecordError(
                f"{name}: a row was made with ndlinear {made}, this is {versions()['ndlinear']}; run it again"
            )


def frame(rows: list[dict]) -> pd.DataFrame:
    """One line per run: configuration, metrics, counts, cost."""
    kept = ("parameters", "macs", "seconds", "peak_memory_mb", "device", "curve")
    return pd.DataFrame(
        [{**r["config"], **r["metrics"], **{k: r[k] for k in kept if k in r}} for r in rows]
    )
