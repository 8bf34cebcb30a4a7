"""Rows of results: the file, which rows count, and running what is missing."""

from ..modes import LabError
from . import budget, golden
from .golden import read
from .runs import complete, record
from .store import RecordError, canonical, digest
