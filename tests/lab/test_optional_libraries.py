"""Where optional libraries are missing: one line installs them, and the torch and numpy that are there stay."""

import ast
import functools
import importlib.metadata
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
HIDDEN = ("tltorch", "tensorly", "peft", "einops", "opt_einsum", "onnx", "onnxscript")
HIDDEN += ("onnxruntime", "safetensors", "aeon", "numba", "tokenizers", "dask", "distributed")
PINS = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]


class Hidden:
    """Looks for modules before all others do, and says of some that they are not installed."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def hide(monkeypatch):
    """Make libraries look as if they were not installed."""
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)

    def apply(*names):
        monkeypatch.setattr(sys, "meta_path", [Hidden(names), *sys.meta_path])
        for loaded in [m for m in sys.modules if m.partition(".")[0] in names]:
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


@functools.cache
def provided() -> dict[str, list[str]]:
    """Module -> the packages that bring it, of what is installed."""
    return importlib.metadata.packages_distributions()


def normal(name: str) -> str:
    return re.match(r"[\w.-]+", name)[0].lower().replace("_", "-")


@pytest.mark.parametrize("module", [m for m in HIDDEN if m != "tensorly"])
def test_a_missing_library_stops_with_one_line_that_installs_it(hide, module):
    hide(module)
    with pytest.raises(LabError, match=rf"No module named '{module}'") as error:
        lab.require(module)
    asked = command_of(str(error.value))
    assert asked[-2:] == PINS
    assert not {"-U", "--upgrade", "-c", "--force-reinstall"} & set(asked)
    if module in provided():  # where the library is installed we can ask which package brought it
        named = {normal(package) for package in asked[:-2]}
        needs = [importlib.metadata.requires(package) or [] for package in named]
        brought = named | {normal(need) for each in needs for need in each}
        assert brought & set(map(normal, provided()[module])), f"{asked} does not bring {module}"


def test_several_missing_libraries_make_one_line(hide):
    """tensorly-torch needs tensorly and does not say so to pip: the line names it too."""
    hide("tensorly", "tltorch", "peft", "einops")
    with pytest.raises(LabError) as error:
        lab.require("json", "tltorch", "peft", "einops.layers.torch", "tltorch")
    asked = command_of(str(error.value))
    assert asked[:-2] == ["tensorly", "tensorly-torch", "peft", "einops"]


def test_on_colab_the_line_is_run_and_the_library_imported(colab, monkeypatch, tmp_path):
    with pytest.raises(LabError, match=r"named 'just_installed'.*pip install just_installed"):
        lab.require("just_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "just_installed", raising=False)

    def install(command, check):
        colab.append(command)
        (tmp_path / "just_installed.py").write_text("x = 1\n")

    monkeypatch.setattr(machine.subprocess, "run", install)
    assert lab.require("just_installed").x == 1
    assert len(colab) == 2
    assert colab[1][:5] == [sys.executable, "-m", "pip", "install", "just_installed"]
    assert colab[1][-2:] == PINS


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
            if name in HIDDEN and asked.get(name, node.lineno + 1) > node.lineno:
                found.append(f"line {node.lineno}: {name}")
    return found


SOURCES = sorted([*modes.chapters(), *(modes.NOTEBOOKS / "lab").rglob("*.py")])
PRINTED_SCALE = {"transformers", "peft"}  # no run of this book's own size needs them


def test_optional_libraries_are_required_before_they_are_imported():
    late = ast.parse("import peft\nfrom safetensors import torch\nlab.require('safetensors')")
    assert unguarded(late) == ["line 1: peft", "line 2: safetensors"]
    assert unguarded(ast.parse("lab.require('json', 'einops.layers')\nimport einops")) == []
    found = {path.name: unguarded(tree_of(path)) for path in SOURCES}
    assert not any(found.values()), found


def test_every_required_library_can_be_installed_with_the_book():
    """What chapters require is in pyproject.toml, so that `make book` brings it."""
    project = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^    "([\w.-]+)', project, re.M))
    for path in SOURCES:
        for name in required(tree_of(path)):
            if name in PRINTED_SCALE | sys.stdlib_module_names or not find_spec(name):
                continue
            asked = machine.install_line([name]).split()[2:-2]
            missing = {re.sub(r"\[.*", "", p) for p in asked} - listed
            assert not missing, f"{path.name} requires {missing}, which pyproject.toml lacks"


def test_colab_brings_what_every_chapter_needs():
    """The dependencies that are not optional are Colab's own; safetensors is asked for where it is used."""
    project = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^notebooks = \[(.*?)^\]", project, re.M | re.S)[1]
    assert set(re.findall(r'^    "([\w.-]+)', needed, re.M)) == {*COLAB_HAS, "safetensors"}
