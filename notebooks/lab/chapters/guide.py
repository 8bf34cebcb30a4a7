"""Situations in which someone might use the layer: ours against dense and against all recorded models of its size."""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd

from .. import stats
from ..page import figures
from ..page.recorded import recorded
from ..page.show import cells, grid, put

SLACK = 1.05  # a model of equal size may have up to 5 % more parameters: widths are whole numbers
LOSS = 1.0  # "at no loss": less than one point is lost
WORDS = {  # what a reader calls the models that the figures' style does not name
    "base*": "smaller dense block",
    "mean": "constant",
    "sorted": "logistic regression, sorted values",
    "linear": "linear or logistic regression",
    "blocks-of-2": "block-diagonal",
    "blocks-64": "block-diagonal",
    "low-rank-1": "rank one",
    "dense twin 100": "dense block, width 100",
    "dense twin 75": "dense block, width 75",
    "lora-1": "LoRA of rank 1",
    "lokr-8-7": "LoKr of PEFT",
}
DATA = ("data", "dataset", "task", "model")  # columns that name the data or the network of a row
ITSELF = "NdLinear itself, in another shape or start"
SHUFFLED = "a control: NdLinear with its input shuffled"
PAST = "reads the past of the forecast quantity, which the others do not get"


class Situation(NamedTuple):
    """One comparison: which recorded runs, what is measured, and on what scale."""

    name: str
    kind: str  # the row of the figure in which it stands
    chapter: str
    records: tuple[str, ...]
    scale: str
    where: Mapping = MappingProxyType({})
    metric: str = "test_accuracy"
    ours: str = "ndlinear"
    dense: str = "dense"
    examples: int = 0  # training examples times passes: the largest scale of a task decides
    search: tuple[str, ...] = ()  # where the rates of the models were searched
    chosen_by: str = (
        "val_loss"  # what chose a rate in the chapter; an accuracy chooses its highest mean
    )
    # model: why it is no opponent although it is small enough
    left_out: Mapping = MappingProxyType({})
    error_of: str = ""  # if named, the metric is an error, given in percent of this model's
    # if named, the runs of ours and dense with better chosen rates
    against_dense: tuple[str, ...] = ()
    seconds: tuple = ()  # the record and the conditions of the times, if they were measured

    @property
    def task(self) -> str:
        """The name without its scale: of one task, one scale decides."""
        return self.name.split(" (")[0]


def _where(frame: pd.DataFrame, conditions: Mapping) -> pd.DataFrame:
    """The rows that agree with the conditions on the columns that there are, or have nothing there; a tuple is any of its values."""
    for column in set(conditions) & set(frame):
        wanted = conditions[column]
        among = wanted if isinstance(wanted, tuple) else (wanted,)
        frame = frame[frame[column].isin(among) | frame[column].isna()]
    return frame


def _all(names: tuple[str, ...], where: Mapping, read) -> pd.DataFrame:
    """The rows of some experiments that agree with the conditions, with one column `arm` for what was trained."""
    frame = _where(read(*names), where)
    for column in ("model", "kind"):
        if "arm" not in frame and column in frame:
            frame = frame.rename(columns={column: "arm"})
    for column in ("width", "family"):
        if column in frame:
            frame = frame.assign(arm=frame["arm"] + " " + frame[column].astype(str))
    return frame


def runs(situation: Situation, read=recorded) -> pd.DataFrame:
    """The runs of a situation: columns `arm`, `seed`, the metric. A rate that was varied is the best in validation."""
    if situation.records == ("compress-digits",):
        return replaced(situation.where["model"], read)
    frame = repeated(_all(situation.records, situation.where, read))
    varied = "lr" in frame and frame.groupby("arm")["lr"].nunique().max() > 1
    if not varied:
        return frame
    sign = 1 if situation.chosen_by.endswith("loss") else -1
    frame = frame.assign(criterion=sign * frame[situation.chosen_by])
    return stats.at_best_rates(frame, ["arm"], "criterion")


def repeated(frame: pd.DataFrame) -> pd.DataFrame:
    """A model without chance was run once: its run stands beside every seed of the others."""
    alone = frame.groupby("arm")["seed"].transform("size") == 1
    seeds = pd.DataFrame({"seed": frame["seed"].unique()})
    return pd.concat([frame[~alone], frame[alone].drop(columns="seed").merge(seeds, how="cross")])


def replaced(net: str, read=recorded) -> pd.DataFrame:
    """A trained dense layer and all that stood in for it: columns `arm`, `seed`, `accuracy`; `terms` in place of parameters."""
    wide = read("compress-digits")
    wide = wide[wide["model"] == net]
    arms = [name for name in wide if name.split("/")[0] in ("dense", "ndlinear-sum", "low-rank")]
    long = wide.melt("seed", arms, "arm", "accuracy").dropna()
    return long.assign(terms=long["arm"].str.split("/").str[1].astype(int))


# ----------------------------------------------------------------------------------------------------------- the opponents
def sizes(found: pd.DataFrame) -> pd.Series:
    """Trained parameters of each arm (for a replaced layer the number of its terms, which cost the same in both forms)."""
    return found.groupby("arm")["parameters" if "parameters" in found else "terms"].mean()


def opponents(situation: Situation, found: pd.DataFrame) -> list[str]:
    """All arms with at most 1.05 times the parameters of ours, but those that are left out for a reason that is written."""
    size = sizes(found)
    small = size[size <= SLACK * size[situation.ours]].index
    return [arm for arm in small if arm not in {situation.ours, *situation.left_out}]


def best(found: pd.DataFrame, situation: Situation) -> str:
    """The opponent with the best mean, over the seeds that ours has too."""
    own = found.loc[found["arm"] == situation.ours, "seed"]
    mean = found[found["seed"].isin(own)].groupby("arm")[situation.metric].mean()
    mean = mean[opponents(situation, found)]
    return mean.idxmin() if situation.error_of else mean.idxmax()


def gain(found: pd.DataFrame, situation: Situation, other: str) -> tuple[float, float, float]:
    """Ours minus another arm, paired by seed, in percentage points: mean and interval. Above zero, ours is better."""
    pair = found[found["arm"].isin([situation.ours, other])]
    shared = pair.groupby("seed")["arm"].transform("nunique") == 2
    by_seed = stats.differences(pair[shared], situation.metric, situation.ours, other)
    if not situation.error_of:
        return stats.interval(100 * by_seed)
    of = found.loc[found["arm"] == situation.error_of, situation.metric].mean()
    return stats.interval(-100 * by_seed / of)


def own_rates(situation: Situation, found: pd.DataFrame, arms: list[str], read=recorded) -> bool:
    """Whether each of these arms had its learning rate chosen from several; one that is not trained by steps needs none."""
    data = {key: value for key, value in situation.where.items() if key in DATA}
    tried = _all((*situation.records, *situation.search), data, read)
    if situation.records == ("compress-digits",):
        return tried["lr"].nunique() > 1
    if "lr" not in tried:
        return True
    tried = tried[tried["lr"].fillna(0) > 0]
    if "parameters" in tried:
        tried = tried[tried["parameters"] != 0]  # a constant has no rate
    count = tried.groupby("arm")["lr"].nunique()
    return all(count.get(arm, 2) > 1 for arm in arms)


def seconds(situation: Situation, read=recorded) -> tuple[float, float, float] | None:
    """Time of a training step with NdLinear over that with the dense layer, mean and interval; None where none was measured."""
    if not situation.seconds:
        return None
    name, where = situation.seconds
    times = _where(read(name), where)
    return tuple(np.exp(stats.interval(np.log(times["ndlinear"] / times["dense"]))))


def compare(situation: Situation, read=recorded) -> dict:
    """One row: ours against dense and against the best opponent, with intervals, sizes, times and the scale."""
    found = runs(situation, read)
    opponent = best(found, situation)
    row = {name: getattr(situation, name) for name in ("kind", "chapter", "scale", "examples")}
    row |= {"situation": situation.name, "task": situation.task, "opponent": opponent}
    again = situation._replace(records=situation.against_dense or situation.records)
    for name, other, among in (
        ("dense", situation.dense, runs(again, read)),
        ("fair", opponent, found),
    ):
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), gain(among, situation, other)))
    if "parameters" in found:
        ours, dense = sizes(found)[[situation.ours, situation.dense]]
        row |= {"parameters": ours, "share": ours / dense}
    time = seconds(situation, read)
    row |= dict(zip(("time", "time_low", "time_high"), time or [np.nan] * 3))
    arms = [situation.ours, situation.dense, *opponents(situation, found)]
    row["counts"] = own_rates(situation, found, arms, read)
    return row | {"seeds": found.loc[found["arm"] == situation.ours, "seed"].nunique()}


# ------------------------------------------------------------------------------------------------------------- the answers
def _word(low: float, high: float, bound: float = 0.0) -> str:
    return {True: "yes", False: "no", None: "not shown"}[stats.above((low, high), bound)]


def better(row) -> str:
    """Better than the best recorded model of its size?"""
    return _word(row["fair_low"], row["fair_high"])


def smaller(row) -> str:
    """Smaller than the dense network at no loss?"""
    if row["share"] > 1 / SLACK:
        return "not smaller"
    if row["dense_high"] < 0:
        return "no"
    return "yes" if row["dense_low"] > -LOSS else "not shown"


def faster(row) -> str:
    """Faster than the dense network in a training step?"""
    return "not timed" if np.isnan(row["time"]) else _word(-row["time_high"], -row["time_low"], -1)


# ------------------------------------------------------------------------------------------------------- the situations
PICTURES, SERIES = "Head after a CNN", "Series, time and channel"
FORECASTS, PIXELS = "Forecasts, time and channel", "Pixels in place"
FOLDED, BLOCK = "One axis, folded by hand", "Transformer block, tokens and channels"
FEW, CONTROL, LOST = "Pixels, few", "Pixels shuffled, a control", "Digits"
WITHOUT_AXES = (FOLDED, CONTROL)
STEP = {"pass": "training", "batch": 128}
THREE = {"ndlinear-3": ITSELF}
PARTS = {"all": 1.0, "a sixteenth": 0.0625}


def _images() -> list[Situation]:
    hundred, ten = "CNN features, CIFAR-100", "CNN features, CIFAR-10"
    top = {"metric": "test_top_five"}
    printed = {"scale": "50,000 pictures, 50 epochs", "examples": 2_500_000}
    brief = {"scale": "20,000 pictures, 6 epochs", "examples": 120_000}
    own = {"scale": "10,000 pictures, 10 epochs", "examples": 100_000}
    parts = ("", "-simple", "-relu", "-pointwise")
    of_ten = tuple(f"cnn-printed-cifar10{part}" for part in parts)
    of_hundred = tuple(f"cnn-printed-cifar100{part}" for part in parts[:3])
    search = {"search": ("cnn-own-rates-search",)}
    rows = [
        (f"{hundred} (10 epochs)", "cifar100", ("cnn-own-rates",), top | own | search),
        (f"{hundred} (printed)", "cifar100", of_hundred, top | printed),
        (f"{hundred} (6 epochs)", "cifar100", ("cnn-longer",), top | brief),
        (f"{ten} (printed)", "cifar10", of_ten, printed),
        (f"{ten} (6 epochs)", "cifar10", ("cnn-longer",), brief),
    ]
    step = {"seconds": ("overhead-time", {"network": "CNN"}), "left_out": {"relu": ITSELF}}
    found = [
        Situation(name, PICTURES, "40_cnn", records, where={"data": data}, **step, **more)
        for name, data, records, more in rows
    ]
    with_relu = {"ours": "relu", "left_out": {"ndlinear": ITSELF}, "seconds": ()}
    behind = ((ten, found[3]), (hundred, found[1]))
    return found + [
        one._replace(name=f"{name}, ReLU behind it (printed)", **with_relu) for name, one in behind
    ]


def _digits() -> list[Situation]:
    one = Situation(
        "Digits, one layer", LOST, "10_one_layer", ("digits-head",), "1,000 pictures, 200 epochs",
        left_out={"ndlinear-shuffled": SHUFFLED}, chosen_by="val_accuracy",
    )  # fmt: skip
    return [one] + [
        Situation(
            f"Digits, residual network, {words}", LOST, "64_structured_layers", ("structured-share",), "300 steps",
            {"data": "digits", "part": part}, search=("structured-share-rates",), left_out=THREE,
            seconds=("structured-time", STEP | {"width": 64}),
        )
        for words, part in PARTS.items()
    ]  # fmt: skip


def _pixels() -> list[Situation]:
    scale = "{:,} pictures, 600 steps"
    tuned = scale + ", rates chosen on a quarter of the pictures, those against dense on all"
    return [
        Situation(
            f"Pixels of CIFAR-10 {order}, {count:,}", CONTROL if order == "shuffled" else kind, "64_structured_layers",
            ("structured-pixels",), words.format(count), {"order": order, "samples": count, "seed": tuple(range(5))},
            search=("structured-pixels-rates",), left_out=THREE, against_dense=better_rates,
            seconds=("structured-time", STEP | {"width": 256}),
        )
        for order in ("in place", "shuffled")
        for count, kind, words, better_rates in (
            (18000, PIXELS, tuned, ("structured-pixels-whole",)),
            (1125, FEW, scale, ()),
        )
    ]  # fmt: skip


def _students() -> list[Situation]:
    brief = "18,000 pictures, 6 epochs"
    kinds = {
        "tokens 100": ("tokens and channels", BLOCK, f"{brief}; no other block mixes tokens"),
        "two modes 100": ("channels folded", FOLDED, brief),
    }
    others = [*kinds, *(f"ndlinear {width}" for width in (50, 75, 100, 125))]
    records = ("vit-others", "vit-students", "vit-twins")
    return [
        Situation(
            f"Transformer block, {words}", kind, "50_as_a_dense_layer", records, scale, {"data": "cifar10"},
            ours=arm, dense="standard 125", search=("vit-tuning",),
            left_out={other: ITSELF for other in others if other != arm},
        )
        for arm, (words, kind, scale) in kinds.items()
    ]  # fmt: skip


def _series() -> list[Situation]:
    sets = dict.fromkeys(("ECG5000", "ECGFiveDays", "ChlorineConcentration"), "ucr")
    sets |= {"RacketSports": "ucr-racketsports", "Heartbeat, training part": "ucr-heartbeat"}
    return [
        Situation(
            f"Series, {data}", SERIES, "42_time_series_classification",
            ("ucr-networks" if name == "ucr" else name, f"{name}-classical"), "40 to 200 epochs", {"data": data},
            "weighted_f1", "time", "base", left_out={"ndlinear": ITSELF},
        )
        for data, name in sets.items()
    ]  # fmt: skip


def _forecasts() -> list[Situation]:
    past = {"last value none": PAST, "linear, with the past none": PAST}
    other = {"Transformer": "RNN", "RNN": "Transformer"}
    itself = [f"ndlinear {family}" for family in other]
    return [
        Situation(
            f"Forecast {data}, {family}", FORECASTS, "41_forecasting", ("ett-forecast",), "10 or 20 epochs",
            {"dataset": data, "protocol": "chronological"}, "mse", f"ndlinear-modes {family}", f"dense {family}",
            error_of="mean none", left_out=past | dict.fromkeys([*itself, f"ndlinear-modes {second}"], ITSELF),
        )
        for data in ("ETTh1", "ETTh2", "ETTm1", "ETTm2")
        for family, second in other.items()
    ]  # fmt: skip


def _text() -> list[Situation]:
    itself = ("ndlinear (1, 1)", "ndlinear (4, 4)", "ndlinear (10, 10)", "ndlinear ReLU")
    left_out = dict.fromkeys(itself, ITSELF) | {"ndlinear shuffled": SHUFFLED}
    drawn = "1,800 sentences, 50 epochs"
    rows = [
        ("SST-2 (official)", "sst2", "official", "4 epochs, official parts", 67349 * 4),
        ("SST-2 (re-drawn)", "sst2", "re-drawn", drawn, 1800 * 50),
        ("CoLA (official)", "cola", "official", "20 epochs, official parts", 8551 * 20),
        ("CoLA (re-drawn)", "cola", "re-drawn", drawn, 1800 * 50),
    ]
    return [
        Situation(
            f"Sentence vectors, {name}", FOLDED, "44_text_head", ("text-head",), scale,
            {"data": data, "split": split}, "accuracy", examples=examples, left_out=left_out,
        )
        for name, data, split, scale, examples in rows
    ]  # fmt: skip


def _folded() -> list[Situation]:
    place = (FOLDED, "64_structured_layers")
    characters = Situation(
        "Characters, feed-forward block", *place, ("structured-characters",), "600 steps", metric="test_loss",
        search=("structured-characters-rates",), left_out=THREE, error_of="dense",
    )  # fmt: skip
    return [characters] + [
        Situation(
            f"Electrocardiograms folded, {words}", *place, ("structured-ecg",), "300 steps",
            {"data": "ecg5000", "part": part}, search=("structured-ecg-rates",), left_out=THREE,
        )
        for words, part in PARTS.items()
    ]  # fmt: skip


def _adapters() -> list[Situation]:
    place, full = (FOLDED, "52_lora"), {"metric": "accuracy", "dense": "full"}
    return [
        Situation(
            "Adapter, encoder, SST-2", *place, ("lora-adapters", "lora-more"), "240 steps of 16", {"task": "sst2"},
            search=("lora-rates", "lora-more-rates"), left_out={"ndlinear-released": ITSELF}, **full,
        ),
    ]  # fmt: skip


def _conversions() -> list[Situation]:
    encoder = Situation(
        "Trained encoder converted", FOLDED, "72_should_you_use_it", ("convert-encoder",), "120 steps of 16 after it",
        metric="accuracy", search=("convert-rates",),
    )  # fmt: skip
    stages = ("fitted", "tuned", "tuned-brief", "scratch", "scratch-brief")
    terms = [f"ndlinear-sum/{rank}/{stage}" for rank in (1, 2, 4, 8) for stage in stages]
    ours, dense = "ndlinear-sum/8/tuned", "dense/64/fitted"
    return [encoder] + [
        Situation(
            f"Trained layer, eight terms, {net.upper()}", FOLDED, "22_approximation", ("compress-digits",),
            "1,000 pictures, 100 epochs after it", {"model": net}, "accuracy", ours, dense,
            left_out={term: ITSELF for term in terms if term != ours},
        )
        for net in ("mlp", "cnn")
    ]  # fmt: skip


def situations() -> list[Situation]:
    """All situations, those with real axes first."""
    real = [*_pixels(), *_digits(), *_images(), *_students(), *_series(), *_forecasts()]
    found = [*real, *_text(), *_folded(), *_adapters(), *_conversions()]
    return sorted(found, key=lambda situation: situation.kind in WITHOUT_AXES)


@functools.cache
def measured() -> pd.DataFrame:
    """All situations of the page, one row each; `decides` marks the largest scale of a task, at own rates if there is one."""
    read = functools.cache(recorded)  # several situations rest on one record
    rows = pd.DataFrame([compare(situation, read) for situation in situations()])
    for name, rule in (("better", better), ("smaller", smaller), ("faster", faster)):
        rows[name] = [rule(row) for row in rows.to_dict("records")]
    order = rows.sort_values(["counts", "examples"])
    return rows.assign(decides=rows.index.isin(order.groupby("task").tail(1).index))


def with_axes(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that decide and count, where the input has axes that mean something."""
    return rows[rows["decides"] & rows["counts"] & ~rows["kind"].isin(WITHOUT_AXES)]


# ------------------------------------------------------------------------------------------------------------- the page
def numbers(row, name: str, form: str = "+.1f") -> str:
    """Mean and interval as text."""
    mean, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def name(arm: str) -> str:
    """A model in the words of a reader."""
    first = arm.split("/")[0].removesuffix(" none")
    return WORDS.get(first, figures.label(first))


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows as a reader sees them: three answers, each with its numbers, and the evidence."""
    found = []
    for row in rows.to_dict("records"):
        share = "" if np.isnan(row["share"]) else f"; {row['share']:.1%} of the parameters"
        time = "" if np.isnan(row["time"]) else f"; {numbers(row, 'time', '.2f')} times dense"
        rates = "own rates" if row["counts"] else "printed rate only, not counted"
        scale = rates if row["decides"] else f"{rates}, another scale decides"
        found.append(
            {
                "situation": row["situation"],
                "better than the best of its size?": f"{row['better']}; {numbers(row, 'fair')} ({name(row['opponent'])})",
                "smaller at no loss?": f"{row['smaller']}; {numbers(row, 'dense')}{share}",
                "faster?": f"{row['faster']}{time}",
                "evidence": f"{row['scale']}; {row['seeds']} seeds; {scale}",
                "chapter": row["chapter"],
            }
        )
    return pd.DataFrame(found)


def link(chapter: str) -> str:
    """A chapter as a link, named by its number."""
    return f'<a href="{html.escape(chapter)}.html">chapter {html.escape(chapter[:2])}</a>'


def table(rows: pd.DataFrame) -> None:
    """A table whose column `chapter` links to the chapters."""
    body = [
        cells(link(v) if k == "chapter" else html.escape(str(v)) for k, v in row.items())
        for row in rows.to_dict("records")
    ]
    shown = grid("Situations and answers", rows.columns, body)
    put(rows.to_string(index=False), html=shown)


def draw(axis, rows: pd.DataFrame) -> None:
    """Differences with intervals, two for each situation; hollow where only the printed rate was run."""
    marks = (
        ("dense", "dense", -0.14, "the dense network"),
        ("fair", "ndlinear", 0.14, "the best model of its size"),
    )
    for column, style, shift, words in marks:
        for counts, part in rows.assign(at=np.arange(len(rows)) + shift).groupby("counts"):
            found = part[[column, f"{column}_low", f"{column}_high"]]
            look = {"label": words} if counts else {"mfc": "none"}
            figures.intervals(axis, part["at"], found, style, capsize=2, **look)
    names = [f"{row.situation}\n({name(row.opponent)})" for row in rows.itertuples()]
    axis.set_yticks(range(len(rows)), names)
    axis.set_xscale("symlog", linthresh=1)
    ticks = [-100, -10, -1, 0, 1, 10, 100]
    axis.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axis.axvline(0, color="#8a8a8a", linewidth=1)
    axis.set(xlabel="NdLinear minus the other, percentage points (right: NdLinear is better)")
    axis.invert_yaxis()


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
