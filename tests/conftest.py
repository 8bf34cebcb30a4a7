"""Tests import `ndlinear` from the repository root and `lab` from the notebooks folder, installed or not."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
