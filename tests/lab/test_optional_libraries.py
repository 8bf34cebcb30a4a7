"""Where optional libraries are missing: one line installs them, and the torch and numpy that are there stay."""

import ast
import re
import sys

import lab
import numpy
import pytest
import torch
from lab import LabError, machine, modes
from lab.tools import scripts
from test_colab import OPTIONAL

COLAB_HAS = "torch numpy scipy pandas matplotlib seaborn scikit-learn tqdm pyyaml filelock ipykernel ipywidgets"
PINS = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]


@pytest.mark.parametrize(
    ("wanted", "packages"),
    [
        (["peft"], ["peft"]),
        (["sklearn.datasets"], ["scikit-learn"]),
        (["distributed"], ["dask[distributed]"]),
        (["onnxscript", "onnx"], ["onnx", "onnxscript", "onnxruntime"]),
        # tensorly-torch needs tensorly and does not say so to pip: the line names it too
        (["json", "tltorch", "einops.layers.torch"], ["tensorly", "tensorly-torch", "einops"]),
    ],
)
def test_missing_libraries_stop_with_one_line_that_installs_them(monkeypatch, wanted, packages):
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    for name in wanted[wanted[0] == "json" :]:
        for loaded in [m for m in sys.modules if m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(LabError) as error:
        lab.require(*wanted, wanted[-1])
    (line,) = re.findall(r"pip install ([^\n]*)", str(error.value))
    assert line.split() == [*packages, *PINS]


def test_on_colab_the_line_is_run_and_the_library_imported(monkeypatch, tmp_path):
    commands = []

    def install(command, check):
        commands.append(command)
        if len(commands) == 2:
            (tmp_path / "just_installed.py").write_text("x = 1\n")

    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr(machine.subprocess, "run", install)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LabError, match=r"named 'just_installed'.*pip install just_installed"):
        lab.require("just_installed")
    assert lab.require("just_installed").x == 1
    monkeypatch.delitem(sys.modules, "just_installed")
    assert commands == [[sys.executable, "-m", "pip", "install", "just_installed", *PINS]] * 2


# ------------------------------------------------------------------------------------ what notebooks and lab may import
def unguarded(code: str) -> list[str]:
    """Optional libraries that are imported although no earlier line required them."""
    asked, imported = {}, []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "require":
            for name in (a.value for a in node.args if isinstance(a, ast.Constant)):
                asked.setdefault(name.partition(".")[0], []).append(node.lineno)
        elif isinstance(node, ast.Import):
            imported += [(alias.name.partition(".")[0], node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.append((node.module.partition(".")[0], node.lineno))
    return [
        f"line {line}: {name}"
        for name, line in imported
        if name in OPTIONAL.split() and min(asked.get(name, [line + 1])) > line
    ]


def test_optional_libraries_are_required_before_they_are_imported():
    late = "import peft\nfrom safetensors import torch\nlab.require('safetensors')"
    assert unguarded(late) == ["line 1: peft", "line 2: safetensors"]
    assert unguarded("lab.require('json', 'einops.layers')\nimport einops") == []
    found = {path.name: unguarded(scripts.source(path)) for path in modes.chapters()}
    for path in (modes.NOTEBOOKS / "lab").rglob("*.py"):
        found[path.name] = unguarded(path.read_text(encoding="utf-8"))
    assert not any(found.values()), found


def test_notebooks_need_what_colab_has_and_one_more():
    project = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^notebooks = \[(.*?)^\]", project, re.M | re.S)[1]
    assert set(re.findall(r'^    "([\w.-]+)', needed, re.M)) == {*COLAB_HAS.split(), "safetensors"}
