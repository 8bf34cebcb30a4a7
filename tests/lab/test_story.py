"""The ledger as a story: what a claim takes, what may be said of it, where its cell stands, and a list made of that."""

import pytest
from bs4 import BeautifulSoup
from lab.chapters import story
from lab.page import ledger

CLAIMS = {
    "layer-a": {"verdict": "holds", "scope": "as printed", "notebook": "10_x", "needs": ["cpu"]},
    "layer-b": {
        "verdict": "fails",
        "ground": "not reproduced",
        "correction": "a < b",
        "notebook": "11_x",
        "needs": ["cpu", "data:CIFAR-10", "data:ETTh1"],
        "records": ["runs"],
    },
    "memory-a": {"verdict": "holds-if", "condition": "b is 1", "notebook": "13_x"},
    "lora-a": {"verdict": "open", "needs": ["gpu", "data:CIFAR-10", "weights:BERT"]},
    "lora-b": {"verdict": "untestable", "reason": "no numbers"},
    "dit-a": {"verdict": "undecided", "would_take": "forty seeds", "notebook": "53_x"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    common = {"kind": "measured", "needs": ["none"]}
    made = {
        name: common | {"id": name, "statement": f"statement <of> {name}"} | claim
        for name, claim in CLAIMS.items()
    }
    monkeypatch.setattr(ledger, "_load", lambda: made)


@pytest.fixture
def shown(monkeypatch):
    """What `put` gets: text and HTML."""
    seen = []
    keep = lambda text, html: seen.append((text, BeautifulSoup(html, "html.parser")))  # noqa: E731
    monkeypatch.setattr(story, "put", keep)
    return seen


def test_frame_has_one_row_per_claim():
    frame = story.frame().set_index("id")
    assert list(frame.index) == list(CLAIMS)
    assert frame.loc["lora-a", ["area", "verdict"]].tolist() == ["LoRA", "open"]
    assert frame.loc["layer-b", "outcome"] == "not reproduced"
    assert story.needs(ledger.claim("memory-a")) == "the runs of other claims"


def test_what_may_be_said():
    said = {id: story.right(ledger.claim(id)) for id in CLAIMS}
    assert said == {
        "layer-a": ("Scope", "as printed"),
        "layer-b": ("Right statement", "a < b"),
        "memory-a": ("Holds if", "b is 1"),
        "lora-a": ("A test takes", "GPU, data, weights"),
        "lora-b": ("Missing", "no numbers"),
        "dit-a": ("What would decide it", "forty seeds"),
    }


def test_claims_are_told_with_what_may_be_said(shown):
    story.tell(["layer-b", "lora-a"])
    ((text, page),) = shown
    assert "layer-b (✗ not reproduced)" in text
    first, second = page.find_all("dd")
    assert [dt.a.text for dt in page.find_all("dt")] == ["layer-b", "lora-a"]
    assert [dt.a["href"] for dt in page.find_all("dt")] == [
        "11_x.html#claim-layer-b",
        "../book/claims.html#lora-a",
    ]
    assert "statement <of> layer-b" in first.text
    assert "Right statement: a < b" in first.text and "Right statement: a < b" in text
    assert page.find_all("dt")[1].find(class_="ndl-open") and "A test takes" in second.text


def test_every_verdict_has_a_colour():
    assert set(story.COLOURS) == set(ledger.OUTCOMES) and set(story.SETTLED) < set(ledger.VERDICTS)
