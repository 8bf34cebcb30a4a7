"""Edits made by hand that change numbers (H: that change none), and which of them a run of a notebook refuses.

``python tests/lab/mutants.py [ID ...]`` makes each edit of mutants.jsonl in a copy of the checkout and runs its notebook, in smoke
mode if the edit names no other; without an ID all of them, which takes about half an hour. Edits whose text is no longer there are
named.
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


def spelt(text: str, suffix: str) -> str:
    """A text as it stands in a file: in a notebook each line is a string of JSON."""
    return text if suffix == ".py" else json.dumps(text)[1:-1].replace(r"\n", '\\n",\n    "')


def refused(checkout: pathlib.Path, notebook: str, mode: str) -> bool:
    """Whether a run of a notebook fails."""
    own = {"PYTHONPATH": f"{checkout}:{checkout / 'notebooks'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--nbmake", f"notebooks/evidence/{notebook}.ipynb"]
    how = {"cwd": checkout, "env": os.environ | own | {"NDL_MODE": mode}}
    return subprocess.run(command, **how, stdout=subprocess.DEVNULL).returncode != 0


def main(wanted: list[str]) -> None:
    lines = pathlib.Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    edits = [edit for edit in map(json.loads, lines) if not wanted or edit["id"] in wanted]
    with tempfile.TemporaryDirectory() as folder:
        checkout = pathlib.Path(folder, "ndlinear-book")
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for edit in edits:
            path = checkout / edit["file"]
            before = after = path.read_text(encoding="utf-8") if path.is_file() else ""
            pairs = [[spelt(text, path.suffix) for text in pair] for pair in edit["pairs"]]
            answer = "no longer applies"
            if all(old in before for old, _ in pairs):
                for old, new in pairs:
                    after = after.replace(old, new, -1 if edit["id"].startswith("H") else 1)
                path.write_text(after, encoding="utf-8")
                found = refused(checkout, edit["notebook"], edit.get("mode", "smoke"))
                answer = "refused" if found else "not refused"
                path.write_text(before, encoding="utf-8")
            print(f"{edit['id']} {edit['what']}: {answer}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
