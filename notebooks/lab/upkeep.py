"""Upkeep of the book: ``python -m lab.upkeep environment | stamp URL | times`` (run in notebooks/)."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time

from .modes import NOTEBOOKS, ROOT, LabError

CHAPTERS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
HEAD = "# Generated from pyproject.toml by `make environment`; a test says whether it is current.\n"


def environment() -> str:
    """environment.yml from the dependencies and extras of pyproject.toml: python and pip from conda, the rest from PyPI."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["book"], *extras["experiments"], *extras["test"]]
    lines = [
        "name: ndlinear-book",
        "channels: [conda-forge]",
        "dependencies:",
        f"  - python{project['requires-python']}",
        "  - pip",
        "  - pip:",
        "      - -c constraints.txt",
        *[f'      - "{need}"' for need in needed],
    ]
    return HEAD + "\n".join(lines) + "\n"


def stamp(url: str) -> int:
    """Write the repository's address into the setup cell of every notebook; returns how many changed."""
    if url and not re.fullmatch(r"https://[\w.-]+/[\w./-]+", url):
        raise LabError(f"{url!r} is not an https address of a git repository")
    changed = 0
    for path in CHAPTERS:
        text = path.read_text(encoding="utf-8")
        new, found = re.subn(r'(?<="BOOK = \\")[^"\\]*(?=\\")', url, text)
        if found != 1:
            raise LabError(
                f"{path.name} has {found} setup cells; copy the one of 00_template.ipynb"
            )
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed += 1
    return changed


def _times_file() -> pathlib.Path:
    return NOTEBOOKS / "results" / "notebook-times.jsonl"


def times() -> None:
    """Run every chapter once in replay and in smoke and record its seconds."""
    from .records import _append, _device, _versions

    for path in CHAPTERS:
        for mode in ("replay", "smoke"):
            began = time.perf_counter()
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--nbmake",
                path.name,
                "-p",
                "no:cacheprovider",
            ]
            subprocess.run(
                command,
                cwd=NOTEBOOKS,
                env=os.environ | {"NDL_MODE": mode},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            row = {
                "experiment": "notebook-times",
                "notebook": path.stem,
                "mode": mode,
                "seconds": round(time.perf_counter() - began, 1),
                "device": _device(),
                "versions": _versions(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            _append(_times_file(), row)
            print(f"{path.stem}: {mode} {row['seconds']} s")


def times_line(slug: str) -> str:
    """The newest recorded times of a chapter, and how long the runs took whose records it reads."""
    from . import ledger

    path, newest = _times_file(), {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        row = json.loads(line)
        if row["notebook"] == slug:
            newest[row["mode"]] = row["seconds"]
    parts = [f"{mode} {seconds:.0f} s" for mode, seconds in sorted(newest.items())]
    names = {
        name for c in ledger.claims() if c.get("notebook") == slug for name in c.get("records", [])
    }
    parts += full_line(sorted(names))
    return " · ".join(parts) or "not recorded yet"


def full_line(names: list[str]) -> list[str]:
    """What the full runs of these experiments took, from their records."""
    from .records import read

    rows = []
    for name in names:
        found = [row for row in read(name) if row["status"] == "ok"]
        rows += [
            row for row in found if row["code"] == found[-1]["code"]
        ]  # not those of earlier code
    if not rows:
        return []
    minutes = sum(row["seconds"] for row in rows) / 60
    return [
        f"full {minutes:.1f} min for {len(rows)} runs on {', '.join(sorted({row['device'] for row in rows}))}"
    ]


def main(arguments: list[str]) -> None:
    """Command line: environment | stamp URL | times."""
    match arguments:
        case ["environment"]:
            (ROOT / "environment.yml").write_text(environment(), encoding="utf-8")
        case ["stamp", url]:
            print(f"{stamp(url)} notebooks changed")
        case ["times"]:
            times()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
