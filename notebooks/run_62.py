# @title Setup: the same cell in every notebook (on Colab it fetches the book first)
MODE = ""  # @param ["", "replay", "smoke", "full"]
BOOK = ""  # address of the book's git repository, written by: make stamp URL=https://...

import os
import pathlib
import subprocess
import sys

PLACES = [pathlib.Path(p) for p in (".", "notebooks", "ndlinear-book/notebooks")]
if not any((p / "lab").is_dir() for p in PLACES):
    if not BOOK:
        raise SystemExit(
            "The book's files are not here and BOOK is empty: set BOOK above to the address of "
            "the book's git repository, or run this notebook inside a clone of it."
        )
    clone = ["git", "clone", "-q", "--depth", "1", BOOK, "ndlinear-book"]
    git = subprocess.run(clone, capture_output=True, text=True)
    if not (PLACES[-1] / "lab").is_dir():
        raise SystemExit(
            f"BOOK = {BOOK!r} did not bring the book. {git.stderr.strip()} Correct BOOK, remove the "
            "folder ndlinear-book if there is one, and run this cell again."
        )
os.chdir(next(p for p in PLACES if (p / "lab").is_dir()))
sys.path.insert(0, os.getcwd())
os.environ["NDL_MODE"] = MODE or os.environ.get("NDL_MODE", "replay")

import lab

lab.start()

lab.card("62_scaling", read_first=["13_memory", "61_overhead"])

import matplotlib.pyplot as plt
import pandas as pd
import torch
from lab import models
from lab.chapters import scaling
from ndlinear import NdLinear

def bytes_sent(model, workers=8):
    return scaling.all_reduce_bytes(scaling.FLOAT * models.size(model), workers)


rows = [(name, models.size(make())) for name, (make, _) in scaling.NETWORKS.items()]
sizes = pd.DataFrame(rows, columns=["network", "parameters"])
sizes["MB sent by one of 8"] = [bytes_sent(make()) / 1e6 for make, _ in scaling.NETWORKS.values()]
lab.table(sizes, {"parameters": "{:,}", "MB sent by one of 8": "{:.2f}"}, "Gradients in float32.")
dense, modewise = (models.size(models.cnn(head)) for head in ("dense", "ndlinear"))
assert (dense, modewise) == (1_070_986, 64_858)

lab.say(f"The paper's CNN sends {dense / modewise:.1f} times fewer bytes per step with NdLinear.")

MACHINE = lab.pick(
    full=lab.machine.machine(), smoke=lab.machine.machine(), replay="AMD EPYC, 2 threads"
)
POWERS = [8, 23]
grid = [
    dict(powers=POWERS, batch=32, rounds=15, repeat=3, machine=MACHINE, seed=seed)
    for seed in range(5)
]
tiny = dict(powers=[8, 11], batch=2, rounds=1, repeat=1)
times = lab.record("scaling-steps", grid, scaling.measured, timed=True, smoke=tiny, smoke_seeds=1)
powers = lab.pick(full=POWERS, smoke=[8, 11], replay=POWERS)
link, steps = scaling.predicted(times, powers)
lab.say(f"A message takes {1e6 * link.latency:.0f} µs, and then {link.bandwidth / 1e9:.2f} GB/s.")

form = dict.fromkeys(("alone", "communication", "predicted", "measured"), "{:,.0f}")
lab.table(
    steps,
    form | {"parameters": "{:,}", "error": "{:+.0%}"},
    "One step on two processes, microseconds; predicted from the step alone and the fitted link.",
)
worst = steps["error"].abs().max()
lab.finding("MODEL", holds=worst <= 0.2)

figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
exponents = range(*powers)
seen = times.median(numeric_only=True)
nbytes = [scaling.FLOAT * 2**k for k in exponents]
measured = [seen[f"all-reduce {2**k}"] for k in exponents]
line = [1e6 * scaling.all_reduce_seconds(n, 2, link) for n in nbytes]
axis.loglog(nbytes, line, color=lab.colour("dense"), label="fitted")
axis.loglog(nbytes, measured, "o", color=lab.colour("ndlinear"), label="measured")
axis.set(xlabel="bytes of the gradient", ylabel="microseconds of an all-reduce")
axis.legend()
plt.show()

layer = NdLinear((8, 12), (16, 4), bias=False, dtype=torch.float64)
x = torch.randn(5, 8, 12, dtype=torch.float64)
for p in (2, 4):
    y, sent = scaling.cut_forward(layer, x, p)
    assert (y - layer(x)).abs().max() < 1e-12
    assert sent == (p - 1) / p * 5 * 16 * 12 / p

rows = []
for dims, hidden in (((64, 64), (128, 128)), ((32, 32), (64, 64)), ((64, 8), (128, 16))):
    found = scaling.break_even(dims, hidden, workers=8)
    rows.append((f"{dims} → {hidden}", found["dense"], found["ndlinear"]))
columns = ["block and back", "dense", "NdLinear"]
caption = "Samples per step, of all 8 processes, from which data-parallel training sends less."
lab.table(pd.DataFrame(rows, columns=columns), {"NdLinear": "{:.0f}"}, caption)
assert all(few < many for _, many, few in rows)

ARMS = [("dense", 0), ("dense", 4), ("dense", 2), ("dense", 1), ("ndlinear", 0)]
FIXED = dict(steps=600, batch=64)
rates = [
    dict(arm=arm, rank=rank, lr=lr, **FIXED, seed=seed)
    for seed in range(100, 103)
    for arm, rank in ARMS
    for lr in lab.pick(full=(1e-3, 3e-3, 1e-2), smoke=(1e-3,))
]
options = dict(smoke={"steps": 4}, smoke_seeds=1, data=("digits",), together=True)
tried = lab.record("scaling-rates", rates, scaling.trained, **options)
best = tried.groupby(["arm", "rank", "lr"])["accuracy"].mean().groupby(["arm", "rank"]).idxmax()

grid = [
    dict(arm=arm, rank=rank, lr=best[arm, rank][-1], **FIXED, seed=seed)
    for seed in range(10)
    for arm, rank in ARMS
]
runs = lab.record("scaling-compressed", grid, scaling.trained, **options)
runs["name"] = [
    "NdLinear" if a == "ndlinear" else f"PowerSGD, rank {r}" if r else "dense"
    for a, r in zip(runs["arm"], runs["rank"])
]
table = lab.summary(runs, "name", ["accuracy", "bytes"])
lab.table(
    table[["name", "accuracy", "accuracy_low", "accuracy_high", "bytes"]],
    {"bytes": "{:,.0f}"},
    "Test accuracy with 95 % interval; bytes of gradients per step.",
    intervals={"accuracy": "{:.3f}"},
)

few = table.set_index("name")["bytes"]
allowed = [name for name in few.index if "rank" in name and few[name] <= few["NdLinear"]]
against = max(allowed, key=few.get)
gap = lab.paired(runs, "accuracy", against, "NdLinear", by="name")
word = {True: "higher", False: "lower", None: "not told apart"}[lab.above(gap)]
numbers = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gap)
lab.say(f"{against} minus NdLinear: {numbers}, {word}.")
pass

figure, axis = plt.subplots(figsize=(5.4, 3.4), layout="constrained")
for row in table.itertuples():
    look = "ndlinear" if row.name == "NdLinear" else "dense"
    axis.vlines(row.bytes / 1e3, row.accuracy_low, row.accuracy_high, color=lab.colour(look))
    axis.plot(row.bytes / 1e3, row.accuracy, lab.marker(look), color=lab.colour(look))
    axis.annotate(row.name, (row.bytes / 1e3, row.accuracy), (5, 5), textcoords="offset points")
axis.set(xscale="log", xlabel="kilobytes of gradients per step", ylabel="test accuracy")
axis.margins(x=0.25, y=0.2)
plt.show()

grid = [
    dict(workers=w, killed=k, runs=24, seconds=0.5, machine=MACHINE, seed=seed)
    for seed in range(5)
    for w, k in ((1, 0), (2, 0), (2, 1))
]
few_runs = dict(runs=2, seconds=0.01)
served = lab.record(
    "scaling-grid", grid, scaling.throughput, timed=True, smoke=few_runs, smoke_seeds=1
)
served["what"] = [
    f"{w} worker{'s' * (w > 1)}{', one killed' * k}"
    for w, k in zip(served["workers"], served["killed"])
]
shown = lab.summary(served, "what", "per_minute")
lab.table(shown.drop(columns="n"), {}, "Runs per minute", intervals={"per_minute": "{:.0f}"})
assert (served["complete"] == 1).all(), "a run was lost"

speed = served.pivot(index="seed", columns="what", values="per_minute")
gain = speed["2 workers"] / speed["1 worker"]
lab.say("Two workers over one: {:.2f} [{:.2f}, {:.2f}] times the runs.".format(*lab.interval(gain)))
lab.finding("GRID", holds=(served["complete"] == 1).all())

SPEED, HALF = 4e14, 2
CLUSTERS = {
    "8 GPUs, one node": (8, scaling.Link(3e-6, 450e9)),
    "64 GPUs": (64, scaling.Link(1e-5, 50e9)),
    "1,024 GPUs": (1024, scaling.Link(1e-5, 50e9)),
    "8 on gigabit Ethernet": (8, scaling.Link(5e-5, 0.125e9)),
}


def work(model, shape):
    return 6 * lab.count_macs(model, torch.zeros(1, *shape)) * 64 / SPEED


cnn = {head: models.cnn(head).eval() for head in ("dense", "ndlinear")}
TRAINED = {
    ("CNN", "dense"): (models.size(cnn["dense"]), work(cnn["dense"], (3, 32, 32))),
    ("CNN", "NdLinear"): (models.size(cnn["ndlinear"]), work(cnn["ndlinear"], (3, 32, 32))),
}
for arm in ("Linear", "NdLinear"):
    count = lab.fact("linear_vs_ndlinear", model="OPT-Small", method=arm, metric="params")
    TRAINED["OPT-Small", arm.replace("Linear", "dense") if arm == "Linear" else arm] = (
        count,
        6 * count * 16_384 / SPEED,
    )

rows = []
for where, (gpus, link) in CLUSTERS.items():
    for key, (count, compute) in TRAINED.items():
        found = scaling.shares(link, gpus, count, compute, HALF)
        both = [1e3 * found[what] for what in ("compute", "communication")]
        rows.append((where, *key, *both, found["efficiency"]))
columns = ["cluster", "network", "layers", "computing, ms", "sending, ms", "share of computing"]
plan = pd.DataFrame(rows, columns=columns)
form = dict.fromkeys(columns[3:5], "{:.3g}") | {"share of computing": "{:.0%}"}
lab.table(plan, form, "One step by the model, with the assumptions above.")

sending = plan.set_index(["cluster", "network", "layers"])["sending, ms"].unstack("layers")
ratio = (sending["dense"] / sending["NdLinear"]).unstack("network")
lab.finding(
    "With NdLinear the CNN's gradients take about two thirds of the time inside a node, where the "
    "messages decide and not the bytes, and a fourteenth of it on gigabit Ethernet. OPT-Small, with 4 % "
    "fewer parameters, sends 4 % faster everywhere.",
    holds=0.6 < 1 / ratio.loc["8 GPUs, one node", "CNN"] < 0.75
    and 14 < ratio.loc["8 on gigabit Ethernet", "CNN"] < 15
    and ratio["OPT-Small"].between(1.03, 1.05).all(),
)
