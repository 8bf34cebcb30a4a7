"""The ledger as a story: a list of claims made of what may be said of each."""

from bs4 import BeautifulSoup
from lab.chapters import story
from lab.page import ledger


def test_claims_are_told_with_what_may_be_said(monkeypatch):
    common = {"kind": "measured", "statement": "1 <of> 2", "notebook": "11_x"}
    fails = {"verdict": "fails", "ground": "not reproduced", "correction": "a < b"}
    claims = {"layer-b": common | fails, "lora-b": common | {"verdict": "untestable"}}
    claims["lora-b"]["reason"] = "no numbers"
    monkeypatch.setattr(ledger, "_load", lambda: {k: v | {"id": k} for k, v in claims.items()})
    seen = []
    monkeypatch.setattr(story, "put", lambda text, html: seen.extend([text, html]))
    story.tell(claims)
    text, page = seen[0], BeautifulSoup(seen[1], "html.parser")
    assert "layer-b (✗ not reproduced)" in text and "Right statement: a < b" in text
    assert [a["href"] for a in page.select("dt a")] == [
        "11_x.html#claim-layer-b",
        "../book/claims.html#lora-b",
    ]
    first, second = page.select("dd")
    assert "1 <of> 2" in first.text and "Missing: no numbers" in second.text
