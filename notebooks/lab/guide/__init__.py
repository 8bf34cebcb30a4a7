"""For your own model: where a structured layer could stand (`report`), one fitted to trained weights (`convert`), and which kind to
train (`race`)."""

from .racing import (
    KINDS,
    Contestant,
    Race,
    build,
    groups,
    halving,
    race,
    rates,
    schedule,
    swap,
    winner,
)
from .reporting import (
    Advice,
    Case,
    advise,
    by_chance,
    convert,
    first_term,
    folding,
    foldings,
    report,
    watch,
)

__all__ = [
    "KINDS",
    "Advice",
    "Case",
    "Contestant",
    "Race",
    "advise",
    "build",
    "by_chance",
    "convert",
    "first_term",
    "folding",
    "foldings",
    "groups",
    "halving",
    "race",
    "rates",
    "report",
    "schedule",
    "swap",
    "watch",
    "winner",
]
