"""What the book has for readers beside its chapters: recipes that run, and a citation."""

import re
import shutil
import subprocess
import sys
import sysconfig

import ndltake
import pytest
import yaml
from lab import modes
from lab.page.scale import recorded

ROOT = modes.ROOT


# --- recipes -----------------------------------------------------------------------------------------------------


RECIPES = "\n".join((ROOT / "book" / f"{n}.md").read_text("utf8") for n in ("recipes", "adapters"))
OPTIONAL = {"numpy", "scipy", "pandas", "safetensors", "peft", "transformers", "matplotlib"}
OPTIONAL |= {"tqdm", "filelock", "yaml", "lab"}
BRINGS = {  # a package -> what comes with it
    "transformers": {"numpy", "safetensors", "scipy", "pandas", "tqdm", "filelock", "yaml"},
    '"./ndlinear-book[guide]"': {"numpy", "scipy", "pandas"},
}
BRINGS["peft"] = BRINGS["transformers"] | {"transformers"}


def recipes() -> dict[str, tuple[str, str]]:
    """Title and number of each block of Python -> what the recipe says that it needs, and the block."""
    found = {}
    for section in RECIPES.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        needs = " ".join(re.search(r"(?ms)^Needs (.*?)[.:](?: |\n)", section)[1].split())
        for number, code in enumerate(re.findall(r"(?s)```python\n(.*?)```", section)):
            found[f"{title} {number}"] = needs, code
    return found


@pytest.mark.parametrize("needs", dict.fromkeys(needs for needs, _ in recipes().values()))
def test_recipes_run_with_what_they_name(needs, tmp_path):
    """Each as it stands, in an empty folder and a Python that sees the files and the libraries that they name, and no others."""
    blocks = [code for own, code in recipes().values() if own == needs]
    (tmp_path / "all").mkdir()
    ndltake.copy(ROOT, tmp_path / "all")
    for file in re.findall(r"`(\w+\.py)`", needs):
        shutil.copy(tmp_path / "all" / file, tmp_path)
    if "`ndlinear_guide`" in needs:
        shutil.copytree(ROOT / "ndlinear_guide", tmp_path / "ndlinear_guide")
    named = {word for line in re.findall(r"`pip install (.*?)`", needs) for word in line.split()}
    absent = OPTIONAL - named - set().union(*(BRINGS.get(word, set()) for word in named))
    libraries = sysconfig.get_path("purelib")
    run = "import warnings; warnings.filterwarnings('error', module='ndlinear')\n"
    run += f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {libraries!r}]"
    run += f"; sys.modules.update(dict.fromkeys({sorted(absent)}))\n"
    run += f"for block in {blocks!r}:\n    exec(block, {{'__name__': '__main__'}})"
    alone = {"PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    how = {"cwd": tmp_path, "env": alone, "timeout": 600}
    how |= {"capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-S", "-c", run], **how)
    assert done.returncode == 0, done.stderr
    printed = [line for block in blocks for line in re.findall(r"(?m)^print\(.*\)  # (.*)$", block)]
    assert printed and done.stdout.splitlines() == printed


def test_every_block_of_python_is_a_recipe_and_shown_on_github():
    assert len(recipes()) >= 11 and RECIPES.count("```python\n") == len(recipes())
    assert not re.search(r"```\{take-with-you\}[^\n]*\n```", RECIPES), "an empty box on GitHub"


def test_the_recipe_for_images_has_the_size_of_the_recorded_networks():
    made: dict = {}
    exec(recipes()["A head after a CNN 0"][1], made)
    size = sum(p.numel() for part in ("body", "head") for p in made[part].parameters())
    trained = recorded("cnn-printed-cifar10-relu").query("arm == 'relu'")
    assert set(trained["parameters"]) == {size} and set(trained["epochs"]) == {50}


# --- citing ------------------------------------------------------------------------------------------------------


def test_the_citation_says_what_the_file_says():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    book, paper = ndltake.bibtex(ROOT, "https://example.org/book", "2026").split("\n\n")
    for value in (cited["title"], cited["version"], "https://example.org/book", "2026"):
        assert f"{{{value}}}" in book
    (reference,) = cited["references"]
    for value in (reference["doi"], *(a["family-names"] for a in reference["authors"])):
        assert value in paper
