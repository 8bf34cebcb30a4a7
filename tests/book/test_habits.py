"""What keeps the project in order from outside its code: workflows, citation and hooks."""

import json
import pathlib
import re

import pytest
import yaml
from lab import modes

import ndlinear
import ndlinear_guide

ROOT = modes.ROOT
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf8"))


# -------------------------------------------------------------------------------------------------------- workflows
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_write_nothing_but_the_published_pages(path):
    """Whatever else a workflow lets in or hands out, zizmor finds (`make lint`)."""
    content = workflow(path.stem)
    given = [
        (n, p) for n, job in content["jobs"].items() for p in job.get("permissions", {}).items()
    ]
    writes = {(name, key) for name, (key, value) in given if value != "read"}
    assert content["permissions"] == {}
    assert writes <= {("deploy", "pages"), ("deploy", "id-token")}


def test_the_book_is_published_only_after_green_tests():
    jobs = workflow("publish")["jobs"]
    assert jobs["deploy"]["needs"] == "build" and jobs["build"]["needs"] == "test"
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert not any("if" in job or "continue-on-error" in job for job in jobs.values())
    test = workflow("test")
    triggers = test[True]  # YAML 1.1 reads the key `on` as a truth value
    assert "workflow_call" in triggers and "pull_request" in triggers
    commands = " ".join(step.get("run", "") for step in test["jobs"]["test"]["steps"])
    assert "make book" in commands and "make test" in commands


# --------------------------------------------------------------------------------------- citation, hooks, the top level
def test_citations_agree_with_the_module_and_the_bibliography():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    archived = json.loads((ROOT / ".zenodo.json").read_text(encoding="utf8"))
    for record in (cited, archived):
        assert record["version"] == ndlinear.__version__
        assert record["license"] == "Apache-2.0"
    paper = cited["references"][0]
    entry = (ROOT / "book" / "references.bib").read_text(encoding="utf8")
    entry = entry.partition("@article{reneau2025ndlinear")[2].partition("\n}")[0]
    written = re.search(r"author\s*=\s*\{(.*?)\},\s*journal", entry, re.S)[1]
    authors = " ".join(written.split()).split(" and ")
    assert authors == [f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]]
    assert re.search(r"doi\s*=\s*\{(.*?)\}", entry)[1] == paper["doi"]
    assert archived["related_identifiers"][0]["identifier"] == paper["doi"]


def test_hooks_have_the_versions_of_the_constraints():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf8"))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf8").splitlines()
    asked = [hook["additional_dependencies"] for repo in hooks["repos"] for hook in repo["hooks"]]
    assert len(asked) == 4
    for (requirement,) in asked:
        assert requirement in pins, f"{requirement} is not what constraints.txt says"


def test_the_changelog_ends_at_the_version_of_the_module():
    headings = re.findall(r"^## (.+)$", (ROOT / "book" / "changelog.md").read_text("utf8"), re.M)
    assert headings[0] == "Not released yet" and headings[1] == ndlinear.__version__


def test_the_code_of_this_checkout_is_tested():
    """Also where another one's stands on the path, as an editable installation puts it there."""
    for module in (modes, ndlinear, ndlinear_guide):
        assert pathlib.Path(module.__file__).is_relative_to(ROOT)
