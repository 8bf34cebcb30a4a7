"""Notebooks as plain scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from .. import modes
from ..modes import NOTEBOOKS, LabError


def chosen(names: list[str]) -> list[pathlib.Path]:
    """The notebooks that these words name: a path, or the beginning of a name such as "evidence/43"."""
    found = []
    for name in names:
        begin = name.removesuffix(".ipynb").removeprefix("notebooks/")
        matching = [p for p in modes.chapters() if modes.slug(p).startswith(begin)]
        if not matching:
            raise LabError(f"no notebook of the book begins with {name!r}")
        found += matching
    return list(dict.fromkeys(found))


def source(notebook: pathlib.Path) -> str:
    """The code cells of a notebook as one script; pages use no magics."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n\n".join(code) + "\n"


def folded_solutions(notebook: dict) -> list[str]:
    """The Python code in the folded parts of a notebook's text: solutions of exercises, which tests run after its cells."""
    texts = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    folded = [part for text in texts for part in re.findall(r"(?s)<details.*?</details>", text)]
    return [code for part in folded for code in re.findall(r"(?s)```python\n(.*?)```", part)]


def run(
    notebook: pathlib.Path, mode: str, *, limit: float | None = None, quiet: bool = True, **settings
) -> int | None:
    """Run the code of a notebook in a mode; returns the exit status, or None where ``limit`` seconds ended it.

    Args:
        settings: further environment variables.
    """
    where = {"PYTHONPATH": os.pathsep.join([str(modes.ROOT), str(NOTEBOOKS)]), "MPLBACKEND": "Agg"}
    environment = os.environ | where | {"NDL_MODE": mode} | settings
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, f"{notebook.stem}.py")
        script.write_text(source(notebook), encoding="utf-8")
        try:
            return subprocess.run(
                [sys.executable, str(script)],
                cwd=NOTEBOOKS,
                env=environment,
                timeout=limit,
                stdout=subprocess.DEVNULL if quiet else None,
            ).returncode
        except subprocess.TimeoutExpired:
            return None
