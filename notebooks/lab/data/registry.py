"""The registry: what sets.yml says of each data set, with its files and with the functions that read them."""

from __future__ import annotations

import functools
import importlib
import pathlib
from collections.abc import Callable

from ..modes import read_yaml
from .files import Layout, Source, known


@functools.cache
def declared() -> dict[str, dict]:
    """The content of sets.yml, where the fields are explained."""
    return read_yaml(pathlib.Path(__file__).with_name("sets.yml"))


def _function(told: str | dict[str, dict]) -> Callable:
    """A function of this folder: "module.function", or with keywords that it is always called with."""
    ((name, keywords),) = ({told: {}} if isinstance(told, str) else told).items()
    module, _, function = name.partition(".")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return functools.partial(found, **keywords)


def _expected(told: dict) -> tuple:
    classes = told.get("classes")
    return tuple(told["shape"]), tuple(classes) if isinstance(classes, list) else classes


def _form(told: dict) -> Layout:
    files = tuple(known()[name] for name in told.get("files", ()))
    expect = {part: _expected(each) for part, each in told.get("expect", {}).items()}
    return Layout(files, _function(told["read"]), expect, told["note"], told.get("content", ""))


def _source(name: str, told: dict) -> Source:
    stand_in = _function(told["stand_in"]) if "stand_in" in told else None
    forms = tuple(map(_form, told["forms"]))
    return Source(name, told["about"], told["origin"], told["licence"], forms, stand_in)


def sources() -> dict[str, Source]:
    """The data sets of sets.yml by their names."""
    return {name: _source(name, told) for name, told in declared()["sets"].items()}
