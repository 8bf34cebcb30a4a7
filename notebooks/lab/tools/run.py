"""Full runs within a limit of time: ``python -m lab run NOTEBOOK ... [--budget S] [--out DIR]``.

Each notebook trains what the records lack. No run is begun that would not finish in time, and what still runs when the time is
up is ended: its row is lost, and all finished ones are on disk. With --out the rows go to a folder, and `python -m lab merge`
brings them home from there.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time

from ..modes import slug
from . import scripts


def main(arguments: list[str]) -> int:
    asked = argparse.ArgumentParser(prog="lab run", description=__doc__)
    asked.add_argument("notebooks", nargs="+")
    asked.add_argument("--budget", type=float, default=math.inf, help="seconds for all of them")
    asked.add_argument("--out", type=pathlib.Path, help="folder for the new rows")
    asked = asked.parse_args(arguments)
    notebooks = scripts.chosen(asked.notebooks)
    end = time.monotonic() + asked.budget
    settings = {"NDL_RESULTS": str(asked.out.resolve())} if asked.out else {}
    failed = 0
    for notebook in notebooks:
        left = end - time.monotonic()
        if left <= 0:
            print(f"{slug(notebook)}: not begun, the time is up")
            continue
        limit = None if math.isinf(left) else left
        budget = {} if limit is None else {"NDL_BUDGET_S": f"{left:.1f}"}
        status = scripts.run(notebook, "full", limit=limit, quiet=False, **settings, **budget)
        words = {0: "done, as far as the budget goes", None: "ended, the time is up"}
        print(f"{slug(notebook)}: {words.get(status, f'failed with status {status}')}", flush=True)
        failed += status not in words
    return int(failed > 0)
