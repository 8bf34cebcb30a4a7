"""The examples in the docstrings of ndlinear.py run, and every public name has one."""

import doctest
import inspect

import pytest

import ndlinear as nd


def test_examples_run():
    failed, run = doctest.testmod(nd)
    assert not failed and run > 40


@pytest.mark.parametrize("name", nd.__all__)
def test_every_public_name_has_an_example(name):
    thing = getattr(nd, name)
    text = inspect.getdoc(thing)
    assert ">>> " in text


def test_lines_are_no_longer_than_100_columns():
    assert max(map(len, inspect.getsource(nd).splitlines())) <= 100
