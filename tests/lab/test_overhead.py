"""The printed overheads, recomputed from the values beside them."""

import pandas as pd
import pytest
from lab.chapters import overhead


def test_an_increase_lies_between_the_extremes_of_the_rounding(monkeypatch):
    values = {"Linear": 100.0, "NdLinear": 103.0}

    def facts(table, method, **where):
        return pd.DataFrame([{"value": values[method], "ulp": 1.0}])

    monkeypatch.setattr(overhead, "facts", facts)
    found = overhead.increase("any", "any")
    assert found == pytest.approx([3, 100 * (102.5 / 100.5 - 1), 100 * (103.5 / 99.5 - 1)])
