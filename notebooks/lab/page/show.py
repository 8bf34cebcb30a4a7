"""How notebooks speak: Markdown and tables in Jupyter, plain text in a script."""

from __future__ import annotations

import base64
import html as html_
import json
import math
import re
import string
import sys
from collections.abc import Iterable

import pandas as pd


def jupyter():
    """The running shell if this is a notebook's kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if hasattr(shell, "kernel") else None


def put(text: str, *, html: str | None = None, markdown: bool = False) -> None:
    """Show ``html`` (or ``text`` as Markdown) in Jupyter, print ``text`` elsewhere."""
    if jupyter() is None or (html is None and not markdown):
        print(text)
        return
    from IPython.display import HTML, Markdown, display

    display(HTML(html) if html is not None else Markdown(text))


def interactive(name: str, values: dict, otherwise: str) -> None:
    """A place that a script of the book (book/_static/NAME.js) fills with a figure; elsewhere it shows a sentence.

    Args:
        values: plain data that the figure starts from, so that its numbers are those of the notebook.
        otherwise: what stands there without the script.
    """
    data = html_.escape(json.dumps(values))
    put(
        otherwise,
        html=f'<div class="ndl-interactive" data-script="{name}" data-values="{data}">'
        f"<p>{html_.escape(otherwise)}</p></div>",
    )


def say(text: str) -> None:
    """Show a sentence that contains computed numbers."""
    put(text, markdown=True)


def table(
    frame: pd.DataFrame,
    formats: dict[str, str] | None = None,
    caption: str = "",
    intervals: dict[str, str] | None = None,
) -> None:
    """Show a table without its index; underscores in headings become spaces.

    Args:
        formats: column -> format such as ``"{:.3f}"``; missing values stay empty.
        intervals: metric -> format; merges the columns ``m``, ``m_low``, ``m_high`` into one, "0.979 [0.973, 0.986]".
    """
    frame = _merge(frame.copy(), intervals or {})
    for column, form in (formats or {}).items():
        frame[column] = [form.format(v) if pd.notna(v) else "" for v in frame[column]]
    frame = frame.rename(columns=lambda name: str(name).replace("_", " ")).rename_axis(columns=None)
    body = frame.to_html(
        index=False, border=0, classes="ndl-table", escape=True, na_rep="", justify="left"
    )
    body = re.sub(r"(?<=<td>)[^<]+", _in_one_piece, body)
    head = f"<p class='ndl-caption'>{html_.escape(caption)}</p>" if caption else ""
    text = (caption + "\n" if caption else "") + frame.to_string(index=False, na_rep="")
    label = html_.escape(caption or "table")
    put(
        text,
        html=f'<div class="ndl-scroll" tabindex="0" role="region" aria-label="{label}">{head}{body}</div>',
    )


def words(found, form: str = "{:+.1f}") -> str:
    """A mean with its interval as text, "+1.0 [+0.5, +1.5]"; a value alone; nothing for None."""
    if found is None:
        return ""
    if isinstance(found, tuple):
        return f"{form} [{form}, {form}]".format(*found)
    return form.format(found)


def download(frame: pd.DataFrame, name: str, words: str) -> None:
    """Show a link that saves a table as a file of comma-separated values; the page itself holds it."""
    text = frame.to_csv(index=False)
    held = base64.b64encode(text.encode("utf-8")).decode("ascii")
    size = f"{len(frame)} rows, {len(text) / 1000:.0f} kB"
    link = f'<a href="data:text/csv;base64,{held}" download="{name}">Download {name}</a>'
    put(f"{words}: {size}", html=f'<p class="ndl-take">{link} {html_.escape(words)} ({size})</p>')


def grid(name: str, heads: Iterable[str], rows: Iterable[str], style: str = "") -> str:
    """HTML of a table that scrolls inside itself on a narrow screen; each row is the HTML of its cells."""
    head = "".join(f'<th scope="col">{html_.escape(text)}</th>' for text in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="ndl-scroll" tabindex="0" role="region" aria-label="{html_.escape(name)}">'
        f'<table class="ndl-table{style and " " + style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def cells(row: Iterable[str]) -> str:
    """A row of a `grid`, from the HTML inside of its cells."""
    return "".join(f"<td>{cell}</td>" for cell in row)


def baselines(rows: list[tuple], form: str = "{:.3f}", caption: str = "") -> None:
    """The paper's dense baselines beside ours, and why the two differ: the reader sees what our opponent is worth.

    The reasons stand in a list under the table, each once, under the letter that its rows carry.

    Args:
        rows: (name, printed value, ours as (mean, low, high), reason in words).
        form: of all numbers.
    """
    letters = dict(zip(dict.fromkeys(why for *_, why in rows), string.ascii_lowercase))
    shown = [
        (name, form.format(printed), f"{form} [{form}, {form}]".format(*ours), letters[why])
        for name, printed, ours, why in rows
    ]
    columns = ["dense baseline", "printed", "ours", "why not equal"]
    table(pd.DataFrame(shown, columns=columns), caption=caption)
    say("\n".join(f"- *{letter}*: {why}" for why, letter in letters.items()))


def _in_one_piece(cell: re.Match) -> str:
    """The text of a cell with real minus signs, which do not break lines, and intervals kept together."""
    text = re.sub(r"(?<![\w.)])-(?=\d)|(?<=\de)-(?=\d)", "\N{MINUS SIGN}", cell[0])
    text = re.sub(r"\[([^][, ]+), ([^][, ]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", text)
    text = re.sub(r"^([^\w\s]+) (?=\w+$)", "\\1\N{NO-BREAK SPACE}", text)  # a sign and its word
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _merge(frame: pd.DataFrame, intervals: dict[str, str]) -> pd.DataFrame:
    """The frame with each metric and its interval in one column of text; a value of one run stands alone."""
    for metric, form in intervals.items():
        low, high = f"{metric}_low", f"{metric}_high"
        cells = zip(frame[metric], frame[low], frame[high])
        frame[metric] = [
            "" if pd.isna(cell[0]) else words(cell if math.isfinite(cell[1]) else cell[0], form)
            for cell in cells
        ]
        frame = frame.drop(columns=[low, high])
    return frame
