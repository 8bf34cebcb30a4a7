"""The seconds of every notebook in replay and in smoke, recorded: ``python -m lab times``; their footers say them."""

from __future__ import annotations

import argparse
import time

from .. import modes
from ..machine import device, versions
from ..modes import LabError, slug
from ..page.footer import times_file
from ..records.store import append
from . import scripts


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(prog="lab times", description=__doc__).parse_args(arguments)
    for path in modes.chapters():
        for mode in ("replay", "smoke"):
            began = time.perf_counter()
            if scripts.run(path, mode):
                raise LabError(f"{slug(path)} fails in {mode} mode, see above")
            row = {"experiment": "notebook-times", "notebook": slug(path), "mode": mode}
            row["seconds"] = round(time.perf_counter() - began, 1)
            row |= {"device": device(), "versions": versions()}
            append(times_file(), row | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
            print(f"{slug(path)}: {mode} {row['seconds']} s")
