"""The paper's table of overheads: what its own values say."""

from __future__ import annotations

import pandas as pd

from ..page.facts import facts


def increase(model: str, metric: str) -> list[float]:
    """In percent: from the values as printed, and the extremes of what rounds to them."""
    (a, da), (b, db) = (
        (float(f["value"]), float(f["ulp"]) / 2)
        for f in (
            facts("overhead", model=model, metric=metric, method=m).iloc[0]
            for m in ("Linear", "NdLinear")
        )
    )
    return [100 * (y / x - 1) for x, y in ((a, b), (a + da, b - db), (a - da, b + db))]


def printed() -> pd.DataFrame:
    """The six printed increases, half a unit of their last digit, and those that follow from the values beside them."""
    table = facts("overhead", method="NdLinear vs Linear")
    table["quantity"] = table["metric"].str.extract("(memory|time)")[0]
    table["half"] = table["ulp"].astype(float) / 2
    metrics = table["metric"].str.removesuffix("_overhead")
    table[["found", "found_low", "found_high"]] = list(map(increase, table["model"], metrics))
    return table
