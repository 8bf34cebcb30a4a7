"""The page book/api.md: the docstrings of ndlinear.py, which are written for a terminal, as reStructuredText."""

import itertools
import re

from sphinx.ext.napoleon import Config, GoogleDocstring

SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Examples?|Notes?):\s*")
MARKUP = re.compile(r"(`+)([^`]+)`+|[*|\\]|(?<=\w)_(?!\w)")
COLUMNS = re.compile(r" {2,}")


def marked(line: str) -> str:
    """Code stands in two backticks, and nothing else in the line is markup."""
    return MARKUP.sub(lambda m: f"``{m[2]}``" if m[1] else f"\\{m[0]}", line)


def kinds(lines: list[str]) -> list[str]:
    """What each line is: an example, from >>> to the next empty line; a line in columns; empty; or a sentence."""
    example, found = False, []
    for line in lines:
        example = line.strip() != "" and (example or line.lstrip().startswith(">>>"))
        if example:
            found.append("example")
        elif not line.strip():
            found.append("empty")
        else:
            found.append("columns" if COLUMNS.search(line) else "sentence")
    return found


SECTIONS = Config(napoleon_use_ivar=True)  # attributes as a list of fields, like arguments


def with_sections(lines: list[str]) -> list[str]:
    """A docstring with Args: and the like: examples stay, the rest is freed of markup and handed to napoleon."""
    text = [line if kind == "example" else marked(line) for line, kind in zip(lines, kinds(lines))]
    return str(GoogleDocstring(text, SECTIONS)).split("\n")


def without_sections(lines: list[str]) -> list[str]:
    """Any other docstring: sentences as paragraphs, what stands in columns as it was written."""
    text: list[str] = []
    for kind, group in itertools.groupby(zip(kinds(lines), lines), key=lambda pair: pair[0]):
        block = [line for _, line in group]
        if kind == "columns":
            text += [".. code-block:: text", "", *(f"    {line}" for line in block)]
        else:
            text += [marked(line).strip() for line in block] if kind == "sentence" else block
        text.append("")
    return text


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """For autodoc; changes `lines` in place."""
    sections = any(SECTION.fullmatch(line.strip()) for line in lines)
    lines[:] = with_sections(lines) if sections else without_sections(lines)
