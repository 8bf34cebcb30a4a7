"""The decision page: its numbers against formulas of their own, and the front page against the records."""

import functools
import json
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from lab import modes
from lab.chapters import guide
from lab.page.recorded import recorded
from scipy import stats as independent

SCORES = {"nd": [0.70, 0.72, 0.75], "big": [0.60, 0.61, 0.69], "a": [0.5] * 3, "b": [0.7, 0.6, 0.7]}
SIZES = {"nd": 100, "big": 900, "a": 100, "b": 104}
ELSEWHERE = {  # runs on the data of a situation that are not its evidence
    "benchmark": "one protocol for all sets, which replaces the situations once it is complete",
    "cnn-structured-whole-search": "the starts of those heads with all pictures",
    "cnn-structured-whole": "CP and TT heads, larger than NdLinear, at the printed scale",
    "cnn-structured-whole-check": "one start for these heads",
    "cnn-sweep-batches": "NdLinear and dense at other batch sizes",
    "cnn-sweep-trained": "NdLinear at other hyper-parameters",
    "cnn-printed-cifar100-chosen": "an epoch chosen on held-out pictures, for NdLinear and dense alone",
    "step-cifar": "rates for NdLinear and dense alone",
    "ucr-positions": "networks that are told the positions",
    "ucr-printed": "more seeds of NdLinear with an axis of length one and of two dense blocks",
    "ucr-heartbeat-repeated": "other cuts of the same cases, without time as an axis",
    "ucr-heartbeat-repeated-classical": "other cuts of the same cases",
    "ett-epochs": "fewer arms, more epochs",
    "ett-last": "fewer arms, more windows; NdLinear with an axis of length one",
    "ett-windows": "fewer arms, more windows; NdLinear with an axis of length one",
    "ett-rate": "other rates of NdLinear with an axis of length one",
    "ett-tuned": "other rates of it, in the released protocol",
    "ett-tuned-rates": "the search of these rates",
    "vit-hundred": "no block with two real modes",
    "vit-teachers": "the teachers",
    "structured-share-rates": "a search of rates",
    "cnn-printed-cifar10-released": "NdLinear itself, as in a released script",
    "cnn-printed-cifar100-released": "NdLinear itself, as in a released script",
}


def made(scores=SCORES, **more) -> pd.DataFrame:
    rows = [
        {"arm": arm, "seed": seed, "score": value, "parameters": SIZES.get(arm, 50)} | more
        for arm, values in scores.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def situation(**changes) -> guide.Situation:
    names = ("one", "", "10_one_layer", ("x",), "three runs", {}, "score", "nd", "big")
    return guide.Situation(*names)._replace(**changes)


def of(frame: pd.DataFrame):
    """A reader of records that always gives these rows."""
    return lambda *names: frame


# --- one comparison ----------------------------------------------------------------------------------------------


def test_a_gain_is_the_paired_difference_in_points():
    row = guide.compare(situation(), of(made()))
    for name, other in (("dense", "big"), ("fair", "b")):
        by_seed = 100 * (np.array(SCORES["nd"]) - SCORES[other])
        low, high = independent.ttest_1samp(by_seed, 0).confidence_interval()
        wanted = [by_seed.mean(), low, high]
        assert [row[name], row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(wanted)
    assert row["opponent"] == "b" and row["share"] == pytest.approx(100 / 900) and row["seeds"] == 3


def test_an_error_is_in_percent_of_the_named_model_and_smaller_is_better():
    row = guide.compare(situation(error_of="a"), of(made(SCORES | {"a": [2.0] * 3})))
    assert row["opponent"] == "b"
    assert row["fair"] == pytest.approx(100 * (np.mean(SCORES["b"]) - np.mean(SCORES["nd"])) / 2)


def test_opponents_are_the_models_of_at_most_the_same_size():
    found = made(SCORES | {"larger": [0.9] * 3, "twin": [0.9] * 3})
    found.loc[found["arm"] == "larger", "parameters"] = 106
    among = situation(left_out={"twin": guide.ITSELF})
    assert guide.opponents(among, found) == ["a", "b"]
    found.loc[found["arm"] == "big", "parameters"] = 101
    assert guide.opponents(among, found) == ["a", "b", "big"]


def test_runs_are_filtered_and_the_rate_is_chosen_in_validation():
    rows = [
        {"model": "nd", "seed": s, "lr": lr, "data": data, "val_loss": loss}
        for s in (0, 1)
        for data in ("x", "y", None)
        for lr, loss in ((0.1, 0.3), (0.01, 0.2))
    ]
    found = guide.runs(situation(where={"data": ("x",)}), of(pd.DataFrame(rows)))
    assert set(found["lr"]) == {0.01} and set(found["data"].dropna()) == {"x"}
    assert len(found) == 4 and list(found["arm"]) == ["nd"] * 4


def test_own_rates_need_several_for_every_trained_model():
    found = made().assign(lr=0.1)
    both = pd.concat([found, found.assign(lr=0.2)])
    of_b = both["arm"] == "b"
    wanted = ((found, False), (both, True), (both.assign(lr=both["lr"].mask(of_b, 0.1)), False))
    not_by_steps = both.assign(lr=both["lr"].mask(of_b))
    for rows, own in (*wanted, (not_by_steps, True)):
        assert guide.own_rates(situation(), found, list(SCORES), of(rows)) == own


def ends(name: str, low: float, high: float) -> dict:
    return {f"{name}_low": low, f"{name}_high": high}


def test_three_questions_have_three_answers():
    found = [guide.better(ends("fair", *e)) for e in ((1, 2), (-2, -1), (-1, 1))]
    assert found == ["yes", "no", "not shown"]
    less = {"share": 0.5}
    found = [guide.smaller(less | ends("dense", *e)) for e in ((-0.9, 1), (-2, -1), (-1.1, 1))]
    assert found == ["yes", "no", "not shown"]
    assert guide.smaller({"share": 0.97} | ends("dense", 1, 2)) == "not smaller"
    times = [{"time": 1.0} | ends("time", *e) for e in ((0.7, 0.9), (1.1, 2), (0.9, 1.1))]
    assert [guide.faster(row) for row in times] == ["yes", "no", "not shown"]
    assert guide.faster({"time": np.nan} | ends("time", np.nan, np.nan)) == "not timed"


def test_the_largest_scale_at_own_rates_decides():
    rows = guide.measured().set_index("situation")
    hundred = rows.filter(like="CIFAR-100 (", axis=0)
    assert list(hundred.index[hundred["decides"]]) == ["CNN features, CIFAR-100 (10 epochs)"]
    assert not hundred.loc["CNN features, CIFAR-100 (printed)", "counts"]
    ten = rows.filter(like="features, CIFAR-10 ", axis=0)
    assert list(ten.index[ten["decides"]]) == ["CNN features, CIFAR-10 (printed)"]
    assert not ten["counts"].any() and rows.groupby("task")["decides"].sum().eq(1).all()


# --- no opponent is forgotten ------------------------------------------------------------------------------------


@functools.cache
def results() -> dict[str, pd.DataFrame]:
    """All recorded experiments."""
    names = [path.stem for path in (modes.NOTEBOOKS / "results").glob("*.jsonl")]
    return {name: recorded(name) for name in names if name != "notebook-times"}


@functools.cache
def values(name: str) -> set[str]:
    """The data of an experiment."""
    frame = results()[name]
    named = frame.columns.intersection(["data", "dataset", "task"])
    return {str(value) for column in named for value in frame[column].unique()}


def kin(one: guide.Situation) -> set[str]:
    """The experiments whose rows have the data and the metric of a situation."""
    wanted = {str(value) for key, value in one.where.items() if key in ("data", "dataset", "task")}
    return {
        name
        for name, frame in results().items()
        if one.metric in frame and wanted and wanted <= values(name)
    }


def reasoned(arm: str, why: str) -> bool:
    """Whether a reason to leave a model out can be seen in its name."""
    if why == guide.ITSELF:
        return arm.startswith(("ndlinear", "tokens ", "two modes ")) or arm == "relu"
    if why == guide.SHUFFLED:
        return arm.startswith("ndlinear") and "shuffled" in arm
    return why == guide.PAST and ("past" in arm or arm.startswith("last value"))


def problems(one: guide.Situation, among: list[guide.Situation]) -> list[str]:
    """Recorded models that could be opponents of a situation, and are neither admitted nor left out for a reason."""
    where = {key: value for key, value in one.where.items() if key in guide.DATA}
    if one.records == ("compress-digits",):
        every = guide.replaced(one.where["model"])
    else:
        every = guide._all(one.records, where, recorded)
    size = guide.sizes(every)
    known = {one.ours, one.dense, *one.left_out, *guide.opponents(one, guide.runs(one))}
    found = [
        f"{arm} is neither admitted nor left out"
        for arm in size.index
        if arm not in known and not size[arm] > 1.05 * size[one.ours]
    ]
    found += [f"{arm}: {why}?" for arm, why in one.left_out.items() if not reasoned(arm, why)]
    elsewhere = {name for other in among if other.chapter != one.chapter for name in other.records}
    alike = [o for o in among if (o.chapter, o.where) == (one.chapter, one.where)]
    alike += [other for other in among if other.task == one.task]
    used = {name for other in alike for name in other.records + other.search}
    unused = kin(one) - used - set(one.search) - set(ELSEWHERE) - elsewhere
    return found + [f"the runs of {name} are not used" for name in sorted(unused)]


@pytest.mark.parametrize("one", guide.situations(), ids=lambda one: one.name)
def test_every_recorded_model_is_admitted_or_left_out_for_a_reason(one):
    assert problems(one, guide.situations()) == []


@pytest.mark.parametrize(
    "name", ["Series, ECG5000", "Pixels of CIFAR-10 in place, 18,000", "Trained encoder converted"]
)
def test_the_best_opponent_cannot_be_dropped(name, monkeypatch):
    one = next(one for one in guide.situations() if one.name == name)
    strongest = guide.measured().set_index("situation").loc[name, "opponent"]
    hidden = one._replace(left_out=dict(one.left_out) | {strongest: guide.ITSELF})
    assert f"{strongest}: {guide.ITSELF}?" in problems(hidden, guide.situations())
    fewer = [arm for arm in guide.opponents(one, guide.runs(one)) if arm != strongest]
    monkeypatch.setattr(guide, "opponents", lambda *_: fewer)
    assert f"{strongest} is neither admitted nor left out" in problems(one, guide.situations())


def test_a_forgotten_record_is_found():
    """As logistic regression on the raw series was, until 23 November 2026."""
    blind = [
        one._replace(records=("ucr-networks",)) if "ucr-classical" in one.records else one
        for one in guide.situations()
    ]
    series = next(one for one in blind if one.name == "Series, ECG5000")
    assert "the runs of ucr-classical are not used" in problems(series, blind)
    assert guide.compare(series)["opponent"] != "linear"


# --- the page ----------------------------------------------------------------------------------------------------


def test_a_table_links_to_the_chapter_and_escapes(monkeypatch):
    shown = []
    monkeypatch.setattr(guide, "put", lambda text, html: shown.append(html))
    guide.table(pd.DataFrame([{"situation": "a < b", "chapter": "10_one_layer"}]))
    assert '<a href="10_one_layer.html">chapter 10</a>' in shown[0] and "a &lt; b" in shown[0]


def test_the_situations_name_chapters_that_exist():
    rows = guide.measured()
    assert all((modes.NOTEBOOKS / f"{name}.ipynb").is_file() for name in rows["chapter"])


@functools.cache
def counted() -> pd.DataFrame:
    rows = guide.measured()
    meaningless = rows["kind"].isin(["One axis, folded by hand", "Pixels shuffled, a control"])
    return rows[rows["decides"] & rows["counts"] & ~meaningless]


def said(name: str, pattern: str) -> list[int]:
    """The whole numbers of one sentence of a page; of a notebook, of its first cell."""
    text = (modes.ROOT / name).read_text(encoding="utf8")
    if name.endswith(".ipynb"):
        text = "".join(json.loads(text)["cells"][0]["source"])
    found = re.search(pattern, " ".join(text.split()))
    assert found, f"{name} no longer says {pattern!r}"
    return [int(value.replace(",", "")) for value in found.groups()]


def test_the_answer_of_the_page_agrees_with_the_records():
    page, rows = "notebooks/72_should_you_use_it.ipynb", counted()
    assert rows.index.equals(guide.with_axes(guide.measured()).index)
    timed = rows.dropna(subset="time").drop_duplicates(
        "time"
    )  # a network that was timed counts once
    for pattern, answers in (
        (
            r"every recorded model of its size: (\d+) of (\d+) situations with real axes",
            rows["better"],
        ),
        (r"less than one point lost: (\d+) of (\d+)", rows["smaller"]),
        (r"in a training step: (\d+) of (\d+) networks timed; one is slower", timed["faster"]),
    ):
        assert said(page, pattern) == [(answers == "yes").sum(), len(answers)]
    assert (timed["faster"] == "no").sum() == 1


def test_a_conversion_is_drawn_with_its_means():
    stages = {"before_accuracy": 0.8, "fitted_accuracy": 0.5, "accuracy": 0.7}
    rows = [
        {"kind": "ndlinear", "seed": s} | {k: v + s / 100 for k, v in stages.items()}
        for s in range(3)
    ]
    _, axis = plt.subplots()
    guide.draw_conversion(axis, pd.DataFrame(rows))
    assert axis.lines[-1].get_ydata() == pytest.approx([81, 51, 71]) and len(axis.lines) == 4
