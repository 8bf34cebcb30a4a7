"""Chapter 43: folded features against the formula, models that are no networks, what a row keeps of a run."""

import lab
import numpy as np
import pandas as pd
import pytest
import torch
from lab import models
from lab.chapters import tabular
from lab.modes import LabError
from scipy import stats
from torch.nn import functional as F


def parts(seed, inputs, outputs, rows=70):
    x = torch.randn(3 * rows, inputs, generator=torch.Generator().manual_seed(seed))
    y = (x[:, 0] * x[:, 1] > 0).long() if outputs == 2 else x[:, 0] + x[:, 1] ** 2
    return lab.Split(*[(x[i : i + rows], y[i : i + rows]) for i in (0, rows, 2 * rows)])


def test_features_that_do_not_fit_are_refused():
    with pytest.raises(LabError, match="do not fit"):
        tabular.folded(11, (2, 5), (4, 4), 2)


def test_folded_is_the_formula_with_relu_after_each_layer():
    network, x = tabular.folded(12, (3, 4), (5, 6), 2), torch.randn(7, 12)
    out = x.reshape(7, 3, 4)
    for layer in (network[1], network[3]):
        (w1, w2), (b1, b2) = layer.weights, layer.biases
        out = torch.einsum("bij,hi,kj->bhk", out, w1, w2)
        out = out + torch.outer(b1, w2.sum(1)) + b2
        out = out.clamp_min(0)
    expected = out.flatten(1) @ network[-1].weight.T + network[-1].bias
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)


def test_filling_up_changes_no_answer():
    torch.manual_seed(0)
    network, x = tabular.folded(11, (3, 4), (5, 6), 2), torch.randn(6, 11)
    filled = torch.cat([x, torch.zeros(6, 1)], 1).view(6, 3, 4)
    torch.testing.assert_close(network(x), network[2:](filled))


def test_models_without_layers_against_their_formulas():
    split = parts(0, 3, 1, rows=200)
    (x, y), (x_test, y_test) = [
        (a.double().numpy(), b.double().numpy()) for a, b in (split.train, split.test)
    ]
    answer, counts = tabular.peer("constant", split, False, 0)
    assert answer == pytest.approx(y.mean()) and counts == {"parameters": 1, "macs": 0}
    solution = np.linalg.lstsq(np.c_[x, np.ones(200)], y, rcond=None)[0]
    answer, counts = tabular.peer("linear", split, False, 0)
    assert answer == pytest.approx(np.c_[x_test, np.ones(200)] @ solution, abs=1e-4)
    assert counts == {"parameters": 4, "macs": 3}
    boosted, counts = tabular.peer("boosting", split, False, 0, most=60)
    assert 1 <= counts["trees"] <= 60
    squares = [((found - y_test) ** 2).mean() for found in (boosted, answer)]
    assert squares[0] < squares[1], "the target is not linear"


def test_classifiers_without_layers():
    split = parts(1, 3, 2, rows=300)
    y = split.test[1].numpy()
    found = {name: tabular.peer(name, split, True, 0, most=60)[0] for name in tabular.PEERS}
    share = {name: (answer == y).mean() for name, answer in found.items()}
    assert share["constant"] in {(y == 0).mean(), (y == 1).mean()}
    assert share["boosting"] > 0.85 > share["linear"], "the sign of a product is not linear"
    scaled = lab.Split(*[(3 * a + 5, b) for a, b in (split.train, split.val, split.test)])
    far = tabular.peer("linear", scaled, True, 0)[0] == found["linear"]
    assert far.mean() > 0.99, "without a penalty the scale of the features does not matter"
    with pytest.raises(LabError, match="constant, linear, boosting"):
        tabular.peer("forest", split, True, 0)


@pytest.mark.parametrize(("outputs", "unit"), [(2, 1.0), (1, 9.0)])
def test_what_is_recorded_of_a_run(outputs, unit):
    seeds, make = [1, 2], lambda: models.mlp(5, 6, 4, outputs)
    data = [parts(s, 5, outputs) for s in seeds]
    found = tabular.runs(make, data, [unit] * 2, {"epochs": 6, "lr": 0.01, "batch": 16}, seeds)
    loss = F.cross_entropy if outputs == 2 else tabular.squared_error
    score = {"s": tabular.accuracy if outputs == 2 else loss}
    plan = tabular.Plan(6, 0, 16, 0.01, optimiser=torch.optim.AdamW)
    each = {name: [getattr(s, name) for s in data] for name in ("train", "val", "test")}
    alone = tabular.fit(make, each, plan, seeds=seeds, loss=loss)
    for name, moment in (("score", "best"), ("score_last", "end")):
        expected = [unit * row["s"] for row in alone.score(each["test"], score, moment)]
        assert [row["metrics"][name] for row in found] == pytest.approx(expected, rel=1e-4)
    assert [row["metrics"]["epoch"] for row in found] == alone.when["best"]
    macs = 5 * 6 + 6 * 4 + 4 * outputs
    assert {(r["parameters"], r["macs"]) for r in found} == {(macs + 6 + 4 + outputs, macs)}


def test_pairs_are_those_of_the_seeds_that_both_arms_have():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=6), rng.normal(size=4)
    rows = [("a", s, v, 5, 7) for s, v in enumerate(a)]
    rows += [("NdLinear", s, v, 3, 9) for s, v in enumerate(b)]
    runs = pd.DataFrame(rows, columns=["arm", "seed", "score", "parameters", "macs"])
    runs = runs.sample(frac=1, random_state=0)
    assert tabular.differences(runs, "a", "NdLinear").to_dict() == dict(enumerate(a[:4] - b))
    expected = stats.ttest_rel(a[:4], b).confidence_interval(0.95)
    table = tabular.overview(runs).set_index("arm")
    assert list(table.loc["a", ["parameters", "macs", "n"]]) == [5, 7, 6]
    assert table.loc["NdLinear", "n"] == 4
    assert table.loc["a", "score"] == pytest.approx(a.mean())
    ends = table.loc["a", ["difference", "difference_low", "difference_high"]].tolist()
    assert ends == pytest.approx([(a[:4] - b).mean(), *expected])
    assert np.isnan(table.loc["NdLinear", "difference"]) and table["score"].is_monotonic_increasing
