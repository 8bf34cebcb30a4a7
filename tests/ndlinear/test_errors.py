"""Bad input: the type of the error, and a message that names what was given, what is wanted and what to do."""

import numpy as np
import pytest
import torch
from torch import nn

import ndlinear as nd
import ndlinear_lora

PAIRS = [
    # different lengths
    ((4, 5), (3,), ValueError, ["(4, 5)", "(3,)", "equally many", "size 1"]),
    ((4,), (3, 2, 1), ValueError, ["(4,)", "(3, 2, 1)", "equally many"]),
    # zero and negative sizes
    ((0, 5), (3, 2), ValueError, ["(0, 5)", "(3, 2)", "positive"]),
    ((4, 5), (3, 0), ValueError, ["(4, 5)", "(3, 0)", "positive"]),
    ((4, -5), (3, 2), ValueError, ["(4, -5)", "(3, 2)", "positive"]),
    # empty
    ((), (), ValueError, ["input_dims=()", "hidden_size=()", "positive"]),
    ((), (3,), ValueError, ["input_dims=()", "(3,)"]),
    # not integers, not sequences
    ((4, 5.0), (3, 2), TypeError, ["(4, 5.0)", "(3, 2)", "integers", "(8, 8)"]),
    ((4, 5), ("3", 2), TypeError, ["(4, 5)", "('3', 2)", "integers"]),
    ("45", (3, 2), TypeError, ["'45'", "(3, 2)", "integers"]),
    (20, (3, 2), TypeError, ["20", "(3, 2)", "sequences"]),
    ((4, 5), 6, TypeError, ["(4, 5)", "6", "sequences"]),
    (None, (3, 2), TypeError, ["None", "(3, 2)"]),
    ((4, None), (3, 2), TypeError, ["(4, None)", "(3, 2)"]),
]
TAKES_SHAPES = [
    nd.NdLinear,
    nd.NdLinearSum,
    nd.cheapest_order,
    nd.count_macs,
    nd.count_parameters,
    lambda d, h: nd.rearrange(torch.zeros(6, 20), d, h),
    lambda d, h: nd.nearest_kronecker(torch.zeros(6, 20), d, h),
    lambda d, h: nd.NdLinear.from_linear(nn.Linear(20, 6), d, h),
    lambda d, h: nd.NdLinearSum.from_linear(nn.Linear(20, 6), d, h),
]


def check(error, call, parts):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert caught.type is error
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))


@pytest.mark.parametrize("dims, hidden, error, parts", PAIRS)
@pytest.mark.parametrize("make", TAKES_SHAPES, ids=range(len(TAKES_SHAPES)))
def test_shapes(make, dims, hidden, error, parts):
    check(error, lambda: make(dims, hidden), parts)


@pytest.mark.parametrize("dims, hidden, error, parts", [p for p in PAIRS if p[0] is not None])
def test_shapes_of_an_adapter(dims, hidden, error, parts):
    check(error, lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(20, 6), dims, hidden), parts)


def test_numpy_integers_and_sizes_are_fine():
    layer = nd.NdLinear(np.array([4, 5]), torch.Size([3, 2]))
    assert layer.input_dims == (4, 5)
    assert all(type(d) is int for d in layer.input_dims + layer.hidden_size)


@pytest.mark.parametrize(
    "rank, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)]
)
def test_ranks(rank, error):
    parts = ["(4, 5)", "(3, 2)", f"rank={rank!r}"]
    for call in (
        lambda: nd.NdLinearSum((4, 5), (3, 2), rank),
        lambda: nd.count_parameters((4, 5), (3, 2), rank=rank),
        lambda: nd.nearest_kronecker(torch.zeros(6, 20), (4, 5), (3, 2), rank),
        lambda: nd.NdLinear.from_linear(nn.Linear(20, 6), (4, 5), (3, 2), rank),
    ):
        check(error, call, parts)


def test_init_names():
    for cls in (nd.NdLinear, nd.NdLinearSum):
        check(
            ValueError,
            lambda cls=cls: cls((4,), (3,), init="xavier"),
            ["xavier", '"linear", "paper" or "unit"'],
        )


def test_an_execution_that_does_not_exist_is_refused_at_any_time():
    layer = nd.NdLinear((4,), (3,))
    for call in (
        lambda: nd.NdLinear((4,), (3,), execution="squential"),
        lambda: setattr(layer, "execution", "squential"),
    ):
        check(ValueError, call, ["squential", '"planned", "recompute" or "sequential"'])


def test_factors_of_integers_would_be_rounded():
    matrix = torch.ones(6, 20, dtype=torch.int32)
    check(TypeError, lambda: nd.nearest_kronecker(matrix, (4, 5), (3, 2)), ["int32", "double()"])


def test_an_order_may_be_an_iterator():
    weights, x = [torch.randn(3, 4), torch.randn(2, 5)], torch.randn(7, 4, 5)
    assert nd.ndlinear(x, weights, order=reversed((0, 1))).shape == (7, 3, 2)
    assert nd.count_macs((4, 5), (3, 2), reversed((0, 1))) == nd.count_macs((4, 5), (3, 2), (1, 0))


# --------------------------------------------------------------------------------------------------------------- inputs
SHAPES = {
    "wrong last size": (7, 4, 6),
    "swapped": (7, 5, 4),
    "one axis missing": (5,),
    "flat": (7, 20),
    "no axis": (),
    "batch axis last": (4, 5, 7),
}
CALLS = {
    "layer": lambda x: nd.NdLinear((4, 5), (3, 2))(x),
    "reordered layer": lambda x: nd.NdLinear((4, 5), (8, 2))(x),
    "sum": lambda x: nd.NdLinearSum((4, 5), (3, 2), 2)(x),
    "function": lambda x: nd.ndlinear(x, [torch.zeros(3, 4), torch.zeros(2, 5)]),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_input_shapes(call, shape):
    parts = ["(..., 4, 5)", f"got {shape}", "ends in (4, 5)", "unflatten"]
    check(ValueError, lambda: call(torch.zeros(shape)), parts)


@calls
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_input(call, dtype):
    parts = ["(7, 4, 5)", str(dtype), "torch.float32", "convert", ".to()"]
    check(TypeError, lambda: call(torch.zeros(7, 4, 5, dtype=dtype)), parts)
    with torch.autocast("cpu", torch.bfloat16):
        check(TypeError, lambda: call(torch.zeros(7, 4, 5, dtype=dtype)), parts)


@calls
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_mixed_dtypes(call, dtype):
    parts = ["(7, 4, 5)", str(dtype), "torch.float32", "autocast"]
    check(TypeError, lambda: call(torch.zeros(7, 4, 5, dtype=dtype)), parts)


@calls
def test_mixed_devices(call):
    parts = ["(7, 4, 5)", "on meta", "on cpu", ".to()"]
    check(TypeError, lambda: call(torch.zeros(7, 4, 5, device="meta")), parts)
    with torch.autocast("cpu", torch.bfloat16):
        check(TypeError, lambda: call(torch.zeros(7, 4, 5, device="meta")), parts)


def test_mixed_dtypes_where_there_is_no_autocast():
    layer = nd.NdLinear((4, 5), (3, 2), device="meta")
    check(
        TypeError,
        lambda: layer(torch.zeros(4, 5, device="meta", dtype=torch.float64)),
        ["float64", "float32", "meta"],
    )


@calls
def test_not_a_tensor(call):
    check(TypeError, lambda: call(np.zeros((7, 4, 5))), ["(..., 4, 5)", "ndarray"])
    check(TypeError, lambda: call([[1.0]]), ["(..., 4, 5)", "list"])


def test_input_of_a_wrapped_layer_is_checked_too():
    layer = nd.NdLinear((4, 5), (3, 2))
    layer.align_layers[0] = nn.Sequential(layer.align_layers[0])
    assert layer(torch.zeros(4, 5)).shape == (3, 2)
    check(ValueError, lambda: layer(torch.zeros(5, 4)), ["(..., 4, 5)", "(5, 4)"])


# ------------------------------------------------------------------------------------------------------- functional form
def test_weights_and_biases_of_the_function():
    x, w = torch.zeros(7, 4, 5), [torch.zeros(3, 4), torch.zeros(2, 5)]
    check(ValueError, lambda: nd.ndlinear(x, []), ["0 weights"])
    check(
        ValueError,
        lambda: nd.ndlinear(x, w, [None]),
        ["2 weights and 1 biases", "one bias per mode"],
    )
    check(ValueError, lambda: nd.ndlinear(x, [w[0], torch.zeros(5)]), ["weight (H, D)"])
    bad = [torch.zeros(4), None]
    check(ValueError, lambda: nd.ndlinear(x, w, bad), ["(7, 4, 5)", "weight (3, 4)", "bias (4,)"])


@pytest.mark.parametrize("order", [(0,), (0, 0), (1, 2), (0, 1, 2), (-1, 0)])
def test_orders(order):
    parts = [str(order), "(0, 1)", "once"]
    weights = [torch.zeros(3, 4), torch.zeros(2, 5)]
    check(ValueError, lambda: nd.ndlinear(torch.zeros(7, 4, 5), weights, order=order), parts)
    check(ValueError, lambda: nd.count_macs((4, 5), (3, 2), order), parts)


def test_mode_products():
    x = torch.zeros(7, 4, 5)
    check(
        ValueError,
        lambda: nd.mode_product(x, torch.zeros(3, 4), -1),
        ["axis -1", "(7, 4, 5)", "(3, 4)", "(H, "],
    )
    check(ValueError, lambda: nd.mode_product(x, torch.zeros(3, 4), 3), ["axis 3", "(7, 4, 5)"])
    check(ValueError, lambda: nd.mode_product(x, torch.zeros(3, 4), -4), ["axis -4", "(7, 4, 5)"])
    check(ValueError, lambda: nd.mode_product(x, torch.zeros(4), 1), ["axis 1", "weight (4,)"])
    bias = torch.zeros(4)
    check(
        ValueError,
        lambda: nd.mode_product(x, torch.zeros(3, 4), 1, bias),
        ["weight (3, 4)", "bias (4,)"],
    )
    check(
        ValueError, lambda: nd.mode_product(torch.zeros(()), torch.zeros(3, 4), 0), ["axis 0", "()"]
    )


# ---------------------------------------------------------------------------------------------- dense layers and adapters
def test_matrices_that_do_not_fold():
    parts = ["(6, 20)", "(3, 2)", "(4, 4)", "(outputs, inputs)"]
    for call in (
        lambda: nd.rearrange(torch.zeros(6, 20), (4, 4), (3, 2)),
        lambda: nd.nearest_kronecker(torch.zeros(6, 20), (4, 4), (3, 2)),
        lambda: nd.NdLinear.from_linear(nn.Linear(20, 6), (4, 4), (3, 2)),
        lambda: nd.NdLinearSum.from_linear(nn.Linear(20, 6), (4, 4), (3, 2), rank=2),
        lambda: nd.NdLinearSum.from_linear(nn.Linear(20, 6), (4, 4), (3, 2)),
    ):
        check(ValueError, call, parts)
    check(
        ValueError,
        lambda: nd.rearrange(torch.zeros(20, 6), (4, 5), (3, 2)),
        ["(20, 6)", "(outputs, inputs)"],
    )
    check(ValueError, lambda: nd.rearrange(torch.zeros(120), (4, 5), (3, 2)), ["(120,)"])


def test_from_linear_wants_a_linear_layer():
    for cls in (nd.NdLinear, nd.NdLinearSum):
        check(
            TypeError,
            lambda cls=cls: cls.from_linear(torch.zeros(6, 20), (4, 5), (3, 2)),
            ["nn.Linear", "Tensor"],
        )


def test_factorisations_of_an_adapter():
    parts = ["(4, 4)", "(3, 2)", "(20, 6)", "(4, 5) and (2, 3)"]
    check(ValueError, lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(20, 6), (4, 4), (3, 2)), parts)
    check(
        ValueError,
        lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(20, 6), (4, 5), (3, 3)),
        ["(4, 5)", "(3, 3)", "(20, 6)"],
    )
    check(
        ValueError,
        lambda: ndlinear_lora.NdLinearLoRA(nn.Linear(20, 6), hidden_size=(6,)),
        ["(4, 5)", "(6,)"],
    )


def test_adapters_want_a_linear_layer():
    check(
        TypeError, lambda: ndlinear_lora.NdLinearLoRA(nn.Conv1d(4, 4, 1)), ["nn.Linear", "Conv1d"]
    )
    check(
        TypeError,
        lambda: ndlinear_lora.NdLinearLoRA(nd.NdLinear((4,), (4,))),
        ["nn.Linear", "NdLinear"],
    )


def test_a_lone_linear_layer_is_no_model():
    words = ["itself", "NdLinearLoRA(model)"]
    check(ValueError, lambda: ndlinear_lora.apply_ndlinear_lora(nn.Linear(4, 4), "*"), words)
