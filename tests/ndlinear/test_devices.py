"""Plans for CUDA, without a GPU: what they look like, and what they start; test_engine runs them with numbers on the CPU.

Fake tensors of torch stand for tensors on CUDA: they have a device, sizes and dtypes but no numbers, and autograd refuses them where
torch is built without CUDA.
"""

import itertools
import math

import pytest
import torch
from ndlinear_cases import Log
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ndlinear as nd

SHAPES = [  # one to four modes; thin products, sizes of one, orders that pay
    ((6,), (4,)),
    ((64, 48), (40, 56)),
    ((40, 6), (30, 1)),
    ((200, 1), (200, 1)),
    ((64, 8, 8), (256, 2, 2)),
    ((3, 4, 5), (5, 1, 4)),
    ((4, 3, 2, 5), (2, 3, 4, 5)),
]


def contiguous(tensor):
    """`Tensor.contiguous`, which first asks for the device and so fails where there is no CUDA."""
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


@pytest.fixture
def cuda(monkeypatch):
    """A fake CUDA: tensors made in it are on it, and the layer takes them for plain tensors."""
    monkeypatch.setattr(nd, "_PLAIN", (*nd._PLAIN, FakeTensor))
    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    with FakeTensorMode(), torch.no_grad():
        yield lambda *sizes, dtype=torch.float32: torch.empty(*sizes, device="cuda", dtype=dtype)


def to_cuda(layer, cuda):
    """The layer with its parameters on the fake device, as after `layer.to("cuda")`."""
    for mode in layer.align_layers:
        for name, value in mode._parameters.items():
            if value is not None:
                mode._parameters[name] = cuda(*value.shape, dtype=value.dtype)
    return layer


# ---------------------------------------------------------------------------------------------------------- the plan
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("dims, hidden", SHAPES, ids=str)
def test_a_plan_for_cuda_takes_the_cheapest_order_and_merges_nothing(dims, hidden, bias):
    for outer, batch, grad in itertools.product((True, False), (1, 40, 3000), (True, False)):
        layer = nd.NdLinear(dims, hidden, outer, bias)
        plan = layer.plan(batch, grad, "cuda")
        assert [step.modes for step in plan.steps] == [(k,) for k in plan.order]
        assert plan.macs == nd.count_macs(dims, hidden, layer.execution_order)
        assert plan.inline == (layer.execution_order == layer.order)


def test_a_layer_that_moves_to_cuda_leaves_its_plans_behind(cuda):
    layer = nd.NdLinear((64, 8, 8), (256, 2, 2), bias=False)
    on_cpu, on_cuda = layer.plan(64), layer.plan(64, device="cuda")
    assert layer.plan(64, device="mps") == layer.plan(64, device="meta") == on_cpu
    with pytest.raises(RuntimeError, match="device type"):
        layer.plan(64, device="gpu")
    for x, plan, products in ((torch.empty(64, 64, 8, 8), on_cpu, 2), (None, on_cuda, 3)):
        if x is None:
            to_cuda(layer, cuda)
            x = cuda(64, 64, 8, 8)
        assert layer.plan(64) is plan and len(plan.steps) == products
        with Log() as log:
            layer(x)
        names = [name for name, *_ in log.operations]
        assert sum(name in ("mm", "bmm") for name in names) == products
        assert ("mul" in names) == (products == 2), "what merges two modes"


# ------------------------------------------------------------------------------------------------- what a plan starts


def test_biases_are_added_inside_the_products(cuda):
    for dims, hidden in (((64, 48), (40, 56)), ((2800, 8), (768, 1)), ((32,) * 3, (32,) * 3)):
        layer = to_cuda(nd.NdLinear(dims, hidden), cuda)
        with Log() as log:
            layer(cuda(512, *dims))
        names = {name for name, *_ in log.operations}
        assert not names & {"add", "add_"} and names & {"addmm", "baddbmm"}


def autocast(dtype):
    """As inside `torch.autocast("cuda", dtype)`, which switches itself off where there is no CUDA."""
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or torch.float16)


@pytest.mark.parametrize("execution", ["planned", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_each_weight_once_not_once_for_each_sample(dtype, execution, cuda):
    """By the plan for any number of samples on CUDA, which merges nothing."""
    shapes = ((128, 20), (128, 20)), ((2800, 16), (768, 16)), ((64, 8, 8), (256, 2, 2))
    for dims, hidden in shapes:
        layer = to_cuda(nd.NdLinear(dims, hidden, execution=execution), cuda)
        autocast(dtype)
        try:
            with Log() as log:
                y = layer(cuda(128, *dims))
        finally:
            autocast(None)
        assert y.dtype == dtype and y.shape == (128, *hidden)
        casts = [shape for name, shape, _ in log.operations if name == "_to_copy"]
        for weight in layer.weights:
            assert casts.count(tuple(weight.shape)) <= 2, "two modes may have equal weights"
        sizes = [(math.prod(shape), name, shape) for name, shape, _ in log.operations]
        steps = layer.plan(device="cuda").steps
        products = [name for name, *_ in log.operations if name.endswith("mm")]
        assert len(products) == len(steps) == len(dims)
        most = max(128 * s.left * s.right * max(s.dim, s.hidden) for s in steps)
        assert max(sizes)[0] <= most, max(sizes)


def test_a_thin_product_is_one_product_of_a_copy(cuda):
    """Where a matrix is larger than its data, it is not read for each sample, nor is its gradient made for each."""
    for right in (3, 20):
        with Log() as log:
            nd._product(cuda(100, 500, right), cuda(400, 500), cuda(400, 1))
        assert [name for name, *_ in log.operations] == ["clone", "mm", "add"]
    with Log() as log:
        nd._product(cuda(100, 8, 8), cuda(8, 8), cuda(8, 1))
    assert [name for name, *_ in log.operations] == ["baddbmm"]
