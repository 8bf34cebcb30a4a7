"""Drop-in for the released package: `ndlinear` 1.0.0 from PyPI, installed beside the path, is held against ours.

The release lies in the folder named by NDL_RELEASED, else it goes into a folder of pytest's cache, and is loaded from
there under another name. Without network and cache these tests are skipped; where the variable CI is set they fail instead.
"""

import os
import pathlib
import sys

import pytest
import torch
from lab import LabError, released

import ndlinear as nd

SHAPES = [
    ((5,), (3,)),
    ((4, 5), (3, 2)),
    ((2, 6), (7, 1)),
    ((3, 4, 5), (6, 4, 2)),
    ((1, 4, 2), (3, 1, 2)),
    ((2, 3, 1, 2, 3), (3, 2, 2, 1, 2)),
]
cases = pytest.mark.parametrize("outer", [True, False], ids=["1..N", "N..1"])
shapes = pytest.mark.parametrize("dims, hidden", SHAPES, ids=str)


@pytest.fixture(scope="session")
def release(request):
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("NDL_RELEASED"):
            folder = pathlib.Path(request.config.cache.mkdir("ndlinear-release")) / released.VERSION
            patch.setenv("NDL_RELEASED", str(folder))
        try:
            module = released.released(install=True)
        except LabError as error:
            pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    assert str(pathlib.Path(module.__file__).parents[1]) not in sys.path
    yield module
    sys.modules.pop("released_ndlinear", None)


def pair(release, dims, hidden, outer):
    """Both layers with the same random numbers, in float64."""
    theirs = release.NdLinear(dims, hidden, transform_outer=outer).double()
    ours = nd.NdLinear(dims, hidden, outer, dtype=torch.float64)
    for a, b in zip(theirs.parameters(), ours.parameters()):
        with torch.no_grad():
            b.copy_(a.normal_())
    return theirs, ours


def test_this_is_the_release_and_not_ours(release):
    assert release.NdLinear is not nd.NdLinear
    assert pathlib.Path(release.__file__).parent != pathlib.Path(nd.__file__).parent
    with pytest.raises(IndexError):
        release.NdLinear((4, 5), (3, 2))(
            torch.randn(4, 5)
        )  # it needs exactly one batch axis; ours does not


@cases
@shapes
def test_values_and_all_gradients(release, dims, hidden, outer):
    torch.manual_seed(0)
    theirs, ours = pair(release, dims, hidden, outer)
    results = []
    x, direction = (
        torch.randn(6, *dims, dtype=torch.float64),
        torch.randn(6, *hidden, dtype=torch.float64),
    )
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        grads = torch.autograd.grad(
            (y * direction).sum() + y.square().sum(), [leaf, *layer.parameters()]
        )
        results.append([y, *grads])
    assert len(results[0]) == 2 + 2 * len(dims)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@cases
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_seed_same_initial_weights(release, dims, hidden, outer, dtype):
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(11)
        theirs = release.NdLinear(dims, hidden, transform_outer=outer)
        after = torch.rand(1)
        torch.manual_seed(11)
        ours = nd.NdLinear(dims, hidden, transform_outer=outer)
        assert torch.equal(after, torch.rand(1)), "what is drawn next is the same too"
        x = torch.randn(3, *dims)
    finally:
        torch.set_default_dtype(torch.float32)
    a, b = theirs.state_dict(), ours.state_dict()
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@cases
@shapes
def test_checkpoints_in_both_directions(release, dims, hidden, outer, tmp_path):
    x = torch.randn(4, *dims, dtype=torch.float64)
    theirs = release.NdLinear(dims, hidden, transform_outer=outer).double()
    ours = nd.NdLinear(dims, hidden, outer).double()
    for source, target in ((theirs, ours), (ours, theirs)):
        for parameter in source.parameters():
            torch.nn.init.normal_(parameter)
        torch.save(source.state_dict(), tmp_path / "checkpoint.pt")
        report = target.load_state_dict(
            torch.load(tmp_path / "checkpoint.pt", weights_only=True), strict=True
        )
        assert not report.missing_keys and not report.unexpected_keys
        torch.testing.assert_close(target(x), source(x), atol=1e-10, rtol=1e-10)
