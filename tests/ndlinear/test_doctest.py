"""The examples in the docstrings of the layer and its adapters run, and every public name has one."""

import doctest
import inspect

import pytest

import ndlinear as nd
import ndlinear_lora

FILES = [nd, ndlinear_lora]
PUBLIC = [getattr(file, name) for file in FILES for name in file.__all__]


def test_examples_run():
    found = [doctest.testmod(file) for file in FILES]
    assert not any(failed for failed, _ in found)
    assert sum(run for _, run in found) >= len(PUBLIC)


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_every_public_name_has_an_example(thing):
    text = inspect.getdoc(thing)
    assert ">>> " in text


def test_lines_are_no_longer_than_100_columns():
    for file in FILES:
        assert max(map(len, inspect.getsource(file).splitlines())) <= 100
