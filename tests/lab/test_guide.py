"""The decision page: its numbers against formulas of their own, and the front page against the records."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from lab import LabError, modes, stats, timing
from lab.chapters import guide
from lab.page.recorded import recorded
from scipy import stats as independent

from ndlinear import count_parameters

SCORES = {"nd": [0.70, 0.72, 0.75], "big": [0.60, 0.61, 0.69], "a": [0.5] * 3, "b": [0.7, 0.6, 0.7]}
SIZES = {"nd": 100, "big": 900, "a": 100, "b": 104}


def made(scores=SCORES, **more) -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "score": value, "parameters": SIZES[arm]} | more
        for arm, values in scores.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def situation(**changes) -> guide.Situation:
    plain = guide.Situation("one", "10_one_layer", ("x",), {}, "score", "nd", "big", ("a", "b"))
    return plain._replace(**changes)


def test_a_gain_is_the_paired_difference_in_points():
    row = guide.compare(situation(), made())
    for name, other in (("dense", "big"), ("fair", "b")):
        by_seed = 100 * (np.array(SCORES["nd"]) - SCORES[other])
        low, high = independent.ttest_1samp(by_seed, 0).confidence_interval()
        wanted = [by_seed.mean(), low, high]
        assert [row[name], row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(wanted)
    assert row["opponent"] == "b" and row["share"] == pytest.approx(100 / 900) and row["seeds"] == 3


def test_an_error_is_in_percent_of_the_constant_and_smaller_is_better():
    found = made(SCORES | {"a": [2.0, 2.0, 2.0]})
    row = guide.compare(situation(constant="a"), found)
    assert row["opponent"] == "b"
    assert row["fair"] == pytest.approx(100 * (np.mean(SCORES["b"]) - np.mean(SCORES["nd"])) / 2)


def test_a_larger_opponent_is_refused():
    with pytest.raises(LabError, match="larger than NdLinear: big"):
        guide.best(made(), situation(opponents=("a", "big")))


@pytest.mark.parametrize(
    ("fair", "dense", "wanted"),
    [
        ((1, 2), (-1, 2), "yes"),
        ((1, 2), (-3, -1), "only to save parameters"),
        ((-1, 2), (1, 2), "no difference shows"),
        ((-2, -1), (1, 2), "no"),
    ],
)
def test_the_rule(fair, dense, wanted):
    row = dict(zip(("fair_low", "fair_high", "dense_low", "dense_high"), fair + dense))
    assert guide.answer(row) == wanted


def test_runs_are_filtered_and_the_rate_is_chosen_in_validation():
    rows = [
        {"model": "nd", "seed": s, "lr": lr, "data": data, "val_loss": loss}
        for s in (0, 1)
        for data in ("x", "y", None)
        for lr, loss in ((0.1, 0.3), (0.01, 0.2))
    ]
    found = guide.runs(situation(where={"data": ("x",)}), read=lambda *names: pd.DataFrame(rows))
    assert set(found["lr"]) == {0.01} and set(found["data"].dropna()) == {"x"}
    assert len(found) == 4 and list(found["arm"]) == ["nd"] * 4


def test_a_replacement_names_its_arms():
    wide = pd.DataFrame(
        {
            "model": ["mlp", "cnn"],
            "seed": [0, 0],
            "dense/64/fitted": [0.9, 0.1],
            "ndlinear-sum/8/tuned": [0.8, 0.2],
            "low-rank/8/tuned": [0.7, 0.3],
        }
    )
    found = guide.replaced("mlp", 8, read=lambda name: wide)
    assert dict(zip(found["arm"], found["accuracy"])) == {
        "dense": 0.9,
        "ndlinear-sum": 0.8,
        "low-rank": 0.7,
    }


def test_a_table_links_to_the_chapter_and_escapes(monkeypatch):
    shown = []
    monkeypatch.setattr(guide, "put", lambda text, html: shown.append(html))
    guide.table(pd.DataFrame([{"situation": "a < b", "chapter": "10_one_layer"}]))
    assert '<a href="10_one_layer.html">chapter 10</a>' in shown[0] and "a &lt; b" in shown[0]


def test_the_situations_name_chapters_that_exist():
    rows = guide.measured()
    assert all((modes.NOTEBOOKS / f"{name}.ipynb").is_file() for name in rows["chapter"])


def number(pattern: str) -> list[int]:
    """The whole numbers of one sentence of the front page."""
    text = " ".join((modes.ROOT / "book" / "index.md").read_text(encoding="utf8").split())
    found = re.search(pattern, text)
    assert found, f"the front page no longer says {pattern!r}"
    return [int(value.replace(",", "")) for value in found.groups()]


def test_the_front_page_agrees_with_the_records():
    cube = (32, 32, 32)
    wanted = [count_parameters(cube, cube, bias=False), 32**6]
    assert number(r"it has ([\d,]+) weights, and `nn.Linear` has ([\d,]+)") == wanted
    rows = guide.measured().set_index("situation")
    behind = {
        data: 100
        * stats.differences(recorded(f"cnn-printed-{data}"), metric, "dense", "ndlinear").mean()
        for data, metric in (("cifar100", "test_top_five"), ("cifar10", "test_accuracy"))
    }
    pattern = (
        r"about (\d+) points of Acc@5 on CIFAR-100 and by half a point of accuracy on CIFAR-10"
    )
    assert number(pattern) == [round(behind["cifar100"])]
    assert 0.4 < behind["cifar10"] < 0.6
    chosen = recorded("cnn-printed-cifar100-chosen")
    left = -100 * stats.paired(chosen, "test_top_five", "ndlinear", "dense")[0]
    assert 0 < left < behind["cifar100"] / 2
    six = recorded("cnn-longer").query("data == 'cifar100'")
    assert stats.paired(six, "test_top_five", "ndlinear", "dense")[1] > 0
    cnn = rows.loc["Features after a CNN, CIFAR-100"]
    assert cnn["dense_low"] < 0 < cnn["dense_high"] and cnn["opponent"] == "low-rank"
    assert cnn["fair_high"] < 0
    assert number(r"low-rank head of equal size is about (\d+) points ahead") == [
        -round(cnn["fair"])
    ]
    series = rows.filter(like="Series", axis=0)
    assert (
        number("On three sets of time series, logistic regression on the raw series is ahead") == []
    )
    assert (series["opponent"] == "linear").all() and (series["fair_high"] < 0).all()


def test_a_model_without_chance_stands_beside_every_seed():
    scores = {"nd": [0.5, 0.6], "linear": [0.7]}
    rows = [
        {"arm": a, "seed": s, "score": v}
        for a, found in scores.items()
        for s, v in enumerate(found)
    ]
    found = guide.runs(situation(), read=lambda *names: pd.DataFrame(rows))
    assert guide.gain(found, situation(), "linear")[0] == pytest.approx(-15)


def test_the_front_page_agrees_with_the_times():
    ratios = timing.ratios(recorded("speed-latency"), "dense").query("peer == 'ndlinear'")
    faster, slower = (ratios["ratio_low"] > 1).sum(), (ratios["ratio_high"] < 1).sum()
    pattern = r"of the same map in (\d+) of (\d+) cases, .*? slower in (\d+), where it is small"
    assert number(pattern) == [faster, len(ratios), slower]


def test_every_question_of_the_tree_ends_at_its_own_leaf():
    leaves = [guide.advise(case).leaf for _, _, case in guide.QUESTIONS]
    assert [leaf[0] for leaf in leaves] == list("0123456")
    assert len(set(leaves)) == len(leaves)


def test_the_tree_is_drawn_with_its_counts():
    figure, axis = plt.subplots()
    guide.draw_tree(axis, pd.Series(["6 dense", "6 dense", "0 not used"]))
    texts = " ".join(text.get_text() for text in axis.texts)
    assert "2 of 3 layers" in texts and "1 of 3 layers" in texts and texts.count("of 3 layers") == 2
    plt.close(figure)


def test_layers_that_differ_in_their_number_are_one_kind():
    names = ["block.0.up", "block.11.up", "head", "spare"]
    report = pd.DataFrame(
        {
            "layer": names,
            "calls": [1, 2, 1, 0],
            "inputs": [4, 4, 6, 4],
            "outputs": [8, 8, 9, 4],
            "separable": [0.02, 0.03, 0.5, 0.9],
            "by chance": [0.02, 0.01, 0.5, 0.1],
        }
    )
    found = guide.kinds(report)
    assert found["layer"].tolist() == ["block.i.up", "head"] and found["count"].tolist() == [2, 1]
    assert found["separable, %"].tolist() == ["2.0 to 3.0", "50.0 to 50.0"]
    assert found["times chance"][0] == "1.00 to 3.00" and found["size"][1] == "6 → 9"


def test_a_conversion_is_drawn_with_its_means():
    rows = [
        {"kind": kind, "seed": seed, "before_accuracy": 0.8, "fitted_accuracy": low + seed / 100}
        | {"accuracy": 0.7 + seed / 100}
        for kind, low in (("dense", 0.8), ("ndlinear", 0.5), ("low-rank", 0.6))
        for seed in range(3)
    ]
    _, axis = plt.subplots()
    guide.draw_conversion(axis, pd.DataFrame(rows))
    means = [line for line in axis.lines if line.get_label() in guide.CONVERTED.values()]
    assert [line.get_label() for line in means] == list(guide.CONVERTED.values())
    assert means[1].get_ydata() == pytest.approx([80, 51, 71]) and len(axis.lines) == 12
    plt.close()
