"""For your own model: where a structured layer could stand (`report`), one fitted to trained weights (`convert`), and which kind to
train (`race`); besides `layers`, structured linear layers of a given size, and `rates`, one rule for their learning rates.

It needs torch, scipy, pandas and `ndlinear.py`."""

from . import layers
from .convert import convert, fit_kronecker, fit_low_rank, rebuild, replaceable
from .race import Contestant, Race, Training, feed_forward, halving, race, swap, training, winner
from .rates import lr_groups, schedule
from .report import by_chance, first_term, report, summary, watch
