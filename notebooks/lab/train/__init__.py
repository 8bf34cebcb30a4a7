"""Training: one loop for one model, and one that trains many seeds at once."""

from . import scores
from .loop import Fit, Split, evaluate, fit, seed_everything

__all__ = ["Fit", "Split", "evaluate", "fit", "scores", "seed_everything"]
