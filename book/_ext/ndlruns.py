"""Tables of the recorded runs, for the status page: rows of the records in, escaped HTML out."""

from lab.page import show
from ndltables import escape


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
    heads = ("Experiment", "Runs", "Seeds", "Device", "torch", "Total time", "First and last")
    body = []
    for name, rows in runs.items():
        dates = sorted(value[:10] for value in values(rows, "time"))
        failed = sum(row.get("status") != "ok" for row in rows)
        seconds = sum(float(row.get("seconds") or 0) for row in rows)
        body.append(
            (
                name,
                f"{len(rows)}" + (f" ({failed} failed)" if failed else ""),
                len(values(rows, "seed")),
                ", ".join(values(rows, "device")),
                ", ".join(values([row.get("versions", {}) for row in rows], "torch")),
                span(seconds),
                " to ".join(dict.fromkeys(dates[:1] + dates[-1:])),
            )
        )
    return grid("Recorded runs", heads, body) if body else "<p>No run has been recorded yet.</p>"


def chapter_times(rows: list[dict]) -> str:
    """The newest recorded time of each chapter in each mode."""
    newest = {(row["notebook"], row["mode"]): row for row in rows}
    body = [
        (
            f"{name[:2]} · {name[3:].replace('_', ' ')}",
            mode,
            span(float(row["seconds"])),
            row.get("device"),
            str(row.get("time", ""))[:10],
        )
        for (name, mode), row in sorted(newest.items())
    ]
    heads = ("Chapter", "Mode", "Time", "Device", "Date")
    return (
        grid("Times of the chapters", heads, body)
        if body
        else "<p>No chapter has been timed yet.</p>"
    )


def grid(name: str, heads: tuple[str, ...], body: list[tuple]) -> str:
    """A plain table that scrolls inside itself on a narrow screen."""
    return show.grid(name, heads, ["".join(map(grid_cell, row)) for row in body])


def grid_cell(value: object) -> str:
    """One cell; short values are not broken over lines."""
    text = "–" if value in (None, "") else str(value)
    return f"<td{' class=ndl-short' if len(text) <= 12 else ''}>{escape(text)}</td>"
