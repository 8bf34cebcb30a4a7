"""Numbers in prose: each is tied to a cell or a phrase that computes it, or is a definition by one of a few rules."""

import json
import random

import lab
import pytest
import ties
from lab import LabError, modes
from lab.page import ledger, quote
from lab.tools import seals


@pytest.mark.parametrize("slug", ties.NOTEBOOKS)
def test_every_number_of_a_chapter_is_tied(slug):
    loose = ties.untied(quote.prose(slug), ties.quotes(slug))
    assert not loose, "\n".join(loose)


@pytest.mark.parametrize("page", ties.PAGES)
def test_every_number_of_a_page_is_what_computes_it(page):
    found = ties.faults(page, (modes.ROOT / page).read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def with_another_digit(text: str, a: int, b: int) -> str:
    """One digit between two places changed, or one more in front."""
    place = random.choice([i for i in range(a, b) if text[i].isdigit()])
    digit = random.choice([d for d in "123456789" if d != text[place]])
    return text[:a] + digit + text[a:] if digit > "7" else text[:place] + digit + text[place + 1 :]


@pytest.mark.parametrize("page", ties.PAGES)
def test_each_other_number_on_a_page_is_found(page):
    text = (modes.ROOT / page).read_text(encoding="utf-8")
    for place in ties.numbers(text):
        assert ties.faults(page, with_another_digit(text, *place)), text[place[0] :][:60]


# --- the ledger --------------------------------------------------------------------------------------------------


def test_a_statement_has_the_papers_numbers():
    foreign = {claim["id"]: ties.strangers(claim) for claim in ledger.claims()}
    assert not any(foreign.values()), {id: found for id, found in foreign.items() if found}
    one = ledger.claim("ett-rnn-etth1")
    changed = one["statement"].replace("0.0880", "0.0870")
    assert ties.strangers(one | {"statement": changed}) == ["0.0870"]


def test_claims_are_as_they_were_sealed():
    assert not seals.broken(), "python -m lab seals says what to do"


def test_a_seal_sees_numbers_rules_and_records_and_no_words():
    for claim in ledger.claims():
        texts = {key: text for key, text in claim.items() if isinstance(text, str) and " " in text}
        for field, text in texts.items():
            changed = [with_another_digit(text, *place) for place in ties.numbers(text)]
            changed += [text.replace(" ", " never ", 1)] if field == "rule" else []
            assert all(seals.seal(claim | {field: one}) != seals.seal(claim) for one in changed)
            same = text if field == "rule" else text.replace(" ", " indeed ")
            assert seals.seal(claim | {field: same}) == seals.seal(claim)
        if claim.get("records"):
            assert seals.seal(claim | {"records": claim["records"][1:]}) != seals.seal(claim)


def test_a_claim_is_sealed_anew_by_its_name_only(tmp_path, monkeypatch, capsys):
    kept = json.loads(seals.PLACE.read_text(encoding="utf-8"))
    edited = kept | {"params-32cube": "0", "opt-params": "0", "gone": "0"}
    monkeypatch.setattr(seals, "PLACE", tmp_path / "seals.json")
    seals.PLACE.write_text(json.dumps(edited))
    seals.main(["params-32cube", "gone"])
    assert seals.broken() == ["opt-params"] and "opt-params: not as" in capsys.readouterr().out
    with pytest.raises(LabError, match="nothing has changed in params-32cube"):
        seals.main(["params-32cube"])


# --- the rules ---------------------------------------------------------------------------------------------------


def test_definitions_are_no_numbers_to_tie():
    text = """1. In chapter 12, on 23 November 2026, CIFAR-10 with 32×32×32 entries, `x = 3`, $N = 2$, float32,
    Theorem 20.8, [11 · Kronecker](11_kronecker.ipynb), a 95 % t interval.\n\n## References\n\n- (1999) 10.1000/3"""
    assert not ties.numbers(text)
    log = "76 edits, measured on 27 November 2026: 12 of them.\n\n## Next\n\nand 13"
    assert [log[a:b] for a, b in ties.numbers(log)] == ["76", "13"]


def test_a_number_that_nothing_covers_is_found():
    text = "It is 24 times as large, **3,072 weights** and −0.5 points."
    assert len(ties.untied(text, [])) == 3
    phrases = ["{} times as large", "{:,} weights", "{:+.1f} points"]
    assert not ties.untied(text, phrases)
    assert len(ties.untied(text, ["24 times as large"])) == 3, "a typed number ties nothing"


def test_a_number_is_said_whole_and_with_its_sign():
    text = "It is **24 times\nas large**, \N{MINUS SIGN}0.5 points; by 2.5."
    for said in (("{:.0f} times as", 24.2), ("{:.1f} points", -0.5), ("by {}", 2.5)):
        assert quote.says(text, *said), said
    for text in ("it is 124 times", "1.24 times", "1,24 times", "-24 times", "+24 times"):
        assert not quote.says(text, "{} times", 24), text
    for text in ("by 2.55", "by 2.5,000", "by 2.5.1"):
        assert not quote.says(text, "by {}", 2.5), text


def test_a_comma_of_a_phrase_may_be_another_and_no_word_or_number():
    phrase = "which is better in {} of {} settings, and level in {}"
    told = "which is better in 14 of 24 settings, and level in 3"
    assert quote.says(told, phrase, 14, 24, 3)
    assert quote.says(told.replace(",", ""), phrase, 14, 24, 3)
    for old, new in (("24", "25"), ("3", "5 or 3"), ("better", "worse"), ("is ", "is not ")):
        assert not quote.says(told.replace(old, new), phrase, 14, 24, 3), new


def test_the_footer_looks_up_what_its_notebook_quotes(monkeypatch, capsys):
    monkeypatch.setenv("NDL_MODE", "replay")
    lab.quote("{:,} weights", 3_073)
    with pytest.raises(LabError, match="does not say '3,073 weights': correct the sentence"):
        lab.footer("10_one_layer")
    lab.footer("10_one_layer")  # nothing is left
    monkeypatch.setenv("NDL_MODE", "smoke")
    lab.quote("{:,} weights", 3_073)
    lab.footer("10_one_layer")
