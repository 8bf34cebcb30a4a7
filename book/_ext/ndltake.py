"""What a reader takes along: the files to download, each with its version and checksum, and how to cite the book.

Plain functions without Sphinx, as in `ndltables.py`; `ndlpages.py` makes directives of them.
"""

import hashlib
import pathlib
import shutil
from typing import NamedTuple

import yaml
from ndltables import escape

import ndlinear


class File(NamedTuple):
    """A file of the repository that stands beside the pages of the built book."""

    name: str  # in the book
    path: str  # in the repository
    says: str


FILES = {
    "ndlinear": File("ndlinear.py", "ndlinear.py", "one file, needs torch only"),
    "ndlinear_lora": File(
        "ndlinear_lora.py", "ndlinear_lora.py", "beside ndlinear.py; files need safetensors"
    ),
    "ndlinear_peft": File(
        "ndlinear_peft.py",
        "ndlinear_peft.py",
        "beside ndlinear.py and ndlinear_lora.py; needs peft",
    ),
    "ndlinear_lokr": File(
        "ndlinear_lokr.py", "ndlinear_lokr.py", "beside ndlinear.py and ndlinear_lora.py"
    ),
    "patch": File(
        "peft-lokr-factored.patch",
        "book/_static/peft-lokr-factored.patch",
        "for peft 0.21; not sent to its authors",
    ),
    "lr_groups": File("lr_groups.py", "ndlinear_guide/rates.py", "one file, needs torch only"),
}


def checksum(root: pathlib.Path, file: File) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256((root / file.path).read_bytes()).hexdigest()


def link(root: pathlib.Path, key: str, folder: str) -> str:
    """A link to a file with its version and its whole checksum; `folder` leads to the top of the book."""
    file = FILES[key]
    about = f"version {ndlinear.__version__}, " if key == "ndlinear" else ""
    return (
        f'<p class="ndl-take"><a href="{escape(folder + file.name)}" download>Download {escape(file.name)}</a> '
        f"({about}{file.says})<br>"
        f'<small>SHA-256 <code style="overflow-wrap: anywhere">{checksum(root, file)}</code></small></p>'
    )


def commands(text: str, url: str) -> str:
    """Commands with the repository's address in place of the word ADDRESS, where it is known."""
    return text.replace("ADDRESS", url) if url else text


def copy(root: pathlib.Path, target: pathlib.Path) -> None:
    """Put the files into the folder of the built book."""
    for file in FILES.values():
        shutil.copyfile(root / file.path, target / file.name)


# --- citing ------------------------------------------------------------------------------------------------------


def bibtex(root: pathlib.Path, url: str = "", year: str = "") -> str:
    """CITATION.cff as BibTeX: the book, and the paper that it is about."""
    cited = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf8"))
    (paper,) = cited["references"]
    book = {
        "title": f"{{{cited['title']}}}",
        "author": authors(cited),
        "year": year,
        "version": cited["version"],
        "license": cited["license"],
        "url": url,
    }
    article = {
        "title": f"{{{paper['title']}}}",
        "author": authors(paper),
        "year": str(paper["year"]),
        "journal": paper["journal"],
        "doi": paper["doi"],
    }
    return entry("software", "ndlinear_book", book) + "\n\n" + entry("article", "ndlinear", article)


def authors(record: dict) -> str:
    """The authors of a record of CITATION.cff: persons by family name, a group in braces."""
    names = []
    for author in record["authors"]:
        if "name" in author:
            names.append(f"{{{author['name']}}}")
        else:
            names.append(f"{author['family-names']}, {author['given-names']}")
    return " and ".join(names)


def entry(kind: str, key: str, fields: dict[str, str]) -> str:
    """One entry of BibTeX; fields without a value are left out."""
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])
