"""Whether rows still stand after the code changed: decided by what the experiment does at its smallest size, its canary.

A smoke run executes every experiment. What comes out is kept in results/canaries/<experiment>.json, and every later smoke run
must give the same within a measured tolerance. Rows of earlier code stand where the present code

1. gives the values of the canary (`moved`),
2. has no other statements than before among those that the canary does not execute (`dark`), and
3. has no number that the earlier code had not (`Reached.numbers`), so that an effect of scale alone does not pass.

Where replay meets code that it does not know, it runs the canary of the notebook once and keeps the answer beside the records;
`make canaries` writes it into the committed file. Rows of times depend on their code to the letter: no canary speaks for them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

import torch

import ndlinear

from .. import modes
from .fingerprint import Definition, bare, numbered
from .store import RecordError, canonical

FOLDER = "canaries"  # beside the records
WORLD = "_world"  # what torch and the layer do, in the same folder
SEEN = ".canaries"  # beside the records, not committed: answers for code that is not committed yet
ROUGH = 0.05  # a relative difference from which on a metric is taken for a time or for noise
FINEST = 1e-5  # the least tolerance
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
HEADLESS = (ast.Try, ast.ExceptHandler, ast.match_case)  # their head computes nothing
MARGIN = 10  # times the largest difference that was measured


# ----------------------------------------------------------------------------------------------------------- what is kept
def place(name: str) -> pathlib.Path:
    """The file of an experiment's canary."""
    return modes.RESULTS / FOLDER / f"{name}.json"


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> dict:
    return json.loads(text)


def kept(name: str) -> dict:
    """The canary of an experiment, empty where there is none."""
    path = place(name)
    return _parsed(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(name: str, content: dict) -> None:
    """Keep a canary: an entry a line, so that a change shows what moved."""
    parts = []
    for field, value in content.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(canonical(entry) for entry in value)
            parts.append(f' "{field}": [\n  {lines}\n ]')
        else:
            parts.append(f' "{field}": {canonical(value)}')
    path = place(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    fresh.replace(path)


# ------------------------------------------------------------------------------------------------------------ what it sees
class Watch:
    """The lines of some files that run while it is on; another tracer, such as that of coverage, waits."""

    def __init__(self, files):
        self.lines: dict[str, set[int]] = {file: set() for file in files}
        self.left: dict[object, set[int]] = {}

    def __enter__(self):
        self.before = sys.gettrace()
        if self.lines:
            sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        if self.lines:
            sys.settrace(self.before)

    def _called(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename not in self.lines:
            return None
        left = self.left.get(code)
        if left is None:
            left = self.left[code] = {line for *_, line in code.co_lines() if line}
        return self._line if left else None

    def _line(self, frame, event, argument):
        left = self.left[frame.f_code]
        left.discard(frame.f_lineno)
        self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line if left else None


def dark(definitions: list[Definition], lines: dict[str, set[int]]) -> list[list[str]]:
    """The statements that did not run, each as (hash with names, hash without, first words).

    One of the two hashes outlives an edit around the statement, the other one a renamed local or helper.
    """
    found = []
    for each in definitions:
        without = numbered(each.tree, each.meant)
        pairs = zip(each.tree.body, without.body) if isinstance(each.tree.body, list) else ()
        for statement, plain in pairs:
            found += _dark(statement, plain, lines[each.file], isinstance(each.tree, ast.ClassDef))
    return sorted(found)


def _dark(node: ast.AST, plain: ast.AST, seen: set[int], at_import: bool) -> list[list[str]]:
    if isinstance(node, ast.Raise) or _is_docstring(node):
        return []
    blocks = [name for name in BLOCKS if isinstance(getattr(node, name, None), list)]
    if not isinstance(node, HEADLESS) and not at_import and not _ran(node, seen):
        if all(isinstance(n, ast.Raise) for n in getattr(node, "body", [None])):
            return []  # what only ends in an error gives no number
        words = ast.unparse(node).partition("\n")[0]
        return [[_short(node), _short(plain), words[:60]]]
    in_class = isinstance(node, ast.ClassDef)  # its statements run at import
    return [
        entry
        for name in blocks
        for child, other in zip(getattr(node, name), getattr(plain, name))
        for entry in _dark(child, other, seen, in_class)
    ]


def _ran(node: ast.stmt, seen: set[int]) -> bool:
    """Whether any line of a statement ran; of one with a body, of its head."""
    body = getattr(node, "body", None)
    end = body[0].lineno if body else node.end_lineno + 1
    return bool(seen & set(range(node.lineno, max(end, node.lineno + 1))))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Wordless(ast.NodeTransformer):
    """Takes out of a statement the sentences, which are for a reader."""

    def visit_Constant(self, node):
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_JoinedStr(self, node):
        return ast.Constant("")


def _short(node: ast.AST) -> str:
    text = ast.unparse(_Wordless().visit(bare(node)))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


# ----------------------------------------------------------------------------------------------------------- what comes out
def values(rows: list[dict]) -> list[list]:
    """(configuration, what came out of it) of some rows: metrics, counts, and mean and end of each curve."""
    found = []
    for row in rows:
        numbers = dict(row["metrics"])
        numbers |= {name: row[name] for name in ("parameters", "macs") if name in row}
        curve = row.get("curve") or []
        curve = curve if isinstance(curve, list) else []  # a table of times has no points
        for column in sorted({name for point in curve for name in point}):
            points = [p[column] for p in curve if isinstance(p.get(column), (int, float))]
            if points:
                numbers |= {
                    f"{column} (mean)": statistics.fmean(points),
                    f"{column} (end)": points[-1],
                }
        found.append([row["config"], {name: _rounded(v) for name, v in sorted(numbers.items())}])
    return found


def _rounded(value):
    return float(f"{value:.8g}") if isinstance(value, float) else value


def by_key(listed: list[list]) -> dict[str, dict]:
    return {canonical(config): found for config, found in listed}


def differences(before: dict[str, dict], after: dict[str, dict]) -> dict[str, tuple[float, str]]:
    """For each metric of the shared configurations the largest relative difference, and in words where.

    Values near zero are measured by the median of their metric. Words and whole numbers differ or do not: infinitely or by 0.
    """
    found: dict[str, tuple[float, str]] = {}
    scale = _scales(before)
    for key in before.keys() & after.keys():
        for metric in before[key].keys() | after[key].keys():
            old, new = (side[key].get(metric, "absent") for side in (before, after))
            size = _difference(old, new, scale.get(metric, 0.0))
            if size >= found.get(metric, (-1.0, ""))[0]:
                found[metric] = size, f"{metric} was {old} and is {new} at {key}"
    return found


def _scales(listed: dict[str, dict]) -> dict[str, float]:
    every: dict[str, list[float]] = {}
    for row in listed.values():
        for metric, value in row.items():
            if isinstance(value, float):
                every.setdefault(metric, []).append(abs(value))
    return {metric: statistics.median(found) for metric, found in every.items()}


def _difference(old, new, scale: float) -> float:
    if old == new:
        return 0.0
    numbers = (int, float)
    if not isinstance(old, numbers) or not isinstance(new, numbers) or isinstance(old, bool):
        return math.inf
    return abs(old - new) / max(abs(old), abs(new), scale / 100)


def moved(name: str, found: list[list]) -> list[str]:
    """In words what the canary of an experiment says otherwise now; the worst metric first."""
    known = kept(name)
    before, after = by_key(known["values"]), by_key(found)
    if not before.keys() & after.keys():
        return ["none of its configurations is that of an earlier smoke run"]
    worst = []
    for metric, (size, words) in differences(before, after).items():
        allowed = known["tolerance"].get(metric, FINEST)
        if (allowed is None and "absent" not in words) or size <= (allowed or 0):
            continue
        worst.append((size, f"{words}, more than {allowed or 0:.0e} of it"))
    return [words for _, words in sorted(worst, reverse=True)]


# ------------------------------------------------------------------------------------------------------------ the smoke run
@contextlib.contextmanager
def watched(experiment):
    """Watches what of an experiment's code runs in the block, if asked; gives a function that takes down its rows at the end."""
    asked = os.environ.get("NDL_CANARIES") and not experiment.timed
    with Watch({d.file for d in experiment.closure.definitions} if asked else ()) as watch:
        settings = state()  # before a training function sets its own
        yield lambda rows: _take(experiment, rows, watch, settings)


def _take(experiment, rows: list[dict], watch: Watch, settings: list[str]) -> None:
    """Write down what a smoke run found where NDL_CANARIES asks for it, else compare it with what is kept."""
    folder, found = os.environ.get("NDL_CANARIES", ""), values(rows)
    if folder:
        reached = experiment.closure
        seen = {"values": found, "shape": reached.shape(), "state": settings}
        if watch.lines:
            seen["dark"] = dark(reached.definitions, watch.lines)
        note(pathlib.Path(folder, f"{experiment.name}.json"), seen)
        return
    known = kept(experiment.name)
    if known.get("values"):
        problems = moved(experiment.name, found) + shaken()
        answer(experiment.name, problems + unset(known, settings))


def answer(name: str, problems: list[str]) -> None:
    """Raise, or with NDL_CANARY=report print, that a canary moved."""
    if not problems:
        return
    text = (
        f"{name}: its smoke run gives other results than the one that stands for its rows: {problems[0]}"
        + (f"; {len(problems) - 1} more" if problems[1:] else "")
        + f". Recorded with {kept(name).get('versions')}. Where that is meant, run "
        f"`make reproduce EXPERIMENT={name} ADOPT=1`, or the notebook with NDL_MODE=full and then `make canaries`."
    )
    if os.environ.get("NDL_CANARY", "") != "report":
        raise RecordError(text)
    print(text)


def note(path: pathlib.Path, found: dict) -> None:
    """Write what was found; a notebook may record an experiment in parts."""
    if path.is_file():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        found["values"] = [*earlier["values"], *found["values"]]
        if "dark" in found and "dark" in earlier:
            again = {entry[0] for entry in found["dark"]}
            found["dark"] = [entry for entry in earlier["dark"] if entry[0] in again]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")


# --------------------------------------------------------------------------------------------------- what nobody changes
def state() -> list[str]:
    """Global settings of torch that change numbers, as they are where an experiment is recorded."""
    return [str(torch.get_default_dtype()), torch.get_float32_matmul_precision()]


def unset(known: dict, settings: list[str]) -> list[str]:
    """In words, if torch is set otherwise than when a canary was taken down."""
    was = known.get("state")
    return [f"torch is set to {settings}, it was {was}"] if was and was != settings else []


def world() -> list[list]:
    """What torch and the layer do with a seed: starts, values, gradients and steps, each as a few numbers by name."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        found = [[name, made()] for name, made in _samples()]
    return [[{"what": name}, numbers] for name, numbers in found]


def _samples():
    """Named layers, of torch and of the book, each trained for three steps of another optimiser."""
    from torch import nn, optim

    exact = {"dtype": torch.float32}
    layers = {
        "Linear": lambda: nn.Linear(6, 4, **exact),
        "Conv2d": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2, **exact)),
        "norms": lambda: nn.Sequential(nn.BatchNorm1d(6, **exact), nn.LayerNorm(6, **exact)),
        "activations": lambda: nn.Sequential(
            nn.Linear(6, 6, **exact), nn.ReLU(), nn.GELU(), nn.Tanh()
        ),
        "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, **exact),
    }
    for start in ("linear", "paper", "unit"):
        for outer in (True, False):
            layers[f"NdLinear {start} {outer}"] = functools.partial(
                _layer, (2, 3), (4, 2), outer, init=start, **exact
            )
    layers["NdLinear of one axis"] = functools.partial(_layer, (6,), (3,), True, **exact)
    layers["NdLinear without bias"] = functools.partial(
        _layer, (3, 1, 2), (2, 2, 3), True, bias=False, **exact
    )
    optimisers = (optim.Adam, optim.AdamW)
    for at, (name, made) in enumerate(layers.items()):
        # gradients that are zero but for rounding, which Adam divides by their size
        flat = name in ("norms", "attention")
        steps = functools.partial(optim.SGD, momentum=0.9) if flat else optimisers[at % 2]
        yield name, functools.partial(_trained, made, steps)


def _layer(dims, hidden, *options, **more):
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, dims), ndlinear.NdLinear(dims, hidden, *options, **more)
    )


def _trained(made, optimiser) -> dict[str, float]:
    torch.manual_seed(0)
    net = made()
    x = torch.linspace(-1, 1, 24, dtype=torch.float32).sin().reshape(4, 6).requires_grad_()
    found = {"start": _sum(*net.parameters())}
    steps = optimiser(net.parameters(), lr=0.1)
    for step in range(3):
        loss = torch.nn.functional.mse_loss(
            net(x).flatten(1), torch.ones((), dtype=torch.float32).expand(4, net(x)[0].numel())
        )
        steps.zero_grad()
        loss.backward()
        found[f"loss {step}"] = _rounded(loss.item())
        steps.step()
    return found | {"end": _sum(*net.parameters()), "gradient": _sum(x.grad)}


def _sum(*tensors) -> float:
    flat = torch.cat([t.detach().double().flatten() for t in tensors])
    return _rounded(float(flat @ torch.arange(1, len(flat) + 1, dtype=torch.float64).cos()))


@functools.cache
def shaken() -> list[str]:
    """What torch or the layer does otherwise than when the world was taken down, in words."""
    if not place(WORLD).is_file():
        return []
    return [f"torch or ndlinear is another: {words}" for words in moved(WORLD, world())][:1]


# ------------------------------------------------------------------------------------------------------------ which rows stand
def stands_for(name: str, code: str) -> dict | None:
    """The entry of an earlier code under which rows of an experiment still count; None where it has none."""
    return next((e for e in kept(name).get("earlier", ()) if e["code"] == code), None)


def join(name: str, code: str, why: str, **more) -> None:
    """From now on rows of a code count as those of the canary's code; ``more``: fields that its configurations had beyond."""
    known = kept(name)
    others = [entry for entry in known.get("earlier", []) if entry["code"] != code]
    entry = {"code": code, "by": why} | {k: v for k, v in more.items() if v}
    write(name, known | {"earlier": sorted([*others, entry], key=canonical)})


def supersede(name: str, code: str, old: str, why: str, without=()) -> None:
    """The present code takes the place of an earlier one, whose rows count as its own; so do those that counted before.

    What its smoke run gave before is dropped: `make canaries` takes down what it gives now.
    """
    known = kept(name)
    others = [e for e in known.get("earlier", []) if e["code"] != code]
    before = {old, known.get("code", old)} - {code} - {e["code"] for e in others}
    write(name, {"code": code, "earlier": others})
    for earlier in sorted(before):
        join(name, earlier, why, without=list(without))


# why the present code of an experiment does not stand for its rows
REASONS: dict[str, list[str]] = {}


def present(experiment) -> str:
    """The code under which rows of an experiment count today: that of its canary where the present code does the same."""
    code, known = experiment.code(), kept(experiment.name)
    if code == known.get("code") or stands_for(experiment.name, code):
        return known["code"]
    if not known.get("values") or experiment.timed or modes.mode() == "smoke":
        return code
    found = observed(known.get("like", experiment.name))
    if found is None:
        problems = ["its smoke run does not reach it"]
    else:
        problems = moved(experiment.name, found["values"])
        problems += against(known, found, experiment.facts())
    REASONS[experiment.name] = problems
    if problems:
        return code
    print(f"{experiment.name}: its code changed and its canary did not; its rows stand.")
    return known["code"]


def against(known: dict, found: dict, here: dict) -> list[str]:
    """What its code says against it: statements that did not run, numbers that are new."""
    problems = unseen(known["dark"], found["dark"])
    if found["shape"] != here["shape"]:
        problems.append(
            "the notebook's file is not what runs here, or it trains by other functions when it is small"
        )
    fresh = set(here["numbers"]) - set(known["numbers"])
    if fresh:
        problems.append(f"numbers that it had not: {', '.join(sorted(fresh)[:5])}")
    return problems


def unseen(before: list[list[str]], after: list[list[str]]) -> list[str]:
    """Statements outside the canary that were changed, added or taken away, in words."""

    def new(some, others):
        names, plain = ({entry[at] for entry in others} for at in (0, 1))
        return [entry[2] for entry in some if entry[0] not in names and entry[1] not in plain]

    said = []
    if changed := new(after, before):
        count = len(changed)
        said.append(f"its smoke run does not execute {count} statements that are new: {changed[0]}")
    if gone := new(before, after):
        said.append(f"statements are gone that it did not execute: {gone[0]}")
    return said


def observed(name: str) -> dict | None:
    """What a smoke run of the present files says of an experiment; one run of a notebook tells of all of its experiments."""
    import filelock

    folder = modes.RESULTS / SEEN / _files()
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f"{name}.lock"):
        if not (folder / f"{name}.json").is_file():
            command = [sys.executable, "-m", "lab.tools.canaries", "observe", name, str(folder)]
            ran = subprocess.run(command, cwd=modes.NOTEBOOKS, capture_output=True, text=True)
            if ran.returncode:
                raise RecordError(
                    f"{name}: its smoke run failed, so its rows are stale: {ran.stderr[-600:]}"
                )
    found = folder / f"{name}.json"
    return json.loads(found.read_text(encoding="utf-8")) if found.is_file() else None


def _files() -> str:
    """A name for the state of all code."""
    files = [
        *modes.NOTEBOOKS.rglob("*.py"),
        *modes.NOTEBOOKS.rglob("*.ipynb"),
        *modes.ROOT.glob("*.py"),
    ]
    content = [hashlib.sha256(path.read_bytes()).digest() for path in sorted(files)]
    return hashlib.sha256(b"".join(content) + torch.__version__.encode()).hexdigest()[:12]
