"""Training: one loop for one model, and two that train many seeds at once."""

from . import chunked, scores
from .loop import Fit, Split, evaluate, fit, seed_everything

__all__ = ["Fit", "Split", "chunked", "evaluate", "fit", "scores", "seed_everything"]
