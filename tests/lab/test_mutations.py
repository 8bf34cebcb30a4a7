"""Mutants of the training loop: of those that change what a full run gives, the guard of the records lets none pass.

Each mutant changes one place of lab/train/loop.py by syntax tree: an operator, a comparison, a number, a statement less. It is run
at full length, which tells whether it changes numbers, and small, as a smoke run would. NDL_MUTANTS=1 runs all of them.
"""

import ast
import copy
import functools
import linecache
import os
import types

import lab
import pytest
import torch
from lab.records import canary, fingerprint
from lab.train import loop

EVERY = 1 if os.environ.get("NDL_MUTANTS") else 6
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
COMPARED = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Is: ast.IsNot}
COMPARED |= {ast.IsNot: ast.Is, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn}
TRAIN = """
def run(config):
    torch.manual_seed(config["seed"])
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    fit = loop.fit(
        model, DATA, loss=torch.nn.functional.mse_loss, epochs=config["epochs"], lr=0.05,
        batch_size=8, seed=config["seed"],
    )
    return {"metrics": fit.metrics | {"best": fit.best_epoch}, "curve": fit.curve}
"""
FULL, SMALL = ([{"epochs": n, "seed": seed} for seed in (0, 1)] for n in (12, 3))


def mutants(tree: ast.Module):
    """(place, kind, tree) of every mutant of the functions and classes in a file."""
    plain = list(ast.walk(tree))
    for at, node in enumerate(plain):
        for kind, change in changes(node):
            other = copy.deepcopy(tree)
            change(list(ast.walk(other))[at])
            yield getattr(node, "lineno", 0), kind, other


def changes(node: ast.AST):
    """What can be changed at a node: a name of the change, and a function that makes it."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", lambda n: setattr(n, "op", OPERATORS[type(n.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield "comparison", lambda n: n.ops.__setitem__(0, COMPARED[type(n.ops[0])]())
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "number", lambda n: setattr(n, "value", other)
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if isinstance(block, list) and not isinstance(node, ast.Module):
            for at, statement in enumerate(block):
                if isinstance(statement, (ast.Expr, ast.Assign, ast.AugAssign)):
                    yield "statement less", functools.partial(left_out, field=field, at=at)


def left_out(node: ast.AST, field: str, at: int) -> None:
    getattr(node, field)[at] = ast.Pass()


def loaded(text: str):
    """The training function over a loop with this source."""
    module = types.ModuleType("lab.train.loop")
    module.__package__ = "lab.train"
    scope = {"__name__": "a_notebook", "torch": torch, "loop": module, "DATA": data()}
    for source, names, where in ((text, vars(module), "loop"), (TRAIN, scope, "cell")):
        file = f"<{where} {abs(hash(source))}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        names["__file__"] = file
        exec(compile(source, file, "exec"), names)
    return scope["run"]


def data() -> lab.Split:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=draw)
    y = x.sum(1, keepdim=True).tanh() + 0.3 * torch.randn(60, 1, generator=draw)
    return lab.Split(*((x[part], y[part]) for part in (slice(30), slice(30, 45), slice(45, 60))))


def outcome(run, grid) -> dict:
    """What runs give, without their seconds; the error where one fails."""
    try:
        rows = [{"config": config} | run(dict(config)) for config in grid]
    except Exception as error:
        return {"all": {"error": type(error).__name__}}
    found = canary.by_key(canary.values(rows))
    return {k: {m: v for m, v in row.items() if "seconds" not in m} for k, row in found.items()}


def seen(run) -> tuple[dict, list, set]:
    """What a small run gives, what it does not execute, and the numbers of its code."""
    reached = fingerprint.closure(run)
    with canary.Watch({d.file for d in reached.definitions}) as watch:
        found = outcome(run, SMALL)
    return found, canary.dark(reached.definitions, watch.lines), reached.numbers()


def moved(before: dict, after: dict) -> bool:
    same = before.keys() == after.keys()
    return not same or any(
        size > canary.FINEST for size, _ in canary.differences(before, after).values()
    )


def test_mutants_that_change_numbers_are_refused():
    text = "".join(linecache.getlines(loop.__file__))
    tree = ast.parse(text)
    plain = loaded(ast.unparse(tree))
    full, (small, dark, numbers) = outcome(plain, FULL), seen(plain)
    assert "all" not in full, full
    harmful, passed = 0, []
    for line, kind, other in list(mutants(tree))[::EVERY]:
        try:
            run = loaded(ast.unparse(ast.fix_missing_locations(other)))
            again = outcome(run, FULL)
            if not moved(full, again):
                continue
            harmful += 1
            found, unlit, figures = seen(run)
        except Exception:  # it cannot even be read: no row comes of it
            continue
        if not (moved(small, found) or canary.unseen(dark, unlit) or figures - numbers):
            passed.append(f"line {line}: {kind}")
    print(f"{harmful} mutants change numbers; not refused: {passed}")
    assert harmful >= (60 if EVERY == 1 else 8)
    assert len(passed) <= harmful // 30, passed


if __name__ == "__main__":
    pytest.main([__file__, "-s"])
