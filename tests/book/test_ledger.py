"""The ledger: complete, consistent with the notebooks and the records, and able to contradict a wrong verdict."""

import collections
import functools
import statistics

import numpy as np
import pytest
import ties
import torch
from lab import modes, records
from lab.page import ledger
from lab.page.facts import facts
from lab.page.ledger import LedgerError

SETTLED = [c for c in ledger.claims() if c["verdict"] not in ("open", "untestable")]
RUN_SECONDS_FOR_THREE_SEEDS = 600
# parameters in front of the heads of the released CNN; some rows count the head alone
CONVOLUTIONS = 19_584
read = functools.cache(records.read)  # many claims rest on the same rows


def test_there_are_177_claims_with_facts():
    claims = ledger.claims()
    assert len(claims) == 177
    theory = {"definition", "theorem", "arithmetic", "parameter-count", "flop-count"}
    kinds = {*theory, "measured", "qualitative"}
    assert all(c["statement"] and c["where"] and c["kind"] in kinds for c in claims)


def test_fact_cells_exist():
    for claim in ledger.claims():
        for cell in claim.get("cells", []):
            found = facts(cell["table"], **cell.get("where", {}))
            assert len(found) == cell["rows"], (claim["id"], cell)


def test_each_settled_claim_is_judged_by_exactly_one_cell_of_its_chapter():
    """And no other id is judged."""
    cells = collections.Counter(
        (slug, getattr(call.args[0], "value", None))
        for slug in map(modes.slug, modes.chapters())
        for call in ties.calls(slug, "lab.verdict")
        if slug != "00_template"
    )
    assert cells == collections.Counter((claim["notebook"], claim["id"]) for claim in SETTLED)


def test_measured_claims_rest_on_records_with_enough_seeds():
    for claim in SETTLED:
        from_the_print = claim["scope"] == "as printed" and claim.get("cells")
        if claim["kind"] == "measured" and not from_the_print:
            assert claim.get("records"), f"{claim['id']} is measured: name its records"
        for name in claim.get("records", []):
            rows = [r for r in read(name) if r["status"] == "ok"]
            assert rows, f"{claim['id']}: results/{name}.jsonl is missing or empty"
            if claim["kind"] == "definition":
                continue  # it is carried out once, and nothing is drawn
            seconds = statistics.mean(r["seconds"] for r in rows)
            enough = 3 if seconds > RUN_SECONDS_FOR_THREE_SEEDS else 5
            assert len({r["seed"] for r in rows}) >= enough, f"{claim['id']}: {name} has too few"


@pytest.fixture
def entries(monkeypatch):
    """A ledger of four entries in place of the real one."""
    made = {
        "right": {"statement": "1 < 2", "verdict": "holds", "rule": "arithmetic"},
        "wrong": {"statement": "2 < 1", "verdict": "fails", "ground": "refuted"},
        "some": {"statement": "x > 0", "verdict": "holds-if", "condition": "x is 1"},
        "noise": {"statement": "a > b", "verdict": "undecided", "records": ["r"]},
    }
    made["wrong"]["correction"] = "1 < 2"
    for name, entry in made.items():
        made[name] = {"id": name, "rule": "r", "scope": "s", "notebook": "x"} | entry
    monkeypatch.setattr(ledger, "_load", lambda: made)
    monkeypatch.setenv("NDL_MODE", "replay")
    return made


def test_evidence_that_agrees_is_shown(entries, capsys):
    ledger.verdict("right", holds=np.bool_(True), note="seen")
    ledger.verdict("wrong", holds=torch.tensor(False))
    ledger.verdict("some", holds=False, under=True)
    ledger.verdict("noise", holds=None)
    out = capsys.readouterr().out
    for words in ("✓ holds · right", "seen", "✗ refuted", "holds if x is 1", "≈ undecided"):
        assert words in out


@pytest.mark.parametrize(
    ("id", "evidence"),
    [
        ("right", {"holds": False}),
        ("wrong", {"holds": True}),
        ("some", {"holds": True}),
        ("some", {"holds": False}),
        ("noise", {"holds": True}),
    ],
)
def test_evidence_that_disagrees_raises(entries, id, evidence):
    with pytest.raises(LedgerError, match=rf"claim '{id}': the ledger says .* the evidence says"):
        ledger.verdict(id, **evidence)


def test_an_open_or_unknown_claim_cannot_be_judged(entries):
    entries["right"]["verdict"] = "open"
    with pytest.raises(LedgerError, match="the ledger says 'open'"):
        ledger.verdict("right", holds=True)
    with pytest.raises(LedgerError, match="no claim 'nothing'"):
        ledger.verdict("nothing", holds=True)
    with pytest.raises(LedgerError, match="needs holds=False"):
        ledger.verdict("some", holds=True, under=True)


def test_smoke_judges_theory_but_not_training(entries, monkeypatch, capsys):
    monkeypatch.setenv("NDL_MODE", "smoke")
    ledger.verdict("noise", holds=True)
    ledger.finding("a is larger", holds=False)
    assert capsys.readouterr().out.count("not judged in smoke mode") == 2
    with pytest.raises(LedgerError):
        ledger.verdict("right", holds=False)


def test_a_finding_that_the_evidence_denies_raises(entries, capsys):
    ledger.finding("a is larger", holds=True)
    assert capsys.readouterr().out == "Checked: a is larger\n"  # a sign of its own: ✓ is for claims
    for evidence in (False, None):
        with pytest.raises(LedgerError, match="the text says 'a is larger'"):
            ledger.finding("a is larger", holds=evidence)


def test_a_verdict_on_the_direction_alone_says_so_with_both_numbers(entries, capsys):
    entries["right"]["direction_only"] = "3 times < 4 here, 2 times printed."
    ledger.verdict("right", holds=True)
    out = capsys.readouterr().out
    assert out.startswith("✓ holds, direction only · right") and "2 times printed" in out
    text = ledger._markup("right", entries["right"], "5 < 6")
    assert 'id="claim-right"' in text and "3 times &lt; 4 here" in text and "5 &lt; 6" in text
    assert ledger.mark(entries["right"]) == "✓ direction only"


FAILS = {"verdict": "fails", "ground": "refuted", "rule": "r", "scope": "as printed"}
FAILS |= {"where": ["sec:analysis"], "notebook": "n", "correction": "c"}
FAILS |= {"statement": "GELU has 6 of them"}
AT_PRINT = {"records": ["r"], "scale": {"parameters": [50, 100], "data": [7, 7]}}
SETTLED_BY = {"rule": "r", "scope": "s", "notebook": "n"}


@pytest.mark.parametrize(
    ("evidence", "ground"),
    [
        ({}, "refuted"),
        (AT_PRINT, "not reproduced"),
        (AT_PRINT | {"scope": "reduced: half of it"}, "not reproduced"),  # no word decides
        ({"records": ["r"], "cells": ["c"]}, "refuted"),  # judged by the printed cells
        (AT_PRINT | {"cells": ["c"], "scope": "as printed: 50 epochs"}, "not reproduced"),
        (AT_PRINT | {"scale": {"data": [49, 100]}}, "not reproduced at small scale"),
        ({"slip": {"printed": 6, "right": 5.5}}, "slip"),
        ({"slip": {"printed": 6, "right": 3.9}}, "refuted"),
        ({"slip": {"name": "GELU"}}, "slip"),
        ({"slip": {"name": "ReLU"}}, "refuted"),
        ({"slip": {"name": "GELU"}, "where": ["sec:analysis", "abstract"]}, "refuted"),
        (AT_PRINT | {"slip": {"name": "GELU"}}, "not reproduced"),
    ],
)
def test_the_ground_follows_from_the_evidence(evidence, ground):
    claim = FAILS | evidence
    assert ledger.ground(claim) == ground
    for given in ledger.GROUNDS:
        problem = next(ledger.problems(claim | {"ground": given}), None)
        assert (problem is None) == (given == ground), (given, problem)


def test_the_sizes_of_a_scale_are_those_of_the_rows_and_of_the_printed_tables():
    """Ours in the rows of the claim's records; the printed parameters in a cell of its tables, rounded as there."""
    known = {"parameters": (), "data": ("images", "samples", "train"), "budget": ("epochs",)}
    for claim in (c for c in ledger.claims() if "scale" in c):
        rows = [row for name in claim["records"] for row in read(name)]
        for size, (ours, printed) in claim["scale"].items():
            values = {
                row["config"][key] for row in rows for key in known[size] if key in row["config"]
            }
            if size == "parameters":
                own = {row["parameters"] for row in rows if row.get("parameters")}
                values = own | {count + CONVOLUTIONS for count in own}
            assert ours in values or not values, (claim["id"], size, ours, sorted(values, key=str))
            cells = claim.get("cells", []) if size == "parameters" else []
            found = {c["table"] for c in cells}
            counts = {
                n for name in found for n in facts(name, metric="params")["value"].astype(float)
            }
            assert printed in counts or not counts, (claim["id"], printed)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"verdict": "true"}, "not one of"),
        ({"verdict": "holds"}, "needs rule, scope, notebook"),
        (FAILS | {"correction": ""}, "needs correction"),
        (FAILS | {"ground": None}, "needs `ground`"),
        (FAILS | {"records": ["r"], "scope": "small"}, "needs `scale`"),
        (FAILS | AT_PRINT | {"scope": "s", "scale": {"size": [1, 2]}}, "needs `scale`"),
        ({"verdict": "undecided", "ground": "refuted"}, "`ground` goes with fails"),
        (FAILS | {"another_reading": {"reading": "b", "verdict": "fails"}}, "delete it"),
        (FAILS | {"another_reading": {"reading": "b"}}, "needs a reading and a verdict"),
        (SETTLED_BY | {"verdict": "holds-if"}, "needs condition"),
        ({"verdict": "untestable"}, "needs reason"),
        (SETTLED_BY | {"verdict": "undecided"}, "needs would_take"),
        ({"verdict": "fails", "direction_only": "1 here, 2 printed"}, "not with 'fails'"),
        ({"verdict": "holds", "direction_only": "Better by 2.5."}, "a sentence with both numbers"),
    ],
)
def test_incomplete_entries_are_found(entry, message):
    assert any(message in problem for problem in ledger.problems(entry))
