"""Tables of the book as HTML, made from the ledger, the notebooks and the recorded runs.

Plain functions without Sphinx: data in, escaped HTML or Markdown out. `ndlbook.py` turns them into directives.
"""

import collections
import functools
import html
import json
import pathlib
import re

import yaml
from lab import modes
from lab.page import ledger
from lab.page.show import cells

HERE = pathlib.Path(__file__).resolve().parent

# What the outcomes mean. The word and the sign carry them, the colour only repeats it.
MEANING = {
    "holds": "true as stated, within the scope given; where direction only is said, not in size",
    "holds-if": "true under the condition given beside it, which contradicts the text or adds to it",
    **ledger.GROUNDS,
    "undecided": "tested, and the interval includes both answers",
    "untestable": "cannot be tested; what is missing is given beside it",
    "open": "not tested yet",
}
COLUMNS = (("verdict", "Verdict"), ("id", "Claim"), ("statement", "What the paper says"))


def escape(text: object) -> str:
    """Any value as HTML text, safe inside elements and attributes."""
    return html.escape("" if text is None else str(text), quote=True)


@functools.cache
def places() -> dict[str, str]:
    """Label of the paper's source -> readable name."""
    return yaml.safe_load((HERE / "places.yml").read_text(encoding="utf8"))


def place(labels: list[str] | str | None) -> str:
    """Readable places of a claim, joined; a label without a name is shown as it is."""
    labels = [labels] if isinstance(labels, str) else labels or []
    return "; ".join(dict.fromkeys(str(places().get(label, label)) for label in labels))


def badge(name: str, text: str = "") -> str:
    """An outcome, or a verdict, as sign and word or other text."""
    return f'<span class="ndl-badge {style(name)}">{text or f"{ledger.SIGNS[name]} {name}"}</span>'


def style(name: str) -> str:
    """The style class of an outcome or a verdict: every ground is a way to fail."""
    mild = " ndl-mild" if name in ledger.MILD else ""
    return f"ndl-{'fails' if name in ledger.GROUNDS else name}{mild}"


def claim_badge(claim: dict) -> str:
    """The verdict of a claim as sign and word; one that holds for the direction only says so."""
    return f'<span class="{ledger.classes(claim)}">{ledger.label(claim)}</span>'


def cell_link(claim: dict, uri: str) -> str | None:
    """Address of the cell that judges the claim, or None where no cell does."""
    if claim["verdict"] in ledger.SETTLED and claim.get("notebook"):
        return f"{uri}{claim['notebook']}.html#claim-{claim['id']}"
    return None


def remarks(claim: dict) -> str:
    """Our additions to a statement: condition, correction or reason in the open, the decision rule folded."""
    parts = (
        ("Holds if", "condition"),
        ("Right statement", "correction"),
        ("What would decide it", "would_take"),
        ("Missing", "reason"),
        ("Direction only", "direction_only"),
        ("Another reading", "another_reading"),
    )
    claim = claim | {"another_reading": ledger.another_reading(claim)}
    rows = [
        f'<div class="ndl-remark"><b>{head}:</b> {escape(claim[key])}</div>'
        for head, key in parts
        if claim.get(key)
    ]
    if claim.get("rule"):
        rows.append(f"<details><summary>Decision rule</summary>{escape(claim['rule'])}</details>")
    return "".join(rows)


def origin(claim: dict) -> str:
    """Where in the paper a claim stands, of which kind it is, and for what our verdict was reached."""
    parts = (
        ("Where", place(claim.get("where"))),
        ("Kind", claim.get("kind")),
        ("Scope", claim.get("scope")),
        ("Scale, ours and printed", ledger.scale_words(claim)),
    )
    text = " · ".join(f"{head}: {escape(value)}" for head, value in parts if value)
    return f'<div class="ndl-origin">{text}</div>'


def claims_table(claims: list[dict], uri: str, known: set[str]) -> str:
    """All claims as one table. `uri` leads to the notebooks, `known` are the notebooks that the book has."""
    order = {name: rank for rank, name in enumerate(ledger.OUTCOMES)}
    rows = []
    for claim in claims:
        link = cell_link(claim, uri) if claim.get("notebook") in known else None
        verdict = claim_badge(claim)
        if link:
            verdict += f' <a class="ndl-cell" href="{escape(link)}">chapter {escape(ledger.chapter_of(claim)[:2])}</a>'
        statement = f"<div>{escape(claim['statement'])}</div>{remarks(claim)}"
        tds = (
            f'<td role="cell" data-sort="{order[ledger.outcome(claim)]}">{verdict}</td>'
            f'<td role="cell"><a class="ndl-id" href="#{escape(claim["id"])}">{escape(claim["id"])}</a></td>'
            f'<td role="cell">{statement}{origin(claim)}</td>'
        )
        only = f' data-only="{ledger.DIRECTION}"' if claim.get("direction_only") else ""
        rows.append(
            f'<tr role="row" id="{escape(claim["id"])}" data-verdict="{ledger.outcome(claim)}"{only} '
            f'data-kind="{escape(claim.get("kind"))}" data-area="{escape(ledger.area(claim))}">{tds}</tr>'
        )
    heads = "".join(
        f'<th role="columnheader" scope="col" data-key="{key}">{head}</th>' for key, head in COLUMNS
    )
    return (
        f'<div class="ndl-claims mathjax_ignore tex2jax_ignore">{filter_form(claims)}'
        '<p class="ndl-status" role="status"></p>'
        '<table class="ndl-ledger" role="table"><caption class="ndl-hidden">Claims of the paper and verdicts</caption>'
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(rows)}</tbody></table></div>'
    )


def filter_form(claims: list[dict]) -> str:
    """The filter above the table; hidden until the script has taken it over."""

    def select(name: str, title: str, values: list[str]) -> str:
        options = "".join(f'<option value="{escape(v)}">{escape(v)}</option>' for v in values)
        return f'<label>{title} <select name="{name}"><option value="">all</option>{options}</select></label>'

    verdicts = [name for name in ledger.OUTCOMES if any(ledger.outcome(c) == name for c in claims)]
    verdicts += [ledger.DIRECTION] if any(c.get("direction_only") for c in claims) else []
    kinds = sorted({str(c.get("kind")) for c in claims})
    areas = sorted({ledger.area(c) for c in claims}, key=str.lower)
    return (
        '<form class="ndl-filter" hidden aria-label="Filter the claims">'
        '<label class="ndl-wide">Text <input type="search" name="text" autocomplete="off" '
        'placeholder="id, statement, place …"></label>'
        f"{select('verdict', 'Verdict', verdicts)}{select('kind', 'Kind', kinds)}{select('area', 'Area', areas)}"
        '<button type="reset">Show all</button></form>'
    )


def claims_counts(claims: list[dict], uri: str, changed: int, log: str) -> str:
    """How many claims have which outcome: a bar and a list whose entries lead to the filtered table.

    `changed` verdicts were turned in the course of the work; `log` is the address of the page that lists them.
    """
    counts = collections.Counter(map(ledger.outcome, claims))
    shown = [name for name in ledger.OUTCOMES if counts[name]]
    bar = "".join(
        f'<span class="ndl-bar-part {style(v)}" style="flex-grow:{counts[v]}"></span>'
        for v in shown
    )
    only = collections.Counter(c["verdict"] for c in claims if c.get("direction_only"))
    items = "".join(
        f'<li><a href="{escape(uri)}?verdict={v.replace(" ", "+")}">{badge(v)} <b>{counts[v]}</b></a> '
        f'<span class="ndl-meaning">{MEANING[v]}{direction_count(only[v], uri)}</span></li>'
        for v in shown
    )
    turned = f'<a href="{escape(log)}">{changed} verdicts changed</a> in the course of the work'
    return (
        f'<div class="ndl-counts"><p><b>{ledger.headline(claims)}</b> The others cannot be tested here; {turned}.</p>'
        f'<div class="ndl-bar" aria-hidden="true">{bar}</div><ul>{items}</ul>'
        f"<p>{rules_sentence(claims)}</p></div>"
    )


def meanings() -> str:
    """What each outcome means, as a table."""
    rows = "".join(f"<tr>{cells([badge(n), escape(MEANING[n])])}</tr>" for n in ledger.OUTCOMES)
    return f'<table class="ndl-table"><tbody>{rows}</tbody></table>'


def rules_sentence(claims: list[dict]) -> str:
    """How many rules were not left as they were written before the first run."""
    ruled = [claim for claim in claims if claim.get("rule")]
    later = [claim for claim in ruled if ledger.LATER.search(claim["rule"])]
    return (
        f"The rule that decides is written before the first run, with exceptions: {len(later)} of {len(ruled)} rules were "
        "written or changed when some results were known, and say so."
    )


def are(number: int) -> str:
    """A number with its verb: "none is", "1 is", "2 are"."""
    return f"{number or 'none'} {'is' if number < 2 else 'are'}"


def direction_count(number: int, uri: str) -> str:
    """How many claims of a verdict hold for the direction only, with a link to them; nothing where none does."""
    if not number:
        return ""
    address = f"{uri}?verdict={ledger.DIRECTION.replace(' ', '+')}"
    return f'; <a href="{escape(address)}">of these <b>{number}</b> {ledger.DIRECTION}</a>'


def chapter(path: pathlib.Path, folder: str, claims: list[dict]) -> str:
    """A chapter as a Markdown list entry: title, start of its answer, verdicts that it gives."""
    first = json.loads(path.read_text(encoding="utf8"))["cells"][0]["source"]
    title, _, rest = "".join(first).partition("\n")
    paragraphs = rest.strip().split("\n\n")  # a report says first what was claimed
    found = paragraphs[1 if path.stem in modes.REPORTS else 0]
    sentences = re.split(r"(?<=[.!?])\s", " ".join(found.split()))
    answer = " ".join(sentences[: 1 if len(sentences[0]) > 60 else 2])
    judged = [
        c for c in claims if ledger.chapter_of(c) == path.stem and c["verdict"] in ledger.SETTLED
    ]
    given = collections.Counter(map(ledger.outcome, judged))
    marks = " ".join(
        badge(v, f'{ledger.SIGNS[v]} {given[v]}<span class="ndl-hidden"> {v}</span>')
        for v in ledger.OUTCOMES
        if given[v]
    )
    link = f"[{path.stem[:2]} · {title.removeprefix('# ').strip()}]({folder}{path.name})"
    return f"- **{link}** {rebase_links(answer, folder)} {marks}".rstrip()


def rebase_links(markdown: str, folder: str) -> str:
    """Relative links of a notebook's Markdown, seen from a page in another folder; images are left alone."""
    return re.sub(
        r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#|/)([^)\s]+)", lambda m: f"{m[1]}{folder}{m[2]}", markdown
    )
