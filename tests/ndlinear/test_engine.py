"""The engine: every plan gives the values and gradients of Algorithm 1, keeps no more, and steps aside where it must."""

import copy
import itertools
import math
import operator
import random

import pytest
import torch
from torch.autograd import forward_ad

import ndlinear as nd

EXECUTIONS = ("planned", "recompute")


def pair(dims, hidden, outer=True, bias=True, execution="planned", dtype=torch.float64):
    """A layer and the same layer that runs Algorithm 1 literally."""
    layer = nd.NdLinear(dims, hidden, outer, bias, execution=execution, dtype=dtype)
    reference = nd.NdLinear(dims, hidden, outer, bias, execution="sequential", dtype=dtype)
    reference.load_state_dict(layer.state_dict())
    assert reference.execution_order == reference.order
    return layer, reference


def gradients(layer, x, g):
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], g)]


def second_derivatives(layer, x, g):
    (first,) = torch.autograd.grad(layer(x), x, g, create_graph=True)
    return torch.autograd.grad(first.square().sum(), layer.weights)


def assert_same(layer, reference, batch):
    x = torch.randn(*batch, *layer.input_dims, dtype=torch.float64, requires_grad=True)
    g = torch.randn(*batch, *layer.hidden_size, dtype=torch.float64)
    assert layer(x).is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), reference(x), atol=1e-10, rtol=1e-10)
    found = ([*gradients(of, x, g), *second_derivatives(of, x, g)] for of in (layer, reference))
    for ours, theirs in zip(*found):
        error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-300)
        assert ours.shape == theirs.shape and error < 1e-10, str(layer.plan(math.prod(batch)))


def kept(layer, batch):
    """Numbers in the distinct storages that are kept for backward, without parameters."""
    x = torch.randn(*batch, *layer.input_dims, dtype=torch.float64, requires_grad=True)
    parameters, found = {p.untyped_storage().data_ptr() for p in layer.parameters()}, {}

    def pack(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    del y
    return sum(size // 8 for pointer, size in found.items() if pointer not in parameters)


def at_most(layer, batch):
    """Numbers that Algorithm 1 keeps, or the input alone, and beside them what is made once of the weights and biases."""
    dims, hidden = layer.input_dims, layer.hidden_size
    sizes, samples = list(dims), math.prod(batch)
    steps = 0
    for k in layer.order:
        steps, sizes[k] = steps + math.prod(sizes), hidden[k]
    plan = layer.plan(samples)
    assert plan.saved <= steps
    made = len(dims) * math.prod(hidden) + 2 * sum(hidden)
    for step in plan.steps:  # a merged weight grows factor by factor
        entries = (dims[k] * hidden[k] for k in step.modes)
        made += sum(itertools.accumulate(entries, operator.mul))
    return samples * (steps if layer.execution == "planned" else math.prod(dims)) + made


@pytest.mark.parametrize("seed", range(4))
def test_random_layers(seed):
    """4 times 30 layers: any sizes, orders, biases, batch axes and kinds of plan. None keeps more than Algorithm 1."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(30):
        n = draw.randint(1, 5)
        most = (60, 24, 14, 8, 6)[n - 1]
        dims, hidden = (tuple(draw.randint(1, most) for _ in range(n)) for _ in range(2))
        batch = draw.choice([(), (0,), (1,), (3,), (17,), (200,), (2, 3), (4, 4), (2, 0, 3)])
        execution, outer, bias = draw.choice(EXECUTIONS), draw.random() < 0.5, draw.random() < 0.7
        layer, reference = pair(dims, hidden, outer, bias, execution)
        assert_same(layer, reference, batch)
        assert kept(layer, batch) <= at_most(layer, batch)
        for grad in (True, False):  # and by the plans for CUDA
            call = (math.prod(batch).bit_length(), grad, False, False)
            layer._plans[call] = layer.plan(math.prod(batch), grad, "cuda")
        layer._plans_for_any = [layer.plan(device="cuda")] * 2
        assert_same(layer, reference, batch)
        x = torch.randn(3, *batch, *dims, dtype=torch.float64)
        torch.testing.assert_close(torch.func.vmap(layer)(x), reference(x))


@pytest.mark.parametrize(
    "dims, hidden", [((6, 5), (7, 4)), ((4, 3, 2), (2, 3, 4)), ((5, 1), (6, 1)), ((3, 20), (2, 18))]
)
@pytest.mark.parametrize("bias", [True, False])
def test_all_candidates_of_the_search_agree(dims, hidden, bias, monkeypatch):
    plans, estimate = [], nd._estimate
    note = lambda *a, **k: plans.append(estimate(*a, **k)) or plans[-1]  # noqa: E731
    monkeypatch.setattr(nd, "_estimate", note)
    for order in ((0, 1, 2)[: len(dims)], (2, 1, 0)[-len(dims) :]):
        plans.clear()
        nd._search.__wrapped__(dims, hidden, order, bias, (5, True, False, False))
        assert len(plans) >= 3
        layer, reference = pair(dims, hidden, order[0] == 0, bias)
        for plan in plans:
            layer._plans = {(3, grad, False, False): plan for grad in (True, False)}
            assert_same(layer, reference, (5,))
            assert sorted(plan.order) == list(range(len(dims))) and plan.macs > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "batch, dims, hidden",
    [(64, (64, 8, 8), (64, 8, 8)), (8, (28, 28, 3), (64, 64, 6)), (300, (200, 1), (200, 1))],
)
def test_values_and_gradients_are_as_precise_as_those_of_algorithm_1(batch, dims, hidden, dtype):
    torch.manual_seed(0)
    layer, reference = pair(dims, hidden)
    x, g = torch.randn(batch, *dims).double(), torch.randn(batch, *hidden).double()
    exact = gradients(layer, x.requires_grad_(), g)
    low = x.detach().to(dtype).requires_grad_()
    found = (gradients(of.to(dtype), low, g.to(dtype)) for of in (layer, reference))
    for ours, theirs, want in zip(*found, exact):
        assert ours.dtype == dtype
        error, usual = ((made.double() - want).norm() for made in (ours, theirs))
        assert error <= 2 * usual + torch.finfo(dtype).eps * want.norm()


# ------------------------------------------------------------------------------------------------------------ the plan
def test_plan_merges_small_neighbours_and_drops_singletons():
    plan = nd.NdLinear((64, 8, 8), (256, 2, 2)).plan(64)
    assert [step.modes for step in plan.steps] == [(1, 2), (0,)]
    assert plan.macs == 64 * 64 * 4 + 64 * 256 * 4
    assert nd.NdLinear((200, 1), (200, 1)).plan(1000).steps[0].modes == (0, 1)
    assert nd.NdLinear((2800, 8), (768, 1)).plan(2048).order == (1, 0)
    assert nd.NdLinear((32, 64), (32, 64)).plan(512).macs == nd.count_macs((32, 64), (32, 64))


def test_plan_is_readable_and_kept():
    layer = nd.NdLinear((64, 8, 8), (128, 4, 4))
    text = str(layer.plan(64))
    assert "2x3" in text and "196,608 multiply-adds" in text and "kept for backward" in text
    assert layer.plan(64) is layer.plan(100) and layer.plan(64, False) is not layer.plan(64)
    assert layer.plan().seconds < layer.plan(10_000).seconds


# ------------------------------------------------------------------------------------------- where the engine steps aside
def test_what_autograd_does_not_know_runs_only_in_ordinary_calls_without_gradients(monkeypatch):
    """Sums in place and oneDNN, which has no gradient: where anything watches, `_product` computes."""
    calls, fast = [], nd._fast_product
    monkeypatch.setattr(nd, "_fast_product", lambda *a: calls.append(1) or fast(*a))
    layer, x = nd.NdLinear((11, 64), (11, 64)), torch.randn(300, 11, 64)
    assert not layer.plan(300, False).literal
    frozen = copy.deepcopy(layer).requires_grad_(False)
    frozen(x)
    with torch.no_grad():
        layer(x)
    assert len(calls) >= 2 * len(layer.plan(300, False).steps)
    calls.clear()
    layer(x)
    frozen(x.clone().requires_grad_())
    torch.func.vmap(frozen)(x)
    torch.func.vmap(frozen)(x.unflatten(0, (3, 100)))
    torch.func.jvp(frozen, (x,), (x,))
    with forward_ad.dual_level():
        frozen(forward_ad.make_dual(x, x))
    other = nd.NdLinear((11, 64), (11, 64), dtype=torch.complex64).requires_grad_(False)
    other(x.to(torch.complex64))
    torch.func.grad(lambda x: frozen(x).sum())(x)
    with torch.autocast("cpu", torch.bfloat16):
        frozen(x)
    torch.export.export(frozen, (x,))
    with torch.no_grad():
        nd.NdLinear((11, 64), (11, 64), execution="sequential")(x)
    frozen.align_layers[0].register_forward_hook(lambda *a: None)
    frozen(x)
    assert not calls


@pytest.mark.parametrize("dims, hidden", [((512, 8), (512, 8)), ((300, 1), (400, 1))])
def test_both_derivatives_where_onednn_would_compute(dims, hidden):
    """Products of over 2^25 multiply-adds: a kernel without gradients of its own would make them zero."""
    layer, reference = pair(dims, hidden, dtype=torch.float32)
    x = torch.randn(300, *dims)
    assert x.numel() * max(hidden) >= 2**25
    found = []
    for module in (layer, reference):
        inputs = [x.clone().requires_grad_(), *module.parameters()]
        y = module(inputs[0]).square().sum()
        first = torch.autograd.grad(y, inputs, retain_graph=True)
        (g,) = torch.autograd.grad(y, inputs[:1], create_graph=True)
        second = torch.autograd.grad(g.square().sum(), [inputs[0], *module.weights])
        found.append([*first, *second])
    for ours, theirs in zip(*found):
        assert theirs.any() and (ours - theirs).norm() < 1e-3 * theirs.norm()
