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


def function(told: str | dict[str, dict]) -> Callable:
    """A function of this folder: "module.function", or with keywords that it is always called with."""
    ((name, keywords),) = ({told: {}} if isinstance(told, str) else told).items()
    module, _, function = name.partition(".")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return functools.partial(found, **keywords)


def _form(read: str | dict, files: tuple[str, ...] = (), **told) -> Layout:
    return Layout(tuple(known()[name] for name in files), function(read), **told)


def _source(name: str, forms: list[dict], stand_in: str | dict | None = None, **told) -> Source:
    layouts = tuple(_form(**form) for form in forms)
    return Source(name, layouts=layouts, stand_in=stand_in and function(stand_in), **told)


def sources() -> dict[str, Source]:
    """The data sets of sets.yml by their names."""
    return {name: _source(name, **told) for name, told in declared()["sets"].items()}
