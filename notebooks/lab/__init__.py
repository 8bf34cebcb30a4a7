"""What the notebooks share: modes, records, the ledger, data, a training loop, statistics and figures.

Nothing here imports from a notebook. Only torch, numpy, scipy, pandas, matplotlib and filelock (which torch brings) are
needed to run an experiment; IPython, tqdm, PyYAML, scikit-learn and dask are used where they are installed.
"""

from . import modes  # first: it puts ndlinear.py on the import path
from .costs import costs
from .data import load, split
from .facts import fact, facts, protocols, setting
from .figures import colour, label, marker, style
from .ledger import claim, finding, verdict
from .modes import LabError, mode, pick
from .records import read, record
from .show import card, require, say, start, table
from .stats import compare, decide, interval, summary
from .training import Fit, Split, count_macs, fit, seed_everything

from . import stacked  # isort: skip

__all__ = [
    "Fit",
    "LabError",
    "Split",
    "card",
    "claim",
    "colour",
    "compare",
    "costs",
    "count_macs",
    "decide",
    "fact",
    "facts",
    "finding",
    "fit",
    "interval",
    "label",
    "load",
    "marker",
    "mode",
    "modes",
    "pick",
    "protocols",
    "read",
    "record",
    "require",
    "say",
    "seed_everything",
    "setting",
    "split",
    "stacked",
    "start",
    "style",
    "summary",
    "table",
    "verdict",
]
