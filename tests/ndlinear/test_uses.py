"""What a layer must survive in real programs: it computes the same after whatever frameworks and tools do to it.

Evidence 63 probes one layer at each run: also ONNX by dynamo, compilers, forward mode, two processes, ensembles and the meta device.
"""

import contextlib
import copy
import io
import itertools
import pickle

import pytest
import torch
from ndlinear_cases import KINDS, made, modes_of, randomise, reference
from torch import nn
from torch.nn.utils import parametrize

import ndlinear as nd

LAYERS = [kind for kind in KINDS if kind not in ("adapter", "encoder")]


def same(a, b, tol=1e-10):
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def gradients(y, inputs):
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    loss = (weights * y).sum() + y.abs().square().mean()
    return torch.autograd.grad(loss.real, inputs)


# ------------------------------------------------------------------------- inputs, copies and calls that change nothing
def reversed_axes(x):
    return x.permute(*reversed(range(x.ndim)))


LAYOUTS = {
    "transposed storage": lambda x: reversed_axes(reversed_axes(x).contiguous()),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of a wider axis": lambda x: nn.functional.pad(x, (2, 1))[..., 2:-1],
    "expanded": lambda x: x[:1].expand_as(x),
    "swapped batch axes": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "complex numbers": lambda x: torch.complex(x, torch.randn_like(x)),
}


def loaded(layer):
    """After calls, into a layer of another type with other numbers: nothing computed earlier may be stale."""
    other = randomise(copy.deepcopy(layer).float())
    other.double().load_state_dict(layer.state_dict(), assign=True)
    return other.requires_grad_()


def averaged(layer):
    mean = torch.optim.swa_utils.get_ema_multi_avg_fn(0.0)
    average = torch.optim.swa_utils.AveragedModel(layer, multi_avg_fn=mean)
    for mode in modes_of(layer):
        randomise(mode)
    average.update_parameters(layer)
    return average.module.requires_grad_()


def swapped(layer):
    def call(x):
        values = {name: 1 * value for name, value in layer.named_parameters()}
        return torch.func.functional_call(layer, values, (x,))

    return call


def packed(layer):
    """What offloads activations (torch.autograd.graph.save_on_cpu) must see everything that is kept."""

    def call(x):
        kept = []
        pack = lambda tensor: kept.append(tensor) or len(kept) - 1  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: kept[i].clone()):
            y = layer(x)
        assert kept or not y.requires_grad, "nothing was saved through the hooks"
        return y

    return call


def in_pieces(layer):
    for mode in modes_of(layer):
        mode.weight.data = mode.weight.data.t().contiguous().t()
    return lambda x: layer(x)


def complex_numbers(layer):
    randomise(layer.to(torch.complex128))
    return lambda x: layer(x)


CALLS = {  # what is made of a layer: a copy with parameters of its own, or a function that uses it
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "state_dict": loaded,
    "average": averaged,
    "functional_call": swapped,
    "saved tensors": packed,
    "weights in pieces": in_pieces,
    "changed in place": lambda layer: lambda x: layer(x).mul_(2).div_(2),
    "vmap": lambda layer: torch.func.vmap(layer),
    "vmap over the last axis": lambda layer: (
        lambda x: torch.func.vmap(layer, in_dims=-1)(x.movedim(0, -1))
    ),
    "fx": lambda layer: (lambda traced: lambda x: traced(x))(torch.fx.symbolic_trace(layer)),
    "complex numbers": complex_numbers,
}
NOT_PROMISED = {  # torch's own encoder takes few of them, an adapter is not traced, assigning unties
    *(("encoder", use) for use in ("vmap", "vmap over the last axis", "complex numbers")),
    *(("encoder", "fx"), ("adapter", "fx"), ("tied", "state_dict")),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    ("kind", "use"),
    sorted(set(itertools.product(KINDS, LAYOUTS | CALLS)) - NOT_PROMISED),
)
def test_values_and_gradients_are_those_of_the_formula(kind, use):
    """In evaluation torch's encoder reads the weights of its layers, its attention always does."""
    layer, x = made(kind)
    layer.eval()
    layer(x)
    call = CALLS.get(use, lambda layer: lambda x: layer(x))(layer)
    owner = call if isinstance(call, nn.Module) else layer
    x = LAYOUTS.get(use, lambda x: x)(x)
    before = x.clone()
    with torch.no_grad():
        same(call(x), reference(layer, x))
    assert torch.equal(x, before), "the input is not changed"
    x.requires_grad_()
    y, wanted = call(x), reference(layer, x)
    assert y.is_contiguous() or use in CALLS
    same(y, wanted)
    names = [name for name, value in layer.named_parameters() if value.requires_grad]
    names = [] if kind == "encoder" else names  # whose reference holds copies
    found, right = (
        gradients(value, [x, *map(dict(of.named_parameters()).get, names)])
        for value, of in ((y, owner), (wanted, layer))
    )
    for ours, theirs in zip(found, right):
        same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_autocast(kind, dtype):
    layer, x = made(kind, torch.float32)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.to(dtype))
        dense = nd.to_linear(layer)
    assert all(map(torch.equal, dense.parameters(), nd.to_linear(layer).parameters()))
    assert y.dtype == torch.bfloat16, "the folded bias does not lift the result to float32"
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    assert (y.float() - want).abs().max() < 0.05 * want.abs().max()


# ----------------------------------------------------------------------------------------------- compilers and exports
@pytest.mark.parametrize("kind", ["sum", "adapter", "encoder"])
def test_compile_for_every_batch_size_and_later_weights(kind):
    torch.compiler.reset()
    layer, x = made(kind)
    compiled = torch.compile(layer.train(), fullgraph=kind != "encoder", backend="aot_eager")
    for size in (8,) if kind == "encoder" else (8, 5, 64):
        x = torch.randn(size, *x.shape[1:], dtype=x.dtype, requires_grad=True)
        for mode in modes_of(layer):
            randomise(mode)
        y, wanted = compiled(x), reference(layer, x)
        same(y, wanted, 1e-8)
        trained = [value for value in layer.parameters() if value.requires_grad]
        inputs = [x] if kind == "encoder" else [x, *trained]
        for ours, theirs in zip(gradients(y, inputs), gradients(wanted, inputs)):
            same(ours, theirs, 1e-8)


def test_compile_with_checks_still_refuses_a_wrong_shape():
    torch.compiler.reset()
    compiled = torch.compile(nd.NdLinear((4, 5, 6), (8, 5, 3)), backend="eager")
    with pytest.raises(Exception, match=r"shape \(\.\.\., 4, 5, 6\), got \(3, 5, 4, 6\)"):
        compiled(torch.randn(3, 5, 4, 6))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", ["backwards", "flat", "sum", "adapter"])
def test_export_with_dynamic_batch_axes_is_saved_and_loaded(kind):
    layer, x = made(kind)
    sizes, file = {0: torch.export.Dim("batch"), 1: torch.export.Dim("steps")}, io.BytesIO()
    program = torch.export.export(layer, (x,), dynamic_shapes=(sizes,))
    torch.export.save(program, file)
    file.seek(0)
    restored = torch.export.load(file).module()
    for shape in ((3, 2), (7, 5), (1, 2), (2, 1)):
        x = torch.randn(*shape, *x.shape[2:], dtype=x.dtype)
        same(restored(x), layer(x))


# ------------------------------------------------------------------------------------------- what autograd may ask for
@pytest.mark.parametrize("kind", LAYERS)
def test_any_part_may_be_frozen(kind):
    """Each input of the function alone."""
    layer, x = made(kind)
    inputs = [x.requires_grad_(), *layer.parameters()]
    wanted = gradients(layer(x), inputs)
    for only, want in zip(inputs, wanted):
        for tensor in inputs:
            tensor.requires_grad_(tensor is only)
        same(gradients(layer(x), [only])[0], want)


@pytest.mark.parametrize("execution", ["planned", "recompute"])
@pytest.mark.parametrize("what", ["input", "weight"])
@pytest.mark.parametrize("kind", ["as defined", "reordered", "backwards", "no bias"])
def test_a_change_before_the_backward_is_noticed_or_harmless(kind, what, execution):
    """As torch.nn.Linear: where the backward needs what has been overwritten since, it must say so."""
    layer, x = made(kind)
    layer.execution = execution
    parameters = list(layer.parameters())
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


# ------------------------------------------------------- numbers that a mode brings when it is called, or in another form
def cast_by_hooks(model):
    """As layer-wise casting, or FSDP2 with a policy for single modes: another dtype outside of calls."""
    for mode in modes_of(model):
        mode.double()
        mode.register_forward_pre_hook(lambda module, inputs: module.float() and None)
        mode.register_forward_hook(lambda module, inputs, y: module.double() and None)


class Int8(torch.Tensor):
    """What torchao's tensors are to us, where it is not installed: other numbers inside, a product that knows them, and `dequantize`."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.scale = values.abs().amax() / 127
        self.numbers = (values / self.scale).round().to(torch.int8)

    def dequantize(self):
        return self.numbers.float() * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.dequantize(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of numbers of eight bits")


def int8(linear):
    linear._parameters["weight"] = nn.Parameter(Int8(linear.weight.detach()), requires_grad=False)


class Same(nn.Module):
    def forward(self, weight):
        return weight.clone()


def parametrised(model):
    for mode in modes_of(model):
        parametrize.register_parametrization(mode, "weight", Same())


class Twice(nn.Linear):
    """What an adapter library does: a layer in place of the mode's, with a weight, that does something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def of_another_class(model):
    """One mode is enough."""
    mode = modes_of(model)[-1]
    mode.__class__ = Twice
    for parameter in mode.parameters():
        parameter.div_(2)


def wrapped(model):
    for layer in model.modules():
        if isinstance(layer, nd.NdLinear):
            for k, mode in enumerate(layer.align_layers):
                layer.align_layers[k] = nn.Sequential(mode, nn.Identity())


def cpu_offload(model):
    pytest.importorskip("accelerate").cpu_offload(model, "cpu")


def quantised(model):
    """torch.ao puts modules in place of the modes whose `weight` and `bias` are methods."""
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


ALTERED = {  # what is done to the modes of a model, and how far its results may move
    "cast by hooks": (cast_by_hooks, 1e-5),
    "parametrised": (parametrised, 1e-5),
    "wrapped": (wrapped, 1e-5),
    "of another class": (of_another_class, 1e-5),
    "int8": (lambda model: list(map(int8, modes_of(model))), 0.06),
    "quantize_dynamic": (quantised, 0.06),
    "cpu_offload": (cpu_offload, 1e-5),
}
READ_OUTSIDE = {  # weights that are read outside of calls, as those of nn.Linear are
    *(("adapter", "cast by hooks"), ("adapter", "wrapped"), ("adapter", "quantize_dynamic")),
    ("encoder", "cast by hooks"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "how"),
    sorted(set(itertools.product(KINDS.keys() - {"tied", "one bias"}, ALTERED)) - READ_OUTSIDE),
)
def test_modes_of_another_make_and_their_dense_equivalent(kind, how):
    (layer, x), (alter, tol) = made(kind, torch.float32), ALTERED[how]
    model = nn.Sequential(layer).eval()
    with torch.no_grad():
        want = model(x)
        alter(model)
        got = model(x)
        assert (got - want).abs().max() <= tol * want.abs().max()
        assert tol < 0.01 or (got != want).any()
        if kind in ("adapter", "encoder") or how == "cast by hooks":
            return
        axes = 1 if kind == "flat" else len(model[0].input_dims)
        dense = nd.to_linear(model[0])
        found = dense(x.flatten(-axes).to(dense.weight.dtype)).float()
        close = 0.06 if how == "quantize_dynamic" else 1e-4  # which rounds the input, too
        assert (found - got.flatten(-axes)).abs().max() <= close * got.abs().max()
        held = [] if how == "wrapped" else [w for term in model[0].terms for w in term.weights]
        assert all(isinstance(weight, torch.Tensor) for weight in held)


def test_from_linear_of_a_quantised_layer():
    dense = nn.Linear(24, 15)
    want = nd.NdLinearSum.from_linear(dense, (4, 6), (3, 5), rank=12)
    int8(dense)
    got = nd.NdLinearSum.from_linear(dense, (4, 6), (3, 5), rank=12)
    x = torch.randn(7, 4, 6)
    assert (got(x) - want(x)).abs().max() < 0.05 * want(x).abs().max()
    with pytest.raises(TypeError, match=r"cannot multiply torch.float8_e4m3fn: .*bfloat16"):
        nd.NdLinear.from_linear(nn.Linear(24, 15).to(torch.float8_e4m3fn), (4, 6), (3, 5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["reordered", "backwards", "flat", "sum"])
@pytest.mark.parametrize("execution", ["planned", "sequential"])
def test_onnx_by_torchscript_keeps_the_batch_axis_free(kind, execution):
    runtime = pytest.importorskip("onnxruntime")
    layer, x = made(kind, torch.float32)
    for term in layer.terms:
        term.execution = execution
    file, names = io.BytesIO(), {"input_names": ["x"], "output_names": ["y"]}
    free = {"x": {0: "batch"}, "y": {0: "batch"}}
    torch.onnx.export(layer, (x,), file, dynamo=False, dynamic_axes=free, **names)
    session = runtime.InferenceSession(file.getvalue())
    for batch in (1, 7, 12):
        x = torch.randn(batch, *x.shape[1:])
        y = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        same(y, layer(x), 1e-4)


# --------------------------------------------------------------------------------------------------------------- hooks
ON_MODES = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("hook", ON_MODES)
@pytest.mark.parametrize("everywhere", [False, True], ids=["on a mode", "on all modules"])
@pytest.mark.parametrize("kind", ["as defined", "reordered", "backwards", "no bias", "sum"])
def test_hooks_see_the_modes(kind, everywhere, hook):
    (layer, x), seen, modes = made(kind), [], None
    modes = modes_of(layer)
    note = lambda module, *arguments: seen.append(module)  # noqa: E731
    if everywhere:
        handles = [getattr(nn.modules.module, f"register_module_{hook}")(note)]
    else:
        handles = [getattr(mode, f"register_{hook}")(note) for mode in modes]
    with contextlib.ExitStack() as hooked:
        for handle in handles:
            hooked.enter_context(handle)
        x.requires_grad_()
        y = layer(x)
        y.sum().backward()
    same(y, reference(layer, x))
    found = [module for module in seen if any(module is mode for mode in modes)]
    if kind != "sum":
        order = layer.order if "forward" in hook else layer.order[::-1]
        assert found == [modes[k] for k in order]
    assert {id(module) for module in found} == set(map(id, modes))
    seen.clear()
    layer(x).sum().backward()
    assert not seen


# ----------------------------------------------------------------------------------------------- small things, once each
def test_a_flat_layer_has_the_sizes_and_names_of_its_dense_layer():
    layer = nd.FlatNdLinear((4, 5), (3, 2), dtype=torch.float64)
    x = torch.randn(7, 2, 20, dtype=torch.float64)
    assert layer(x[:0]).shape == (0, 2, 6) and layer(x[0, 0]).shape == (6,)
    assert (layer.in_features, layer.out_features, layer.num_layers) == (20, 6, 2)
    assert layer.state_dict().keys() == nd.NdLinear((4, 5), (3, 2)).state_dict().keys()


def test_a_mode_is_pickled_without_this_file():
    layer = nd.NdLinear((4, 6), (3, 5), init="unit")
    pickled = pickle.dumps(layer.align_layers[1])
    assert b"ndlinear" not in pickled and b"torch.nn.modules.linear" in pickled
    assert b"Plan" not in pickle.dumps(layer), (
        "nor a layer's plans, which another version may not know"
    )
    mode = pickle.loads(pickled)
    mode.reset_parameters()
    assert type(mode) is nn.Linear and 0 < mode.weight.abs().max() <= 6**-0.5
