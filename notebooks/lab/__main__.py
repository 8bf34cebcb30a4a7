"""The book's one command: ``python -m lab COMMAND ...``; without a command it lists them."""

import importlib
import sys

from .modes import LabError

COMMANDS = {
    "run": "NOTEBOOK ... [--budget S] [--out DIR]: train what the records lack",
    "merge": "DIR: check the rows of such a folder and append them to the records",
    "again": "[EXPERIMENT [KEY=VALUE ...]] [--seconds S]: recorded rows once more, against their record",
    "golden": "NOTEBOOK ... [--only EXPERIMENT ...] [--same WHY | --wider]: the numbers of small runs anew",
    "bench": "[FILE.py:LAYER [--sets SET ...] [--quick]]: your layer in the benchmark; without one, times on this machine",
    "report": "PAGE PDF: the reproducibility report as one sheet",
    "pdf": "HTML PDF: the built book as one file",
    "seals": "[CLAIM ...]: claims whose numbers or records have changed since somebody looked; seal these anew",
    "stamp": "URL: the repository's address into every setup cell",
    "times": "the seconds of every notebook, recorded",
}


def main(arguments: list[str]) -> int | None:
    """Run a command; what a reader can put right ends in one line."""
    command, *rest = arguments or [""]
    if command not in COMMANDS:
        raise SystemExit("\n".join([__doc__, *(f"  {n} {text}" for n, text in COMMANDS.items())]))
    try:
        return importlib.import_module(f"lab.tools.{command}").main(rest)
    except LabError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
