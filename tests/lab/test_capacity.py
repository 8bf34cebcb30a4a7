"""lab.capacity against brute force, closed forms and independent counts."""

import itertools
import json
import math

import numpy as np
import pytest
from lab.chapters import capacity

SHAPES = [(2, 2), (2, 3), (3, 2), (3, 3), (2, 2, 2), (2, 3, 1), (1, 4), (3,), (2, 1, 2, 2), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_explicit_set_is_shattered_in_integers(shape):
    tensors = []
    for factors in capacity.shattered(shape):
        tensor = np.array(factors[0], dtype=object)
        for factor in factors[1:]:
            tensor = np.multiply.outer(tensor, np.array(factor, dtype=object))
        tensors.append(tensor.flatten())
    assert len(tensors) == capacity.lower(shape) <= capacity.upper(shape) <= math.prod(shape)
    for labels in itertools.product((1, -1), repeat=len(tensors)):
        weight = np.array([1], dtype=object)
        for w in capacity.realise(shape, labels):
            weight = np.kron(weight, np.array(w, dtype=object))
        assert [int(np.sign(weight @ t)) for t in tensors] == list(labels)


def test_two_axes_are_exact():
    for d in range(1, 9):
        assert capacity.lower((2, d)) == capacity.upper((2, d)) == 2 * d
        assert capacity.effective((2, d)) == d + 1


def test_polynomials_have_the_signs_asked_for():
    for signs in itertools.product((1, -1), repeat=6):
        c = capacity.polynomial(signs)
        assert len(c) - 1 == sum(a != b for a, b in itertools.pairwise(signs))
        assert [np.sign(sum(a * (2 * i) ** e for e, a in enumerate(c))) for i in range(6)] == list(
            signs
        )


def test_entropy_bounds_the_number_of_subsets():
    for m in (5, 20, 61):
        for size in range(m + 1):
            exact = math.log2(sum(math.comb(m, k) for k in range(size + 1)))
            assert exact <= capacity.subset_bits(m, size) + 1e-9 <= m + 1e-9


@pytest.mark.parametrize(("variables", "degree"), [(3, 2), (10, 1), (40, 5)])
def test_largest_is_the_last_that_fits(variables, degree):
    def bits(m):
        return capacity.warren_bits(m, variables, degree)

    m = capacity.largest(bits, variables)
    assert m <= bits(m) and m + 1 > bits(m + 1)
    assert m <= 2 * variables * math.log2(4 * math.e * degree)


def test_one_long_axis_tends_to_two():
    ratios = [capacity.upper((4, d)) / d for d in (10**3, 10**4, 10**5)]
    assert ratios == sorted(ratios, reverse=True) and 2 < ratios[-1] < 2.1


@pytest.mark.parametrize("file", sorted(capacity.FOLDER.glob("*.json")), ids=lambda p: p.stem)
def test_certificates_are_exact(file):
    shape = json.loads(file.read_text(encoding="utf-8"))["shape"]
    points, weights = capacity.certificate(shape)
    assert len(weights) == 2 ** (len(points) - 1)
    for number, (first, *others) in enumerate(weights):
        flat = first
        for w in others:
            flat = [a * b for a in flat for b in w]
        values = [sum(a * b for a, b in zip(flat, point)) for point in points]
        assert [v > 0 for v in values] == [
            bool(number >> i & 1) for i in range(len(points))
        ] and 0 not in values


def test_search_finds_and_writes_a_certificate(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capacity, "FOLDER", tmp_path)
    capacity.main(["2,2", "4", "20", "1"])
    points, weights = capacity.certificate((2, 2))
    assert len(points) == 4 and len(weights) == 8 and "shattered" in capsys.readouterr().out


def test_search_says_when_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "FOLDER", tmp_path)
    monkeypatch.setattr(capacity, "whole_weights", lambda *a: None)
    with pytest.raises(SystemExit, match="another seed"):
        capacity.main(["2,2", "4", "1"])
    assert not list(tmp_path.iterdir())


def test_weights_are_refused_when_a_pattern_is_missing():
    points = np.array([[1, 0, 0, 0], [1, 0, 0, 0]])  # two equal points are never told apart
    assert capacity.whole_weights((2, 2), points, np.random.default_rng(0), rounds=1) is None
