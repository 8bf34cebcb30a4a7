"""The small table at the head of a chapter."""

from __future__ import annotations

import json
import pathlib

from .. import modes
from ..records import golden, store
from . import ledger
from .show import put


def card(slug: str, *, read_first: list[str] | None = None, gpu: bool = False) -> None:
    """The small table at the head of a chapter: claims settled here, what to read first, time in each mode, GPU or not."""
    settled = [c for c in ledger.of_chapter(slug) if c["verdict"] not in ("open", "untestable")]
    claims = {cell(c, slug): f"{ledger.mark(c)}\N{NO-BREAK SPACE}{c['id']}" for c in settled}
    chapters = {f"{name}.html": name for name in read_first or []}
    rows = [
        ("Settles", *links(claims, "no claim")),
        ("Read first", *links(chapters, "nothing")),
        *evidence(slug),
        ("Time", *[times_line(slug)] * 2),
        ("GPU", *["for a full run" if gpu else "not needed"] * 2),
    ]
    body = "".join(f"<tr><th scope='row'>{head}</th><td>{cell}</td></tr>" for head, cell, _ in rows)
    put(
        "\n".join(f"{head:<11}{cell}" for head, _, cell in rows),
        html=f'<table class="ndl-card">{body}</table>',
    )


def links(named: dict[str, str], otherwise: str) -> tuple[str, str]:
    """Addresses with their words, in one line: as links, and the words alone."""
    found = [f'<a href="{address}">{words}</a>' for address, words in named.items()]
    return ", ".join(found) or otherwise, ", ".join(named.values()) or otherwise


def evidence(slug: str) -> list[tuple[str, str, str]]:
    """The row that leads from a lecture to its rules, runs and judgements, where they stand apart."""
    names = modes.evidence(slug)
    if not names:
        return []
    titles, _ = links({f"evidence/{name}.html": title(name) for name in names}, "")
    files = ", ".join(f"evidence/{name}.ipynb" for name in names)
    return [("Evidence", f"{titles}: rules, runs and judgements", files)]


def title(name: str) -> str:
    """Number and title of an evidence notebook, such as "E43 · Tables"."""
    notebook = modes.NOTEBOOKS / "evidence" / f"{name}.ipynb"
    first = "".join(json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"])
    return f"E{name[:2]} · {first.splitlines()[0].removeprefix('# ')}"


def cell(claim: dict, slug: str) -> str:
    """Address of the cell that judges a claim, seen from a chapter."""
    page = "" if claim["notebook"] == slug else f"{claim['notebook']}.html"
    return f"{page}#claim-{claim['id']}"


def times_file() -> pathlib.Path:
    """The record of `make times`."""
    return modes.RESULTS / "notebook-times.jsonl"


def times_line(slug: str) -> str:
    """The newest recorded times of a chapter, and how long the runs took whose records it reads."""
    path, newest = times_file(), {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        row = json.loads(line)
        if row["notebook"] == slug:
            newest[row["mode"]] = row["seconds"]
    parts = [f"{mode} {seconds:.0f} s" for mode, seconds in sorted(newest.items())]
    names = {name for c in ledger.of_chapter(slug) for name in c.get("records", [])}
    parts += full_line(sorted(names))
    return " · ".join(parts) or "not recorded yet"


def full_line(names: list[str]) -> list[str]:
    """What the full runs of these experiments took, from their records."""
    rows = [row for name in names for row in golden.current(name, store.read(name)).values()]
    minutes = sum(row["seconds"] for row in rows) / 60
    devices = ", ".join(sorted({row["device"] for row in rows}))
    return [f"full {minutes:.1f} min for {len(rows)} runs on {devices}"] if rows else []
