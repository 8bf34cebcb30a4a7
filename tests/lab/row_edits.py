"""Rows of the project's records edited at random, with the row's digest made anew, and how many of the edits replay refuses.

``python tests/lab/row_edits.py [SEED]`` edits one row of each of 45 records (bar: 43 refused), in copies of the files; it ends with 1
where the bar is missed.
"""

import os
import pathlib
import random
import sys
import tempfile

os.environ["NDL_MODE"] = "replay"

from lab import modes, records
from lab.records import golden
from lab.records.store import canonical, digest

EDITS = 45


def changed(value: dict, chance: random.Random) -> None:
    """One number of a dictionary, or of one that it holds, times 1.1 and plus one."""
    names = sorted(key for key, item in value.items() if isinstance(item, (int, float)))
    key = chance.choice(names)
    value[key] = 1.1 * value[key] + 1


def curve(rows: list[dict], at: int, chance: random.Random) -> None:
    rows[at]["curve"] = [*rows[at].get("curve", []), {"epoch": 1e6, "loss": 0.0}]


KINDS = {
    "metric": lambda rows, at, chance: changed(rows[at]["metrics"], chance),
    "row deleted": lambda rows, at, chance: rows.pop(at),
    "row doubled": lambda rows, at, chance: rows.insert(at, dict(rows[at])),
    "seconds": lambda rows, at, chance: rows[at].update(seconds=1.1 * rows[at]["seconds"]),
    "time": lambda rows, at, chance: rows[at].update(time="2026-01-01T00:00:00+00:00"),
    "device": lambda rows, at, chance: rows[at].update(device="NVIDIA H200"),
    "parameters": lambda rows, at, chance: rows[at].update(
        parameters=(rows[at].get("parameters") or 0) + 1
    ),
    "seed": lambda rows, at, chance: rows[at].update(seed=rows[at]["seed"] + 1),
    "curve": curve,
}


def refused(name: str, kind: str | None, folder: pathlib.Path, chance: random.Random) -> bool:
    """Whether replay refuses a record of which one row was edited in a copy; without a kind, a copy as it was."""
    rows = [dict(row, metrics=dict(row["metrics"])) for row in golden.read(name)]
    if kind:
        KINDS[kind](rows, chance.randrange(len(rows)), chance)
    made_anew = (canonical(row | {"digest": digest(row)}) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text("".join(made_anew), encoding="utf-8")
    kept, modes.RESULTS = modes.RESULTS, folder
    try:
        records.read(name)
    except modes.LabError:
        return True
    finally:
        modes.RESULTS = kept
    return False


def main(seed: int) -> int:
    chance = random.Random(seed)
    names = [
        p.stem for p in sorted(modes.RESULTS.glob("*.jsonl")) if golden.kept(p.stem)["record"][0]
    ]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "golden").symlink_to(modes.RESULTS / "golden")
        for number, name in enumerate(chance.sample(names, EDITS)):
            assert not refused(name, None, pathlib.Path(folder), chance), name
            kind = list(KINDS)[number % len(KINDS)]
            if not refused(name, kind, pathlib.Path(folder), chance):
                missed.append(f"{name}: {kind}")
    print(
        *(f"not refused: {one}" for one in missed),
        f"seed {seed}: {EDITS - len(missed)} of {EDITS} edits of rows refused",
        sep="\n",
    )
    return int(len(missed) > 2)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 0))
