"""The ledger book/paper/claims.yml: what the paper claims, what this book found, and the cell that judges."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterator

from .. import modes, reads
from ..modes import PAPER, LabError, mode, read_yaml
from .show import put, say

SIGNS = {
    "holds": "✓",
    "holds-if": "✓*",
    "fails": "✗",
    "undecided": "≈",
    "untestable": "–",
    "open": "○",
}
DIRECTION = "direction only"
SCALES = ("parameters", "data", "budget")  # the fields of `scale`: [ours, printed]
NEAR = 0.5  # the share of every printed size that runs near the printed scale have
SHORT_RULE = 300  # characters; a longer rule is folded in the box of its verdict
# What a claim with this verdict must say.
RULED = ("rule", "scope", "notebook")
NEEDS = {
    "holds": RULED,
    "holds-if": (*RULED, "condition"),
    "fails": (*RULED, "correction"),
    "undecided": (*RULED, "would_take"),
    "untestable": ("reason",),
    "open": (),
}
VERDICTS = tuple(NEEDS)
SETTLED = VERDICTS[:4]  # a cell judges them
# The rule that sorts the claims that fail, in words; `ground` below applies it. A claim that holds under a condition has no ground:
# the condition says what was missing.
GROUNDS = {
    "refuted": "a proof, a count or the paper's own printed cells contradict it",
    "not reproduced": "runs with at least half of the printed parameters and data, and offered as much training, contradict it",
    "not reproduced at small scale": "runs with less than half of the printed parameters, data or training contradict it, "
    "which says nothing about the printed size",
    "slip": "a matter of rounding, typing or naming, without weight for the message",
}
# What is counted: the verdicts, with the grounds in the place of "fails".
OUTCOMES = ("holds", "holds-if", *GROUNDS, "undecided", "untestable", "open")
SIGNS |= dict.fromkeys(GROUNDS, "✗")
MILD = ("not reproduced at small scale", "slip")  # badges in a weaker look
HEADLINES = {"abstract", "sec:conclusion", "Impact Statement"}
SLIP_FACTOR = 1.5
# In a rule: part of it was written when results, of these runs or of earlier ones, were known.
LATER = re.compile(
    r"\b(amended|added|written|decided on) (on|when|while|after|before|its|as)\b|were added", re.I
)
# First part of a claim's id -> the area it belongs to.
AREAS = {
    "ablation": "ablations",
    "bert": "BERT heads",
    "bias": "dial a bias",
    "cnn": "CNN heads",
    "dit": "DiT",
    "entropy": "entropy",
    "ett": "ETT forecasting",
    "flops": "FLOPs",
    "layer": "the layer",
    "lora": "LoRA",
    "memory": "memory",
    "opt": "OPT pre-training",
    "overhead": "overhead",
    "params": "parameters",
    "related": "related work",
    "sample": "sample efficiency",
    "structured": "structured layers",
    "tabular": "tabular data",
    "theory": "theory",
    "ucr": "UCR classification",
    "vit": "ViT distillation",
}


class LedgerError(LabError):
    """Ledger and evidence disagree, or the ledger is incomplete."""


@functools.cache
def _load() -> dict[str, dict]:
    entries = read_yaml(PAPER / "claims.yml")["claims"]
    for entry in entries:
        for problem in problems(entry):
            raise LedgerError(f"claims.yml, {entry.get('id')}: {problem}")
    if len({entry["id"] for entry in entries}) != len(entries):
        raise LedgerError("claims.yml: an id stands twice")
    return {entry["id"]: entry for entry in entries}


def problems(entry: dict) -> Iterator[str]:
    """What is wrong with one entry of the ledger."""
    verdict = entry.get("verdict")
    if verdict not in VERDICTS:
        yield f"verdict {verdict!r} is not one of {', '.join(VERDICTS)}"
        return
    if missing := [key for key in NEEDS[verdict] if not entry.get(key)]:
        yield f"verdict {verdict!r} needs {', '.join(missing)}"
    if "direction_only" in entry:
        sentence = entry["direction_only"]
        if verdict not in ("holds", "holds-if"):
            yield f"`direction_only` goes with holds and holds-if, not with {verdict!r}"
        elif not isinstance(sentence, str) or len(re.findall(r"\d[\d.,]*", sentence)) < 2:
            yield "`direction_only` is a sentence with both numbers: what is printed and what we found"
    if other := entry.get("another_reading"):
        if set(other) != {"reading", "verdict"} or other["verdict"] not in VERDICTS:
            yield "`another_reading` needs a reading and a verdict"
        elif other["verdict"] == verdict:
            yield "`another_reading` gives the same verdict: delete it"
    if verdict == "fails":
        yield from _ground_problems(entry)
    elif stray := [key for key in ("ground", "slip", "scale") if key in entry]:
        yield f"`{stray[0]}` goes with fails, not with {verdict!r}"


def _ground_problems(entry: dict) -> Iterator[str]:
    """What is wrong with the ground of a claim that fails, and with the scale that it follows from."""
    scale = entry.get("scale") or {}
    if entry.get("ground") not in GROUNDS:
        yield f"a claim that fails needs `ground`: one of {', '.join(GROUNDS)}"
    elif not entry.get("scope"):
        return  # reported as missing
    elif by_runs(entry) and (not scale or set(scale) - set(SCALES)):
        yield f"a claim that fails by runs needs `scale`: some of {', '.join(SCALES)}"
    elif by_runs(entry) and not all(len(pair) == 2 and min(pair) > 0 for pair in scale.values()):
        yield "`scale` has pairs of numbers, ours and the printed one"
    elif (found := ground(entry)) != entry["ground"]:
        yield f"`ground` is {entry['ground']!r}; its records, scale, place and slip make it {found!r}"


def ground(claim: dict) -> str:
    """The ground on which a claim fails, from what the verdict rests on: the rule in `GROUNDS`, applied.

    Runs decide where the claim names records, unless its scope is "as printed" and it points to cells of the paper's tables; its
    `scale` says whether they are far below print. All else is decided by pencil: a slip, or refuted.
    """
    if by_runs(claim):
        return "not reproduced" if least_share(claim) >= NEAR else "not reproduced at small scale"
    return "slip" if is_slip(claim) else "refuted"


def by_runs(claim: dict) -> bool:
    """Whether runs decide a claim, not a proof, a count or the paper's own cells."""
    printed = claim["scope"] == "as printed" and claim.get("cells")
    return bool(claim.get("records")) and not printed


def least_share(claim: dict) -> float:
    """The smallest of our sizes over the printed ones."""
    return min(ours / printed for ours, printed in claim["scale"].values())


def scale_words(claim: dict) -> str:
    """Our sizes and the printed ones, such as "parameters 7,088 of 70,000"; "" for a claim without them."""
    sizes = (claim.get("scale") or {}).items()
    return "; ".join(f"{name} {ours:,} of {printed:,}" for name, (ours, printed) in sizes)


def is_slip(claim: dict) -> bool:
    """Whether the field `slip` names a small thing: no headline, and two near numbers or a word."""
    slip = claim.get("slip")
    if not slip or claim.get("records") or HEADLINES & set(claim["where"]):
        return False
    if "name" in slip:
        return slip["name"].lower() in claim["statement"].lower()
    ratio = slip["printed"] / slip["right"]
    return 1 / SLIP_FACTOR <= ratio <= SLIP_FACTOR


def another_reading(claim: dict) -> str | None:
    """What the verdict would be by another reasonable reading, as a sentence, or None."""
    if (other := claim.get("another_reading")) is None:
        return None
    return f"{other['reading'][:1].upper()}{other['reading'][1:]}: {other['verdict']}."


def claims() -> list[dict]:
    """All entries of the ledger, in its order."""
    reads.note("claims", "all")
    return list(_load().values())


def of_chapter(notebook: str) -> list[dict]:
    """The entries that a chapter settles, it or its evidence; those of one notebook for the name of an evidence notebook."""
    reads.note("claims of", notebook)
    return [entry for entry in _load().values() if belongs(entry, notebook)]


def belongs(claim: dict, notebook: str) -> bool:
    """Whether a claim is settled in a notebook, or in the evidence of that chapter."""
    return notebook in (claim.get("notebook"), chapter_of(claim))


def chapter_of(claim: dict) -> str:
    """The chapter in which a claim is treated, such as "40_cnn"; "" for none. Its evidence may judge it."""
    return modes.lecture((claim.get("notebook") or "").rpartition("/")[2])


def judged(some: list[dict]) -> list[dict]:
    """The claims that could be judged: the denominator of every headline."""
    return [claim for claim in some if claim["verdict"] not in ("untestable", "open")]


def headline(some: list[dict]) -> str:
    """How many claims could be judged, and how; the one sentence of front page, README, report and the page of all claims."""
    found = [claim["verdict"] for claim in judged(some)]
    count = {verdict: found.count(verdict) for verdict in VERDICTS}
    return (
        f"Of {len(some)} claims {len(found)} could be judged: {count['holds']} hold, {count['holds-if']} hold under a condition, "
        f"{count['fails']} fail, {count['undecided']} {'is' if count['undecided'] == 1 else 'are'} undecided."
    )


def outcome(claim: dict) -> str:
    """The verdict of a claim, or the ground on which it fails."""
    return claim.get("ground") or claim["verdict"]


def tally(some: list[dict]) -> dict[str, int]:
    """How many of some claims have which outcome."""
    return {name: sum(outcome(c) == name for c in some) for name in OUTCOMES}


def mark(claim: dict) -> str:
    """The sign of a claim's verdict; a claim that holds for the direction only says so."""
    sign = SIGNS[claim["verdict"]]
    return f"{sign} {DIRECTION}" if claim.get("direction_only") else sign


def label(claim: dict) -> str:
    """Sign and word of a claim's verdict, such as "✓ holds, direction only"; the ground in place of "fails"."""
    words = f"{SIGNS[claim['verdict']]} {outcome(claim)}"
    return f"{words}, {DIRECTION}" if claim.get("direction_only") else words


def classes(claim: dict) -> str:
    """The style classes of a claim's badge."""
    more = " ndl-direction" if claim.get("direction_only") else ""
    more += " ndl-mild" if claim.get("ground") in MILD else ""
    return f"ndl-badge ndl-{claim['verdict']}{more}"


def area(claim: dict) -> str:
    """The area of a claim: the first part of its id, in words."""
    prefix = claim["id"].split("-")[0]
    return AREAS.get(prefix, prefix)


def claim(id: str) -> dict:
    """One entry of the ledger."""
    if id not in _load():
        raise LedgerError(f"no claim {id!r} in book/paper/claims.yml")
    reads.note("claim", id)
    return _load()[id]


def _found(holds: bool | None, under: bool | None) -> str:
    """The verdict that the evidence gives."""
    if under is not None and holds is not False:
        raise LedgerError(
            "`under` says that a statement that fails as printed holds under a condition: it needs holds=False"
        )
    if holds is None:
        return "undecided"
    return "holds" if holds else "holds-if" if under else "fails"


def verdict(id: str, *, holds: bool | None, under: bool | None = None, note: str = "") -> None:
    """Judge a claim by evidence, show the verdict, and raise when the ledger says otherwise.

    Args:
        id: the claim's id in the ledger; the cell becomes its anchor ``claim-<id>``.
        holds: True, False, or None when the interval includes both.
        under: True when the claim, false as printed, holds under the ledger's ``condition``.
        note: one sentence, Markdown-free, with the numbers that decided.

    Claims that rest on records are not judged in smoke mode, where nothing was trained to the end.
    """
    entry, found = claim(id), _found(None if holds is None else bool(holds), under)
    if mode() == "smoke" and entry.get("records"):
        put(f"{id}: not judged in smoke mode")
        return
    if found != entry["verdict"]:
        raise LedgerError(
            f"claim {id!r}: the ledger says {entry['verdict']!r}, the evidence says {found!r}. {note} "
            "If the evidence is right, change `verdict` in book/paper/claims.yml, and keep the rule that was written before the run."
        )
    condition = entry.get("condition") and f"holds if {entry['condition']}"
    parts = entry.get("correction") or condition, entry.get("direction_only"), note
    text = " — ".join([f"{label(entry)} · {id} · {entry['statement']}", *filter(None, parts)])
    put(text, html=_markup(id, entry, note))


def finding(text: str, *, holds: bool | None) -> None:
    """A result of ours that the chapter's prose states: raises unless the evidence holds; not judged in smoke mode.

    Use it beside `verdict` for statements that are not the paper's, so that prose and records cannot drift apart.
    """
    if mode() == "smoke":
        say(f"(not judged in smoke mode) {text}")
    elif holds is None or not holds:
        raise LedgerError(f"the text says {text!r}, the evidence says otherwise: correct the text")
    else:
        say(f"Checked: {text}")


def _markup(id: str, entry: dict, note: str) -> str:
    """The box of a verdict. A rule that is longer than what it decides is folded, so that the evidence is what one sees."""
    rule = entry.get("rule") or ""
    short = len(rule) <= SHORT_RULE
    parts = (
        ("Right statement.", entry.get("correction")),
        ("Condition.", entry.get("condition")),
        ("Direction only.", entry.get("direction_only")),
        ("Evidence.", note),
        ("Scale, ours and printed.", scale_words(entry)),
        ("Another reading.", another_reading(entry)),
        ("What would decide it.", entry.get("would_take")),
        ("Rule.", rule if short else ""),
    )
    told = [f"<br><span><b>{head}</b> {html.escape(text)}</span>" for head, text in parts if text]
    folded = "" if short else f"<details><summary>Rule</summary>{html.escape(rule)}</details>"
    return (
        f'<div class="ndl-verdict" id="claim-{id}"><span class="{classes(entry)}">{label(entry)}</span> <code>{id}</code>'
        f"<br><span>{html.escape(entry['statement'])}</span>{''.join(told)}{folded}</div>"
    )
