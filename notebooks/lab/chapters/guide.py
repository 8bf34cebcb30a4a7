"""Situations in which someone might use the layer: ours against dense and against the best fair opponent, from records."""

from __future__ import annotations

import html
from typing import NamedTuple

import numpy as np
import pandas as pd

from .. import stats
from ..guide import Case, advise
from ..modes import LabError
from ..page import figures
from ..page.recorded import recorded
from ..page.show import put

SLACK = (
    1.05  # an opponent of equal size may have up to 5 % more parameters: widths are whole numbers
)
WORDS = {  # what a reader calls the arms that the figures' style does not name
    "base": "dense block",
    "base*": "smaller dense block",
    "learned": "dense, learned activation",
    "mean": "constant",
}


class Situation(NamedTuple):
    """One comparison: which recorded runs, which arms, and what is measured."""

    name: str
    chapter: str
    records: tuple[str, ...]
    where: dict
    metric: str
    ours: str
    dense: str
    opponents: tuple[str, ...]  # all that were run, no larger than ours, not the same map
    constant: str = ""  # if named, the metric is an error, given in percent of this arm's


def runs(situation: Situation, read=recorded) -> pd.DataFrame:
    """The runs of a situation: columns `arm`, `seed`, the metric. A rate that was varied is the best in validation."""
    frame = read(*situation.records)
    for column, wanted in situation.where.items():
        among = wanted if isinstance(wanted, tuple) else (wanted,)
        frame = frame[frame[column].isin(among) | frame[column].isna()]
    if "arm" not in frame:
        frame = frame.rename(columns={"model": "arm"})
    frame = repeated(frame)
    return tuned(frame) if "val_loss" in frame else frame


def repeated(frame: pd.DataFrame) -> pd.DataFrame:
    """A model without chance was run once: its run stands beside every seed of the others."""
    alone = frame.groupby("arm")["seed"].transform("size") == 1
    seeds = pd.DataFrame({"seed": frame["seed"].unique()})
    return pd.concat([frame[~alone], frame[alone].drop(columns="seed").merge(seeds, how="cross")])


def tuned(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each arm the runs with the learning rate of the lowest mean validation loss."""
    mean = frame.groupby(["arm", "lr"])["val_loss"].mean()
    best = mean.groupby("arm").idxmin()
    chosen = pd.MultiIndex.from_frame(frame[["arm", "lr"]]).isin(list(best))
    return frame[chosen]


def replaced(net: str, terms: int, read=recorded) -> pd.DataFrame:
    """A trained dense layer and what stands in for it after fine-tuning: columns `arm`, `seed`, `accuracy`."""
    wide = read("compress-digits")
    arms = {
        "dense/64/fitted": "dense",
        f"ndlinear-sum/{terms}/tuned": "ndlinear-sum",
        f"low-rank/{terms}/tuned": "low-rank",
    }
    wide = wide[wide["model"] == net].rename(columns=arms)
    return wide.melt("seed", list(arms.values()), "arm", "accuracy")


def gain(found: pd.DataFrame, situation: Situation, other: str) -> tuple[float, float, float]:
    """Ours minus another arm, paired by seed, in percentage points: mean and interval. Above zero, ours is better."""
    by_seed = stats.differences(found, situation.metric, situation.ours, other)
    if not situation.constant:
        return stats.interval(100 * by_seed)
    of = found.loc[found["arm"] == situation.constant, situation.metric].mean()
    return stats.interval(-100 * by_seed / of)


def best(found: pd.DataFrame, situation: Situation) -> str:
    """The opponent with the best mean; LabError if one is larger than ours."""
    size = found.groupby("arm")["parameters"].mean() if "parameters" in found else pd.Series()
    limit = SLACK * size.get(situation.ours, np.inf)
    too_large = [arm for arm in situation.opponents if size.get(arm, 0) > limit]
    if too_large:
        raise LabError(f"{situation.name}: larger than NdLinear: {', '.join(too_large)}")
    mean = found.groupby("arm")[situation.metric].mean()[list(situation.opponents)]
    return mean.idxmin() if situation.constant else mean.idxmax()


def compare(situation: Situation, found: pd.DataFrame | None = None) -> dict:
    """One row: ours against dense and against the best opponent, with intervals, and the share of dense parameters."""
    found = runs(situation) if found is None else found
    row = {"situation": situation.name, "chapter": situation.chapter}
    row["opponent"] = best(found, situation)
    for name, other in (("dense", situation.dense), ("fair", row["opponent"])):
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), gain(found, situation, other)))
    if "parameters" in found:
        size = found.groupby("arm")["parameters"].mean()
        row["share"] = size[situation.ours] / size[situation.dense]
    return row | {"seeds": found["seed"].nunique()}


def answer(row) -> str:
    """The rule of the page, applied to the intervals against the best opponent and against dense."""
    ahead = stats.above((row["fair_low"], row["fair_high"]))
    if ahead and stats.below((row["dense_low"], row["dense_high"])):
        return "only to save parameters"
    return {True: "yes", False: "no", None: "no difference shows"}[ahead]


# ------------------------------------------------------------------------------------------------------- the situations
def _images() -> list[Situation]:
    pair, equal = ("ndlinear", "dense"), ("linear", "narrow")
    cnn = "Features after a CNN, CIFAR-"
    own = ("cnn-own-rates",)  # with a rate of its own for each head
    ten = {"data": "cifar10"}
    return [
        Situation(cnn + "100", "40_cnn", own, {}, "test_top_five", *pair, ("low-rank", *equal)),
        Situation(cnn + "10", "40_cnn", ("cnn-longer",), ten, "test_accuracy", *pair, equal),
        Situation(
            "Pixels of digits",
            "10_one_layer",
            ("digits-head",),
            {},
            "test_accuracy",
            "ndlinear",
            "dense",
            ("linear", "dense-params"),
        ),
    ]


def _text() -> Situation:
    where = {"data": "sst2", "split": "re-drawn"}
    arms = ("ndlinear", "dense", ("dense-params",))
    name = "Sentence vectors, SST-2"
    return Situation(name, "44_text_head", ("text-head",), where, "accuracy", *arms)


def _series(data: str, ours: str) -> Situation:
    """Arm `ndlinear` works on features alone, as the printed counts demand; arm `time` on time and channel."""
    axes = {"ndlinear": "features only", "time": "time an axis"}
    equal = ("learned", "folded", "base*", "linear") + (("base",) if ours == "time" else ())
    name = f"Series {data}, {axes[ours]}"
    chapter = "42_time_series_classification"
    where = {"data": data}
    records = ("ucr-networks", "ucr-classical")
    return Situation(name, chapter, records, where, "weighted_f1", ours, "base", equal)


def _forecast(data: str) -> Situation:
    last = "ett-last" if data in ("ETTm1", "ETTm2") else "ett-windows"  # the run that decides there
    return Situation(
        f"Forecast {data}, Transformer",
        "41_forecasting",
        (last,),
        {"dataset": data, "protocol": "chronological", "family": ("Transformer", "none")},
        "mse",
        "ndlinear",
        "dense",
        ("mean",),  # a block of equal width and a linear model have runs with fewer windows only
        constant="mean",
    )


def _table(data: str, networks: str, seeds: range, constant: str) -> Situation:
    return Situation(
        f"Table {data}",
        "43_tabular",
        (networks, "tabular-peers"),
        {"dataset": data, "scaling": "standardised", "epochs": 40, "seed": tuple(seeds)},
        "score",
        "NdLinear",
        "dense",
        ("dense, equal parameters", "linear", "boosting"),
        constant=constant,
    )


def _replacement(net: str) -> Situation:
    name = f"Trained layer, eight terms, {net.upper()}"
    arms = ("ndlinear-sum", "dense", ("low-rank",))
    return Situation(name, "22_approximation", ("compress-digits",), {}, "accuracy", *arms)


def measured() -> pd.DataFrame:
    """All situations of the page, one row each."""
    series = ("ECG5000", "ECGFiveDays", "ChlorineConcentration")
    trained = [
        *_images(),
        _text(),
        *(_series(data, ours) for ours in ("time", "ndlinear") for data in series),
        *(_forecast(data) for data in ("ETTh1", "ETTh2", "ETTm1", "ETTm2")),
        _table("Cardio Disease", "tabular-printed", range(10, 20), ""),
        _table("Delivery Time", "tabular-networks", range(10), "constant"),
    ]
    rows = [compare(situation) for situation in trained]
    rows += [compare(_replacement(net), replaced(net, 8)) for net in ("mlp", "cnn")]
    rows = pd.DataFrame(rows)
    rows["answer"] = [answer(row) for row in rows.to_dict("records")]
    return rows


# ------------------------------------------------------------------------------------------------------------- the page
def numbers(row, name: str) -> str:
    """Mean and interval as text."""
    mean, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def link(chapter: str) -> str:
    """A chapter as a link, named by its number."""
    return f'<a href="{html.escape(chapter)}.html">chapter {html.escape(chapter[:2])}</a>'


def table(rows: pd.DataFrame) -> None:
    """A table whose column `chapter` links to the chapters."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in rows.columns)
    body = ""
    for row in rows.to_dict("records"):
        cells = [link(v) if k == "chapter" else html.escape(str(v)) for k, v in row.items()]
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    region = (
        '<div class="ndl-scroll" tabindex="0" role="region" aria-label="Situations and answers">'
    )
    inside = (
        f'<table class="ndl-table"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    )
    put(rows.to_string(index=False), html=f"{region}{inside}</div>")


def draw(axis, rows: pd.DataFrame) -> None:
    """Differences with intervals, two for each situation."""
    marks = (("dense", "dense", -0.14, "against dense"), ("fair", "ndlinear", 0.14, "best fair"))
    for name, style, shift, words in marks:
        at = np.arange(len(rows)) + shift
        error = [rows[name] - rows[f"{name}_low"], rows[f"{name}_high"] - rows[name]]
        form = {"fmt": figures.marker(style), "color": figures.colour(style), "capsize": 2}
        axis.errorbar(rows[name], at, xerr=error, label=words, **form)
    names = [
        f"{row.situation}\n({WORDS.get(row.opponent, figures.label(row.opponent))})"
        for row in rows.itertuples()
    ]
    axis.set_yticks(range(len(rows)), names)
    axis.set_xscale("symlog", linthresh=1)
    ticks = [-100, -10, -1, 0, 1, 10, 100]
    axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axis.axvline(0, color="#8a8a8a", linewidth=1)
    axis.set(xlabel="NdLinear minus the other, percentage points (right: NdLinear is better)")
    axis.invert_yaxis()


# ---------------------------------------------------------------------------------------------------- the decision tree
QUESTIONS = [  # in the order in which `lab.guide.advise` asks, each with a case that ends there
    ("Does the model use the layer?", "no", Case(called=False)),
    ("Are inputs and outputs products\nof two numbers above one?", "no", Case(foldable=False)),
    ("Is the trained weight\nnearly a Kronecker product?", "yes", Case(separable=True)),
    ("Are parameters scarce?", "yes", Case(limit="parameters")),
    ("Are operations scarce?", "yes", Case(limit="operations")),
    ("Is time scarce, and another\nlayer measured as faster?", "yes", Case(limit="time", fastest="low-rank")),
    ("", "", Case()),
]  # fmt: skip


def draw_tree(axis, leaves: pd.Series) -> None:
    """The decision tree of `lab.guide`, with the number of layers that came to each leaf."""
    counts = leaves.value_counts()
    last = len(QUESTIONS) - 1
    for i, (question, answered, case) in enumerate(QUESTIONS):
        found = advise(case)
        words = f"{found.leaf}: {found.words.split(':')[0]}"
        if found.leaf in counts:
            words += f"\n{counts[found.leaf]} of {len(leaves)} layers"
        box = {"boxstyle": "round", "facecolor": "none", "edgecolor": figures.colour("ndlinear")}
        axis.text(0.58, -i, words, va="center", fontsize=9, bbox=box, wrap=True)
        if i == last:
            axis.plot([0.2, 0.2, 0.55], [1 - i - 0.3, -i, -i], color="0.5", linewidth=1)
            break
        axis.text(0.2, -i, question, ha="center", va="center", fontsize=9)
        axis.annotate("", (0.56, -i), (0.42, -i), arrowprops={"arrowstyle": "->", "color": "0.5"})
        axis.text(0.48, -i + 0.1, answered, ha="center", fontsize=8)
        axis.plot([0.2, 0.2], [-i - 0.3, -i - 0.7], color="0.5", linewidth=1)
    axis.set(xlim=(0, 1.35), ylim=(-last - 0.5, 0.5))
    axis.axis("off")


def kinds(report: pd.DataFrame) -> pd.DataFrame:
    """A report in short: layers whose names differ in their numbers alone are one row, with the range of what was found."""
    used = report[report["calls"] > 0]
    kind = used["layer"].str.replace(r"\d+", "i", regex=True)
    rows = []
    for name, group in used.groupby(kind, sort=False):
        low, high = group["separable"].min(), group["separable"].max()
        ratio = group["separable"] / group["by chance"]
        rows.append(
            {
                "layer": name,
                "count": len(group),
                "size": f"{group['inputs'].iloc[0]:,} → {group['outputs'].iloc[0]:,}",
                "separable, %": f"{100 * low:.1f} to {100 * high:.1f}",
                "times chance": f"{ratio.min():.2f} to {ratio.max():.2f}",
            }
        )
    return pd.DataFrame(rows)


CONVERTED = {"dense": "dense", "ndlinear": "sum of NdLinear terms", "low-rank": "low rank"}
STAGES = {"before": "before_accuracy", "fitted": "fitted_accuracy", "after": "accuracy"}


def draw_conversion(axis, runs: pd.DataFrame) -> None:
    """Accuracy of a network before some of its layers are exchanged, right after, and after a brief training: a line for each
    kind of layer, thin lines for the seeds."""
    for kind, part in runs.groupby("kind", sort=False):
        look = {"color": figures.colour(kind)}
        values = 100 * part[list(STAGES.values())].to_numpy()
        axis.plot(range(3), values.T, lw=0.6, alpha=0.5, **look)
        mark = figures.marker(kind)
        axis.plot(range(3), values.mean(0), mark, ls="-", lw=1.6, label=CONVERTED[kind], **look)
    axis.set_xticks(range(3), ["dense", "exchanged", "trained on"])
    axis.set(ylabel="accuracy, percent")
