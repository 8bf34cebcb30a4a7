"""Where optional libraries are missing: one line installs them, and the torch and numpy that are there stay."""

import ast
import functools
import pathlib
import re
import sys
from importlib.util import find_spec

import lab
import numpy
import pytest
import torch
from lab import LabError, machine, modes
from lab.tools import scripts

COLAB_HAS = ("torch", "numpy", "scipy", "pandas", "matplotlib", "seaborn", "scikit-learn", "tqdm")
COLAB_HAS += ("pyyaml", "filelock", "ipykernel", "ipywidgets")
OPTIONAL = ("tltorch", "tensorly", "peft", "einops", "opt_einsum", "onnx", "onnxscript", "numba")
OPTIONAL += ("onnxruntime", "safetensors", "aeon", "tokenizers", "dask", "distributed")
PINS = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]
SOURCES = sorted([*modes.chapters(), *(modes.NOTEBOOKS / "lab").rglob("*.py")])
PRINTED_SCALE = {"transformers", "peft"}  # no run of this book's own size needs them


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
@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    text = path.read_text(encoding="utf-8")
    return ast.parse(text if path.suffix == ".py" else scripts.source(path))


def required(tree: ast.AST) -> dict[str, int]:
    """Each library that `require` names, with the first line that does."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "require":
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    name = argument.value.partition(".")[0]
                    lines[name] = min(node.lineno, lines.get(name, node.lineno))
    return lines


def unguarded(tree: ast.Module) -> list[str]:
    """Optional libraries that are imported although no earlier line required them."""
    asked, found = required(tree), []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in (name.partition(".")[0] for name in names):
            if name in OPTIONAL and asked.get(name, node.lineno + 1) > node.lineno:
                found.append(f"line {node.lineno}: {name}")
    return found


def test_optional_libraries_are_required_before_they_are_imported():
    late = ast.parse("import peft\nfrom safetensors import torch\nlab.require('safetensors')")
    assert unguarded(late) == ["line 1: peft", "line 2: safetensors"]
    assert unguarded(ast.parse("lab.require('json', 'einops.layers')\nimport einops")) == []
    found = {path.name: unguarded(tree_of(path)) for path in SOURCES}
    assert not any(found.values()), found


def test_what_chapters_require_is_installed_with_the_book_and_the_rest_is_colabs_own():
    project = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^    "([\w.-]+)', project, re.M))
    for path in SOURCES:
        for name in required(tree_of(path)):
            if name in PRINTED_SCALE | sys.stdlib_module_names or not find_spec(name):
                continue
            asked = machine.install_line([name]).split()[2:-2]
            missing = {re.sub(r"\[.*", "", p) for p in asked} - listed
            assert not missing, f"{path.name} requires {missing}, which pyproject.toml lacks"
    needed = re.search(r"^notebooks = \[(.*?)^\]", project, re.M | re.S)[1]
    assert set(re.findall(r'^    "([\w.-]+)', needed, re.M)) == {*COLAB_HAS, "safetensors"}
