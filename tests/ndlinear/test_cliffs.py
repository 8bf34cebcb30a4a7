"""No cliff: what a step starts is counted, not timed, and compared with the loop over the modes that anyone would write."""

from functools import partial, reduce

import pytest
import torch
from ndlinear_cases import randomise
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ndlinear as nd


def drawn(y, *sizes):
    return torch.randn(sizes, dtype=y.dtype)


# How a tensor that reaches a layer may lie in memory
LAYOUTS = {
    "dense": torch.randn_like,
    "of a sum": lambda y: torch.ones((), dtype=y.dtype).expand_as(y),
    "of a mean over the last axis": lambda y: drawn(y, *y.shape[:-1], 1).expand_as(y),
    "batch last": lambda y: drawn(y, *y.shape[1:], len(y)).movedim(-1, 0),
    "strided": lambda y: drawn(y, *y.shape[:-1], 2 * y.shape[-1])[..., ::2],
    "one sample": lambda y: drawn(y, 1, *y.shape[1:]).expand_as(y),
}
SLOW_ONCE = (  # shapes on which an earlier layer was slower than the loop, and another
    ((2, 2, 2), (6, 6, 2)),
    ((2, 5), (32, 32)),
    ((8, 12), (16, 16)),
    ((14, 35), (6, 19)),
    ((5, 2), (32, 32)),
    ((4, 2), (16, 64)),
    ((24, 32), (48, 64)),
    ((1, 1, 64), (1, 1, 64)),
)


BATCH = 300
shapes = pytest.mark.parametrize("dims, hidden", SLOW_ONCE, ids=str)


def loop(layer, x):
    """The loop over the modes that anyone would write: each axis is moved to the end, mapped and moved back."""
    for k, (weight, bias) in enumerate(zip(layer.weights, layer.biases)):
        x = (x.movedim(k + 1, -1) @ weight.t() + bias).movedim(-1, k + 1)
    return x


def counted(step) -> tuple[int, int]:
    """Operations of torch that a step starts, those inside others included, and the bytes that they allocate."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    entries = [entry for entry in seen.key_averages() if entry.key.startswith("aten::")]
    allocated = sum(max(entry.self_cpu_memory_usage, 0) for entry in entries)
    return sum(entry.count for entry in entries), allocated


def started(step) -> int:
    return counted(step)[0]


def assert_no_more(step, theirs):
    (operations, allocated), (most, memory) = counted(step), counted(theirs)
    assert operations <= 1.5 * most, f"{operations} operations, the loop starts {most}"
    assert allocated <= 1.15 * memory, f"{allocated} bytes, the loop takes {memory}"


@pytest.mark.parametrize("layout", LAYOUTS)
@shapes
def test_a_step_and_a_call_start_and_allocate_no_more_than_the_loop(dims, hidden, layout):
    """A step whose gradient lies so, and a call without gradients whose input does.

    Without the cure a gradient of a sum starts a copy for each sample: over 6,000 operations here.
    """
    layer, lay = nd.NdLinear(dims, hidden), LAYOUTS[layout]
    x = torch.randn(BATCH, *dims, requires_grad=True)

    def step(forward):
        y = forward(x)
        y.backward(lay(y))

    assert_no_more(lambda: step(layer), lambda: step(lambda x: loop(layer, x)))
    x = x.detach().double().requires_grad_()
    inputs, g = [x, *layer.double().parameters()], lay(layer(x).detach())
    pairs = (torch.autograd.grad(y, inputs, g) for y in (layer(x), loop(layer, x)))
    for ours, theirs in zip(*pairs):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-8)
    layer.float().requires_grad_(False)
    x = lay(torch.empty(BATCH, *dims))
    assert_no_more(lambda: layer(x), lambda: loop(layer, x))


@pytest.mark.parametrize("layout", ["of a sum", "batch last", "strided"])
def test_a_product_of_many_matrices_gets_each_in_one_piece(layout, monkeypatch):
    """torch multiplies others one by one: an input of stride zero took four times as long as in the loop."""
    baddbmm, strides = torch.baddbmm, []

    def note(bias, weight, matrices):
        strides.append(matrices.stride()[1:] == (matrices.shape[2], 1))
        return baddbmm(bias, weight, matrices)

    monkeypatch.setattr(torch, "baddbmm", note)
    layer = nd.NdLinear((14, 35), (6, 19)).requires_grad_(False)
    layer(LAYOUTS[layout](torch.empty(BATCH, 14, 35)))
    assert strides and all(strides)


@pytest.mark.parametrize(
    "batch, dims, hidden", [(1000, (5, 2), (32, 32)), (1000, (4, 2), (16, 64))]
)
def test_a_product_of_few_inputs_and_many_results_is_not_merged(batch, dims, hidden):
    """It took one and a half times as long as the loop: its gradients are narrow, its rows a multiple of a page."""
    layer = nd.NdLinear(dims, hidden)
    assert all(len(layer.plan(batch, grad).steps) == 2 for grad in (False, True))


@shapes
def test_gradients_for_each_sample_start_no_more_operations_than_the_loop(dims, hidden):
    """Products of many matrices are slow under vmap: a mode of length one took three times as long as the loop."""
    x = torch.randn(16, *dims)

    def for_each_sample(execution):
        module = nd.NdLinear(dims, hidden, execution=execution)

        def loss(values, x):
            return torch.func.functional_call(module, values, (x,)).square().sum()

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))
        return started(lambda: gradients(dict(module.named_parameters()), x))

    ours, theirs = for_each_sample("planned"), for_each_sample("sequential")
    assert ours <= theirs + 1, f"{ours} operations, the loop starts {theirs}"


def test_a_plan_for_many_modes_is_found_quickly(monkeypatch):
    """Eight modes have over a thousand candidates in all orders; 130 are compared."""
    tried = []
    own = nd._estimate
    monkeypatch.setattr(nd, "_estimate", lambda *a, **k: tried.append(a) or own(*a, **k))
    nd._search.cache_clear()
    layer = nd.NdLinear((2,) * 8, (2,) * 8)
    for batch in (1, 10, 100):
        layer.plan(batch)
    nd._search.cache_clear()
    assert len(tried) <= 130 * 5


# ------------------------------------------------------------------------------------------------------- sums of terms
SUMS = [  # either mode first, added up to one matrix, and more than two modes
    ((24, 32), (48, 64), 8),
    ((48, 64), (24, 32), 8),
    ((8, 8), (8, 8), 4),
    ((4, 3, 2), (2, 3, 4), 3),
]


def term_by_term(layer, x):
    y = reduce(torch.add, [term(x) for term in layer.terms])
    return y if layer.bias is None else y + layer.bias


class Twice(nd.NdLinear):
    def forward(self, x):
        return 2 * nd.NdLinear.forward(self, x)


double = partial(nd.NdLinear, dtype=torch.float64)
TERMS = {  # what someone may make of the terms of a sum: then more than their weights matters
    "as made": lambda terms: None,
    "a hook": lambda terms: terms[0].register_forward_hook(lambda module, inputs, y: 2 * y),
    "a hook before": lambda terms: terms[0].register_forward_pre_hook(lambda _, x: 2 * x[0]),
    "of gradients": lambda terms: terms[0].register_full_backward_hook(lambda _, dx, dy: (-dx[0],)),
    "a bias": lambda terms: terms.append(double(terms[0].input_dims, terms[0].hidden_size)),
    "a forward": lambda terms: setattr(terms[0], "forward", partial(Twice.forward, terms[0])),
    "a class": lambda terms: setattr(terms[0], "__class__", Twice),
    "a wrapper": lambda terms: terms.__setitem__(0, nn.Sequential(terms[0], nn.Tanh())),
}


@pytest.mark.parametrize("batch", [(1,), (300,), (2, 0)])
@pytest.mark.parametrize("dims, hidden, rank", SUMS, ids=str)
@pytest.mark.parametrize("change", TERMS.values(), ids=TERMS)
def test_a_sum_is_that_of_its_terms(change, dims, hidden, rank, batch):
    layer = randomise(nd.NdLinearSum(dims, hidden, rank, dtype=torch.float64))
    weights = layer.terms[0].weights
    change(layer.terms)
    x = torch.randn(*batch, *dims, dtype=torch.float64, requires_grad=True)
    g = torch.randn(*batch, *hidden, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    found = []
    for forward in (layer, lambda x: term_by_term(layer, x)):
        y = forward(x)
        first = torch.autograd.grad(y, inputs, g, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), weights)
        found.append([y, *first, *second])
    for ours, theirs in zip(*found):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dims, hidden, rank", SUMS[:3], ids=str)
def test_a_sum_of_two_modes_starts_few_products(dims, hidden, rank):
    layer, x = nd.NdLinearSum(dims, hidden, rank), torch.randn(64, *dims)
    with torch.no_grad():
        ours = started(lambda: layer(x))
        theirs = started(lambda: term_by_term(layer, x))
    assert ours < theirs
