"""A layer of your own in the benchmark of evidence 64: ``python -m lab bench FILE.py:LAYER [--sets SET ...] [--quick]``.

LAYER is a class or a function (axes before, axes behind, numbers) -> module of at most so many numbers, or None where it cannot be
made so small. It is trained on all sets by the protocol of all layers and gets records of its own, which a pull request can bring.
A run that was stopped goes on where it was; NDL_CLUSTER spreads it. Without a layer: the times of chapter 60 on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import tempfile

import numpy as np
import pandas as pd
from torch import nn

from ..benchmark import models, protocol, reading
from ..benchmark.models import QUARTER, SMALL
from ..chapters import encoder
from ..data.with_axes import SETS
from ..modes import NOTEBOOKS, LabError
from ..records import record

QUICK = ("digits", "breast-cancer")  # both come with scikit-learn


class FromFile:
    """A layer out of a file, which each process reads by itself."""

    def __init__(self, path: pathlib.Path, name: str):
        self.path, self.name, self.found = path, name, None

    def __getstate__(self) -> dict:
        return self.__dict__ | {"found": None}

    def __call__(self, axes: tuple, hidden: tuple, most: int) -> nn.Module | None:
        if self.found is None:
            spec = importlib.util.spec_from_file_location(f"layer_{self.path.stem}", self.path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            if not callable(getattr(module, self.name, None)):
                raise LabError(f"{self.path} has no class or function {self.name}")
            self.found = getattr(module, self.name)
        return self.found(axes, hidden, most)


def layer_of(text: str) -> FromFile:
    """The layer that "FILE.py:LAYER" names."""
    file, _, name = text.rpartition(":")
    path = pathlib.Path(file).resolve()
    if not path.is_file() or not name.isidentifier():
        raise LabError(f"{text!r}: name a file and what is in it, such as my_layer.py:MyLayer")
    if name.lower() in [n.replace("-", "") for n in models.NAMES] + ["rates", "seconds"]:
        raise LabError(
            f"{name} is a name that the benchmark has for itself: give yours another one"
        )
    return FromFile(path, name)


def cells_of(layer: FromFile, sets: list[str], size: str) -> list[dict]:
    """The cells of a layer: both budgets, sets on which it can be made so small."""
    found = []
    for budget in (SMALL, QUARTER):
        fits = [s for s in sets if models.network(layer, protocol.shape_of(s), budget) is not None]
        print(f"{layer.name}, {budget}, {size} samples: fits {len(fits)} of {len(sets)} sets")
        key = (size, layer.name, budget, protocol.IN_PLACE)
        found += [dict(zip(protocol.CELL, (name, *key))) for name in fits]
    return found


def train(
    layer: FromFile, sets: list[str], sizes: tuple, cuts: range | None = None
) -> pd.DataFrame:
    """Trials and runs of a layer; ``cuts``: those alone, for trials as well."""
    name = "benchmark-" + re.sub(r"[^a-z0-9]+", "-", layer.name.lower()).strip("-")
    source = hashlib.sha256(layer.path.read_bytes()).hexdigest()[:12]
    trainer = protocol.Trainer(protocol.Tables(encoder.tables), {layer.name: layer})

    def recorded(experiment, run):
        def rows(grid):
            grid = [c | {"source": source} for c in grid if cuts is None or c["seed"] in cuts]
            return record(experiment, grid, run, data=protocol.data_of, together=True)

        return rows

    found = []
    for size in sizes:
        cells = cells_of(layer, sets, size)
        if not cells:
            raise LabError(f"{layer.name} fits no set: return None only where it cannot be smaller")
        tried = protocol.tried(recorded(f"{name}-rates", trainer.trials), cells)
        found.append(recorded(name, trainer.runs)(protocol.tested(cells, tried)))
    return pd.concat(found, ignore_index=True)


def shown(own: pd.DataFrame) -> None:
    """The layer's runs by set, and its row among those of all layers in the same sets, sizes and cuts."""
    by = own.assign(log=np.log(own["test_loss"])).groupby(["budget", "size", "data"], sort=False)
    means = by.agg(lr=("lr", "first"), parameters=("parameters", "first"), log=("log", "mean"))
    means["test loss"] = np.exp(means.pop("log"))
    print(means.to_string(float_format="{:.4g}".format))
    beside = reading.rows_on_disk().ran.merge(own[["data", "size", "seed"]].drop_duplicates())
    for budget in own["budget"].unique():
        print(f"\nBudget {budget}: test loss over that of the narrowed dense layer, mean over sets")
        found = reading.standings(pd.concat([beside, own]), budget)
        print(found.to_string(index=False, float_format="{:.3f}".format))


def times(notebook: pathlib.Path) -> None:
    """Run the cells of a chapter that are tagged "bench", in full mode and without judging claims."""
    os.environ["NDL_MODE"] = "full"
    os.environ["NDL_BENCH"] = "1"  # times of other chapters are taken by this command only
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    tagged = [c for c in cells if "bench" in c["metadata"].get("tags", [])]
    code = ["import lab\n\nlab.start()", *("".join(c["source"]) for c in tagged)]
    exec("\n\n".join(code), {"__name__": "times"})


def main(arguments: list[str]) -> None:
    if not arguments:
        for chapter in ("60_speed", "64_benchmark"):
            times(NOTEBOOKS / "evidence" / f"{chapter}.ipynb")
        return
    asked = argparse.ArgumentParser(prog="lab bench", description=__doc__)
    asked.add_argument("layer", type=str, metavar="FILE.py:LAYER")
    asked.add_argument("--sets", nargs="+", choices=list(SETS), default=[], metavar="SET")
    asked.add_argument("--quick", action="store_true", help="small samples, one cut, kept nowhere")
    asked = asked.parse_args(arguments)
    os.environ["NDL_MODE"] = "full"
    layer = layer_of(asked.layer)
    if not asked.quick:
        return shown(train(layer, asked.sets or list(SETS), protocol.SIZES))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NDL_RESULTS"] = folder
        shown(train(layer, asked.sets or list(QUICK), ("small",), cuts=range(1)))
