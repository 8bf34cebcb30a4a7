"""The reproducibility report: scope, method, results, what was easy and what was hard, on one page, from ledger and records.

Plain functions without Sphinx, as in `ndltables.py`. Every number is counted here; the sentences around them are ours.
"""

import collections

from lab.page.ledger import OUTCOMES, SETTLED, SIGNS, headline, tally
from lab.page.show import cells, grid
from ndltables import are, escape

COUNTS = ("arithmetic", "parameter-count", "flop-count")
PENCIL = ("definition", "theorem")
GROUPS = {
    "Arithmetic and counts": COUNTS,
    "Definitions and theorems": PENCIL,
    "Measured": ("measured",),
    "Qualitative": ("qualitative",),
}
GAPS = {
    "seeds": "seed",
    "number of runs": "run",
    "shapes": "shape",
    "learning rate": "learning rate",
}
PRINT = """<style>@media print {
  @page { size: A4; margin: 12mm 14mm }
  html, body { font-size: 9.4pt !important; background: #fff !important; color: #000 !important }
  .bd-header, .bd-header-article, .bd-sidebar, .bd-sidebar-primary, .bd-sidebar-secondary, .prev-next-area, .bd-footer,
  .bd-footer-content, .bd-footer-article, .search-button__wrapper, .headerlink, #pst-skip-link { display: none !important }
  .bd-main, .bd-content, .bd-article-container, .bd-article, .bd-container__inner {
    display: block !important; max-width: none !important; padding: 0 !important; margin: 0 !important }
  h1 { font-size: 15pt !important; margin: 0 0 2mm !important }
  h2 { font-size: 11pt !important; margin: 2mm 0 1mm !important }
  p, ul, table { margin: 0 0 1.2mm !important; line-height: 1.35 !important }
  table.ndl-table th, table.ndl-table td { padding: 0.3mm 2mm !important }
}</style>"""


def report(
    claims: list[dict],
    runs: dict[str, list[dict]],
    protocols: dict,
    changed: int,
    told: list[tuple],
) -> str:
    """The whole page as HTML.

    `runs` holds the rows of every experiment, `protocols` the printed protocol of each experiment of the paper, and
    `changed` is the number of entries in the log of corrections, `told` what the benchmark of layers counts: phrases and values.
    """
    sections = {"Scope": scope(claims), "Method": method(runs), "Results": results(claims, told)}
    lists = {"What was easy": easy(claims), "What was hard": hard(claims, protocols, changed)}
    for name, sentences in lists.items():
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        sections[name] = f"<ul>{items}</ul>"
    body = "".join(f"<h2>{name}</h2>{html}" for name, html in sections.items())
    return f'{PRINT}<div class="ndl-report">{body}</div>'


def of_kind(claims: list[dict], *kinds: str) -> list[dict]:
    """The claims of some kinds."""
    return [claim for claim in claims if claim["kind"] in kinds]


def with_verdict(claims: list[dict], *verdicts: str) -> list[dict]:
    """The claims with some verdicts."""
    return [claim for claim in claims if claim["verdict"] in verdicts]


def scope(claims: list[dict]) -> str:
    """Which statements were examined."""
    parts = [f"{len(of_kind(claims, *kinds))} {name.lower()}" for name, kinds in GROUPS.items()]
    text = (
        f"All {len(claims)} statements of the paper that we found checkable, tables and appendices included: "
        f"{', '.join(parts)}. {len(with_verdict(claims, *SETTLED))} are judged by a cell of a notebook, by a rule of decision "
        "that the ledger holds beside the verdict; the build fails where evidence and verdict disagree."
    )
    return f"<p>{escape(text)}</p>"


def method(runs: dict[str, list[dict]]) -> str:
    """How they were examined, with what, and how long it took."""
    rows = [row for found in runs.values() for row in found if row.get("status") == "ok"]
    hours = sum(float(row.get("seconds") or 0) for row in rows) / 3600
    machines = collections.Counter(str(row.get("device")) for row in rows)
    dates = sorted(str(row["time"])[:10] for row in rows if row.get("time"))
    text = (
        "The layer was written anew from Algorithm 1; a test holds its values, its seeded weights and its checkpoints against "
        "the released package. Theorems are proved or refuted beside a check, printed counts are rebuilt from networks, and "
        "measured claims are run again by the printed protocol, mostly at a reduced scale that the verdict names. Arms share "
        "seeds, differences are paired, intervals are of 95 %. "
    )
    text += (
        f"{len(rows):,} runs of {len(runs)} experiments are recorded, {hours:,.0f} hours in all, from {dates[0]} to {dates[-1]}, on: "
        f"{'; '.join(name for name, _ in machines.most_common())}."
        if rows
        else "No run is recorded."
    )
    return f"<p>{escape(text)}</p>"


def results(claims: list[dict], told: list[tuple]) -> str:
    """Verdicts by group of claims, and the counts of the benchmark of layers in the words of the front page."""
    parts = {name: of_kind(claims, *kinds) for name, kinds in GROUPS.items()} | {"All": claims}
    counts = {name: tally(some) for name, some in parts.items()}
    rows = [
        cells([f"{SIGNS[name]} {name}", *(found[name] for found in counts.values())])
        for name in OUTCOMES
        if counts["All"][name]
    ]
    rows.append(cells(["all", *map(len, parts.values())]))
    gpu = [claim for claim in claims if "gpu" in claim["needs"]]
    direction = [claim for claim in with_verdict(claims, "holds") if claim.get("direction_only")]
    text = (
        f"Of {len(gpu)} claims whose test takes a graphics card, {are(len(with_verdict(gpu, 'untestable')))} untestable here. "
        f"{len(direction) or 'No'} verdicts hold for the direction only, not for the printed size. On every set of tables with real "
        f"axes that was at hand {'; '.join(phrase.format(*values) for phrase, *values in told)}."
    )
    table = grid("Verdicts", ["Outcome", *parts], rows)
    return f"<p>{escape(headline(claims))}</p>{table}<p>{escape(text)}</p>"


def easy(claims: list[dict]) -> list[str]:
    """What took little, from the verdicts."""
    counted, pencil = of_kind(claims, *COUNTS), of_kind(claims, *PENCIL)
    settled = ("holds", "holds-if", "fails")
    unrecorded = [claim for claim in with_verdict(pencil, *settled) if not claim.get("records")]
    public = next(claim for claim in claims if claim["id"] == "layer-code-public")
    return [
        f"Arithmetic and counts: {len(with_verdict(counted, *settled))} of {len(counted)} are settled, "
        f"{len(with_verdict(counted, 'holds', 'holds-if'))} of them as printed or under a condition that we name.",
        f"Definitions and theorems: {len(with_verdict(pencil, *settled))} of {len(pencil)} are settled, {len(unrecorded)} of them "
        "without a recorded run.",
        f"The released code: {public['correction']}",
    ]


def hard(claims: list[dict], protocols: dict, changed: int) -> list[str]:
    """What took much, or could not be done."""
    gaps = [protocol["silent_on"] for protocol in protocols.values()]
    missing = {
        name: sum(any(word in gap for gap in found) for found in gaps)
        for name, word in GAPS.items()
    }
    most = sorted(missing, key=missing.get, reverse=True)[:3]
    undecided = with_verdict(of_kind(claims, "measured"), "undecided")
    return [
        f"Settings: of {len(gaps)} experiments each leaves {min(map(len, gaps))} to {max(map(len, gaps))} unstated, most often "
        f"{', '.join(f'{name} ({missing[name]})' for name in most)}.",
        f"Means: of the claims {are(len(with_verdict(claims, 'untestable')))} untestable, for reasons that the ledger names.",
        f"Chance: measured claims that stay undecided after the runs that could be made: {len(undecided)}.",
        f"Ourselves: {changed} times a verdict or a statement of this book was put right afterwards; the page of corrections "
        "lists each with its reason.",
    ]
