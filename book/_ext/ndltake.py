"""What a reader takes along: the files to download, each with its version and checksum, and how to cite the book.

Plain functions without Sphinx, as in `ndltables.py`; `ndlbook.py` makes directives of them.
"""

import hashlib
import pathlib
import shutil

import yaml
from ndltables import escape

import ndlinear

FILES = {  # name beside the pages -> path in the repository, and what it needs
    "ndlinear.py": ("ndlinear.py", "one file, needs torch only"),
    "ndlinear_lora.py": ("ndlinear_lora.py", "beside ndlinear.py; files need safetensors"),
    "ndlinear_peft.py": ("ndlinear_peft.py", "beside ndlinear.py and ndlinear_lora.py; needs peft"),
    "ndlinear_lokr.py": ("ndlinear_lokr.py", "beside ndlinear.py and ndlinear_lora.py"),
    "peft-lokr-factored.patch": (
        "book/_static/peft-lokr-factored.patch",
        "for peft 0.21; not sent to its authors",
    ),
    "lr_groups.py": ("ndlinear_guide/rates.py", "one file, needs torch only"),
}


def link(root: pathlib.Path, name: str, folder: str) -> str:
    """A link to a file with its version and its whole SHA-256; `folder` leads to the top of the book."""
    path, says = FILES[name]
    digest = hashlib.sha256((root / path).read_bytes()).hexdigest()
    about = f"version {ndlinear.__version__}, " if name == "ndlinear.py" else ""
    return (
        f'<p class="ndl-take"><a href="{escape(folder + name)}" download>Download {escape(name)}</a> '
        f"({about}{says})<br>"
        f'<small>SHA-256 <code style="overflow-wrap: anywhere">{digest}</code></small></p>'
    )


def copy(root: pathlib.Path, target: pathlib.Path) -> None:
    """Put the files into the folder of the built book."""
    for name, (path, _) in FILES.items():
        shutil.copyfile(root / path, target / name)


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
