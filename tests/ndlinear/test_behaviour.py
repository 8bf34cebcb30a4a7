"""What a layer must survive in real programs: layouts, dtypes, compilers, transforms, copies, tools that touch its parts.

Chapter 63 probes one layer at each run: also ONNX, forward mode, two processes, pruning, ensembles and the meta device.
"""

import copy
import io
import pickle

import pytest
import torch
from ndlinear_cases import expected, randomise
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import ndlinear as nd
import ndlinear_lora

# One layer that runs as defined, one that runs reordered with its bias folded, one without bias.
KINDS = {
    "as defined": {"input_dims": (4, 5, 6), "hidden_size": (4, 5, 6)},
    "reordered": {"input_dims": (4, 5, 6), "hidden_size": (8, 5, 3)},
    "backwards": {"input_dims": (4, 5, 6), "hidden_size": (4, 10, 3), "transform_outer": False},
    "no bias": {"input_dims": (4, 5, 6), "hidden_size": (8, 5, 3), "bias": False},
}


@pytest.fixture(params=KINDS)
def layer(request):
    torch.manual_seed(0)
    layer = randomise(nd.NdLinear(**KINDS[request.param], dtype=torch.float64))
    assert (layer.execution_order == layer.order) == (request.param == "as defined")
    return layer


def batch(*sizes, dtype=torch.float64):
    return torch.randn(*sizes, 4, 5, 6, dtype=dtype)


def same(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


# ------------------------------------------------------------------------------------------------------------- layouts
LAYOUTS = {
    "transposed storage": lambda: torch.randn(6, 5, 3, 4, dtype=torch.float64).permute(2, 3, 1, 0),
    "every second": lambda: batch(6)[::2],
    "part of a wider axis": lambda: torch.randn(3, 4, 5, 9, dtype=torch.float64)[..., 2:8],
    "expanded": lambda: batch(1).expand(3, 4, 5, 6),
    "channels_last": lambda: batch(3).to(memory_format=torch.channels_last),
    "swapped batch axes": lambda: batch(2, 3).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layer, layout):
    x = LAYOUTS[layout]()
    before = x.clone()
    with torch.no_grad():
        same(layer(x), expected(layer, x))
    assert torch.equal(x, before), "the input is not changed"
    x.requires_grad_()
    y = layer(x)
    assert y.is_contiguous()
    same(y, expected(layer, x))
    same(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(layer(x.contiguous()).sum(), x)[0])


# -------------------------------------------------------------------------------------------------------------- dtypes
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_complex(layer):
    layer = layer.to(torch.complex128)
    x = torch.complex(batch(2), batch(2)).requires_grad_()
    inputs = [x, *layer.parameters()]
    ours, theirs = layer(x), expected(layer, x)
    same(ours, theirs)
    pairs = (torch.autograd.grad(y.abs().square().sum(), inputs) for y in (ours, theirs))
    for a, b in zip(*pairs):
        same(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(layer, dtype):
    layer, x = layer.float(), batch(8, dtype=torch.float32)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.to(dtype))
    assert y.dtype == torch.bfloat16, "the folded bias does not lift the result to float32"
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    assert (y.float() - want).abs().max() < 0.05 * want.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert nd.NdLinearSum((4, 5), (3, 2), 2)(torch.randn(7, 4, 5)).dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------- compilers and exports
@pytest.mark.parametrize("marked", [True, False], ids=["told that it varies", "not told"])
def test_compile_once_for_every_batch_size_and_later_weights(layer, marked):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for size in (8, 5, 64):
        x = batch(size).requires_grad_()
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        inputs = [x, *randomise(layer).parameters()]
        ours, theirs = compiled(x), expected(layer, x)
        same(ours, theirs)
        pairs = (torch.autograd.grad(y.square().sum(), inputs) for y in (ours, theirs))
        for a, b in zip(*pairs):
            same(a, b)
    assert counter.frame_count == (1 if marked else 2)  # not told: once for 8, once for any size


def test_compile_with_checks_still_refuses_a_wrong_shape():
    torch.compiler.reset()
    compiled = torch.compile(nd.NdLinear((4, 5, 6), (8, 5, 3)), backend="eager")
    with pytest.raises(Exception, match=r"shape \(\.\.\., 4, 5, 6\), got \(3, 5, 4, 6\)"):
        compiled(torch.randn(3, 5, 4, 6))


OTHERS = {
    "sum": lambda: (nd.NdLinearSum((4, 5), (3, 2), 2), (4, 5)),
    "lora": lambda: (ndlinear_lora.NdLinearLoRA(nn.Linear(20, 6), alpha=3.0, bias=True), (20,)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_compile_the_other_layers(kind):
    torch.compiler.reset()
    layer, shape = OTHERS[kind]()
    x = torch.randn(6, *shape)
    randomise(layer)
    same(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x), 1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_export_with_dynamic_batch_axes_is_saved_and_loaded(layer):
    sizes, file = {0: torch.export.Dim("batch"), 1: torch.export.Dim("steps")}, io.BytesIO()
    program = torch.export.export(layer, (batch(3, 2),), dynamic_shapes=(sizes,))
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in ((3, 2), (7, 5), (1, 2), (2, 1)):
        x = batch(*shape)
        same(loaded(x), layer(x))


# ------------------------------------------------------------------------------------------- what autograd may ask for
def gradients(layer, x, needed, **options):
    """Gradients of a fixed function of the output by those of [x, *parameters] that are needed."""
    inputs = [x, *layer.parameters()]
    for tensor, need in zip(inputs, needed):
        tensor.requires_grad_(need)
    weights = torch.linspace(-1, 1, layer(x).numel(), dtype=x.dtype).reshape(layer(x).shape)
    total = (weights * layer(x)).sum() + layer(x).square().mean()
    return torch.autograd.grad(total, [t for t in inputs if t.requires_grad], **options)


def test_any_part_may_be_frozen(layer):
    """Each input of the function alone."""
    x, count = batch(3), 1 + len(list(layer.parameters()))
    wanted = gradients(layer, x, [True] * count)
    for only in range(count):
        same(gradients(layer, x, [i == only for i in range(count)])[0], wanted[only])


@pytest.mark.parametrize("execution", ["planned", "recompute"])
@pytest.mark.parametrize("what", ["input", "weight"])
def test_a_change_before_the_backward_is_noticed_or_harmless(layer, what, execution):
    """As torch.nn.Linear: where the backward needs what has been overwritten since, it must say so."""
    layer.execution = execution
    x, parameters = batch(3), list(layer.parameters())
    wanted = torch.autograd.grad(layer(x).square().sum(), parameters)
    y = layer(x)
    with torch.no_grad():
        (x if what == "input" else layer.weights[1]).mul_(2)
    try:
        got = torch.autograd.grad(y.square().sum(), parameters)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for a, b in zip(got, wanted):
        same(a, b)


def test_saved_tensors_pass_through_hooks(layer):
    """What offloads activations (torch.autograd.graph.save_on_cpu) must see everything that is kept."""
    x, kept = batch(3).requires_grad_(), []
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: kept[i].clone()):
        y = layer(x)
    assert kept, "nothing was saved through the hooks"
    for a, b in zip(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), wanted):
        same(a, b)


def test_nothing_is_kept_without_gradients(layer):
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.no_grad(),
    ):
        layer(batch(3))
    assert not kept
    with torch.inference_mode():
        assert layer(batch(3)).is_inference()


def test_tied_weights():
    """One matrix in two modes and in two layers: gradients add up."""
    layer = randomise(nd.NdLinear((4, 4, 6), (4, 4, 3), dtype=torch.float64))
    layer.align_layers[1].weight = layer.align_layers[0].weight
    x = torch.randn(3, 4, 4, 6, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        for y in (layer(x), expected(layer, x))
    )
    for a, b in zip(found, wanted):
        same(a, b)


def test_in_place_operations_on_the_result(layer):
    for size in (3, 2500):
        x = batch(size)
        got = torch.autograd.grad(
            nn.ReLU(inplace=True)(layer(x)).square().mean(), list(layer.parameters())
        )
        wanted = torch.autograd.grad(
            torch.relu(expected(layer, x)).square().mean(), list(layer.parameters())
        )
        for a, b in zip(got, wanted):
            same(a, b)


# ---------------------------------------------------------------------------------------------------------- torch.func
def test_vmap_over_samples(layer):
    x = batch(5)
    same(torch.func.vmap(layer)(x), layer(x))
    same(torch.func.vmap(layer, in_dims=2)(x.movedim(0, 2)), layer(x))


# -------------------------------------------------------------------------------------------------- copies and devices
def test_a_layer_in_use_is_moved_copied_and_loaded(layer):
    """Nothing that a first call computed may be stale afterwards: other numbers, other type, other tensors."""
    x = batch(3)
    layer(x).sum().backward()
    other = randomise(copy.deepcopy(layer))
    same(other(x), expected(other, x))
    layer.load_state_dict(other.state_dict(), assign=True)
    same(layer(x), other(x))
    randomise(layer)
    same(layer(x), expected(layer, x))
    assert layer.float()(x.float()).dtype == torch.float32
    layer.double().align_layers[0].weight.data = torch.zeros_like(other.weights[0])
    same(layer(x), expected(layer, x))
    same(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_dtype_argument_and_caller_s_list():
    dims = [4, 5]
    layer = nd.NdLinear(dims, dims, dtype=torch.float16)
    dims[0] = 9
    assert layer.input_dims == layer.hidden_size == (4, 5)
    assert layer.weights[0].dtype == torch.float16
    assert nd.NdLinearSum((4, 5), (4, 5), dtype=torch.float16).bias.dtype == torch.float16


# --------------------------------------------------------------------- tools that replace, wrap or hook a mode's module
class Doubled(nn.Module):
    """What an adapter library does: a module around the mode's nn.Linear."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("mode", range(3))
def test_a_wrapped_mode_is_called(layer, mode):
    x = batch(2)
    wrapped = copy.deepcopy(layer)
    wrapped.align_layers[mode] = Doubled(wrapped.align_layers[mode])
    with torch.no_grad():
        for parameter in layer.align_layers[mode].parameters():
            parameter.mul_(2)
    same(wrapped(x), layer(x))
    assert "NdLinear(" in repr(wrapped)


HOOKS = ["register_forward_hook", "register_forward_pre_hook"]
HOOKS += ["register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_a_mode_fire(layer, kind):
    x, seen = batch(2).requires_grad_(), []
    want = layer(x)
    note = lambda module, *arguments: seen.append(module)  # noqa: E731
    handles = [getattr(mode, kind)(note) for mode in layer.align_layers]
    y = layer(x)
    y.sum().backward()
    same(y, want)
    order = layer.order if "forward" in kind else layer.order[::-1]
    assert seen == [layer.align_layers[k] for k in order]
    for handle in handles:
        handle.remove()
    layer(x).sum().backward()
    assert len(seen) == 3
