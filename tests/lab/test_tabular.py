"""Chapter 43: folded features against the formula, and models that are no networks."""

import lab
import numpy as np
import pandas as pd
import pytest
import torch
from lab.chapters import tabular
from lab.modes import LabError


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
    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] + x[:, 1] ** 2
    split = lab.Split(*[(x[i : i + 200], y[i : i + 200]) for i in (0, 200, 400)])
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
    with pytest.raises(LabError, match="constant, linear, boosting"):
        tabular.peer("forest", split, False, 0)


def test_pairs_are_those_of_the_seeds_that_both_arms_have():
    a, b = np.random.default_rng(0).normal(size=(2, 6))
    rows = [("a", s, v) for s, v in enumerate(a)] + [("b", s, v) for s, v in enumerate(b[:4])]
    runs = pd.DataFrame(rows, columns=["arm", "seed", "score"]).sample(frac=1, random_state=0)
    assert tabular.differences(runs, "a", "b").to_dict() == dict(enumerate((a - b)[:4]))
