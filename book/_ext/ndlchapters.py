"""Chapter numbers: in front of every title, and as links wherever a page names a chapter.

The number is that of the notebook's file name, so a chapter that is added, renamed or given another title needs no other change.
"""

import html
import re

from docutils import nodes
from sphinx.transforms import SphinxTransform

# "chapter 12", "chapters 10, 30 and 32", "chapters 30 to 33"
MENTION = re.compile(
    r"\bchapter\s+(\d\d)\b|\bchapters\s+\d\d\b(?:(?:,?\s+(?:and|or|to)\s+|,\s+|–)\d\d\b)*",
    re.IGNORECASE,
)
# markup, and elements in which there can be no link, from their start to their end
MARKUP = re.compile(
    r"""(<!--.*?-->
        |<(?P<tag>a|button|code|option|pre|script|style|svg|textarea|title)\b.*?</(?P=tag)>
        |<(?:[^<>"']|"[^"]*"|'[^']*')*>)""",
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
FILE_NAME_AS_TEXT = re.compile(r"(<a\b[^>]*>)(\d\d_\w+)(</a>)")


def number(docname: str) -> str:
    """The number of a chapter, '12' for notebooks/12_cost_and_order; '' for any other page."""
    match = re.fullmatch(r"notebooks/(\d\d)_\w+", docname)
    return match[1] if match else ""


def by_number(docnames) -> dict[str, str]:
    """Number of a chapter -> its page."""
    return {number(name): name for name in sorted(docnames) if number(name)}


class NumberedTitle(SphinxTransform):
    """Writes the number before the title, for side bar, cards and browser tab alike; anchors stay as they are."""

    default_priority = 830  # after MyST has named the anchors, before Sphinx collects the titles

    def apply(self, **kwargs) -> None:
        found = number(self.env.docname)
        title = next(self.document.findall(nodes.title), None)
        if found and title is not None:
            title.insert(0, nodes.Text(f"{found} · "))


def link(body: str, address: dict[str, str]) -> str:
    """HTML in which every chapter that the text names is a link. address: number of a chapter -> address of its page."""

    def anchor(found: str, text: str) -> str:
        return f'<a href="{html.escape(address[found])}">{text}</a>' if found in address else text

    def mention(match: re.Match) -> str:
        if match[1]:
            return anchor(match[1], match[0])
        return re.sub(r"\d\d", lambda one: anchor(one[0], one[0]), match[0])

    parts, end = [], 0
    for markup in MARKUP.finditer(body):
        parts += [MENTION.sub(mention, body[end : markup.start()]), markup[0]]
        end = markup.end()
    return "".join([*parts, MENTION.sub(mention, body[end:])])


def name_links(body: str, titles: dict[str, str]) -> str:
    """HTML in which a link that shows the file name of a chapter shows its title. titles: file name -> title as HTML."""
    return FILE_NAME_AS_TEXT.sub(
        lambda match: match[1] + titles.get(match[2], match[2]) + match[3], body
    )
