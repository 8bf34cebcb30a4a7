"""Imports of the lab go down only, and no chapter's module knows another's; read from the syntax trees of all its files."""

import ast
import pathlib

import lab
import pytest

LAB = pathlib.Path(lab.__file__).parent
# from the ground upwards
ORDER = ["ground", "train", "data", "released", "records", "page", "benchmark", "chapters", "tools"]


def room(module: str) -> str:
    """Where a module of the lab lies: a folder, or the ground that all of them stand on."""
    parts = module.split(".")
    if module == "lab":
        return "lab"
    return parts[1] if parts[1] in ORDER else "ground"


def name_of(file: pathlib.Path, root: pathlib.Path) -> str:
    parts = ["lab", *file.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: pathlib.Path, root: pathlib.Path, modules: set[str]) -> set[str]:
    """Modules of the lab that a file imports, inside functions as well."""
    name = name_of(file, root)
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & modules
            if names - modules:
                found.add(base)
    return {module for module in found if module.split(".")[0] == "lab"}


def violations(root: pathlib.Path) -> list[str]:
    """Imports that do not go down, "importer -> imported"."""
    files = sorted(root.rglob("*.py"))
    modules = {name_of(file, root) for file in files}
    found = []
    for file in files:
        name = name_of(file, root)
        for module in sorted(imported(file, root, modules)):
            here, there = room(name), room(module)
            if name == "lab" or name == module:
                continue
            if here == there:
                allowed = here != "chapters" or "lab.chapters" in (name, module)
            else:
                allowed = there in ORDER and ORDER.index(there) < ORDER.index(here)
            if not allowed:
                found.append(f"{name} -> {module}")
    return found


def test_imports_of_the_lab_go_down_only():
    assert violations(LAB) == []


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("chapters/one.py", "from . import two", "lab.chapters.one -> lab.chapters.two"),
        ("chapters/one.py", "import lab.chapters.two", "lab.chapters.one -> lab.chapters.two"),
        ("chapters/one.py", "from .. import fit", "lab.chapters.one -> lab"),
        ("train/loop.py", "def f():\n    from ..data import load", "lab.train.loop -> lab.data"),
    ],
)
def test_an_import_upwards_or_aside_is_found_and_one_downwards_is_none(
    tmp_path, place, line, found
):
    files = dict.fromkeys(("modes", "train/scores", "data/__init__", "page/show"), "")
    files["chapters/two"] = "from ..page import show\nfrom ..train.loop import fit\nimport torch"
    files["train/loop"] = "from . import scores\nfrom ..modes import mode"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    assert violations(tmp_path) == []
    (tmp_path / place).write_text(line + "\n")
    assert violations(tmp_path) == [found]
