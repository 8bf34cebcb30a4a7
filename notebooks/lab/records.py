"""Recorded runs: results/<experiment>.jsonl, one line per finished (configuration, seed).

A line is appended and fsynced the moment its run ends, under a lock that keeps a second writer out. A killed run loses
at most the run in flight; the next one goes on where it stopped. Nothing is ever overwritten: a torn last line is moved to
<experiment>.jsonl.torn, and a run made with an older training function stays in the file beside its successor.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import inspect
import json
import linecache
import os
import pathlib
import platform
import re
import tempfile
import textwrap
import time
import types

import pandas as pd

from . import cluster
from .modes import RESULTS, LabError, mode


class RecordError(LabError):
    """A record is missing, stale, damaged or in use."""


# ---------------------------------------------------------------------------------------------------------------- the file
def canonical(value) -> str:
    """JSON with sorted keys and no spaces: equal text for equal values."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(row: dict) -> str:
    """Checksum of a row without its own ``digest`` field."""
    return hashlib.sha256(
        canonical({k: v for k, v in row.items() if k != "digest"}).encode()
    ).hexdigest()[:16]


def _parse(path: pathlib.Path) -> tuple[list[dict], bytes]:
    """The rows of a record file and what is torn at its end."""
    if not path.is_file():
        return [], b""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    rows = []
    for number, line in enumerate((whole + newline).splitlines(), 1):
        try:
            row = json.loads(line)
            intact = row["digest"] == digest(row)
        except (ValueError, TypeError, KeyError):
            intact = False
        if not intact:
            raise RecordError(
                f"{path.name}, line {number}: the row does not match its own checksum, so it was edited or damaged. "
                "Records are written by full runs only: restore the file from version control."
            )
        rows.append(row)
    return rows, torn


def _append(path: pathlib.Path, row: dict) -> None:
    with open(path, "ab") as file:
        file.write((canonical(row | {"digest": digest(row)}) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _set_torn_aside(path: pathlib.Path, torn: bytes) -> None:
    """Move a torn last line to <name>.torn, first there, then away from here."""
    with open(path.with_name(path.name + ".torn"), "ab") as aside:
        aside.write(torn + b"\n")
        aside.flush()
        os.fsync(aside.fileno())
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - len(torn))
    print(f"{path.name}: a torn last line ({len(torn)} bytes) was set aside in {path.name}.torn")


@contextlib.contextmanager
def _only_writer(path: pathlib.Path):
    import filelock

    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RecordError(
            f"{path.name} is being written by another run; wait for it or stop it"
        ) from error
    try:
        yield
    finally:
        lock.release()


# ------------------------------------------------------------------------------------------------- what a row depends on
def _tree(node) -> object:
    """A syntax tree as nested lists: no positions, comments, docstrings or empty fields, so equal over formatting and Python versions."""
    if isinstance(node, list):
        return [_tree(n) for n in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {
        k: v
        for k, v in ast.iter_fields(node)
        if v not in (None, []) and k not in ("kind", "type_comment", "type_params")
    }
    body = fields.get("body")
    if (
        isinstance(body, list)
        and isinstance(body[0], ast.Expr)
        and isinstance(getattr(body[0].value, "value", None), str)
    ):
        fields["body"] = body[1:]
    return [type(node).__name__, {k: _tree(v) for k, v in fields.items()}]


def _source_tree(thing) -> ast.AST:
    """Syntax tree of a function or class, also of a class typed into a notebook (which `inspect` does not find)."""
    if isinstance(thing, types.FunctionType):
        return ast.parse(textwrap.dedent(inspect.getsource(thing)))
    method = next((f for f in vars(thing).values() if isinstance(f, types.FunctionType)), None)
    if method is None:
        return ast.parse(repr(sorted(str(k) for k in vars(thing) if not k.startswith("__"))))
    lines, at = linecache.getlines(method.__code__.co_filename), method.__code__.co_firstlineno
    classes = [
        n
        for n in ast.walk(ast.parse("".join(lines)))
        if isinstance(n, ast.ClassDef) and n.name == thing.__name__
    ]
    return next(n for n in classes if n.lineno <= at <= n.end_lineno)


def _global_names(tree: ast.AST) -> set[str]:
    """Names that a function or class reads and does not bind itself, as argument or by assignment."""
    nodes = list(ast.walk(tree))
    bound = {n.arg for n in nodes if isinstance(n, ast.arg)}
    bound |= {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return {n.id for n in nodes if isinstance(n, ast.Name)} - bound


def code_hash(run) -> str:
    """Hash of a training function, of the notebook's functions, classes and constants it uses, and of the training loop's revision."""
    from .training import REVISION

    seen: dict[str, object] = {"training loop": REVISION}

    def visit(thing, scope: dict) -> None:
        tree = _source_tree(thing)
        seen[thing.__qualname__] = _tree(tree)
        for name in sorted(_global_names(tree) - set(seen)):
            value = scope.get(name)
            if isinstance(value, (types.FunctionType, type)) and value.__module__ == run.__module__:
                if value.__qualname__ not in seen:
                    visit(value, scope)
            elif isinstance(value, (bool, int, float, str, tuple, list, dict)) and name in scope:
                seen[name] = repr(value)

    visit(run, run.__globals__)
    return hashlib.sha256(
        repr(sorted(seen.items(), key=lambda item: item[0])).encode()
    ).hexdigest()[:16]


def _versions() -> dict[str, str]:
    import numpy
    import torch

    import ndlinear

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "ndlinear": getattr(ndlinear, "__version__", "?"),
    }


def _device() -> str:
    """The device as a reader should know it: GPU name, or processor model with the threads in use."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """Processor model and the threads in use."""
    import torch

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    return f"{model}, {torch.get_num_threads()} threads"


def _peak_memory_mb() -> tuple[float, str]:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20, "cuda allocator"
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0.0, "not measured"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, "process"


# ------------------------------------------------------------------------------------------------------------- the runs
def run_group(run, configs: list[dict], run_mode: str, together: bool = False) -> list[dict]:
    """Run configurations, here or on a worker: the result of each with seconds, memory, device and versions; errors come back as data.

    Without ``together`` the group is one configuration and ``run`` gets it; with it, ``run`` gets the list and returns a list.
    """
    import torch

    from .training import seed_everything

    os.environ["NDL_MODE"] = run_mode
    seed_everything(configs[0]["seed"])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        results = run([dict(c) for c in configs]) if together else [run(dict(configs[0]))]
        if len(results) != len(configs):
            raise RecordError(f"{len(results)} results for {len(configs)} configurations")
        canonical(results)
        outs = [{"status": "ok", **result} for result in results]
    except Exception as error:  # recorded, reported at the end, tried again next time
        outs = [
            {"status": "failed", "error": f"{type(error).__name__}: {error}", "metrics": {}}
            for _ in configs
        ]
    memory, of = _peak_memory_mb()
    shared = {
        "seconds": round(
            (time.perf_counter() - began) / len(configs), 3
        ),  # a group shares its time
        "peak_memory_mb": round(memory, 1),
        "peak_memory_of": of,
        "device": _device(),
        "versions": _versions(),
    }
    return [out | shared | ({"together": len(configs)} if together else {}) for out in outs]


def _groups(configs: list[dict], together: bool) -> list[list[dict]]:
    """Each configuration by itself, or those that differ in nothing but the seed together."""
    groups: dict[str, list[dict]] = {}
    for config in configs:
        kind = canonical({k: v for k, v in config.items() if k != "seed" or not together})
        groups.setdefault(kind, []).append(config)
    return list(groups.values())


def _check_grid(name: str, grid: list[dict]) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise RecordError(f"experiment name {name!r}: use lower-case words joined by '-'")
    for config in grid:
        if not isinstance(config.get("seed"), int):
            raise RecordError(f"each configuration needs an integer 'seed', got {config}")
        try:
            canonical(config)
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"a configuration holds JSON values only: {error} in {config}"
            ) from error
    if len({canonical(c) for c in grid}) != len(grid):
        raise RecordError(f"{name}: a configuration stands twice in the grid")


def _smoke_grid(grid: list[dict], overrides: dict, seeds: int) -> list[dict]:
    """The grid with overrides and the first seeds only: small, but through every arm."""
    first = sorted({c["seed"] for c in grid})[:seeds]
    small = {canonical(c | overrides): c | overrides for c in grid if c["seed"] in first}
    return list(small.values())


def record(
    name: str,
    grid: list[dict],
    run,
    *,
    smoke: dict | None = None,
    smoke_seeds: int = 2,
    data: tuple[str, ...] = (),
    together: bool = False,
) -> pd.DataFrame:
    """The results of ``run`` on every configuration of a grid, one row each, in the grid's order.

    replay reads results/<name>.jsonl and refuses missing or stale rows; full runs what the file lacks and appends; smoke runs a small grid
    (``smoke`` overrides, first ``smoke_seeds`` seeds) through the same code into a temporary file.

    Args:
        name: experiment, the file's name.
        grid: flat JSON configurations, each with an integer ``seed``.
        run: config -> dict with ``metrics`` (name -> number) and, where they make sense, ``parameters``, ``macs`` (multiply-adds per
            sample), ``curve``. It must depend on nothing but its configuration and what the notebook defines.
        data: data sets used; their checksums go into the row.
        together: ``run`` trains all seeds of a configuration at once (`lab.stacked`): it gets the list of the configurations that
            differ in nothing but the seed and are still missing, and returns the list of their results. One row each, as
            always; ``seconds`` is the group's time over its size, and a killed run loses the group in flight.
    """
    _check_grid(name, grid)
    code = code_hash(run)
    if mode() == "replay":
        rows, _ = _parse(RESULTS / f"{name}.jsonl")
        return _frame(_select(name, rows, grid, code))
    if mode() == "full":
        return _frame(complete(RESULTS / f"{name}.jsonl", grid, run, code, data, together))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{name}.jsonl"
        return _frame(
            complete(path, _smoke_grid(grid, smoke or {}, smoke_seeds), run, code, data, together)
        )


def complete(
    path: pathlib.Path,
    grid: list[dict],
    run,
    code: str,
    data: tuple[str, ...] = (),
    together: bool = False,
) -> list[dict]:
    """Run what the file lacks, append each row as it ends, and return the rows of the grid."""
    from .data import checksum

    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(path):
        rows, torn = _parse(path)
        if torn:
            _set_torn_aside(path, torn)
        done = {r["key"] for r in rows if r["status"] == "ok" and r["code"] == code}
        missing = [c for c in grid if canonical(c) not in done]
        fixed = {
            "experiment": path.stem,
            "code": code,
            "data": {d: checksum(d) for d in data if missing},
        }
        for group, outcomes in cluster.map_groups(
            run, _groups(missing, together), together=together, label=path.stem
        ):
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            for config, outcome in zip(group, outcomes):
                row = {
                    **fixed,
                    "key": canonical(config),
                    "config": config,
                    "seed": config["seed"],
                    **outcome,
                    "time": now,
                }
                _append(path, row)
        rows, _ = _parse(path)
    return _select(path.stem, rows, grid, code)


def _select(name: str, rows: list[dict], grid: list[dict], code: str) -> list[dict]:
    """The rows of a grid, or an error that says what to run."""
    newest = {r["key"]: r for r in rows if r["status"] == "ok" and r["code"] == code}
    absent = [c for c in grid if canonical(c) not in newest]
    if not absent:
        return [newest[canonical(c)] for c in grid]
    keys = {canonical(c) for c in absent}
    failed = {
        r["key"]: r["error"]
        for r in rows
        if r["status"] == "failed" and r["code"] == code and r["key"] in keys
    }
    stale = {r["key"] for r in rows if r["code"] != code} & keys
    why = (
        f"{len(failed)} failed, the first with {next(iter(failed.values()))!r}"
        if failed
        else f"{len(stale)} of them were made by another version of the training function"
        if stale
        else "they were never run"
    )
    raise RecordError(
        f"results/{name}.jsonl lacks {len(absent)} of {len(grid)} rows, e.g. {absent[0]}; {why}. "
        "Run the notebook with NDL_MODE=full: it trains only these rows."
    )


def _frame(rows: list[dict]) -> pd.DataFrame:
    """One line per run: configuration, metrics, counts, cost."""
    kept = ("parameters", "macs", "seconds", "peak_memory_mb", "device", "curve")
    return pd.DataFrame(
        [{**r["config"], **r["metrics"], **{k: r[k] for k in kept if k in r}} for r in rows]
    )


def read(name: str) -> list[dict]:
    """All intact rows of a record file as they stand, for pages that report on records (a torn last line is left out)."""
    return _parse(RESULTS / f"{name}.jsonl")[0]
