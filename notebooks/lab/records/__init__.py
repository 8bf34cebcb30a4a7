"""Rows of results, what they depend on, and where they are run."""

from ..modes import LabError
from . import budget
from .fingerprint import FingerprintError, code_hash
from .runs import Experiment, complete, record
from .store import RecordError, canonical, digest, read
