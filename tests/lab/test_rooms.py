"""Imports of the lab go down only, and no chapter's module knows another's; read from the syntax trees of all its files."""

import ast
import importlib.util
import pathlib

import lab
import pytest

LAB = pathlib.Path(lab.__file__).parent
# from the ground, the modules of the folder itself, upwards
ORDER = ["ground", "train", "data", "released", "records", "page", "benchmark", "chapters", "tools"]


def imported(file: pathlib.Path, package: str) -> list[str]:
    """What a file of a package imports, inside functions as well: "lab.modes.mode"."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def violations(root: pathlib.Path) -> list[str]:
    """Imports that do not go down, "importer -> imported"; those of the lab itself, which imports all rooms, are left out."""
    found = []
    for file in sorted(root.rglob("*.py")):
        module = file.relative_to(root).with_suffix("").parts
        here = module[0] if module[0] in ORDER else "ground"
        for name in imported(file, ".".join(["lab", *module[:-1]])):
            first, *rest = name.split(".")
            there = rest[0] if rest and rest[0] in ORDER else "ground"
            known = there != "ground" or (rest and (root / f"{rest[0]}.py").is_file())
            down = known and ORDER.index(there) < ORDER.index(here)
            beside = known and there == here != "chapters"
            if first == "lab" and module != ("__init__",) and not (down or beside):
                found.append(f"{'.'.join(module)} -> {name}")
    return found


def test_imports_of_the_lab_go_down_only():
    assert violations(LAB) == []


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("chapters/one", "from . import two", "chapters.one -> lab.chapters.two"),
        ("chapters/one", "import lab.chapters.two", "chapters.one -> lab.chapters.two"),
        ("chapters/one", "from .. import fit", "chapters.one -> lab.fit"),
        ("train/loop", "def f():\n    from ..data import load", "train.loop -> lab.data.load"),
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
    (tmp_path / f"{place}.py").write_text(line + "\n")
    assert violations(tmp_path) == [found]
