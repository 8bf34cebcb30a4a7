"""Printed numbers of the paper held against numbers that a cell computes: one rule, one list, one table."""

from __future__ import annotations

import itertools

import pandas as pd
import torch

import ndlinear
from ndlinear_lora import apply_ndlinear_lora

from .. import models
from ..counts import count_macs, operations, sizes
from ..models import AsReleased, size
from ..modes import LabError
from ..page.facts import fact, facts
from ..page.ledger import claim

CLASSES = ("exact", "rounded", "truncated", "differs", "no configuration")
UNITS = {"count": 1, "GFLOP": 1e9}


def classify(value: float | None, printed: float, ulp: float) -> str:
    """How a computed number relates to a printed one, whose last printed digit counts ``ulp``.

    "exact": equal, every digit printed. "rounded": at most half a unit away. "truncated": the digits left out were cut.
    "differs": else. "no configuration": there is nothing to compute (None).
    """
    if value is None:
        return "no configuration"
    slack = 1e-9 * ulp  # printed decimals are not exact in binary
    if ulp == 1 and value == printed:
        return "exact"
    if abs(value - printed) <= ulp / 2 + slack:
        return "rounded"
    return "truncated" if printed - slack <= value < printed + ulp - slack else "differs"


def _in_unit(count: float | None, metric: str) -> str:
    if pd.isna(count):
        return ""
    return f"{count / 1e9:,.3f}" if metric == "flops" else f"{count:,.0f}"


class Sheet:
    """The counts printed in the tables, each beside the one that a model gives.

    >>> sheet = Sheet()
    >>> sheet.add("text_classify", 222, "768 as 96 x 8 to 2 x 2, then 4-2", "bert-head-params-nd", method="NdLinear")
    >>> sheet.judge("bert-head-params-nd")
    {'holds': True}
    """

    def __init__(self):
        self.rows, self.taken = [], set()

    def add(self, table, count, how, claim, metric="params", departs="", **where) -> None:
        """Enter a count for all cells of a table that ``where`` selects.

        Args:
            table: of the paper, by its name; count: of the model that was built, None if none was found; in units, whatever the
                unit of the table.
            how: the model in a few words; claim: the claim of the ledger that the cells belong to.
            departs: the setting, if any, in which this model contradicts the text or the released code.
        """
        cells = facts(table, metric=metric, **where)
        places = {(table, *self._place(cell)) for cell in cells.itertuples()}
        if not places or places & self.taken:
            raise LabError(f"{table} {where}: no such cell, or a cell that has its count already")
        self.taken |= places
        for cell in cells.itertuples():
            found = None if count is None else count / UNITS[cell.unit]
            row = {"table": table, "row": cell.row, "col": cell.col, "metric": metric}
            row |= {"dataset": cell.dataset, "network": cell.model, "method": cell.method}
            row |= {"printed": cell.printed, "rebuilt": count, "how": how, "departs": departs}
            row["ratio"] = None if found is None else found / cell.value
            row["match"] = classify(found, cell.value, float(cell.ulp))
            self.rows.append(row | {"claim": claim})

    def judge(self, claim: str) -> dict[str, bool]:
        """The evidence on a claim, as `lab.verdict` takes it.

        It holds if every cell is met, exactly, rounded or truncated; under a condition if a cell is met only by a model
        that departs from the text or the released code; it fails if a cell is not met.
        """
        rows = [row for row in self.rows if row["claim"] == claim]
        if not rows:
            raise LabError(f"no count was entered for the claim {claim!r}")
        met = all(row["match"] in CLASSES[:3] for row in rows)
        if met and any(row["departs"] for row in rows):
            return {"holds": False, "under": True}
        return {"holds": met}

    @staticmethod
    def _place(cell) -> tuple:
        return cell.row, cell.col, cell.metric, cell.model

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each cell entered so far."""
        return pd.DataFrame(self.rows)

    def listed(self) -> pd.DataFrame:
        """All cells entered so far, with the number printed in each and the network that was built for it."""
        rows = self.frame
        rows["experiment"] = places(rows)
        rows["rebuilt"] = [_in_unit(*pair) for pair in zip(rows["rebuilt"], rows["metric"])]
        names = ["experiment", "dataset", "network", "method", "how", "printed", "rebuilt", "match"]
        return rows[[*names, "departs"]]

    def missing(self, tables: list[str]) -> list[tuple[str, str]]:
        """The printed counts of these tables that have not been entered."""
        return [
            (name, c.printed)
            for name in tables
            for c in facts(name, metric=["params", "flops"]).itertuples()
            if (name, *self._place(c)) not in self.taken
        ]


# ------------------------------------------------------------------------------------------------ the paper's own tables
KEYS = ("dataset", "model", "width", "depth", "blocks", "sigma")
BASELINES = {  # table: rows of NdLinear, rows that it is held against
    "ndlinear_lora": ({"method": "NdLinear-LoRA"}, {"method": "LoRA", "rank": 8}),
    "opt_pretrain": ({"method": "NdLinear"}, {"method": "Linear"}),
    "text_classify": ({"method": "NdLinear"}, {"method": "Linear"}),
    "ts_forecast_combined_side_by_side": ({"method": "NdLinear"}, {"method": "Linear"}),
    "ts_tf_classify_final_revised": ({"method": "NdLinear"}, {"method": "Base Model"}),
    "ts_tf_classify_final": ({"method": "NdLinear"}, {"method": "Linear"}),
    "cnn_image_classify": ({"method": "NdLinear"}, {"method": "Linear"}),
    "fid_scores": ({"method": "NdLinear"}, {"method": "Baseline"}),
    "trl_tcl": ({"method": "NdLinear"}, {"method": ["TRL/TCL", "TT"]}),
    "vit_scaling": ({"method": "NdViT"}, {"method": "Naive ViT"}),
    **{f"radius_0{s}": ({"method": "NdLinear"}, {"method": "dense"}) for s in (10, 20, 30)},
}


def pairs(
    table: str, metric: str, new: dict | None = None, old: dict | None = None, **where
) -> pd.DataFrame:
    """Printed cells of ``new`` beside the cells of ``old`` that agree in data, network, width, depth and number of blocks.

    Without ``new`` and ``old``: NdLinear and its baseline, as `BASELINES` has them. Columns ``new``, ``old``, ``fewer``, by
    how many per cent new is below old.
    """
    new, old = new or BASELINES[table][0], old or BASELINES[table][1]
    halves = [facts(table, metric=metric, **where, **who) for who in (new, old)]
    keys = [k for k in KEYS if k in halves[0]]
    a, b = (half[[*keys, "value"]] for half in halves)
    both = a.rename(columns={"value": "new"}).merge(b.rename(columns={"value": "old"}), on=keys)
    if both.empty:
        raise LabError(f"{table}: no {metric} of {new} and {old} that belong together")
    return both.assign(fewer=100 * (1 - both["new"] / both["old"]))


def recomputed() -> dict[str, float]:
    """The percentages, ratios and differences of the text (table "text_numbers"), from the cells that they are made of."""
    ett, cnn = "ts_forecast_combined_side_by_side", "cnn_image_classify"

    def fewer(table, metric="params", **options):  # the largest, where there are several pairs
        return pairs(table, metric, **options)["fewer"].max()

    def change(table, metric, **options):
        both = pairs(table, metric, **options).iloc[0]
        return both["new"] - both["old"]

    def times(table, metric, **options):
        both = pairs(table, metric, **options).iloc[0]
        return both["old"] / both["new"]

    found = {}
    for data in ("GSM8K", "MultiArith"):
        where = {"model": "Qwen3-1.7B", "dataset": data}
        found[f"lora-{data.lower()}"] = change("ndlinear_lora", "accuracy", **where)
    for size_ in ("Small", "Mid"):
        gap = change("opt_pretrain", "perplexity", model=f"OPT-{size_}")
        found[f"opt-{size_.lower()}-gap"] = -gap
    for model, data in (("RNN", "ETTh1"), ("Transformer", "ETTh2")):
        found[f"ett-params-{model.lower()}"] = fewer(ett, model=model)
        found[f"ett-{model.lower()}"] = fewer(ett, "mse", model=model, dataset=data)
    for classes, metric in ((10, "acc_at_1"), (100, "acc_at_5")):
        found[f"cifar{classes}-params"] = fewer(cnn, dataset=f"CIFAR-{classes}")
        found[f"cifar{classes}-accuracy"] = 100 * change(cnn, metric)
    biases = {"new": {"bias": "true"}, "old": {"bias": "false"}}
    for width in (32, 128):
        found[f"bias-{width}"] = fewer("app_bias", "test_mse", **biases, width=width)
    sweep = facts("app_hyperparam", metric="acc_at_5")
    worst = sweep.loc[sweep["value"].idxmin()]
    by_size = sweep.pivot(index=["lr", "batch"], columns="hidden_size", values="value")
    dense = fact(cnn, dataset="CIFAR-100", method="Linear", metric="params")
    doubled = facts("app_hyperparam", metric="params")["value"].min()
    few, many = (claim(f"sample-{kind}")["numbers"] for kind in ("separable", "entangled"))
    return found | {
        "lora-qwen": fewer("ndlinear_lora", model="Qwen3-1.7B"),
        "lora-llama": times("ndlinear_lora", "params", model="LLaMA3-8B"),
        "bert-head": fewer("text_classify"),
        "ucr-max": fewer("ts_tf_classify_final_revised"),
        "ucr-lsst": fewer("ts_tf_classify_final_revised", dataset="LSST"),
        "cardio": fewer("ts_tf_classify_final", dataset="Cardio Disease"),
        "delivery": fewer("ts_tf_classify_final", dataset="Delivery Time"),
        "tt-latency": times("trl_tcl", "latency", old={"method": "TT"}),
        "sweep-range": sweep["value"].max() - worst["value"],
        "sweep-worst": worst["value"],
        "sweep-ratio": dense / float(worst["params"]),
        "hidden-gain": (by_size["256,2,2"] - by_size["128,4,4"]).max(),
        "hidden-params": 100 * (1 - doubled / dense),
        "order-spread": 100 - facts("app_ordering")["value"].min(),
        "samples-fewer": few["dense"] / few["nd"],
        "samples-more": many["nd"] / many["dense"],
    }


# ---------------------------------------------------------------------------------------- every printed count, rebuilt
RADIUS = "radius_010", "radius_020", "radius_030"


def rebuilt() -> Sheet:
    """Every count that a table prints, beside that of the network that we build for it."""
    sheet = Sheet()
    with torch.device("meta"):  # shapes without numbers
        for enter in (_radius_bump, _heads, _series, _forecasters, _cifar, _opt, _adapters, _dit):
            enter(sheet.add)
    return sheet


def _radius_bump(add) -> None:
    for c in facts("radius_010", metric="params").itertuples():
        net = models.radius_mlp(c.method, int(c.width), int(c.depth), layer=AsReleased)
        forward = 2 * count_macs(net, torch.zeros(1, 10))
        how = f"width {c.width}, depth {c.depth}"
        key = {"method": c.method, "width": c.width, "depth": c.depth}
        judged = "entropy-params-dense" if c.method == "dense" else "entropy-params-nd"
        for name in RADIUS:
            add(name, size(net), how, judged, **key)
            add(name, forward * 1000 * 4000, how, "entropy-flops", "flops", **key)
    for c in facts("app_bias", metric="params").itertuples():
        net = models.radius_mlp("NdLinear", int(c.width), depth=2, bias=c.bias == "true")
        what = f"width {c.width}, depth 2, biases: {c.bias}"
        add("app_bias", size(net), what, "ablation-bias-params", width=c.width, bias=c.bias)


def _heads(add) -> None:
    for data in models.TABULAR:
        for method in ("Linear", "NdLinear"):
            judged, net = f"tabular-{data.split()[0].lower()}-params", models.tabular(data, method)
            how = "two layers and an output layer"
            add("ts_tf_classify_final", size(net), how, judged, dataset=data, method=method)
    departs, judged = "hidden size 2, the text says 128", "bert-head-params-linear"
    net = models.text_head()
    add("text_classify", size(net), "768-2-2", judged, departs=departs, method="Linear")
    how, net = "(96, 8) to (2, 2), then 4-2", models.text_head("NdLinear")
    add("text_classify", size(net), how, "bert-head-params-nd", method="NdLinear")


def _series(add) -> None:
    departs = "one encoder layer; the appendix says three recurrent layers of 128"
    for data, (_, width, _, m) in models.UCR.items():
        blocks = {"Base Model": 4 * width, "Base Model*": width, "NdLinear": (width, m)}
        for method, block in blocks.items():
            net, how = models.series_classifier(data, method), f"width {width}, block {block}"
            where = {"dataset": data, "method": method, "departs": departs}
            add("ts_tf_classify_final_revised", size(net), how, "ucr-params", **where)


def _forecasters(add) -> None:
    departs = {"Linear": "block of 2,048 units, the text says 32", "NdLinear": ""}
    how = {"Linear": "block of 2,048", "NdLinear": "as released: (32, 1) twice, and 2,048 unused"}
    for method in how:
        where = {"departs": departs[method], "model": "Transformer", "method": method}
        net, judged = models.forecaster(method), "ett-params-transformer"
        add("ts_forecast_combined_side_by_side", size(net), how[method], judged, **where)
    departs, how = "64 units, the text says 96", "96 units, then 96-96-12"
    where = {"model": "RNN", "claim": "ett-params-rnn"}
    add(
        "ts_forecast_combined_side_by_side", size(models.recurrent()), how, method="Linear", **where
    )
    net, where = models.recurrent("NdLinear", hidden=64), where | {"departs": departs}
    add("ts_forecast_combined_side_by_side", size(net), "64 units", method="NdLinear", **where)


def _cifar(add) -> None:
    units, images = "one per multiply-add; app:flops counts two", torch.zeros(128, 3, 32, 32)
    for method, head in (("Linear", "dense"), ("NdLinear", "ndlinear")):
        for n in (10, 100):
            where = {"dataset": f"CIFAR-{n}", "method": method}
            net, judged = models.cnn(head, n, layer=AsReleased), f"cnn-cifar{n}-params"
            add("cnn_image_classify", size(net), f"{n} classes", judged, **where)
    for hidden in ("128,4,4", "256,2,2"):
        net = models.cnn("ndlinear", 100, hidden=sizes(hidden), layer=AsReleased)
        for metric, departs in (("params", ""), ("flops", units)):
            count = size(net) if metric == "params" else operations(net, images)
            where = {"departs": departs, "hidden_size": hidden}
            judged = f"ablation-hyper-{metric}"
            add("app_hyperparam", count, f"to ({hidden})", judged, metric, **where)
    for method, head, classes, how, departs in (
        ("NdLinear", "ndlinear", 100, "(64, 8, 8) to itself", ""),
        ("TRL/TCL", "cp", None, "4096 x 4096 as CP of rank 64", "no classifier"),
        ("TT", "tt", 100, "4096 x 4096 as tensor train of rank 64", ""),
    ):
        net = models.cnn(head, classes, layer=AsReleased)
        judged = "cnn-cifar100-params" if method == "NdLinear" else "structured-params"
        add("trl_tcl", size(net), how, judged, departs=departs, method=method)
        work, where = operations(net, images), {"departs": units, "method": method}
        add("trl_tcl", work, how, "structured-flops", "flops", **where)


def _opt(add) -> None:
    for name, settings in models.OPT.items():
        for method, inside in (("Linear", None), ("NdLinear", models.OPT_INSIDE[name])):
            net = models.opt(**settings, inside=inside)
            count = size(net) - (size(net["project"]) if "project" in net else 0)
            how = f"block {inside or settings['hidden']}, as the training script counts"
            for printed in ("opt_pretrain", "linear_vs_ndlinear"):
                add(printed, count, how, "opt-params", model=name, method=method)


def adapted(name: str, bias: bool = False) -> int:
    """Trained parameters of a decoder whose linear maps have NdLinear adapters."""
    with torch.device("meta"):
        net = models.decoder(*models.DECODERS[name])
        return size(apply_ndlinear_lora(net, models.TARGETS, bias=bias))


def _adapters(add) -> None:
    departs = "no biases; the released adapter has them"
    for name, judged in (("Qwen3-1.7B", "lora-params-qwen"), ("LLaMA3-8B", "lora-params-llama")):
        maps = [layer for part in models.decoder(*models.DECODERS[name]) for layer in part.values()]
        for rank in (4, 8):
            count = sum(size(models.LoRA(layer, rank)) for layer in maps)
            where = {"model": name, "rank": rank}
            add("ndlinear_lora", count, f"rank {rank}", "lora-params-baseline", **where)
        where = {"model": name, "rank": "", "departs": departs}
        add("ndlinear_lora", adapted(name), "near-square factors", judged, **where)


def _dit(add) -> None:
    part = "some blocks; the released code replaces all or none"
    for variant, blocks, departs in (("674M", 0, ""), ("619M", 7, part), ("563M", 14, part)):
        net = models.dit(blocks)
        how = f"(1152, 1) twice in {blocks} of 28 blocks"
        add("fid_scores", size(net), how, "dit-params", departs=departs, variant=variant)


# ------------------------------------------------------------------------------------------------------ released shapes
def chain_cost(widths: tuple[int, ...], bias: bool) -> tuple[int, int]:
    """Parameters and multiply-adds of linear layers of these widths, one after the other."""
    macs = sum(a * b for a, b in itertools.pairwise(widths))
    return macs + bias * sum(widths[1:]), macs


def kind_of(shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """What a stack of NdLinear layers is when an axis of its input has one entry."""
    axes = [k for k, d in enumerate(shapes[0][0]) if d == 1]
    if not axes:
        return "multi-mode"
    widths = [1] + [hidden[axes[0]] for _, hidden in shapes]
    if set(widths) == {1}:
        return "dense"
    if widths[-1] == 1:
        return f"dense, learned activation of {max(widths)} terms"
    return "repeated by a learned line"


def released_shapes() -> pd.DataFrame:
    """Each experiment's NdLinear stack with its cost per unit, as released and in the cheapest order, and its dense baseline's."""
    rows = []
    for name, layers in facts("released_shapes").groupby("experiment", sort=False):
        first = layers.iloc[0]
        shapes = [(sizes(d), sizes(h)) for d, h in zip(layers["input_dims"], layers["hidden_size"])]
        step = 1 if first.order == "1..N" else -1
        base, macs = chain_cost(sizes(first.baseline), first.baseline_bias == "yes")
        stack = [shapes[0][0], *(hidden for _, hidden in shapes)]
        row = {"experiment": name, "unit": first.unit, "kind": kind_of(shapes)}
        row["shapes"] = " → ".join("×".join(map(str, shape)) for shape in stack)
        row["source"] = ":".join(filter(None, [first.file, first.line])) or "solved from the counts"
        row["parameters"] = sum(ndlinear.count_parameters(d, h) for d, h in shapes)
        row["released"] = sum(ndlinear.count_macs(d, h, range(len(d))[::step]) for d, h in shapes)
        row["cheapest"] = sum(
            ndlinear.count_macs(d, h, ndlinear.cheapest_order(d, h)) for d, h in shapes
        )
        rows.append(row | {"baseline_parameters": base, "baseline": macs})
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------------------------------ figures
PLACES = {  # beginning of a table's name -> the experiment; a longer beginning counts before a shorter one
    "radius": "Radius Bump",
    "app_bias": "bias ablation",
    "ts_tf": "tabular",
    "ts_fore": "ETT",
    "text": "BERT head",
    "ts_tf_classify_final_revised": "UCR",
    "cnn": "CIFAR",
    "trl_tcl": "CIFAR, TRL and TT",
    "app_hyper": "CIFAR, sweep",
    "linear_vs": "OPT",
    "opt": "OPT",
    "ndlinear_lora": "LoRA",
    "fid": "DiT",
}
LOOKS = {  # class of a match -> colour, of no method of the book: greens and violet are met
    "exact": "#1a8a5a",
    "rounded": "#6cae75",
    "truncated": "#8172b3",
    "differs": "#c44e72",
    "no configuration": "#8a8a8a",
}


def places(frame: pd.DataFrame) -> pd.Series:
    """The experiment of each cell, with the kind of count: "OPT", "Radius Bump: FLOPs"."""

    def place(table: str) -> str:
        found = [start for start in PLACES if table.startswith(start)]
        return PLACES[max(found, key=len)]

    return frame["table"].map(place) + frame["metric"].map({"params": "", "flops": ": FLOPs"})


def draw_matches(axis, frame: pd.DataFrame) -> None:
    """How many printed counts of each experiment are met, and how: one bar per experiment."""
    counts = pd.crosstab(places(frame), frame["match"]).reindex(columns=CLASSES, fill_value=0)
    counts = counts.loc[places(frame).unique()[::-1]]
    left = pd.Series(0, index=counts.index)
    for match in CLASSES:
        axis.barh(counts.index, counts[match], left=left, color=LOOKS[match], label=match)
        left += counts[match]
    axis.set(xlabel="printed counts")
    axis.grid(axis="y", visible=False)
    axis.legend(loc="lower right")
