"""Chapter 22: trained layers replaced by Kronecker terms or by a truncated singular value decomposition."""

from __future__ import annotations

import pandas as pd

METHODS = ("dense", "ndlinear-sum", "low-rank")


def by_arm(runs: pd.DataFrame) -> pd.DataFrame:
    """Test accuracy in percent: a row for each network and seed, a column for each method, number of terms and stage."""
    columns = [name for name in runs if name.split("/")[0] in METHODS]
    scores = runs.melt(["model", "seed"], columns, "arm", "accuracy")
    scores[["method", "R", "stage"]] = scores["arm"].str.split("/", expand=True)
    scores["R"], scores["accuracy"] = scores["R"].astype(int), 100 * scores["accuracy"]
    return scores.pivot(
        index=["model", "seed"], columns=["method", "R", "stage"], values="accuracy"
    )
