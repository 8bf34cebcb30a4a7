"""The file as a project of someone else has it: a copy beside the code, no book, strict tools."""

import doctest
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import ndlinear_cases
import pytest
import test_algebra
import torch

import ndlinear as nd
import ndlinear_lora

SOURCE = pathlib.Path(nd.__file__).read_text(encoding="utf-8")
PROJECT = """
import torch
from torch import Tensor, nn

from ndlinear import FlatNdLinear, NdLinear, NdLinearSum, count_parameters, to_linear


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = NdLinear((width, 4), (8, 8), init="unit")
        self.second = FlatNdLinear.from_linear(nn.Linear(64, 6), (8, 8), (3, 2))
        self.sum = NdLinearSum((3, 2), (3, 2), rank=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).flatten(1))
        z: Tensor = self.sum(y.reshape(-1, 3, 2))
        return z


dense: nn.Linear = to_linear(Network(5).first)
size: int = count_parameters((5, 4), (8, 8))
"""


UNREAD = "_decomp _dynamo _export _functorch _higher_order_ops _inductor _library _prims _refs _subclasses ao cuda"
UNREAD += " distributed distributions export fx jit masked nested onnx optim package profiler sparse testing"
RULES = "[mypy]\nstrict = True\n[mypy-sympy.*,numpy.*,{}]\nfollow_imports = skip\n"


def test_its_types_pass_a_strict_check(tmp_path):
    """Against those of tensors and modules; the rest of torch is left unread, which takes a fifth of the time."""
    pytest.importorskip("mypy")
    shutil.copy(nd.__file__, tmp_path)
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "rules.ini").write_text(
        RULES.format(",".join(f"torch.{part}.*" for part in UNREAD.split()))
    )
    check = [sys.executable, "-m", "mypy", "--config-file", "rules.ini"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*check, "project.py", "ndlinear.py"], timeout=300, **how)
    assert done.returncode == 0, done.stdout + done.stderr


def imported(source, name, optimise=-1):
    """A module of this source."""
    module = types.ModuleType(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        exec(compile(source, name, "exec", optimize=optimise), vars(module))
    return module


def test_it_runs_without_asserts_and_docstrings():
    module = imported(SOURCE, "bare", optimise=2)
    layer, x = module.NdLinear((4, 5), (3, 2)), torch.randn(7, 4, 5)
    assert module.NdLinear.__doc__ is None
    torch.testing.assert_close(module.to_linear(layer)(x.flatten(1)), layer(x).flatten(1))


def test_it_computes_the_same_where_part_3_is_deleted(monkeypatch):
    kept, count = re.subn(r"# ==== Part 3.*?(?=# ==== Checks)", "", SOURCE, flags=re.DOTALL)
    assert count == 1 and len(kept) < 0.8 * len(SOURCE)
    module = imported(kept, "without_engine")
    del module.NdLinear.plan  # all that asks for part 3
    for tests in (ndlinear_cases, test_algebra):
        monkeypatch.setattr(tests, "nd", module)
    ran = 0
    for name, test in vars(test_algebra).items():
        marks = {mark.name for mark in getattr(test, "pytestmark", [])}
        if name.startswith("test_") and "parametrize" not in marks:
            test()
            ran += 1
    examples = doctest.testmod(module)
    assert ran >= 7 and examples.attempted >= len(module.__all__) and not examples.failed
    layer = module.NdLinear((4, 5), (3, 2), execution="recompute")
    x = torch.randn(7, 4, 5)
    torch.testing.assert_close(layer(x), module.ndlinear(x, layer.weights, layer.biases))


def test_each_file_names_its_licence_and_version():
    for name in ("ndlinear", "ndlinear_lora", "ndlinear_lokr", "ndlinear_peft"):
        head = pathlib.Path(nd.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        head = head.split('"""')[1]
        assert "Apache-2.0" in head and f"ersion {nd.__version__}" in head, name


# ----------------------------------------------------------------------------------------------- what a reader of it sees
FILES = [nd, ndlinear_lora]
PUBLIC = [getattr(file, name) for file in FILES for name in file.__all__]


def test_every_public_name_has_an_example_and_all_run():
    found = [doctest.testmod(file) for file in FILES]
    assert not any(failed for failed, _ in found)
    assert sum(run for _, run in found) >= len(PUBLIC)
    assert [thing.__name__ for thing in PUBLIC if ">>> " not in inspect.getdoc(thing)] == []
    assert max(len(line) for file in FILES for line in inspect.getsource(file).splitlines()) <= 100
