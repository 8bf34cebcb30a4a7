"""The line at the end of a chapter."""

from __future__ import annotations

import json
import pathlib
import re

from .. import modes
from ..machine import module_version
from ..records import golden
from . import ledger, quote
from .show import put


def footer(slug: str) -> None:
    """The last line of a chapter: the claims that it settles, its evidence, times, the layer's file. Looks up what it quoted."""
    quote.look_up(slug)
    settled = [c for c in ledger.of_chapter(slug) if c["verdict"] not in ("open", "untestable")]
    claims = {cell(c, slug): f"{ledger.mark(c)}\N{NO-BREAK SPACE}{c['id']}" for c in settled}
    count = f"{len(claims)} claim{'' if len(claims) == 1 else 's'} of the paper settled here"
    folded = f"<details><summary>{count}</summary>{links(claims)}</details>" if claims else ""
    top = "../" * (1 + slug.count("/"))  # of the built book, where the layer's file lies
    layer = f'<a href="{top}ndlinear.py" download>Download ndlinear.py</a> {module_version()}'
    line = " · ".join([*evidence(slug), times_line(slug), layer])
    html = f'<div class="ndl-footer">{folded}<p>{line}</p></div>'
    put(" ".join(re.sub("<[^>]*>", " ", html).split()), html=html)


def links(named: dict[str, str]) -> str:
    """Links in one line. named: address -> words."""
    return ", ".join(f'<a href="{address}">{words}</a>' for address, words in named.items())


def evidence(slug: str) -> list[str]:
    """What leads from a lecture to its rules, runs and judgements, where they stand apart."""
    names = {f"evidence/{name}.html": title(name) for name in modes.evidence(slug)}
    return [f"Evidence: {links(names)}"] if names else []


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
    rows = [row for name in names for row in golden.current(name, golden.read(name)).values()]
    minutes = sum(row["seconds"] for row in rows) / 60
    devices = ", ".join(sorted({row["device"] for row in rows}))
    return [f"full {minutes:.1f} min for {len(rows)} runs on {devices}"] if rows else []
