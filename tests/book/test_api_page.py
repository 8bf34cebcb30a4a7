"""Docstrings written for a terminal become reStructuredText without a warning and without losing a character."""

import docutils.core
import docutils.nodes
import ndlapi

PLAIN = """Multiply *args by weight_ |x| and `**search`: see `load_lora` and back\\slash.
name, other   the first one, in columns
              and its second line
A sentence after them
goes on here.

>>> 1 + 1
2
"""


def read(docstring: str) -> docutils.nodes.document:
    """The docstring as docutils understands it; any complaint of docutils is an error."""
    lines = docstring.rstrip("\n").split("\n")
    ndlapi.on_docstring(None, "function", "f", None, None, lines)
    text = "\n".join(lines).replace(".. code-block:: text", ".. code:: text")
    settings = {"halt_level": 2, "report_level": 2, "syntax_highlight": "none"}
    return docutils.core.publish_doctree(text, settings_overrides=settings)


def test_sentences_columns_and_examples_are_told_apart():
    document = read(PLAIN)
    paragraphs = [node.astext() for node in document.findall(docutils.nodes.paragraph)]
    assert paragraphs == [
        "Multiply *args by weight_ |x| and **search: see load_lora and back\\slash.",
        "A sentence after them\ngoes on here.",
    ]
    columns = [node.astext() for node in document.findall(docutils.nodes.literal_block)]
    assert columns == ["name, other   the first one, in columns\n              and its second line"]
    assert [n.astext() for n in document.findall(docutils.nodes.doctest_block)] == [">>> 1 + 1\n2"]
