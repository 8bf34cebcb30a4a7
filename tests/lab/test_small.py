"""Modes, statistics, colours and what notebooks show."""

import base64
import io
import itertools
import random
import re

import lab
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import LabError, stats
from lab.page import figures, show
from matplotlib.colors import to_rgb
from scipy import stats as scipy_stats


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "fast")
    with pytest.raises(LabError, match="replay, smoke, full"):
        lab.mode()


def test_interval_is_students():
    values = np.random.default_rng(0).normal(3, 2, 12)
    mean, low, high = lab.interval(values)
    expected = scipy_stats.t.interval(0.95, 11, loc=values.mean(), scale=scipy_stats.sem(values))
    assert (mean, low, high) == pytest.approx((values.mean(), *expected))
    assert lab.interval([1.0])[1:] == (-np.inf, np.inf)
    with pytest.raises(LabError, match="finite"):
        lab.interval([1.0, np.nan])


def test_cuts_that_share_cases_have_the_variance_of_nadeau_and_bengio():
    values = np.random.default_rng(0).normal(size=15)
    mean, low, high = stats.over_cuts(values, trained_on=164, tested_on=40, level=0.975)
    spread = np.sqrt(values.var(ddof=1) * (1 / 15 + 40 / 164))
    assert (low, high) == pytest.approx(scipy_stats.t.interval(0.975, 14, mean, spread))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("dense", 0), ("nd", 0), ("nd", 1)], "finish the grid"),
        ([("a", 0), ("b", 0)], "need the same seeds; there are a, b"),
        ([("dense", 0), ("nd", 0)] * 2, "several runs share"),
    ],
)
def test_compare_refuses_unpaired_runs(rows, message):
    with pytest.raises(LabError, match=message):
        lab.compare(pd.DataFrame(rows, columns=["model", "seed"]).assign(loss=1.0), "loss")


def test_pooled_against_a_grid_search_and_the_formula():
    values, errors = np.array([0.1, 0.5, -0.2, 0.3, 0.8]), np.array([0.1, 0.2, 0.1, 0.15, 0.1])

    def likelihood(between):  # restricted, by the multivariate normal of the contrasts
        contrast = np.linalg.svd(np.ones((1, 5)))[2][1:]
        covariance = contrast @ np.diag(errors**2 + between) @ contrast.T
        return scipy_stats.multivariate_normal(np.zeros(4), covariance).logpdf(contrast @ values)

    grid = np.linspace(0, 0.5, 501)
    between = grid[np.argmax([likelihood(b) for b in grid])]
    found = stats.pooled(values, errors)
    assert abs(found.between**2 - between) < 1e-3
    weight = 1 / (errors**2 + found.between**2)
    mean = (weight * values).sum() / weight.sum()
    spread = (weight * (values - mean) ** 2).sum() / 4 / weight.sum()
    half = scipy_stats.t.ppf(0.975, 4) * np.sqrt(spread)
    assert np.allclose(found[:3], (mean, mean - half, mean + half))
    assert found.new_low < found.low < found.high < found.new_high
    assert stats.pooled([0.1, 0.11, 0.09], [0.2, 0.2, 0.2]).between == 0


@given(st.floats(-3, 3), st.floats(0, 3), st.floats(-3, 3), st.floats(0, 3))
def test_answers_follow_the_interval(low, width, bound, span):
    """Each answer against its own wording, for intervals and bounds drawn at random."""
    high, middle, most = low + width, low + width / 2, bound + span
    for ends in ((low, high), (middle, low, high)):
        answers = {
            stats.above: (low > bound, high < bound),
            stats.below: (high < bound, low > bound),
            stats.at_least: (low >= bound, high < bound),
        }
        for answer, (yes, no) in answers.items():
            found = answer(ends, bound)
            assert (found is True, found is False) == (yes, no)
        found = stats.inside(ends, bound, most)
        assert (found is True) == (bound <= low and high <= most)
        assert (found is False) == (high < bound or low > most)


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=6))
def test_answers_are_joined_as_in_three_valued_logic(answers):
    """Strong Kleene logic: what the answer would be for every way to decide the undecided, where all ways agree."""
    ways = [
        [a if a is not None else chosen[i] for i, a in enumerate(answers)]
        for chosen in itertools.product([True, False], repeat=len(answers))
    ]
    for joined, plain in ((stats.all_of, all), (stats.any_of, any)):
        possible = {plain(way) for way in ways}
        assert joined(*answers) is (possible.pop() if len(possible) == 1 else None)


@given(st.integers(2, 9), st.floats(-5, 5), st.integers(0, 2**32))
def test_paired_differences_do_not_depend_on_the_order_of_rows(n, shift, seed):
    draw = random.Random(seed)
    noise = [draw.gauss(0, 1) for _ in range(n)]
    rows = [("a", s, noise[s] + shift) for s in range(n)] + [("b", s, noise[s]) for s in range(n)]
    rows += [("c", n, 0.0)]  # an arm with other seeds does not matter
    draw.shuffle(rows)
    mean, low, high = stats.paired(pd.DataFrame(rows, columns=["arm", "seed", "m"]), "m", "a", "b")
    assert mean == pytest.approx(shift) and low <= mean <= high
    assert high - low == pytest.approx(0, abs=1e-9), "the pairs differ by the same number"


def luminance(colour):
    rgb = np.array(to_rgb(colour))
    rgb = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return rgb @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("name", figures.METHODS)
def test_colours_stand_out_on_white_and_on_dark(name):
    """Graphical objects need a contrast of about 3 (2.2 is our floor for the lightest) to either ground."""
    value = luminance(figures.METHODS[name][0])
    dark = luminance("#121212")
    assert 1.05 / (value + 0.05) >= 2.2 and (value + 0.05) / (dark + 0.05) >= 2.2


@pytest.fixture
def shown(monkeypatch):
    """Collects what is shown: as text in a script, as HTML in a notebook."""
    found = []
    monkeypatch.setattr(show, "put", lambda text, html: found.append((text, html)))
    return found


def test_a_table_is_escaped_merges_intervals_and_leaves_missing_values_empty(shown):
    frame = pd.DataFrame({"a_b": [1.234, None], "a_b_low": [1.1, None], "a_b_high": [1.3, None]})
    frame = frame.assign(c=[1.23456, None], d="<script>").rename_axis(columns="kind")
    lab.table(frame, {"c": "{:.2f}"}, "x < y", {"a_b": "{:.1f}"})
    ((text, html),) = shown
    assert " ".join(text.split()) == "x < y a b c d 1.2 [1.1, 1.3] 1.23 <script> <script>"
    assert "<script>" not in html and "kind" not in html
    assert "&lt;script&gt;" in html and "x &lt; y" in html


def test_numbers_in_tables_do_not_break_over_lines(shown):
    wanted = {
        "-28 [-55, -0]": "−28 [−55,~−0]",
        "5.7e-04": "5.7e−04",
        "1 ± 2": "1~±~2",
        "✓ right": "✓~right",
        "depth-3 of 2020-01-03": "depth-3 of 2020-01-03",
    }
    lab.table(pd.DataFrame({"a": list(wanted)}))
    found = re.findall("<td>(.*)</td>", shown[0][1])
    assert found == [text.replace("~", "\N{NO-BREAK SPACE}") for text in wanted.values()]


def test_a_table_is_downloaded_from_the_page_itself(shown):
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y <z>"]})
    lab.download(frame, "some.csv", "Two <rows>")
    ((text, html),) = shown
    assert text == "Two <rows>: 2 rows, 0 kB" and "Two &lt;rows&gt;" in html
    held = re.search('href="data:text/csv;base64,([^"]*)" download="some.csv"', html)[1]
    assert pd.read_csv(io.BytesIO(base64.b64decode(held))).equals(frame)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    """Its adjusted p-value is the largest Bonferroni p-value of all families that contain the comparison."""
    wanted = [0.0] * len(p_values)
    for family in itertools.product([False, True], repeat=len(p_values)):
        smallest = min(itertools.compress(p_values, family), default=0)
        for i in itertools.compress(range(len(p_values)), family):
            wanted[i] = max(wanted[i], min(1, sum(family) * smallest))
    assert stats.holm(p_values) == pytest.approx(wanted)


def test_p_below_agrees_with_the_interval_and_with_scipy():
    values = np.random.default_rng(3).normal(-0.3, 1, 12)
    for bound in (-0.9, -0.3, 0.2, 0.5):
        wanted = scipy_stats.ttest_1samp(values, bound).pvalue if values.mean() < bound else 1
        assert stats.p_below(values, bound) == pytest.approx(wanted)
        assert (stats.p_below(values, bound) < 0.05) == (stats.interval(values)[2] < bound)
    assert stats.p_below([1.0, 1.0], 2) == 0 and stats.p_below([1.0, 1.0], 1) == 1
    assert stats.p_below([1.0], 2) == 1, "one run decides nothing"


def test_a_family_fails_by_one_comparison_that_survives_their_number():
    assert stats.of_family(True, [0.2, 0.3]) is True
    assert stats.of_family(False, [0.02, 0.9]) is False  # 2 x 0.02
    assert stats.of_family(False, [0.03, 0.9]) is None  # 2 x 0.03
