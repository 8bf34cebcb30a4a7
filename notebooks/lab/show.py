"""How notebooks speak: Markdown and tables in Jupyter, plain text in a script."""

from __future__ import annotations

import hashlib
import html as html_
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable

import pandas as pd

from .modes import LabError, mode


def _in_jupyter() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def put(text: str, *, html: str | None = None, markdown: bool = False) -> None:
    """Show ``html`` (or ``text`` as Markdown) in Jupyter, print ``text`` elsewhere."""
    if not _in_jupyter() or (html is None and not markdown):
        print(text)
        return
    from IPython.display import HTML, Markdown, display

    display(HTML(html) if html is not None else Markdown(text))


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


def _in_one_piece(cell: re.Match) -> str:
    """The text of a cell with real minus signs, which do not break lines, and intervals kept together."""
    text = re.sub(r"(?<![\w.)])-(?=\d)|(?<=\de)-(?=\d)", "\N{MINUS SIGN}", cell[0])
    text = re.sub(r"\[([^][, ]+), ([^][, ]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", text)
    text = re.sub(r"^([^\w\s]+) (?=\w+$)", "\\1\N{NO-BREAK SPACE}", text)  # a sign and its word
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def _merge(frame: pd.DataFrame, intervals: dict[str, str]) -> pd.DataFrame:
    """The frame with each metric and its interval in one column of text."""
    for metric, form in intervals.items():
        low, high = f"{metric}_low", f"{metric}_high"
        cells = zip(frame[metric], frame[low], frame[high])
        frame[metric] = [
            f"{form} [{form}, {form}]".format(*cell) if pd.notna(cell[0]) else "" for cell in cells
        ]
        frame = frame.drop(columns=[low, high])
    return frame


def start(seed: int = 0) -> None:
    """Set seeds and figure style, and print the line that a bug report should quote."""
    import torch

    from .figures import style
    from .training import seed_everything

    seed_everything(seed)
    style()
    device = f"cuda ({torch.cuda.get_device_name()})" if torch.cuda.is_available() else "cpu"
    print(f"{mode()} · {device} · torch {torch.__version__} · ndlinear.py {module_version()}")


def module_version() -> str:
    """Version and first eight digits of the sha256 of the ndlinear.py in use."""
    import ndlinear

    with open(ndlinear.__file__, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:8]
    return f"{getattr(ndlinear, '__version__', '?')} ({digest})"


def card(slug: str, *, read_first: list[str] | None = None, gpu: bool = False) -> None:
    """The small table at the head of a chapter: claims settled here, what to read first, time in each mode, GPU or not."""
    from . import ledger, upkeep

    settled = [
        c
        for c in ledger.claims()
        if c.get("notebook") == slug and c["verdict"] not in ("open", "untestable")
    ]
    links = [
        (
            f'<a href="#claim-{c["id"]}">{ledger.SIGNS[c["verdict"]]}&nbsp;{c["id"]}</a>',
            f"{ledger.SIGNS[c['verdict']]} {c['id']}",
        )
        for c in settled
    ]
    rows = [
        (
            "Settles",
            ", ".join(a for a, _ in links) or "no claim",
            ", ".join(b for _, b in links) or "no claim",
        ),
        (
            "Read first",
            *[
                ", ".join(form.format(s) for s in read_first or []) or "nothing"
                for form in ('<a href="{0}.html">{0}</a>', "{0}")
            ],
        ),
        ("Time", *[upkeep.times_line(slug)] * 2),
        ("GPU", *["for a full run" if gpu else "not needed"] * 2),
    ]
    body = "".join(f"<tr><th scope='row'>{head}</th><td>{cell}</td></tr>" for head, cell, _ in rows)
    put(
        "\n".join(f"{head:<11}{cell}" for head, _, cell in rows),
        html=f'<table class="ndl-card">{body}</table>',
    )


# What pip installs for an optional library where that is not the library's own name alone: tensorly-torch does not ask for
# tensorly, and a chapter that writes ONNX files also runs them.
PACKAGES = {
    "distributed": ("dask[distributed]",),
    "numba": ("aeon",),
    "onnxscript": ("onnx", "onnxscript", "onnxruntime"),
    "tltorch": ("tensorly", "tensorly-torch"),
}


def require(*modules: str):
    """Import optional libraries; on Colab install what is missing, beside the torch and numpy that are there.

    Args:
        modules: names as in an import statement; name all that a chapter needs together, so that one line installs them.
    Returns:
        The module, or a tuple of several.
    Raises:
        LabError: a library is missing; the message names the line that installs it.
    """
    missing = _missing(modules)
    if missing and "COLAB_RELEASE_TAG" in os.environ:
        subprocess.run([sys.executable, "-m", *install_line(missing).split()], check=False)
        importlib.invalidate_caches()
        missing = _missing(modules)
    if missing:
        problems = "; ".join(str(error) for error in missing.values())
        raise LabError(f"{problems}. Install it and run this cell again: {install_line(missing)}")
    found = [importlib.import_module(module) for module in modules]
    return found[0] if len(found) == 1 else tuple(found)


def _missing(modules: tuple[str, ...]) -> dict[str, ModuleNotFoundError]:
    """The modules that cannot be imported because something is not installed, each with the error that says what."""
    missing = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing[module] = error
    return missing


def install_line(modules: Iterable[str]) -> str:
    """The pip command for optional libraries. It names the torch and numpy in use, so that pip leaves them or refuses."""
    import numpy
    import torch

    packages = []
    for module in modules:
        library = module.partition(".")[0]
        packages += PACKAGES.get(library, (library,))
    pins = [f"torch=={torch.__version__.partition('+')[0]}", f"numpy=={numpy.__version__}"]
    return " ".join(["pip", "install", *dict.fromkeys(packages), *pins])
