"""Recorded rows once more: ``python -m lab again [EXPERIMENT [KEY=VALUE ...]] [--seconds S] [--seed N]`` (`make again`).

Without a name, groups of rows are drawn from all experiments whose data are at hand until, by their own record, S seconds are full,
first from notebooks that the change since the branch left main touches; N is the commit's number if none is named. Only what ran with
three seeds or more is drawn: without them nothing says how much a number may move. With a name, its groups whose configurations have
the values named. The notebook that records them runs in replay, and there these groups run.
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

ROUNDING = 1e-4  # relative: other threads, other instructions
TIMED = re.compile(
    r"speed.*|overhead.*|cnn-(latency|memory)|scaling-.*|benchmark-seconds|behaviour.*"
)
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


def groups(experiment: str) -> dict[str, list[dict]]:
    """The current rows of an experiment, those that ran together under one key."""
    found: dict[str, list[dict]] = {}
    for row in golden.current(experiment, golden.read(experiment)).values():
        fields = row["config"].items()
        together = [(k, v) for k, v in fields if k != "seed" or "together" not in row]
        found.setdefault(store.canonical(together), []).append(row)
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
    """Experiment -> configurations, one of each group, until so many seconds are full."""
    names = sorted(p.stem for p in modes.RESULTS.glob("*.jsonl") if not TIMED.fullmatch(p.stem))
    names.remove("notebook-times")
    draw, chosen, opened = random.Random(seed), {}, set()
    names = draw.sample(names, len(names))
    for name in sorted(names, key=lambda name: bool(first) and owner(name) not in first):
        every = list(groups(name).values())
        seeds = collections.Counter(_kind(row) for group in every for row in group)
        cheap = [
            group
            for group in every
            if sum(r["seconds"] for r in group) <= LONGEST
            and min(seeds[_kind(row)] for row in group) >= SEEDS
        ]
        for group in draw.sample(cheap, min(1, len(cheap))):
            if not at_hand(group):
                continue
            chosen[name] = [group[0]["config"]]
            seconds -= sum(row["seconds"] for row in group)
            seconds -= 0 if owner(name) in opened else OPENING
            opened.add(owner(name))
        if seconds <= 0:
            break
    return chosen


def run(chosen: dict[str, list[dict]]) -> list[dict]:
    """Run these groups again, by the notebooks that record them: {experiment, recorded row, new one}."""
    notebooks: dict[pathlib.Path, dict] = {}
    for name, configs in chosen.items():
        notebooks.setdefault(owner(name), {})[name] = configs
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder, "again.jsonl")
        for path, asked in notebooks.items():
            listed = pathlib.Path(folder, "asked.json")
            listed.write_text(json.dumps(asked), encoding="utf-8")
            settings = {"NDL_AGAIN": str(listed), "NDL_AGAIN_TO": str(target)}
            if scripts.run(path, "replay", OMP_NUM_THREADS="1", **settings):
                raise LabError(f"{modes.slug(path)} fails in replay, see above")
        lines = target.read_text(encoding="utf-8").splitlines() if target.is_file() else []
    return [json.loads(line) for line in lines]


def judge(experiment: str, pairs: list[dict]) -> list[str]:
    """What is not as recorded, in words."""
    problems = [p["again"]["error"] for p in pairs if "error" in p["again"]][:1]
    recorded = [row for group in groups(experiment).values() for row in group]
    chaotic, kinds = golden.kept(experiment).get("chaotic", False), {}
    for pair in pairs:
        kinds.setdefault(_kind(pair["recorded"]), []).append(pair)
    for kind, own in kinds.items():
        like = [row for row in recorded if _kind(row) == kind]
        for metric in [*own[0]["recorded"]["metrics"], "parameters"]:
            old, new = ([_value(p[side], metric) for p in own] for side in ("recorded", "again"))
            if not _stands(old, new, [_value(row, metric) for row in like], chaotic):
                problems.append(f"{metric} was {old[:3]} and is {new[:3]} at {kind}")
    return problems


def _kind(row: dict) -> str:
    return store.canonical({k: v for k, v in row["config"].items() if k not in ("seed", "first")})


def _value(row: dict, name: str):
    return row["metrics"].get(name, row.get(name))


def _stands(old: list, new: list, seeds: list, chaotic: bool) -> bool:
    """Whether new numbers are the old ones but for rounding, which may be a tenth of the standard deviation over ``seeds``.

    If ``chaotic``: or whether their mean lies where 999 of 1,000 means of as many other seeds would.
    """
    if max(map(golden.difference, old, new)) <= ROUNDING:
        return True
    if len(seeds) < SEEDS or any(not isinstance(v, (int, float)) for v in old + new + seeds):
        return False
    if max(abs(a - b) for a, b in zip(old, new)) <= statistics.stdev(seeds) / 10:
        return True
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
    if not asked.experiment:
        print(f"rows drawn with --seed {asked.seed}")
        chosen = drawn(asked.seconds, asked.seed, touched())
    else:
        wanted = dict(value.split("=", 1) for value in asked.values)
        rows = [row for g in groups(asked.experiment).values() for row in g]
        chosen = {asked.experiment: [r["config"] for r in rows if _has(r["config"], wanted)]}
    failed, found = 0, run(chosen)
    for name in chosen:
        pairs = [pair for pair in found if pair["experiment"] == name]
        problems = judge(name, pairs)
        if not pairs:
            print(f"{name}: these rows are in no grid of its notebook any more")
        failed += bool(problems)
        print(f"{name}: {len(pairs)} rows again", *problems, sep="\n  ")
    return int(failed > 0)


def _has(config: dict, wanted: dict[str, str]) -> bool:
    return all(str(config.get(key)) in value.split("|") for key, value in wanted.items())
