"""Sentences of the ledger with what its records, its tables and the layer give: id and field of a claim, a phrase, its values.

A phrase has a field of `str.format` for each value. What stands here is computed again in each test, so that a record that is run
anew says which sentence it moves. The other numbers of the ledger's own words, such as those that printed tables give, are held by
its seals (`lab/tools/seals.py`).
"""

import inspect
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from lab import stats
from lab.benchmark import models, reading
from lab.chapters import ablations, bump, dial
from lab.page import facts, ledger
from lab.page.scale import recorded

SIGNED = "{:+.1f} points [{:+.1f}, {:+.1f}]"
ERROR = "{:.1f} % [{:.1f}, {:.1f}]"


def points(runs: pd.DataFrame, metric: str, one: str, other: str, level: float = 0.95) -> list:
    """Mean and interval of a paired difference, in points."""
    return [100 * value for value in stats.paired(runs, metric, one, other, level=level)]


def pictures() -> Iterator[tuple]:
    ids = "cnn-cifar10-accuracy", "cnn-cifar100-accuracy"
    words = (
        ("reaches {:.1f} % top-1", "it {:.1f} %, as printed: ", "it reaches {:.1f} %: "),
        ("reaches {:.1f} % Acc@5", None, "and NdLinear {:.1f} %, seven less: "),
    )
    for id, metric, said in zip(ids, ("test_accuracy", "test_top_five"), words):
        name = f"cnn-printed-{id.split('-')[1]}"
        runs = pd.concat([recorded(name), recorded(f"{name}-relu")])
        mean = 100 * runs.groupby("arm")[metric].mean()
        yield id, "correction", f"the dense head {said[0]}", mean["dense"]
        relu = points(runs, metric, "relu", "dense", 0.975)
        if said[1]:
            yield id, "correction", said[1] + SIGNED + ", three seeds, 97.5 %", mean["relu"], *relu
        else:
            yield id, "correction", "ReLU behind it, " + SIGNED + ", 97.5 %", *relu
        without = points(runs, metric, "ndlinear", "dense")
        yield id, "correction", said[2] + SIGNED, mean["ndlinear"], *without
    chosen = recorded("cnn-printed-cifar100-chosen")
    behind = points(chosen, "test_top_five", "ndlinear", "dense")
    yield ids[1], "correction", "chosen on {:,} pictures", *chosen["held"].unique()
    yield ids[1], "correction", "by less, " + SIGNED.replace("+", ""), *behind
    short = recorded("cnn-longer").query("data == 'cifar100' and lr == 0.001")
    ahead = points(short, "test_top_five", "ndlinear", "dense")
    yield ids[1], "correction", "With {:,} pictures", *short["images"].unique()
    yield ids[1], "correction", "ahead, by {:.1f} points [{:.1f}, {:.1f}]", *ahead


def maps() -> Iterator[tuple]:
    runs = recorded("cnn-structured-whole")
    best = 100 * runs.query("arm == 'cp'")["test_top_five"].mean()
    over = [points(runs, "test_top_five", "cp", other) for other in ("ndlinear", "tt")]
    yield "structured-accuracy", "would_take", "reaches {:.1f} %", best
    yield "structured-accuracy", "would_take", "{:.1f} points of Acc@5 [{:.1f}, {:.1f}]", *over[0]
    yield "structured-accuracy", "would_take", "{:.1f} [{:.1f}, {:.1f}] above TT", *over[1]
    phrase = "and {:.1f} points below the CP map"
    yield "structured-best-on-all-metrics", "would_take", phrase, over[0][0]


def series() -> Iterator[tuple]:
    runs = recorded("ucr-printed")
    means = (
        ("ucr-ecgfiveday", "ECGFiveDays", "macro_f1", "(macro {:.3f} [{:.3f}, {:.3f}])"),
        ("ucr-better-than-matched", "ECGFiveDays", "macro_f1", "(macro {:.3f} [{:.3f}, {:.3f}],"),
        ("ucr-chlorine", "ChlorineConcentration", "macro_f1", "is {:.3f} [{:.3f}, {:.3f}] (level"),
        ("ucr-ecg5000", "ECG5000", "weighted_f1", "minus Base is {:.3f} [{:.3f}, {:.3f}]."),
    )
    for id, data, metric, phrase in means:
        part = runs[runs["data"] == data]
        part = part[part["seed"] >= 40] if data == "ChlorineConcentration" else part
        yield id, "correction", phrase, *stats.paired(part, metric, "ndlinear", "base")


def tables() -> Iterator[tuple]:
    wanted = "dataset == 'Cardio Disease' and scaling == 'standardised'"
    runs = recorded("tabular-printed").query(wanted)
    mean = 100 * runs.groupby("arm")["score"].mean()
    more = points(runs, "score", "dense", "NdLinear")
    id = "tabular-cardio-accuracy"
    yield id, "correction", "the printed {} epochs", *runs["epochs"].unique()
    yield id, "correction", "NdLinear has {:.1f} %", mean["NdLinear"]
    yield id, "correction", "dense network {:.1f} %", mean["dense"]
    yield id, "correction", "{:.2f} points more [{:.2f}, {:.2f}]", *more
    peers = recorded("tabular-peers").query("dataset == 'Cardio Disease' and arm == 'boosting'")
    yield id, "correction", "boosting has {:.1f} %", 100 * peers["score"].mean()


def biases() -> Iterator[tuple]:
    runs = recorded("ablation-bias")
    printed, released = runs.query("epochs == 4000"), runs.query("epochs == 800")
    more = "lower the error at width 16 by ", "by more, ", "by more, "
    less = "the change is ", "lower the error by ", "lower the error by "
    for width, long, short in zip((16, 32, 64), more, less):
        id = f"ablation-bias-width{width}"
        field = "correction" if width == 16 else "condition"
        mean, low, high = ablations.change(printed, width)
        yield id, field, long + ERROR, -mean, -high, -low
        mean, low, high = ablations.change(released, width)
        if width == 16:
            yield id, field, short + "{:.1f} % [{:.1f}, {:+.1f}]", mean, low, high
        else:
            yield id, field, short + ERROR, -mean, -high, -low
        change = abs(ablations.printed_change(width))
        yield id, field, ("a rise of {:.1f} %" if width == 16 else "the printed {:.1f} %"), change


def orders() -> Iterator[tuple]:
    runs = recorded("ablation-cifar-trained")
    arms = "reverse order", "random order", "reverse axes"
    kept = {arm: ablations.retention(runs, arm) for arm in arms}
    id = "ablation-order-retention"
    yield id, "correction", "(reverse " + ERROR, *kept["reverse order"]
    yield id, "correction", "random " + ERROR + " of the accuracy", *kept["random order"]
    yield id, "correction", "keep " + ERROR, *kept["reverse axes"]


def sizes() -> Iterator[tuple]:
    id, runs = "ablation-hidden-doubling", recorded("ablation-cifar-trained")
    one = points(runs, "test_top_five", "64x4x4", "32x4x4")
    yield id, "correction", "gains {:.1f} [{:.1f}, {:.1f}], (64,4,4)", *one
    mean, low, high = points(runs, "test_top_five", "128x4x4", "64x4x4")
    yield id, "correction", "loses {:.1f} [{:.1f}, {:.1f}], and the printed", -mean, -high, -low
    counts = runs.groupby("arm")["parameters"].first()[["64x4x4", "128x4x4", "256x2x2"]]
    dense = recorded("cnn-printed-cifar100").query("arm == 'dense'")["parameters"].iloc[0]
    saved = sorted(100 * (1 - counts / dense))
    yield id, "correction", "have {:.0f} to {:.0f} % fewer parameters", saved[0], saved[-1]


def sweep() -> Iterator[tuple]:
    runs, id = recorded("cnn-sweep-batches"), "ablation-hyper-lr-001"
    printed = facts.facts("app_hyperparam", metric="acc_at_5").astype({"lr": float, "batch": int})
    printed = printed[printed["lr"] == 0.01].set_index(["hidden_size", "batch"])["value"]
    for arm in ("128,4,4", "256,2,2"):
        some = runs[runs["arm"] == arm]
        wide = 100 * some.pivot(index="seed", columns="batch", values="test_top_five")
        change = stats.interval(wide[128] - wide[32], level=0.975)
        phrase = "by {:+.1f} [{:+.1f}, {:+.1f}]" + (" points" if arm == "128,4,4" else "")
        phrase += f" with ({arm}), printed " + "{:+.1f}"
        yield id, "correction", phrase, *change, printed[arm, 128] - printed[arm, 32]


def samples() -> Iterator[tuple]:
    id, runs = "sample-separable", recorded("dial-starts")
    found = dial.factors(runs, "dense-params", "ndlinear", 0.1, (0.05,))[0.05]
    phrase = "needs {:.2f} times the samples of NdLinear [{:.2f}, {:.2f}]"
    yield id, "correction", phrase, found["ratio"], found["low"], found["high"]


def changes(name: str, metric: str, key: str, one: str, other: str, **where) -> np.ndarray:
    """One arm minus another by seed, for the rows of a record with these settings; of an error in logarithms."""
    runs = recorded(name)
    for column, value in where.items():
        runs = runs[runs[column] == value]
    wide = runs.pivot(index="seed", columns=key, values=metric)
    wide = wide if metric == "test_top_five" else np.log(wide)
    return (wide[one] - wide[other]).to_numpy()


def in_percent(logs: np.ndarray, level: float) -> list[float]:
    return [100 * math.expm1(value) for value in stats.interval(logs, level=level)]


def doubling() -> Iterator[tuple]:
    looks = ("ablation-doubling", "gains", 0.975), ("ablation-cifar-trained", "after", 0.95)
    for name, word, level in looks:
        gain = 100 * changes(name, "test_top_five", "arm", "256x2x2", "128x4x4")
        phrase = word + " {:.1f} [{:.1f}, {:.1f}]"
        yield "ablation-hidden-doubling", "correction", phrase, *stats.interval(gain, level=level)


def forecasts() -> Iterator[tuple]:
    level, phrase = 1 - 0.05 / 4, "by {:.0f} % [{:.0f}, {:.0f}]"
    for data in ("ETTh1", "ETTh2", "ETTm1", "ETTm2"):
        logs = changes("ett-tuned", "mse", "model", "ndlinear", "dense", dataset=data)
        yield f"ett-transformer-{data.lower()}", "correction", phrase, *in_percent(logs, level)


def recurrent() -> Iterator[tuple]:
    """The RNN at rates of its own: how much each start of NdLinear changes both errors, in percent."""
    for data in ("ETTh1", "ETTh2", "ETTm1", "ETTm2"):
        id, field = f"ett-rnn-{data.lower()}", "correction" if data == "ETTh1" else "would_take"
        for metric, arm in itertools.product(("mse", "mae"), ("ndlinear", "ndlinear-paper")):
            if (data, metric) == ("ETTh1", "mae"):
                continue
            logs = changes("ett-rnn-own", metric, "model", arm, "dense", dataset=data)
            mean, *ends = in_percent(logs, 0.95)
            word, sign = ("lower", -1) if mean < 0 else ("higher", 1)
            told = sign * mean, *sorted(sign * end for end in ends)
            yield id, field, word + " by {:.0f} % [{:.0f}, {:.0f}]", *told
        wanted = {"dataset": data, "model": "RNN", "metric": ["mse", "mae"]}
        cells = facts.facts("ts_forecast_combined_side_by_side", **wanted)
        printed = cells.pivot(index="metric", columns="method", values="value")
        half = 50 * (1 - printed["NdLinear"] / printed["Linear"])
        if field == "would_take":
            yield id, field, "printed reductions ({:.1f} % and {:.1f} %)", *half[["mse", "mae"]]


def aligned() -> Iterator[tuple]:
    rows = reading.rows_on_disk()
    gain = reading.answer(reading.by_axes(rows, models.SMALL), "large")
    id, phrase = "bias-aligned-domains", "entries is {:.3f} [{:.3f}, {:.3f}] times that in place"
    yield id, "scope", phrase, *(gain[end] for end in ("ratio", "low", "high"))
    phrase = "of its size in {} of {} cells and worse in {}"
    yield id, "scope", phrase, *reading.printed()[models.SMALL]


def loss_curves() -> Iterator[tuple]:
    id = "opt-loss-curves"
    for name, level in (("opt-second-look", 0.95), ("opt-library", 0.975), ("opt-larger", 0.975)):
        gap = stats.paired(recorded(name), "test_loss", "ndlinear", "dense", level=level)
        yield id, "reason", "{:+.3f} nats [{:.3f}, {:.3f}]", *gap
    yield id, "reason", "held-out text, {} seeds", recorded("opt-second-look")["seed"].nunique()


def directions() -> Iterator[tuple]:
    claim = ledger.claim("sample-entangled")["numbers"]
    found = dial.factors(recorded("dial-samples"), "ndlinear", "dense", 0.9, (0.05,))[0.05]
    for field in ("direction_only", "scope"):
        yield "sample-entangled", field, "least {:.1f} times", found["ratio"]
    yield "sample-entangled", "direction_only", "{:.1f} times printed", claim["nd"] / claim["dense"]
    sweep = recorded("cnn-sweep-trained").query("lr == 0.001")
    levels = 100 * sweep.groupby(["arm", "batch"])["test_top_five"].mean()
    printed = facts.facts("app_hyperparam", metric="acc_at_5").astype({"lr": float})
    printed = printed[printed["lr"] == 0.001]["value"]
    phrase = "{:.1f} to {:.1f} here, {:.2f} to {:.2f} printed"
    ends = levels.min(), levels.max(), printed.min(), printed.max()
    yield "ablation-hyper-lr-0001", "direction_only", phrase, *ends


def dials() -> Iterator[tuple]:
    runs = recorded("dial-a-bias")
    below = 100 * (1 - dial.along(runs, "text")["ratio"])
    phrase = "better by {:.0f} to {:.0f} % at every alpha"
    yield "bias-crossover", "condition", phrase, below.min(), below.max()
    gaps = dial.log_ratios(runs, "linear-scrambled")
    longer = dial.by_budget(recorded("dial-budget")).items()
    ends = {n: dial.ends(part).set_index("alpha") for n, part in longer if "scrambled" in n}
    at = ends["linear-scrambled, 10,000 steps"].loc[0]
    ratio = [1 / at[name] for name in ("ratio", "ratio_high", "ratio_low")]
    phrase = "({:.0f} times lower [{:.0f}, {:.0f}], ten seeds)"
    yield "bias-49x-separable", "condition", phrase, *ratio
    steps = [f"linear-scrambled, {n} steps" for n in ("5,000", "10,000", "20,000")]
    high = [ends[name].loc[1]["ratio"] for name in steps]
    phrase = "{:.0f} times after 5,000 steps, {:.0f} after 10,000, {:.0f} after 20,000"
    yield "bias-64x-entangled", "condition", phrase, *high
    first = math.exp(gaps[1].mean())
    yield "bias-64x-entangled", "condition", "(about {:.0f} times higher", round(first, -1)


def pairs() -> Iterator[tuple]:
    id, runs = "entropy-equal-or-better-mse", recorded("radius-bump")
    found = bump.by_pair(runs, "end_test")
    wide = found.query("width >= 32")["high"] < 0
    yield id, "correction", "{} of {} are better", wide.sum(), len(wide)
    everything = recorded("radius-bump", "radius-bump-fair")
    shapes = list(itertools.product((16, 32, 64, 128), (2, 3)))
    counts = bump.tally(everything, {s: bump.equal_dense(*s) for s in shapes}).loc["parameters"]
    assert counts["higher"] == 0
    yield id, "correction", "better in {} of {} cells", counts["lower"], counts.sum()
    yield id, "correction", "One pair of {} is worse", len(found)


def settings() -> Iterator[tuple]:
    runs = recorded("cnn-sweep-trained")
    cell = 100 * runs.pivot(index="seed", columns=["lr", "arm", "batch"], values="test_top_five")
    spread = stats.interval(cell[cell.mean().idxmax()] - cell[cell.mean().idxmin()])
    phrase = "varies by {:.1f} points [{:.1f}, {:.1f}] between"
    yield "ablation-hyper-range", "correction", phrase, *spread


# every generator here, so that none is forgotten
PARTS = [part for part in list(vars().values()) if inspect.isgeneratorfunction(part)]
