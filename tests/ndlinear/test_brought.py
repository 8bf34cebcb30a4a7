"""Numbers that a mode brings only when it is called, or holds in another form: offloaded, sharded, cast or quantised.

Each case is held against the layer as it was before. What the libraries do is also done by hand, without them.
"""

import copy
import io
import os
import subprocess
import sys

import pytest
import torch
from ndlinear_cases import encoder, randomise
from torch import nn
from torch.nn.utils import parametrize, prune

import ndlinear as nd
import ndlinear_lora

KINDS = {
    "layer": (lambda: nd.NdLinear((4, 6), (3, 5)), (7, 4, 6)),
    "flat": (lambda: nd.FlatNdLinear((4, 6), (3, 5)), (7, 24)),
    "sum": (lambda: nd.NdLinearSum((4, 6), (3, 5), 2), (7, 4, 6)),
    "three modes": (lambda: nd.NdLinear((2, 3, 4), (5, 1, 3), False), (7, 2, 3, 4)),
    "adapter": (lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(24, 15)), (7, 24)),
    "encoder": (encoder, (2, 3, 24)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind):
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model = nn.Sequential(make()).eval()
    for layer in model.modules():
        if isinstance(layer, nd.NdLinear):
            randomise(layer)
    return model, torch.randn(shape)


def modes_of(model):
    layers = [m for m in model.modules() if isinstance(m, nd.NdLinear)]
    return [mode for layer in layers for mode in layer.align_layers]


# -------------------------------------------------------------------------------- by hand, without a library
def offloaded(mode):
    """As accelerate: parameters on the meta device, their numbers brought by a function in place of `forward`."""
    values = {name: value.detach().clone() for name, value in mode.named_parameters()}
    for name, value in mode.named_parameters():
        mode._parameters[name] = nn.Parameter(value.to("meta"), requires_grad=False)
    mode.forward = lambda x: nn.functional.linear(x, values["weight"], values.get("bias"))


def cast_by_hooks(mode):
    """As FSDP2 with a policy for single modes: float64 outside of calls, float32 inside, by hooks."""
    mode.double()
    mode.register_forward_pre_hook(lambda module, inputs: module.float() and None)
    mode.register_forward_hook(lambda module, inputs, y: module.double() and None)


def eight_bits(mode):
    """As the layer-wise casting of diffusers: eight bits outside of calls."""
    forward = mode.forward
    for value in mode.parameters():
        value.data = value.data.mul(8).round().div(8)  # eight bits hold these
    held = {name: value.data.to(torch.float8_e4m3fn) for name, value in mode.named_parameters()}

    def cast(x):
        mode.float()
        y = forward(x)
        restore()
        return y

    def restore():
        for name, value in mode.named_parameters():
            value.data = held[name]

    mode.forward = cast
    restore()


@pytest.mark.parametrize("how", [offloaded, eight_bits, cast_by_hooks])
@kinds
def test_modes_that_bring_their_numbers_when_they_are_called(kind, how):
    if how is not offloaded and kind in ("adapter", "encoder"):
        pytest.skip("these read the type of the weight outside of calls, as those of nn.Linear do")
    model, x = made(kind)
    for mode in modes_of(model):
        if how is eight_bits:
            for value in mode.parameters():
                value.data = (
                    value.data.clamp(-3, 3).mul(8).round().div(8).to(torch.float8_e4m3fn).float()
                )
    with torch.no_grad():
        want = model(x)
        for mode in modes_of(model):
            how(mode)
        torch.testing.assert_close(model(x), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["layer", "flat", "sum", "three modes"])
def test_the_dense_equivalent_of_offloaded_and_wrapped_modes_is_what_they_compute(kind):
    model, x = made(kind)
    want = model(x).flatten(1)
    for mode in modes_of(model)[::2]:
        offloaded(mode)
    found = nd.to_linear(model[0])(x.flatten(1))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
    layer = model[0].terms[0]
    layer.align_layers[1] = nn.Sequential(
        layer.align_layers[1], nn.Linear(layer.hidden_size[1], layer.hidden_size[1])
    )
    found = nd.to_linear(model[0])(x.flatten(1))
    torch.testing.assert_close(found, model(x).flatten(1), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@kinds
def test_quantize_dynamic(kind):
    """torch.ao puts modules in place of the modes whose `weight` and `bias` are methods."""
    if kind == "adapter":
        pytest.skip("it adapts no layer of torch.ao; its own modes are tested with it")
    model, x = made(kind)
    with torch.no_grad():
        want = model(x)
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        got = quantised(x)
        assert 0 < (got - want).abs().max() < 0.06 * want.abs().max()
        layers = [m for m in quantised.modules() if isinstance(m, (nd.NdLinear, nd.NdLinearSum))]
        for layer in layers:
            dense, flat = nd.to_linear(layer), torch.randn(50, 24)
            exact = layer(
                flat if isinstance(layer, nd.FlatNdLinear) else flat.unflatten(1, layer.input_dims)
            ).flatten(1)
            assert (dense(flat) - exact).abs().max() < 0.06 * exact.abs().max()
            assert all(isinstance(w, torch.Tensor) for term in layer.terms for w in term.weights)


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


@kinds
def test_weights_of_eight_bits_in_a_tensor_of_their_own(kind):
    model, x = made(kind)
    with torch.no_grad():
        want = model(x)
        for mode in modes_of(model):
            mode._parameters["weight"] = nn.Parameter(
                Int8(mode.weight.detach()), requires_grad=False
            )
        got = model(x)
        assert 0 < (got - want).abs().max() < 0.06 * want.abs().max()
        if kind in ("layer", "flat", "sum", "three modes"):
            dense = nd.to_linear(model[0])(x.flatten(1))
            torch.testing.assert_close(dense, got.flatten(1), atol=1e-4, rtol=1e-4)


def test_from_linear_of_a_quantised_layer():
    dense = nn.Linear(24, 15)
    want = nd.NdLinearSum.from_linear(dense, (4, 6), (3, 5), rank=12)
    dense._parameters["weight"] = nn.Parameter(Int8(dense.weight.detach()), requires_grad=False)
    got = nd.NdLinearSum.from_linear(dense, (4, 6), (3, 5), rank=12)
    x = torch.randn(7, 4, 6)
    assert (got(x) - want(x)).abs().max() < 0.05 * want(x).abs().max()
    with pytest.raises(TypeError, match=r"cannot multiply torch.float8_e4m3fn: .*bfloat16"):
        nd.NdLinear.from_linear(nn.Linear(24, 15).to(torch.float8_e4m3fn), (4, 6), (3, 5))


# ---------------------------------------------------------------------------------------- with the libraries
@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "dispatch_model"])
@kinds
def test_accelerate(kind, how, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, x = made(kind)
    with torch.no_grad():
        want = model(x)
        leaves = [
            name for name, part in model.named_modules() if name and not list(part.children())
        ]
        names = {name: ("cpu", "disk")[i % 2] for i, name in enumerate(leaves)}
        loose = [n for n, _ in model.named_parameters() if n.rpartition(".")[0] not in names]
        names |= dict.fromkeys(loose, "cpu")
        moved = {
            "cpu_offload": lambda: accelerate.cpu_offload(model, "cpu"),
            "disk_offload": lambda: accelerate.disk_offload(model, tmp_path, "cpu"),
            "dispatch_model": lambda: accelerate.dispatch_model(
                model, names, "cpu", offload_dir=tmp_path, force_hooks=True
            ),
        }[how]()
        torch.testing.assert_close(moved(x), want, atol=1e-5, rtol=1e-5)


def test_fsdp_with_a_policy_for_each_mode(one_process):
    """Its parameters are sharded, and of another type, until its own hooks have run."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "MixedPrecisionPolicy"):
        pytest.skip("this torch has no policies of fully_shard")
    for kind in ("layer", "flat", "sum", "three modes"):
        model, x = made(kind)
        want = model(x)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        for mode in modes_of(model):
            fsdp.fully_shard(mode, mp_policy=policy)
        y = model(x)
        assert 0 < (y - want).abs().max() < 0.03 * want.abs().max()
        y.sum().backward()
        assert all(mode.weight.grad is not None for mode in modes_of(model))


# ---------------------------------------------------------------------------------------- what is read, written
DENSE = {  # a layer, how its dense weight is made, what a write to it says
    "flat": (
        lambda: nd.FlatNdLinear((4, 6), (3, 5)),
        nd.kronecker_weight,
        "is lost: change `align",
    ),
    "adapter": (
        lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(24, 15), bias=True),
        lambda layer: layer.base_layer.weight + nd.kronecker_weight(layer.adapter),
        r"lost: write to base_layer\.weight, or to adapter",
    ),
}
WRITES = {
    "init": lambda layer: nn.init.kaiming_uniform_(layer.weight),
    "init of a bias": lambda layer: nn.init.constant_(layer.bias, 1.0),
    "copy_": lambda layer: layer.weight.copy_(torch.zeros(15, 24)),
    "data": lambda layer: layer.weight.data.normal_(0, 0.02),
    "detached": lambda layer: layer.weight.detach().zero_(),
    "a part": lambda layer: layer.weight[:3].fill_(0),
    "an item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "a view": lambda layer: layer.weight.t()[0].mul_(2),
    "chunk": lambda layer: layer.weight.chunk(3)[0].zero_(),
    "unbind": lambda layer: layer.weight.detach().unbind(0)[0].zero_(),
    "foreach": lambda layer: torch._foreach_zero_([layer.weight]),
    "add_": lambda layer: layer.bias.add_(1),
    "new data": lambda layer: setattr(layer.weight, "data", torch.zeros(15, 24)),
    "out": lambda layer: torch.mul(torch.ones(15, 24), 2, out=layer.weight),
    "a parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(15, 24))),
    "no bias": lambda layer: setattr(layer, "bias", nn.Parameter(torch.zeros(15))),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
dense = pytest.mark.parametrize("make, by_formula, words", DENSE.values(), ids=DENSE)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@dense
def test_a_write_to_the_dense_weight_is_refused_with_what_to_do(make, by_formula, words, write):
    layer = randomise(make())
    before = copy.deepcopy(layer.state_dict())
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(TypeError, match=words):
            write(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    with pytest.raises((AttributeError, TypeError)):
        layer.weight = torch.zeros(15, 24)
    with pytest.raises(AttributeError):
        layer.bias += 1


@dense
def test_the_dense_weight_is_a_plain_tensor_in_all_that_reads_it(make, by_formula, words, tmp_path):
    layer, linear, x = randomise(make()).double(), nn.Linear(24, 15).double(), torch.randn(7, 24)
    weight, x = layer.weight, x.double()
    torch.testing.assert_close(x @ weight.t() + layer.bias, layer(x))
    read = (weight * 2, weight.clone(), weight.float(), weight.t() @ weight, weight.clone().zero_())
    assert {type(result) for result in (*read, copy.deepcopy(weight.detach()))} == {torch.Tensor}
    torch.save({"weight": weight.detach()}, tmp_path / "dense.pt")
    stored = torch.load(tmp_path / "dense.pt", weights_only=True)["weight"]
    assert type(stored) is torch.Tensor and torch.equal(stored, by_formula(layer))
    parameters = [p for name, p in layer.named_parameters() if name.endswith("layers.0.weight")]
    (grad,) = torch.autograd.grad(weight.square().sum(), parameters)
    assert torch.equal(grad, torch.autograd.grad(by_formula(layer).square().sum(), parameters)[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        assert torch.equal(linear.weight, weight)
        linear.weight[:] = 2 * weight
        linear.weight.sub_(weight)
    torch.testing.assert_close(linear.weight, weight.clone())
    linear.load_state_dict({"weight": weight, "bias": layer.bias})
    torch.testing.assert_close(linear(x), layer(x))
    torch.mm(weight.detach(), weight.detach().T, out=torch.empty(15, 15).double())
    with pytest.raises(TypeError, match=words):
        torch.mm(linear.weight.detach(), torch.eye(24).double(), out=layer.weight)
    assert weight.numpy(force=True).shape == (15, 24)


def test_weights_that_do_not_lie_in_one_piece():
    layer = randomise(nd.NdLinear((4, 6), (3, 5), dtype=torch.float64))
    for mode in layer.align_layers:
        mode.weight.data = mode.weight.data.t().contiguous().t()
    x = torch.randn(7, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(nd.to_linear(layer)(x.flatten(1)), layer(x).flatten(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["layer", "flat", "sum", "three modes"])
@pytest.mark.parametrize("execution", ["planned", "sequential"])
def test_onnx_by_torchscript_keeps_the_batch_axis_free(kind, execution):
    runtime = pytest.importorskip("onnxruntime")
    model, x = made(kind)
    for layer in model[0].terms:
        layer.execution = execution
    file, names = io.BytesIO(), {"input_names": ["x"], "output_names": ["y"]}
    free = {"x": {0: "batch"}, "y": {0: "batch"}}
    torch.onnx.export(model, (x,), file, dynamo=False, dynamic_axes=free, **names)
    session = runtime.InferenceSession(file.getvalue())
    for batch in (1, 7, 12):
        x = torch.randn(batch, *x.shape[1:])
        y = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)


def test_attention_with_a_layer_as_its_projection_is_compiled():
    torch.compiler.reset()
    block = encoder().train()
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(
        torch.compile(block, backend="aot_eager")(x), block(x), atol=1e-5, rtol=1e-5
    )


# ------------------------------------------------------------------------------------------- copies and swaps
def test_a_mode_is_pickled_without_this_file(tmp_path):
    layer = nd.NdLinear((4, 6), (3, 5), init="unit")
    torch.save(layer.align_layers[1], tmp_path / "mode.pt")
    read = f"""
import sys, torch
mode = torch.load({str(tmp_path / "mode.pt")!r}, weights_only=False)
mode.reset_parameters()
print(mode, mode.weight.abs().max().item() <= 6 ** -0.5, "ndlinear" in sys.modules)
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", read], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "Linear(in_features=6, out_features=5, bias=True) True False", (
        done.stderr
    )
    assert layer.num_layers == 2, "as in the released package"


def test_averaged_swapped_and_parametrised_weights():
    layer, x = randomise(nd.NdLinear((4, 6), (3, 5))), torch.randn(7, 4, 6)
    averaged = torch.optim.swa_utils.AveragedModel(
        layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.0)
    )
    randomise(layer)
    averaged.update_parameters(layer)
    torch.testing.assert_close(averaged(x), layer(x))
    values = {name: 2 * value for name, value in layer.named_parameters()}
    swapped = torch.func.functional_call(layer, values, (x,))
    with torch.no_grad():
        for value in layer.parameters():
            value.mul_(2)
    torch.testing.assert_close(swapped, layer(x))

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(layer.align_layers[0], "weight", Doubled())
    torch.testing.assert_close(
        nd.to_linear(layer)(x.flatten(1)), layer(x).flatten(1), atol=1e-4, rtol=1e-4
    )
