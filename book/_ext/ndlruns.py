"""The table of the recorded runs, for the status page: rows of the records in, escaped HTML out."""

from lab.page import show
from ndltables import escape

HEADS = ("Experiment", "Runs", "Seeds", "Device", "torch", "Total time", "First and last")


def span(seconds: float) -> str:
    """A duration in the largest fitting unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def values(rows: list[dict], key: str) -> list[str]:
    """The distinct values of a key, of the rows that have it."""
    return list(dict.fromkeys(str(row[key]) for row in rows if key in row))


def run_status(runs: dict[str, list[dict]]) -> str:
    """One row per experiment: how many runs, on what, with what, how long, when."""
    body = []
    for name, rows in runs.items():
        dates = sorted(value[:10] for value in values(rows, "time"))
        failed = sum(row.get("status") != "ok" for row in rows)
        row = (
            name,
            f"{len(rows)}" + (f" ({failed} failed)" if failed else ""),
            len(values(rows, "seed")),
            ", ".join(values(rows, "device")),
            ", ".join(values([row.get("versions", {}) for row in rows], "torch")),
            span(sum(float(row.get("seconds") or 0) for row in rows)),
            " to ".join(dict.fromkeys(dates[:1] + dates[-1:])),
        )
        body.append("".join(map(cell, row)))
    return show.grid("Recorded runs", HEADS, body)


def cell(value: object) -> str:
    """One cell; short values are not broken over lines."""
    text = "–" if value in (None, "") else str(value)
    return f"<td{' class=ndl-short' if len(text) <= 12 else ''}>{escape(text)}</td>"
