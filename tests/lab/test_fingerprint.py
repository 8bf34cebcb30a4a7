"""A recorded row depends on everything that made it: each part of that is changed in turn, and the fingerprint must move.

The source of a file is changed in Python's cache of source lines, where the fingerprint reads it: nothing is imported twice,
and the change takes no effect but on the fingerprint.
"""

import dataclasses
import functools
import json
import linecache
import types
from typing import NamedTuple

import lab
import numpy as np
import pytest
import torch
from lab import models, modes
from lab.chapters import tabular, vision
from lab.data import SOURCES
from lab.records import FingerprintError, RecordError, fingerprint, store
from lab.records.fingerprint import code_hash
from lab.train import chunked, loop, scores, stacked

import ndlinear


def made(source: str, **scope):
    """A function ``run`` as a cell of a notebook would define it."""
    name = f"<cell {abs(hash((source, tuple(scope))))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope["__name__"] = __name__
    exec(compile(source, name, "exec"), scope)
    return scope["run"]


def changed_line(monkeypatch, file: str, number: int, new: str) -> None:
    """Line ``number`` (from 1) of a file, as the fingerprint reads it from now on."""
    lines = list(linecache.getlines(file))
    lines[number - 1] = new
    monkeypatch.setitem(linecache.cache, file, (0, None, lines, file))


def replaced(monkeypatch, file: str, old: str, new: str) -> None:
    """A file with other words, as the fingerprint reads it from now on."""
    lines = [line.replace(old, new) for line in linecache.getlines(file)]
    assert lines != linecache.getlines(file)
    monkeypatch.setitem(linecache.cache, file, (0, None, lines, file))


# --- what kinds of things count ----------------------------------------------------------------------------------


def scaled(x, by=1):
    return x * by


@functools.lru_cache
def cached(x):
    return x + 1


class Point(NamedTuple):
    x: int = 0


@dataclasses.dataclass
class Rule:
    bound: float = 1.0


class Plan:
    def __init__(self, steps):
        self.steps = steps


VALUES = {
    "a number": (2, 3),
    "a set": ({1, 2}, {1, 3}),
    "an array": (np.arange(3), np.arange(1, 4)),
    "a tensor": (torch.arange(3.0), torch.arange(1, 4.0)),
    "a nested list": ([1, {"a": (1, 2)}], [1, {"a": (1, 3)}]),
    "a partial": (functools.partial(scaled, by=2), functools.partial(scaled, by=3)),
    "a named tuple": (Point(1), Point(2)),
    "a data class": (Rule(1.0), Rule(2.0)),
    "an object": (Plan(3), Plan(4)),
    "a dictionary of functions": ({"f": scaled}, {"f": cached}),
    "a function of a library": (torch.relu, torch.tanh),
    "a class of a library": (torch.nn.ReLU, torch.nn.Tanh),
    "a module with weights": (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    "a dtype": (torch.float32, torch.float64),
}


@pytest.mark.parametrize("kind", VALUES)
def test_the_value_of_a_constant_counts(kind):
    source = "def run(config):\n    return VALUE\n"
    first, second = (code_hash(made(source, VALUE=value)) for value in VALUES[kind])
    assert first != second
    assert code_hash(made(source, VALUE=VALUES[kind][0])) == first


@pytest.mark.parametrize("value", [np.random.default_rng(0), torch.Generator(), iter([1])])
def test_what_has_no_content_that_can_be_told_is_refused(value):
    run = made("def run(config):\n    return VALUE\n", VALUE=value)
    with pytest.raises(FingerprintError, match=r"run reads VALUE.*Make it inside the training"):
        code_hash(run)


def test_both_of_two_lambdas_in_a_line_count():
    cell = "FIRST, SECOND = (lambda x: x + 1), (lambda x: x + {})\ndef run(config):\n    return {}(1)\n"
    assert code_hash(made(cell.format(2, "SECOND"))) != code_hash(made(cell.format(3, "SECOND")))


def test_formatting_comments_docstrings_annotations_and_words_of_errors_are_free():
    plain = "def run(c):\n    if c:\n        raise ValueError('no')\n    return c + 1\n"
    dressed = (
        "def run(c: int) -> int:\n    '''Adds one.'''\n    # to what it gets\n    if c:\n"
        "        raise ValueError(\n            f'a better word than {c}'\n        )\n    return (c + 1)\n"
    )
    assert code_hash(made(plain)) == code_hash(made(dressed))
    assert code_hash(made(plain)) != code_hash(made(plain.replace("+ 1", "+ 2")))


def test_classes_typed_into_a_notebook_count():
    cell = (
        "from dataclasses import dataclass\nfrom typing import NamedTuple\n"
        "@dataclass\nclass Limit:\n    bound: float = {0}\n"
        "class Pair(NamedTuple):\n    x: int = {1}\n"
        "class Net:\n    def go(self): return {2}\n"
        "def run(config):\n    return Limit(), Pair(), Net().go()\n"
    )
    base = code_hash(made(cell.format(1, 1, 1)))
    others = [code_hash(made(cell.format(*v))) for v in ((2, 1, 1), (1, 2, 1), (1, 1, 2))]
    assert base not in others


def test_another_function_under_the_same_name_counts():
    cell = "from lab.train.scores import {0} as score\ndef run(config):\n    return score(1, 2)\n"
    assert code_hash(made(cell.format("accuracy"))) != code_hash(made(cell.format("top_five")))


def test_how_a_function_of_the_lab_is_named_does_not_count():
    """Moving a function to another file of the lab, or importing it in another way, leaves rows as they are."""
    ways = (
        "import lab\ndef run(c):\n    return lab.fit(c)\n",
        "from lab.train import loop\ndef run(c):\n    return loop.fit(c)\n",
        "import lab\ndef run(c):\n    return lab.train.loop.fit(c)\n",
    )
    assert len({code_hash(made(way)) for way in ways}) == 1


def test_where_things_lie_does_not_count(monkeypatch):
    run = made("import ndlinear\ndef run(c):\n    return ndlinear.__file__\n")
    before = code_hash(run, layer=True)
    monkeypatch.setattr(ndlinear, "__file__", "/elsewhere/ndlinear.py")
    assert code_hash(run, layer=True) == before
    cells = [made("def run(c):\n    return __file__\n", __file__=place) for place in ("/a", "/b")]
    assert code_hash(cells[0]) == code_hash(cells[1])


def test_a_module_as_a_value_is_refused():
    run = made("from lab import models\ndef run(c):\n    return getattr(models, c)\n")
    with pytest.raises(FingerprintError, match=r"module lab\.models as a value"):
        code_hash(made("from lab import models\nTABLE = [models]\ndef run(c):\n    return TABLE\n"))
    assert code_hash(run), "a bare name without attribute reaches nothing"


def test_only_the_data_sets_that_are_named_count(monkeypatch):
    run = cell_using(lab.load)
    one = code_hash(run, (SOURCES["digits"],))
    assert one != code_hash(run, (SOURCES["diabetes"],))
    monkeypatch.setitem(SOURCES, "new", dataclasses.replace(SOURCES["digits"], name="new"))
    assert code_hash(run, (SOURCES["digits"],)) == one, "a new data set leaves the rows of others"


def test_the_layer_counts_where_it_is_what_is_measured(monkeypatch):
    run = cell_using(ndlinear.NdLinear)
    before = code_hash(run), code_hash(run, layer=True)
    replaced(monkeypatch, ndlinear.__file__, "6 / sum", "7 / sum")
    assert code_hash(run) == before[0] and code_hash(run, layer=True) != before[1]


# --- every training loop, model and data module of the lab -------------------------------------------------------


def cell_using(function) -> types.FunctionType:
    """A training function of a notebook that uses a function or class of the lab through its module."""
    module = function.__module__
    name = function.__qualname__
    return made(f"import {module}\ndef run(config):\n    return {module}.{name}(config)\n")


PARTS = [  # a function of each kind: plain, without gradients, with cached results; a nested reader
    loop.fit,
    loop.evaluate,
    stacked.fit,
    chunked.fit,
    scores.accuracy,
    lab.split,
    models.mlp,
    tabular.fit,
    vision.pictures,
    "cifar10",
    "etth1",
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: getattr(part, "__qualname__", part))
def test_a_changed_line_of_the_lab_makes_rows_stale_and_a_comment_does_not(part, monkeypatch):
    if isinstance(part, str):
        run, also, function = cell_using(lab.load), (SOURCES[part],), SOURCES[part].layouts[0].read
    else:
        run, also, function = cell_using(part), (), getattr(part, "__wrapped__", part)
    before = code_hash(run, also)
    (tree,) = fingerprint._function_trees(function)
    last, file = tree.body[-1], function.__code__.co_filename
    lines = linecache.getlines(file)
    end, first = lines[last.end_lineno - 1].rstrip("\n"), lines[last.lineno - 1]
    changed_line(monkeypatch, file, last.end_lineno, f"{end}  # a comment\n")
    assert code_hash(run, also) == before
    indent = first[: len(first) - len(first.lstrip())]
    changed_line(monkeypatch, file, last.lineno, f"{indent}0 + 0; {first.lstrip()}")
    assert code_hash(run, also) != before, "a statement more"


def test_another_optimiser_in_the_loops_table_moves_the_fingerprint(monkeypatch):
    run = cell_using(loop.fit)
    before = code_hash(run)
    for name in loop.OPTIMISERS:
        monkeypatch.setitem(loop.OPTIMISERS, name, torch.optim.Rprop)
    assert code_hash(run) != before


def test_replay_refuses_rows_of_another_experiment_of_mixed_data_and_of_another_layer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    run = made("def run(config):\n    return {'metrics': {'y': 1.0}}\n")
    grid, how = [{"seed": 0}, {"seed": 1}], {"data": ("digits",)}
    monkeypatch.setenv("NDL_MODE", "full")
    lab.record("mixed", grid, run, **how)
    monkeypatch.setenv("NDL_MODE", "replay")
    path = tmp_path / "mixed.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [
        ({"experiment": "other"}, "rows of other stand in its file"),
        ({"data": {"digits": "0" * 16}}, "different forms of digits"),
        ({"versions": rows[1]["versions"] | {"ndlinear": "0.0.1"}}, r"made with ndlinear 0\.0\.1"),
    ]
    for change, words in cases:
        path.unlink()
        for row in (rows[0], rows[1] | change):
            store.append(path, {k: v for k, v in row.items() if k != "digest"})
        with pytest.raises(RecordError, match=words):
            lab.record("mixed", grid, run, **how)
