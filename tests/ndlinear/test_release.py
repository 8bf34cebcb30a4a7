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
    assert pathlib.Path(module.__file__).parent != pathlib.Path(nd.__file__).parent
    with pytest.raises(IndexError):  # it needs exactly one batch axis; ours does not
        module.NdLinear((4, 5), (3, 2))(torch.randn(4, 5))
    yield module
    sys.modules.pop("released_ndlinear", None)


@pytest.mark.parametrize("outer", [True, False], ids=["1..N", "N..1"])
@pytest.mark.parametrize("dims, hidden", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_seed_same_numbers_and_checkpoints_in_both_directions(
    release, dims, hidden, outer, dtype, tmp_path
):
    torch.set_default_dtype(dtype)
    try:
        made, drawn_next = [], []
        for library in (release, nd):
            torch.manual_seed(11)
            made.append(library.NdLinear(dims, hidden, transform_outer=outer))
            drawn_next.append(torch.rand(1))
    finally:
        torch.set_default_dtype(torch.float32)
    a, b = (layer.state_dict() for layer in made)
    assert list(a) == list(b) and torch.equal(*drawn_next)
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    x, g = (torch.randn(6, *sizes, dtype=torch.float64) for sizes in (dims, hidden))
    made = [layer.double() for layer in made]
    for source, target in (made, made[::-1]):
        for parameter in source.parameters():
            torch.nn.init.normal_(parameter)
        torch.save(source.state_dict(), tmp_path / "checkpoint.pt")
        target.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
        results = []
        for layer in made:
            inputs = [x.clone().requires_grad_(), *layer.parameters()]
            y = layer(inputs[0])
            results.append([y, *torch.autograd.grad((y * g + y.square()).sum(), inputs)])
        assert len(results[0]) == 2 + 2 * len(dims)
        for theirs, ours in zip(*results):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
