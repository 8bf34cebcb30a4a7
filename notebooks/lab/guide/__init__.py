"""For your own model: where a structured layer could stand (`report`), one fitted to trained weights (`convert`), and which kind to
train (`race`). Two lines bring it beside a model, in any folder; the first names the clone's folder ``notebooks``:

    import sys; sys.path.append("ndlinear-book/notebooks")
    from lab import guide

It needs torch, numpy, scipy, pandas, matplotlib and filelock."""

from .racing import (
    KINDS,
    RATES,
    Contestant,
    Race,
    Training,
    build,
    feed_forward,
    groups,
    halving,
    race,
    rates,
    schedule,
    swap,
    training,
    winner,
)
from .reporting import (
    by_chance,
    convert,
    first_term,
    folding,
    foldings,
    report,
    spread,
    summary,
    watch,
)
