"""Where optional libraries are missing: one line installs them, and the torch and numpy that are there stay."""

import ast
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
from importlib.util import find_spec

import lab
import numpy
import pytest
import torch
from lab import LabError, machine, modes

COLAB_HAS = ("torch", "numpy", "scipy", "pandas", "matplotlib", "seaborn", "scikit-learn", "tqdm")
COLAB_HAS += ("pyyaml", "filelock", "ipykernel", "ipywidgets")
HIDDEN = ("tltorch", "tensorly", "peft", "einops", "opt_einsum", "onnx", "onnxscript")
HIDDEN += ("onnxruntime", "safetensors", "aeon", "numba", "tokenizers", "dask", "distributed")
HIDDEN += ("pyfastkron", "linear_operator")
PINS = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]


@pytest.fixture
def hide(monkeypatch):
    """Make libraries look as if they were not installed."""

    class Hidden:
        def __init__(self):
            self.names = set()

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in self.names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    hidden = Hidden()
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setattr(sys, "meta_path", [hidden, *sys.meta_path])

    def apply(*names):
        hidden.names |= set(names)
        for loaded in [m for m in sys.modules if m.partition(".")[0] in hidden.names]:
            monkeypatch.delitem(sys.modules, loaded)

    return apply


@pytest.fixture
def colab(monkeypatch):
    """On Colab: what pip is asked to do is kept, and nothing is installed."""
    commands = []
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr(machine.subprocess, "run", lambda command, check: commands.append(command))
    return commands


def command_of(message: str) -> list[str]:
    lines = re.findall(r"pip install [^\n]*", message)
    assert len(lines) == 1, message
    return lines[0].split()[2:]


def test_what_is_there_is_imported():
    assert lab.require("json") is sys.modules["json"]
    assert lab.require("json", "os.path") == (json, os.path)


@pytest.mark.parametrize("module", [m for m in HIDDEN if m != "tensorly"])
def test_a_missing_library_stops_with_one_line_that_installs_it(hide, module):
    hide(module)
    with pytest.raises(LabError, match=rf"No module named '{module}'") as error:
        lab.require(module)
    asked = command_of(str(error.value))
    assert asked[-2:] == PINS
    assert not {"-U", "--upgrade", "-c", "--force-reinstall"} & set(asked)
    provided = importlib.metadata.packages_distributions()
    named = {re.sub(r"\[.*", "", p).lower().replace("_", "-") for p in asked[:-2]}
    if module in provided:  # where the library is installed we can ask which package brought it
        owners = {p.lower().replace("_", "-") for p in provided[module]}
        dependencies = {
            re.match(r"[\w.-]+", need)[0].lower().replace("_", "-")
            for package in named
            for need in importlib.metadata.requires(package) or []
        }
        assert owners & (named | dependencies), f"{asked} does not bring {module}"


def test_several_missing_libraries_make_one_line(hide):
    """tensorly-torch needs tensorly and does not say so to pip: the line names it too."""
    hide("tensorly", "tltorch", "peft", "einops")
    with pytest.raises(LabError) as error:
        lab.require("json", "tltorch", "peft", "einops.layers.torch", "tltorch")
    asked = command_of(str(error.value))
    assert asked[:-2] == ["tensorly", "tensorly-torch", "peft", "einops"]


def test_pip_leaves_torch_and_numpy_as_the_line_names_them():
    """Asked for the two versions of the line, pip (without any index) finds nothing to do."""
    pins = machine.install_line([]).split()[2:]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps"]
    done = subprocess.run([*command, *pins], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Requirement already satisfied") == 2
    assert "Would install" not in done.stdout


def test_on_colab_the_line_is_run_and_the_library_imported(colab, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(command, check):
        colab.append(command)
        (tmp_path / "just_installed.py").write_text("x = 1\n")

    monkeypatch.setattr(machine.subprocess, "run", install)
    assert lab.require("just_installed").x == 1
    assert colab[0][:5] == [sys.executable, "-m", "pip", "install", "just_installed"]
    assert colab[0][-2:] == PINS
    monkeypatch.delitem(sys.modules, "just_installed")


def test_on_colab_an_installation_that_fails_ends_in_the_same_line(colab):
    with pytest.raises(LabError, match=r"named 'absent_module'.*pip install absent_module"):
        lab.require("absent_module")
    assert len(colab) == 1


# ------------------------------------------------------------------------------------ what notebooks and lab may import
def code_of(path: pathlib.Path) -> str:
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def imported(tree: ast.AST) -> list[tuple[str, int]]:
    """Each library that an import statement names, with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.module.partition(".")[0], node.lineno))
    return found


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


def unguarded(source: str) -> list[str]:
    """Optional libraries that are imported although no earlier line required them."""
    tree = ast.parse(source)
    asked = required(tree)
    return [
        f"line {line}: {name}"
        for name, line in imported(tree)
        if name in HIDDEN and asked.get(name, line + 1) > line
    ]


SOURCES = sorted([*modes.chapters(), *(modes.NOTEBOOKS / "lab").rglob("*.py")])
# NDL_CLUSTER without dask has a message of its own
OWN_MESSAGE = {"where.py"}
PRINTED_SCALE = {"transformers", "peft"}  # no run of this book's own size needs them


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_optional_libraries_are_required_before_they_are_imported(path):
    if path.name not in OWN_MESSAGE:
        assert unguarded(code_of(path)) == []


def test_an_import_without_require_is_found():
    late = "from safetensors import torch\nlab.require('safetensors')"
    assert unguarded("import peft") == ["line 1: peft"]
    assert unguarded(late) == ["line 1: safetensors"]
    assert unguarded("lab.require('json', 'einops.layers')\nimport einops.layers") == []


def test_every_required_library_can_be_installed_with_the_book():
    """What chapters require is in pyproject.toml, so that `make book` brings it."""
    project = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^    "([\w.-]+)', project, re.M))
    for path in SOURCES:
        for name in required(ast.parse(code_of(path))):
            if name in PRINTED_SCALE | sys.stdlib_module_names or not find_spec(name):
                continue
            asked = machine.install_line([name]).split()[2:-2]
            missing = {re.sub(r"\[.*", "", p) for p in asked} - listed
            assert not missing, f"{path.name} requires {missing}, which pyproject.toml lacks"


def test_colab_brings_what_every_chapter_needs():
    """The dependencies that are not optional are Colab's own; safetensors is asked for where it is used."""
    project = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^dependencies = \[(.*?)^\]", project, re.M | re.S)[1]
    assert set(re.findall(r'^    "([\w.-]+)', needed, re.M)) == {*COLAB_HAS, "safetensors"}
