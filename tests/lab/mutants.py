"""Edits made by hand that change numbers (H: that change none), and which of them a smoke run refuses.

``python tests/lab/mutants.py [ID ...]`` makes each edit of mutants.jsonl in a copy of the checkout and runs the notebook that records
its experiment; without an ID all of them, which takes about half an hour. Edits whose text is no longer there are named.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", "_build", "__pycache__", ".*_cache", "shared")
SMOKE = (
    "from lab.tools import again, scripts; import sys; "
    "sys.exit(scripts.run(again.owner(sys.argv[1]), 'smoke', OMP_NUM_THREADS='1'))"
)


def edited(path: pathlib.Path, pairs: list[tuple[str, str]], often: bool) -> str | None:
    """The text of a file after an edit, in a notebook cell by cell; None where a text is not there."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for old, new in pairs:
        if path.suffix == ".ipynb":
            old, new = json.dumps(old)[1:-1], json.dumps(new)[1:-1]
            joined = json.loads(text)
            for cell in joined["cells"]:
                cell["source"] = "".join(cell["source"])
            text = json.dumps(joined)
        if old not in text:
            return None
        text = text.replace(old, new, -1 if often else 1)
    return text


def refused(checkout: pathlib.Path, experiment: str) -> bool:
    """Whether the smoke run of an experiment's notebook fails."""
    where = os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'notebooks'}"}
    command = [sys.executable, "-c", SMOKE, experiment]
    return (
        subprocess.run(command, cwd=checkout, env=where, stderr=subprocess.DEVNULL).returncode != 0
    )


def main(wanted: list[str]) -> None:
    lines = pathlib.Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    edits = [edit for edit in map(json.loads, lines) if not wanted or edit["id"] in wanted]
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder, "ndlinear-book")
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for edit in edits:
            path = checkout / edit["file"]
            text = edited(path, edit["pairs"], often=edit["id"].startswith("H"))
            answer = "no longer applies"
            if text is not None:
                before = path.read_bytes()
                path.write_text(text, encoding="utf-8")
                answer = "refused" if refused(checkout, edit["experiment"]) else "not refused"
                path.write_bytes(before)
            print(f"{edit['id']} {edit['what']}: {answer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
