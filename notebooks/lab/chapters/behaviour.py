"""Does a layer work where torch.nn.Linear works? Small probes, run on any class of layers, with three outcomes.

A probe is a function that takes the class, raises `Wrong` (through `same` or `refuses`) where the layer gives a wrong answer
without saying so, and otherwise returns nothing or a few words; whatever else it raises is an error of the layer. The released
package is loaded beside ours from a folder of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pandas as pd
import torch
from torch import nn

from ..modes import LabError, mode
from ..page.show import table
from ..processes import together
from ..released import layer_class, released

WORDS = {
    "right": "✓ right",
    "wrong": "✗ wrong, no error",
    "error": "! error",
    "not tried": "○ not tried",
}


# ---------------------------------------------------------------------------------------------------------------- probes
class Wrong(Exception):
    """The layer gave a wrong answer without an error."""


class Outcome(NamedTuple):
    """What a probe found: "right", "wrong" (silently), "error" or "not tried", and a few words."""

    outcome: str
    detail: str


def same(got: torch.Tensor, wanted: torch.Tensor, tol: float = 1e-9) -> None:
    """Raise `Wrong` unless two tensors agree in shape and, relative to the largest entry, to `tol`."""
    if got.shape != wanted.shape:
        raise Wrong(f"shape {tuple(got.shape)} instead of {tuple(wanted.shape)}")
    gap = (got - wanted).abs().max().item() if wanted.numel() else 0.0
    if not gap <= tol * max(1.0, wanted.abs().max().item() if wanted.numel() else 1.0):
        raise Wrong(f"off by {gap:.1e}")


def check(condition: bool, words: str = "not as it should be") -> None:
    """Raise `Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(words)


def against_differences(layer: nn.Module, x: torch.Tensor) -> None:
    """Raise `Wrong` unless first and second derivatives, by input and by parameters, agree with finite differences."""
    names, values = zip(*layer.named_parameters())

    def squared(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,)).square()

    inputs = (x.requires_grad_(), *values)
    for test in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        check(test(squared, inputs, raise_exception=False), f"{test.__name__} fails")


def refuses(call: Callable[[], object], *words: str) -> str:
    """The message of the ValueError or TypeError that `call` raises, if it holds all `words`; any other error passes through."""
    try:
        call()
    except (ValueError, TypeError) as error:
        if all(word in str(error) for word in words):
            return str(error).splitlines()[0]
        raise
    raise Wrong("accepted")


class Sheet:
    """Probes by name, in sections. Used as a decorator it adds a probe to the current section; the docstring is its name.

    Results of the released package come from records (`grid` and `run` belong to `lab.record`), those of ours from a run
    here and now, except for probes marked ``heavy``, which are recorded for both.
    """

    def __init__(self):
        self.probes: dict[str, Callable] = {}
        self.sections: dict[str, list[str]] = {}
        self.results: list[dict] = []

    def section(self, name: str, probes: Mapping[str, Callable] | None = None) -> None:
        """Probes defined from here on belong to this section; short ones can be given at once, by name."""
        self.sections[name] = []
        for probe_name, probe in (probes or {}).items():
            self._add(probe_name, probe, heavy=False)

    def __call__(self, probe: Callable | None = None, *, heavy: bool = False) -> Callable:
        if probe is None:
            return functools.partial(self, heavy=heavy)
        name = " ".join((probe.__doc__ or probe.__name__).split()).rstrip(".")
        return self._add(name, probe, heavy)

    def _add(self, name: str, probe: Callable, heavy: bool) -> Callable:
        if name in self.probes or not self.sections:
            raise LabError(f"probe {name!r}: give it a section and a name of its own")
        probe.heavy = heavy
        self.probes[name] = probe
        next(reversed(self.sections.values())).append(name)
        return probe

    def grid(self, section: str) -> list[dict]:
        """What is recorded of a section: each probe on the release, the heavy ones on ours too."""
        names = self.sections[section]
        pairs = [(name, "released") for name in names]
        pairs += [(name, "ours") for name in names if self.probes[name].heavy]
        return [{"behaviour": name, "layer": layer, "seed": 0} for name, layer in pairs]

    def run(self, config: dict) -> dict:
        """One recorded run. In smoke mode heavy probes, and the release where it is not installed, are not tried."""
        probe, small = self.probes[config["behaviour"]], mode() == "smoke"
        if small and (probe.heavy or (config["layer"] == "released" and released() is None)):
            return {"metrics": Outcome("not tried", "")._asdict()}
        return {"metrics": judge(probe, layer_class(config["layer"]))._asdict()}

    def report(self, section: str, recorded: pd.DataFrame) -> None:
        """Judge the probes of a section and show their table: ours, the release, and what the one that is not right says."""
        known = {(r.behaviour, r.layer): (r.outcome, r.detail) for r in recorded.itertuples()}
        rows = []
        for name in self.sections[section]:
            probe, theirs = self.probes[name], known[name, "released"]
            ours = known[name, "ours"] if probe.heavy else judge(probe, layer_class("ours"))
            found = {"here": ours, "release": theirs}
            outcomes = {who: outcome for who, (outcome, _) in found.items()}
            self.results.append({"behaviour": name} | outcomes)
            bad = (f"{who}: {text}" for who, (o, text) in found.items() if o in ("wrong", "error"))
            rows.append((name, *(WORDS[o] for o in outcomes.values()), "; ".join(bad)))
        names = ["behaviour", "here", "release", "what is said"]
        table(pd.DataFrame(rows, columns=names), caption=section)

    def counts(self) -> pd.DataFrame:
        """How many probes reported so far have which outcome, one row per layer."""
        rows = [
            {"layer": who} | {word: len(self.named(who, word)) for word in WORDS}
            for who in ("here", "release")
        ]
        return pd.DataFrame(rows)

    def named(self, who: str, *outcomes: str) -> list[str]:
        """The probes reported so far that found one of the outcomes in "here" or "release"."""
        return [r["behaviour"] for r in self.results if r[who] in outcomes]


@contextlib.contextmanager
def quiet():
    """No warnings and no log lines: exporters and compilers are talkative."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def judge(probe: Callable, layer_class: type) -> Outcome:
    """Run a probe on a class of layers, from a fixed seed. A library that is missing is not the layer's error."""
    torch.manual_seed(0)
    try:
        with quiet():
            detail = probe(layer_class)
    except Wrong as error:
        return Outcome("wrong", str(error))
    except LabError:
        raise
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {_first_line(error)}")
    return Outcome("right", detail or "")


def _first_line(error: Exception, most: int = 150) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[0] if len(lines[0]) <= most else lines[0][: most - 1] + "…"


# ----------------------------------------------------------------------------------------------------------- two processes
@functools.cache
def two_processes(file: str) -> dict[str, float | str]:
    """How far gradients of two gloo processes are from those of one, for the NdLinear that a file defines: see `two_processes.py`."""
    return together([str(pathlib.Path(__file__).with_name("two_processes.py")), file])


def on_two_processes(layer_class: type, how: str, tol: float = 1e-12) -> str:
    """A probe's body: gradients on two processes, wrapped as "ddp" or "fsdp", equal those on one."""
    gap = two_processes(inspect.getfile(layer_class))[how]
    if isinstance(gap, str):
        raise RuntimeError(gap)
    check(gap <= tol, f"gradients off by {gap:.1e}")
    return f"gradients agree to {gap:.0e}"
