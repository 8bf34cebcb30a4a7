"""One switch, NDL_MODE, and the places of the book."""

from __future__ import annotations

import os
import pathlib
import sys

NOTEBOOKS = pathlib.Path(__file__).resolve().parent.parent
ROOT = NOTEBOOKS.parent
PAPER = ROOT / "book" / "paper"
RESULTS = NOTEBOOKS / "results"
MODES = ("replay", "smoke", "full")
# chapters that became part of another one; their old addresses lead there, their evidence keeps its name
MERGED = {
    "13_memory": "12_cost_and_order",
    "14_initialisation": "15_step_size",
    "25_compression": "22_approximation",
    "30_radius_bump": "23_entropy",
    "31_dial_a_bias": "34_when_do_axes_matter",
    "32_sample_efficiency": "34_when_do_axes_matter",
    "50_vit_distillation": "50_as_a_dense_layer",
    "51_opt_pretraining": "50_as_a_dense_layer",
    "53_dit": "50_as_a_dense_layer",
    "61_overhead": "60_speed",
    "62_scaling": "60_speed",
    "64_benchmark": "64_structured_layers",
    "65_race": "64_structured_layers",
    "70_forensics": "71_all_claims",
    "73_protocols": "71_all_claims",
}
# chapters on one of the paper's experiments: short reports of one form
REPORTS = (
    "33_ablations",
    "40_cnn",
    "41_forecasting",
    "42_time_series_classification",
    "43_tabular",
    "44_text_head",
    "50_as_a_dense_layer",
)

# the book's ndlinear.py, also where a package of that name is installed
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def chapters() -> list[pathlib.Path]:
    """Every notebook of the book: the main line, then the evidence."""
    found = [*NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"), *NOTEBOOKS.glob("evidence/[0-9][0-9]_*.ipynb")]
    return sorted(found, key=lambda path: (path.parent != NOTEBOOKS, path.name))


def slug(path: pathlib.Path) -> str:
    """How the ledger and the cards name a notebook: "40_cnn", or "evidence/40_cnn"."""
    return f"evidence/{path.stem}" if path.parent.name == "evidence" else path.stem


def lecture(name: str) -> str:
    """The chapter of the main line that a notebook belongs to, by names without folder and ending."""
    merged, own = MERGED.get(name, name), NOTEBOOKS / f"{name}.ipynb"
    return merged if not own.is_file() and (NOTEBOOKS / f"{merged}.ipynb").is_file() else name


def evidence(name: str) -> list[str]:
    """The notebooks with the rules, runs and judgements of a chapter, as file names without their ending."""
    found = (path.stem for path in sorted(NOTEBOOKS.glob("evidence/[0-9][0-9]_*.ipynb")))
    return [stem for stem in found if lecture(stem) == name]


class LabError(RuntimeError):
    """Something a reader can put right; the message says how."""


def mode() -> str:
    """How this process runs: ``replay`` (read records), ``smoke`` (tiny, offline, for tests) or ``full`` (train what is missing)."""
    name = os.environ.get("NDL_MODE", "").strip() or "replay"
    if name not in MODES:
        raise LabError(f"NDL_MODE={name!r} is not a mode; use one of {', '.join(MODES)}")
    return name


def pick(*, full, smoke):
    """The value for the current mode; replay has that of ``full``, so that a grid names the recorded rows."""
    return smoke if mode() == "smoke" else full


def new_rows_folder() -> pathlib.Path:
    """Where full runs write new rows: NDL_RESULTS, or the project's own folder of records."""
    named = os.environ.get("NDL_RESULTS", "").strip()
    return pathlib.Path(named).expanduser().resolve() if named else RESULTS


def read_yaml(path: pathlib.Path):
    """The content of a YAML file, by the reader in C where PyYAML has it: eight times faster for the ledger."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise LabError("reading a YAML file needs PyYAML: pip install pyyaml") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
