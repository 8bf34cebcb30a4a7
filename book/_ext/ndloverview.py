"""llms.txt, the list of the pages for programs that read the book: title, first paragraph, and each page with its first sentence."""

import pathlib
import re

from docutils import nodes


def write(app) -> None:
    """Write the file into the folder of the built book; its addresses are relative to it."""
    summary = opening(app.env.get_doctree(app.config.root_doc))
    lines = [f"# {app.config.html_title or app.config.project}\n", f"> {summary}\n", "## Pages\n"]
    for name in app.env.collect_relations():
        sentence = re.split(r"(?<=[.!?])\s", opening(app.env.get_doctree(name)), maxsplit=1)[0]
        entry = f"- [{app.env.titles[name].astext()}]({name}.html)"
        lines.append(f"{entry}: {sentence}" if sentence else entry)
    lines.append("\n## Data\n")
    lines.append("- [All claims](claims.json): every claim of the paper with its verdict.")
    (pathlib.Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf8")


def opening(doctree: nodes.document) -> str:
    """The first paragraph of a page that stands directly in a section, in one line; mathematics between dollars."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            return " ".join(plain(paragraph).split())
    return ""


def plain(node: nodes.Node) -> str:
    """The text of a node."""
    if isinstance(node, nodes.math):
        return f"${node.astext()}$"
    if isinstance(node, nodes.Text):
        return node.astext()
    return "".join(plain(child) for child in node.children)
