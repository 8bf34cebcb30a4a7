"""Does a layer work where torch.nn.Linear works? What the probes of evidence 63 are made of, and how they end.

A probe is a function that takes a class of layers, raises `Wrong` (through `same`, `check` or `refuses`) where the layer gives a
wrong answer without saying so, and otherwise returns nothing or a few words; whatever else it raises is an error of the layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pathlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ..modes import LabError
from ..processes import together


class Wrong(Exception):
    """The layer gave a wrong answer without an error."""


class Outcome(NamedTuple):
    """What a probe found: "right", "wrong" (silently) or "error", and a few words."""

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


@functools.cache
def two_processes(layer_class: type) -> dict[str, float | str]:
    """How far gradients of two gloo processes are from those of one, as "ddp" and "fsdp", or the error: see `two_processes.py`."""
    runs = pathlib.Path(__file__).with_name("two_processes.py")
    return together([str(runs), inspect.getfile(layer_class)])
