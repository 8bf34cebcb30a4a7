"""What the notebooks share: modes, records, the ledger, data, a training loop, statistics and figures.

Nothing here imports from a notebook. Only torch, numpy, scipy, pandas, matplotlib, PyYAML and filelock (which torch
brings) are needed to run an experiment; IPython, tqdm, scikit-learn and dask are used where they are installed.

Imports go down only: `chapters` and `tools` -> `page` -> `records` -> `data` -> `train` -> the modules of this folder ->
`ndlinear_guide` and `ndlinear`. No chapter's module knows another's.
"""

from . import reads, modes  # isort: skip  (first: modes puts ndlinear.py on the import path)
from . import counts, machine, records, released, stats, timing
from .counts import count_macs
from .data import load, split
from .machine import require
from .modes import LabError, mode, pick
from .page import figures, ledger
from .page.facts import fact, facts, protocols, setting
from .page.figures import colour, label, marker, style
from .page.footer import footer
from .page.ledger import claim, finding, verdict
from .page.quote import quote
from .page.scale import on_devices, places, recorded, whole
from .page.show import baselines, download, interactive, say, table, words
from .page.start import start
from .records import read, record
from .records.runs import grid
from .stats import (
    above,
    all_of,
    any_of,
    at_least,
    below,
    compare,
    inside,
    interval,
    paired,
    summary,
)
from .train import Fit, Split, evaluate, fit, scores, seed_everything
