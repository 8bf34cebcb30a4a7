"""An experiment survives kill -9: the samples of chapter 31, its networks, its training function and its grid, at a small size."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "evidence" / "32_sample_efficiency.ipynb"
NEEDED = (
    "lab.start()",
    "import itertools",
    "ARMS = ",
    "def modewise(",
    "MODELS = ",
    "def train(",
    "CHOSEN = ",
    "def cells(",
    "runs = lab.record(",
)
SMALL = """
from lab import modes, records
modes.RESULTS = pathlib.Path(sys.argv[1])
some = [c for c in grid if c["samples"] == SIZES[0] and c["model"] != "linear" and c["seed"] < 5]
grid = [c | {{"samples": 100, "steps": 25, "tests": 50}} for c in some]
print("done", len({record}))
"""


def script() -> str:
    """The chapter's code as far as the experiment needs it, with its record call on a small grid and another folder."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    parts = [next(source for source in code if mark in source) for mark in NEEDED]
    before, record = parts.pop().split("runs = ")
    return "\n\n".join([*parts, before, SMALL.format(record=record.strip())])


def finished(path: pathlib.Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_chapter_goes_on_where_kill_minus_nine_stopped_it(tmp_path):
    program, path = tmp_path / "chapter.py", tmp_path / "dial-samples.jsonl"
    program.write_text(script(), encoding="utf-8")
    command = [sys.executable, program, tmp_path]
    how = {
        "cwd": ROOT / "notebooks",
        "env": os.environ | {"NDL_MODE": "full", "OMP_NUM_THREADS": "1"},
    }
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, **how)
    deadline = time.time() + 300
    while finished(path) < 4 and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = path.read_bytes().rpartition(b"\n")[0]
    assert 4 <= before.count(b"\n") + 1 < 20, "killed in the middle"
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert "done 20" in done.stdout, done.stderr
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.read_bytes().startswith(before), "no finished row changed"
    assert len(rows) == len({row["key"] for row in rows}) == 20, "none lost, none doubled"
