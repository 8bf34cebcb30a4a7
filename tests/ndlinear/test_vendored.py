"""The file as a project of someone else has it: a copy beside the code, no book, strict tools."""

import doctest
import importlib.util
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import ndlinear_cases
import pytest
import test_algebra
import test_layer
import torch
from torch import nn

import ndlinear as nd
from ndlinear_guide import convert

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


network = Network(5)
network(torch.randn(2, 5, 4)).sum().backward()
dense: nn.Linear = to_linear(network.first)
size: int = count_parameters((5, 4), (8, 8))
print(dense.out_features, size, network.first.weights[0].shape)
"""


def run(folder, *command):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "ndlinear-book"  # so named that it does not count in the coverage
    folder.mkdir()
    shutil.copy(nd.__file__, folder)
    (folder / "project.py").write_text(PROJECT)
    return folder


def test_its_types_pass_a_strict_check(project):
    pytest.importorskip("mypy")
    done = run(project, "-m", "mypy", "--strict", "project.py", "ndlinear.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_runs_without_book_warnings_and_asserts_and_reads_a_converted_model(project):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    converted, _ = convert(model, {"0": ((8, 8), (8, 8))}, share=0.5)
    x = torch.randn(2, 64)
    torch.save((converted, x, converted(x).detach()), project / "model.pt")
    read = """
import sys, torch, project
model, x, y = torch.load("model.pt", weights_only=False)
torch.testing.assert_close(model(x), y)
if "ndlinear_guide" in sys.modules:
    raise ImportError("ndlinear_guide")
print(model[0])
"""
    done = run(project, "-W", "error", "-OO", "-c", read)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64") and "NdLinearSum((8, 8), (8, 8)" in done.stdout


def without_the_engine(folder):
    """The module as it is after someone has deleted part 3."""
    source = pathlib.Path(nd.__file__).read_text(encoding="utf-8")
    kept, count = re.subn(r"# ==== Part 3.*?(?=# ==== Checks)", "", source, flags=re.DOTALL)
    assert count == 1 and len(kept) < 0.8 * len(source)
    (folder / "without_engine.py").write_text(kept, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("without_engine", folder / "without_engine.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "without_engine", module)
        spec.loader.exec_module(module)
    return module


def test_it_computes_the_same_where_part_3_is_deleted(tmp_path, monkeypatch):
    module = without_the_engine(tmp_path)
    del module.NdLinear.plan  # all that asks for part 3
    for tests in (ndlinear_cases, test_layer, test_algebra):
        monkeypatch.setattr(tests, "nd", module)
    ran = 0
    for tests in (test_layer, test_algebra):
        for name, test in vars(tests).items():
            if name.startswith("test_") and not inspect.signature(test).parameters:
                marks = [mark.name for mark in getattr(test, "pytestmark", [])]
                if "parametrize" not in marks:
                    test()
                    ran += 1
    examples = doctest.testmod(module)
    assert ran >= 10 and examples.attempted >= len(module.__all__) and not examples.failed
    layer = module.NdLinear((4, 5), (3, 2), execution="recompute")
    x = torch.randn(7, 4, 5)
    torch.testing.assert_close(layer(x), module.ndlinear(x, layer.weights, layer.biases))


def test_each_file_names_its_licence_and_version():
    for name in ("ndlinear", "ndlinear_lora", "ndlinear_lokr", "ndlinear_peft"):
        head = pathlib.Path(nd.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        head = head.split('"""')[1]
        assert "Apache-2.0" in head and f"ersion {nd.__version__}" in head, name
