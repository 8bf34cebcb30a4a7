"""For your own model: where a structured layer could stand (`report`), one fitted to trained weights (`convert`), and a table of what
each kind costs when it is trained in place (`compare`); besides `layers`, structured linear layers of a given size, and `rates`, one
rule for their learning rates.

It needs torch, scipy, pandas and `ndlinear.py`."""

from . import layers
from .compare import compare, swap
from .convert import convert, rebuild, replaceable
from .rates import lr_groups
from .report import by_chance, first_term, report
