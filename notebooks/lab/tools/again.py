"""Recorded rows once more: ``python -m lab again [EXPERIMENT [KEY=VALUE ...]] [--seconds S] [--seed N]`` (`make again`).

Without a name, groups of rows are drawn from all experiments whose data are at hand until, by their own record, S seconds are full,
first from notebooks that the change since the branch left main touches; N is the commit's number if none is named. Only what ran with
three seeds or more is drawn: without them nothing says how much a number may move. With a name, its groups whose configurations have
the values named. The notebook that records them runs in replay, and there these groups run. Times are never taken again.
All numbers of a row must be the recorded ones but for rounding, which may grow to a tenth of the standard deviation over seeds;
where the golden file calls an experiment chaotic, they must lie where those of other seeds lie. Exit status 1 if one does not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import math
import pathlib
import random
import re
import statistics
import subprocess
import tempfile

from .. import data, modes
from ..modes import LabError
from ..records import golden, store
from ..stats import interval
from . import scripts

LONGEST = 10.0  # seconds of a group that is drawn
SEEDS = 3  # rows that differ by the seed alone, at least
RECORDS = re.compile(r"lab\.(record|whole|on_devices)\(")
OPENING = 15.0  # seconds until a notebook has reached its experiments


@functools.cache
def _texts() -> dict[pathlib.Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in modes.chapters()}


@functools.cache
def owner(experiment: str) -> pathlib.Path:
    """The notebook that records an experiment: of those that record any, the one whose code has the longest beginning of its name."""
    words = experiment.split("-")
    recording = {path: text for path, text in _texts().items() if RECORDS.search(text)}
    for count in range(len(words), 0, -1):
        begin = "-".join(words[:count])
        for path, text in reversed(recording.items()):
            if f'\\"{begin}' in text:
                return path
    raise LabError(f"no notebook names the experiment {experiment!r}")


def groups(experiment: str) -> list[list[dict]]:
    """The current rows of an experiment, those that ran together in one list."""
    found: dict[str, list[dict]] = {}
    for row in golden.current(experiment, golden.read(experiment)).values():
        own = store.key(row["config"], ("seed",) if "together" in row else ())
        found.setdefault(own, []).append(row)
    return list(found.values())


def named(experiment: str, values: list[str]) -> list[dict]:
    """The rows of an experiment's groups in which a configuration has these values, each KEY=VALUE|VALUE."""
    wanted = [value.partition("=") for value in values]

    def has(row: dict) -> bool:
        return all(str(row["config"].get(key)) in some.split("|") for key, _, some in wanted)

    found = [row for group in groups(experiment) if any(map(has, group)) for row in group]
    if not found:
        raise LabError(f"no row that counts is of {' '.join([experiment, *values])}")
    return found


def git(*command: str) -> str:
    """What git says, or "" where there is no git or no such commit."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        how = {"cwd": modes.ROOT, "capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *command], **how).stdout.strip()
    return ""


def touched() -> set[pathlib.Path]:
    """Notebooks that changed since the branch left main, and those that name a module of a chapter or of data that did."""
    base = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main")
    files = [modes.ROOT / name for name in git("diff", "--name-only", base).split()] if base else []
    modules = [f.stem for f in files if f.parent.name in ("chapters", "data", "train")]
    named = re.compile(rf"\b({'|'.join(map(re.escape, modules))})\b" if modules else "(?!)")
    return {path for path, text in _texts().items() if path in files or named.search(text)}


def at_hand(rows: list[dict]) -> bool:
    """Whether all data of rows are here, in the form that the rows were made with; nothing is downloaded."""
    forms = {pair for row in rows for pair in row["data"].items()}
    layouts = [data.SOURCES[name].layouts for name, _ in forms]
    here = all(any(all(map(data.find, lay.files)) for lay in each) for each in layouts)
    return here and all(data.checksum(name) == form for name, form in forms)


def drawn(seconds: float, seed: int, first: set[pathlib.Path] = frozenset()) -> dict[str, list]:
    """Experiment -> the rows of one of its groups, until so many seconds are full."""
    names = sorted(p.stem for p in golden.place("").parent.glob("*.json"))
    # golden files of times have no numbers
    names = [name for name in names if golden.kept(name)["values"]]
    draw, chosen, opened = random.Random(seed), {}, set()
    names = draw.sample(names, len(names))
    for name in sorted(names, key=lambda name: bool(first) and owner(name) not in first):
        every = groups(name)
        seeds = collections.Counter(_kind(row) for group in every for row in group)
        cheap = [
            group
            for group in every
            if sum(row["seconds"] for row in group) <= LONGEST
            and min(seeds[_kind(row)] for row in group) >= SEEDS
        ]
        for group in filter(at_hand, draw.sample(cheap, min(1, len(cheap)))):
            chosen[name] = group
            seconds -= sum(row["seconds"] for row in group)
            seconds -= 0 if owner(name) in opened else OPENING
            opened.add(owner(name))
        if seconds <= 0:
            break
    return chosen


def run(chosen: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Run these rows again, by the notebooks that record them: experiment -> new rows."""
    notebooks: dict[pathlib.Path, dict] = {}
    for name, rows in chosen.items():
        keys = [store.key(row["config"], golden.kept(name).get("without", ())) for row in rows]
        notebooks.setdefault(owner(name), {})[name] = keys
    with tempfile.TemporaryDirectory() as folder:
        listed = pathlib.Path(folder, "asked.json")
        for path, asked in notebooks.items():
            listed.write_text(json.dumps(asked), encoding="utf-8")
            if scripts.run(path, "replay", OMP_NUM_THREADS="1", NDL_AGAIN=str(listed)):
                raise LabError(f"{modes.slug(path)} fails in replay, see above")
        return {name: store.parse(pathlib.Path(folder, f"{name}.jsonl")) for name in chosen}


def judge(experiment: str, fresh: list[dict]) -> list[str]:
    """What is not as recorded, in words."""
    recorded = golden.current(experiment, golden.read(experiment))
    chaotic, problems = golden.kept(experiment).get("chaotic", False), []
    for kind in dict.fromkeys(map(_kind, fresh)):
        own = [row for row in fresh if _kind(row) == kind]
        before = [recorded[row["key"]] for row in own]
        like = [row for row in recorded.values() if _kind(row) == kind]
        for metric in [*before[0]["metrics"], "parameters"]:
            old, new, seeds = ([_value(r, metric) for r in rows] for rows in (before, own, like))
            if not _stands(old, new, seeds, chaotic):
                apart = [pair for pair in zip(old, new) if pair[0] != pair[1]][:3]
                problems.append(f"{metric} was and is {apart} at {kind}")
    return problems


def _kind(row: dict) -> str:
    return store.key(row["config"], ("seed", "first"))


def _value(row: dict, name: str):
    return row["metrics"].get(name, row.get(name))


def _stands(old: list, new: list, seeds: list, chaotic: bool) -> bool:
    """Whether new numbers are the old ones but for rounding, which may be a tenth of the standard deviation over ``seeds``.

    If ``chaotic``: or whether their mean lies where 999 of 1,000 means of as many other seeds would. Where all ``seeds`` have one
    number, as a cap on steps, that interval has no width: fewer than half may then have another.
    """
    if max(map(golden.difference, old, new)) <= golden.LEAST:
        return True
    if len(seeds) < SEEDS or any(not isinstance(v, (int, float)) for v in old + new + seeds):
        return False
    if max(abs(a - b) for a, b in zip(old, new)) <= statistics.stdev(seeds) / 10:
        return True
    if len({*seeds}) == 1:
        return chaotic and sum(value != seeds[0] for value in new) < len(new) / 2
    mean, low, high = interval(seeds, level=0.999)
    wider = math.sqrt(1 + len(seeds) / len(new))
    return chaotic and abs(statistics.fmean(new) - mean) <= wider * (high - low) / 2


def main(arguments: list[str]) -> int:
    asked = argparse.ArgumentParser(prog="lab again", description=__doc__)
    asked.add_argument("experiment", nargs="?")
    asked.add_argument("values", nargs="*", help="KEY=VALUE|VALUE")
    asked.add_argument("--seconds", type=float, default=60)
    asked.add_argument("--seed", type=int, default=int(git("rev-parse", "HEAD")[:6] or "0", 16))
    asked = asked.parse_args(arguments)
    if asked.experiment:
        chosen = {asked.experiment: named(asked.experiment, asked.values)}
    else:
        print(f"rows drawn with --seed {asked.seed}")
        chosen = drawn(asked.seconds, asked.seed, touched())
    found = run(chosen)
    problems = {name: judge(name, rows) for name, rows in found.items()}
    for name, rows in found.items():
        print(f"{name}: {len(rows)} rows again", *problems[name], sep="\n  ")
        if not rows:
            print("  these rows are in no grid of its notebook any more")
    return int(any(problems.values()))
