"""`pytest --nbmake notebooks` runs every notebook small, seeded and offline, and after it the folded solutions of its exercises.

Kernels inherit the environment.
"""

import os
import pathlib

import nbformat
import nbmake.nb_run
from lab.tools.scripts import folded_solutions

os.environ.setdefault("NDL_MODE", "smoke")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        *map(str, pathlib.Path(__file__).resolve().parents[:2]),  # this checkout's lab and ndlinear
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)


class WithSolutions:
    """Stands in for the module `nbformat` where nbmake reads a notebook: the solutions follow as further cells."""

    @staticmethod
    def read(path, version):
        notebook = nbformat.read(path, version)
        solutions = map(nbformat.v4.new_code_cell, folded_solutions(notebook))
        notebook.cells.extend(solutions)
        return notebook

    def __getattr__(self, name):
        return getattr(nbformat, name)


nbmake.nb_run.nbformat = WithSolutions()
