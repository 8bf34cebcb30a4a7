"""A notebook up to one of its records, cell by cell: ``python -m lab.tools.cells NOTEBOOK.ipynb`` with NDL_ONLY set.

Every cell runs from a file of its own, so that fingerprints find the source of its functions. A cell before the record that fails,
because an optional library is missing, say, is named and passed over. Exit status 3: the record was not reached.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types

from ..modes import NOTEBOOKS, ROOT
from ..records import budget, store
from ..records.budget import EVERY, NOTE

NOT_REACHED = 3
# functions of the lab whose first argument names an experiment
RECORDS = ("record", "at_scale", "on_devices")
# for every process that runs code of a notebook
ANY_RUN = {"MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join([str(ROOT), str(NOTEBOOKS)])}


def code_cells(notebook: pathlib.Path) -> list[tuple[str, str]]:
    """(id, source) of the code cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(c["id"], "".join(c["source"])) for c in cells if c["cell_type"] == "code"]


def script(notebook: pathlib.Path) -> str:
    """The code cells of a notebook as one script; pages use no magics."""
    return "\n\n".join(source for _, source in code_cells(notebook)) + "\n"


def _nodes(notebook: pathlib.Path) -> list[ast.AST]:
    """The syntax of a notebook, cell by cell."""
    return [n for _, source in code_cells(notebook) for n in ast.walk(ast.parse(source))]


def experiments(notebook: pathlib.Path) -> list[str]:
    """The experiments that a notebook names in the call that records them, in their order."""
    calls = [n for n in _nodes(notebook) if isinstance(n, ast.Call) and n.args]
    first = [c.args[0] for c in calls if ast.unparse(c.func).rpartition(".")[2] in RECORDS]
    return list(dict.fromkeys(each.value for each in first if isinstance(each, ast.Constant)))


def words(notebook: pathlib.Path) -> set[str]:
    """Every text in the code of a notebook: what it can name an experiment by."""
    found = [n.value for n in _nodes(notebook) if isinstance(n, ast.Constant)]
    return {value for value in found if isinstance(value, str)}


def replaced(source: str, constants: dict[str, str]) -> str:
    """The source of a cell with other values for some of the names that it assigns: name -> expression."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in constants:
            value = node.value
            first, last = value.lineno - 1, value.end_lineno - 1
            before = lines[first].encode()[: value.col_offset].decode()
            behind = lines[last].encode()[value.end_col_offset :].decode()
            lines[first : last + 1] = [before + constants[ast.unparse(node.targets[0])] + behind]
    return "".join(lines)


def run(notebook: pathlib.Path) -> None:
    """Run the cells in a fresh ``__main__``; ends by SystemExit where the record that NDL_ONLY names is done.

    NDL_CONSTANTS, JSON, gives names that the notebook assigns other values: {"LARGE": "GPU_SCALE"}.
    """
    constants = json.loads(os.environ.get("NDL_CONSTANTS", "{}"))
    only = budget.only_experiment()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    with tempfile.TemporaryDirectory() as folder:
        for name, source in code_cells(notebook):
            file = pathlib.Path(folder, f"{name}.py")
            source = replaced(source, constants)
            file.write_text(source, encoding="utf-8")
            try:
                exec(compile(source, str(file), "exec"), module.__dict__)
            except Exception as error:
                if (only.folder / f"{only.experiment}{NOTE}").is_file():
                    raise  # it was reached, and this is what came of it
                print(f"cell {name} is passed over: {type(error).__name__}: {error}", flush=True)
    if only.experiment != EVERY:
        print(f"{notebook.stem}: the record of {only.experiment} was not reached")
        raise SystemExit(NOT_REACHED)


def up_to(experiment: str, values: dict, folder: pathlib.Path) -> dict[str, str]:
    """The environment of a process that runs a notebook in full up to an experiment, and there what has these values."""
    asked = {"experiment": experiment, "values": values, "folder": str(folder)}
    return os.environ | ANY_RUN | {"NDL_MODE": "full", "NDL_ONLY": json.dumps(asked)}


def start(
    notebook: pathlib.Path, experiment: str, folder: pathlib.Path, values: dict, **more
) -> subprocess.Popen:
    """A process that runs a notebook up to an experiment; what it writes and says goes to ``folder``.

    Args:
        values: of the configurations to be run, as for `make reproduce`. more: further environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = up_to(experiment, values, folder)
    environment |= {"NDL_RESULTS": str(folder), "PYTHONUNBUFFERED": "1"}
    with open(folder / "said.txt", "w", encoding="utf-8") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "lab.tools.cells", str(notebook)],
            cwd=NOTEBOOKS,
            env=environment | more,
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """On Linux: a process whose parent is killed is killed too, so that a machine is free at once."""
    import contextlib
    import ctypes
    import signal

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def hand_out(rows: list[dict], folder: pathlib.Path) -> None:
    """Write rows where a process with this folder finds them, beside those of the records."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        store.append(folder / f"{row['experiment']}.jsonl", row)


def survey(
    notebook: pathlib.Path, constants: dict[str, str] | None = None, rows: list[dict] | None = None
) -> dict[str, dict]:
    """What each experiment of a notebook is now: fingerprint, configurations, data sets. Trains nothing.

    Args:
        rows: further rows that the notebook may need to find its later grids, such as trials of learning rates.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        hand_out(rows or [], folder)
        start(notebook, EVERY, folder, {}, NDL_CONSTANTS=json.dumps(constants or {})).wait()
        notes = [json.loads(p.read_text(encoding="utf-8")) for p in folder.glob(f"*{NOTE}")]
    return {note["experiment"]: note for note in notes}


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]))
