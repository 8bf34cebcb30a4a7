"""Small image classifiers: heads against the formulas that they stand for, pictures, training and memory against counts."""

import functools
import math

import lab
import numpy as np
import pytest
import torch
from lab import models
from lab.chapters import vision
from lab.data import Data, splits
from lab.train.loop import train_epochs
from torch import nn
from torch.nn import functional as F

from ndlinear import ndlinear


@pytest.fixture
def small(monkeypatch):
    """A data set of three classes, twelve training pictures (nine of them exact) and six test pictures."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (18, 3, 32, 32)).astype(np.uint8), np.arange(18) % 3
    splits = {"train": slice(0, 12), "train_exact": slice(0, 9), "test": slice(12, 18)}
    made = Data("small", x, y, ("a", "b", "c"), "", False, splits, "")
    monkeypatch.setattr(vision, "load", lambda name: made)
    vision.pictures.cache_clear()
    yield made
    vision.pictures.cache_clear()


def test_pictures_leave_the_exact_part_when_more_are_asked_for(small, monkeypatch):
    monkeypatch.setattr(splits, "EXACT", 9)
    assert [len(vision.pictures("small", n, 0)[0][0]) for n in (9, 12)] == [9, 12]
    with pytest.raises(lab.modes.LabError, match="too few for 15"):
        vision.pictures("small", 15, 0)


@pytest.mark.parametrize(("images", "held"), [(60, 6), (24, 12)])
def test_few_of_each_class_are_the_first_ones_and_some_are_held_out(images, held):
    """A tenth; of eight pictures of a class, half."""
    x = np.random.default_rng(0).integers(0, 256, (70, 3, 4, 4)).astype(np.uint8)
    parts = {"train": slice(0, 60), "test": slice(60, 70)}
    whole = Data("small", x, np.arange(70) % 3, ("a", "b", "c"), "", False, parts, "")
    parts = splits.few_of_each(whole, images)
    sizes = [len(classes) for _, classes in (parts.train, parts.val, parts.test)]
    assert sizes == [images - held, held, 10]
    seen, classes = (torch.cat([parts.train[i], parts.val[i]]) for i in (0, 1))
    assert classes.bincount().tolist() == [images // 3] * 3
    first = torch.from_numpy(x[:images].astype(np.float64))
    like = torch.corrcoef(torch.cat([seen.double(), first]).flatten(1))[:images, images:]
    assert sorted(like.argmax(1).tolist()) == list(range(images)), (
        "each once, the first of each class"
    )
    assert parts.train[0].mean((0, 2, 3)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "plain, pieces, shapes",
    [
        (models.TTLinear, vision.TTCores, ((4, 3, 2), (5, 2, 3), 4)),
        (models.TTLinear, vision.TTCores, ((3, 4), (2, 5), 2)),
        (models.TTLinear, vision.TTCores, ((6,), (4,), 3)),
        (models.CPLinear, vision.CPFactors, (20, 30, 4)),
    ],
)
def test_a_map_piece_by_piece_is_the_map_multiplied_out(plain, pieces, shapes):
    slow, fast = plain(*shapes).double(), pieces(*shapes).double()
    for parameter in slow.parameters():
        nn.init.normal_(parameter)
    fast.load_state_dict(slow.state_dict())
    inputs = shapes[0] if isinstance(shapes[0], int) else math.prod(shapes[0])
    x = torch.randn(7, inputs).double()
    outputs = [layer(x) for layer in (slow, fast)]
    torch.testing.assert_close(*outputs)
    grads = [
        torch.autograd.grad(y.square().sum(), [*m.parameters()])
        for m, y in zip((slow, fast), outputs)
    ]
    for pair in zip(*grads):
        torch.testing.assert_close(*pair)


def test_tcl_is_ndlinear_without_biases():
    pytest.importorskip("tltorch")
    layer, x = vision.tcl().double(), torch.randn(3, 64, 8, 8).double()
    assert torch.allclose(layer(x), ndlinear(x, list(layer.factors)), atol=1e-10)
    assert models.size(layer) == 64 * 64 + 8 * 8 + 8 * 8


def test_trl_is_a_tucker_weight_and_starts_small():
    pytest.importorskip("tltorch")
    torch.manual_seed(0)
    layer, x = vision.trl(10).double(), torch.randn(3, 64, 8, 8).double()
    core, factors = layer.weight.core, list(layer.weight.factors)
    weight = torch.einsum("abcd,ia,jb,kc,nd->ijkn", core, *factors)
    nn.init.normal_(layer.bias)
    wanted = torch.einsum("bijk,ijkn->bn", x, weight) + layer.bias
    assert torch.allclose(layer(x), wanted, atol=1e-8)
    assert core.shape == (32, 4, 4, 10)
    squares = [vision.trl(10).weight.to_tensor().square().mean().item() for _ in range(10)]
    assert 0.7 < math.sqrt(3 * 4096 * np.mean(squares)) < 1.4


def test_pictures_are_drawn_by_the_seed_in_equal_numbers_and_scaled_by_themselves(small):
    (x, y), (x_test, y_test) = vision.pictures("small", 6, 2)
    raw, classes = small.part("train_exact")
    draw = np.random.default_rng(2)
    places = sorted(i for c in range(3) for i in draw.permutation(np.flatnonzero(classes == c))[:2])
    chosen = torch.from_numpy(raw[places].astype(np.float64))
    mean, deviation = chosen.mean((0, 2, 3)), chosen.std((0, 2, 3), correction=0)
    raw_test = torch.from_numpy(small.part("test")[0].astype(np.float64))
    for found, each in ((x, chosen), (x_test, raw_test)):
        scaled = (each - mean[:, None, None]) / deviation[:, None, None]
        torch.testing.assert_close(found.double(), scaled, rtol=1e-4, atol=1e-4)
    assert y.tolist() == classes[places].tolist()
    assert y_test.tolist() == small.part("test")[1].tolist()


def test_evaluation_is_that_of_all_samples_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(192, 7))
    x, y = torch.randn(23, 3, 8, 8), torch.arange(23) % 3
    found = vision.evaluate(model, (x, y), batch=10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model.eval()(x).float()
    assert found["accuracy"] == pytest.approx((out.argmax(1) == y).float().mean().item(), abs=1e-6)
    assert found["loss"] == pytest.approx(F.cross_entropy(out, y).item(), rel=1e-4)
    among = (out.topk(5).indices == y[:, None]).any(1)
    assert found["top_five"] == pytest.approx(among.float().mean().item(), abs=1e-6)
    assert found["top_five"] < 1


def test_bytes_at_the_peak_are_those_of_the_first_convolution_and_its_norm():
    net = vision.network(models.cnn_head("ndlinear", 100))
    pictures, maps = 8 * 3 * 1024 * 4, 2 * 8 * 32 * 1024 * 4
    buffers = sum(b.nbytes for b in net.buffers())
    beside = vision.tensor_bytes(net, 8) - (pictures + maps + 4 * 433_588 + buffers)
    assert 0 <= beside <= 512  # a few numbers for each channel


@pytest.mark.parametrize("arm", ["dense", "ndlinear"])
def test_the_quick_loop_takes_the_steps_of_the_plain_one(monkeypatch, arm):
    """In float64, dropout and batch norm included: every weight, statistic and loss.

    In float32 the biases in front of a batch norm, whose gradient is zero but for rounding, would
    go their own ways: Adam divides a gradient by its size.
    """
    monkeypatch.setattr(vision, "forward", lambda model, images: model(images.double()))

    def plainly(model, data, **options):
        step = functools.partial(vision.forward, model)
        return train_epochs(model, data, loss=F.cross_entropy, forward=step, **options)

    images = torch.randn(48, 3, 32, 32).to(torch.bfloat16).float()
    data, found = (images, torch.arange(48) % 10), []
    for network, prepared, train in (
        (vision.network, data, plainly),
        (vision.quick_network, vision.in_memory(data, "cpu"), vision.train_quickly),
    ):
        torch.manual_seed(0)
        model = network(nn.Sequential(*models.cnn_head(arm, 10))).double()
        curve = train(model, prepared, epochs=2, lr=1e-3, batch_size=16, seed=3)
        assert [point["epoch"] for point in curve] == [1, 2]
        found.append((model.state_dict(), [point["train_loss"] for point in curve]))
    (slow, losses), (quick, quick_losses) = found
    assert quick_losses == pytest.approx(losses, rel=1e-7)
    for name, value in slow.items():
        torch.testing.assert_close(quick[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_a_network_from_memory_answers_as_on_the_pictures_themselves():
    images, classes = torch.randn(6, 3, 32, 32), torch.arange(6) % 3
    net = vision.quick_network(nn.Sequential(nn.Flatten(), nn.Linear(4096, 3))).eval()
    direct = vision.forward(net, images.to(torch.bfloat16))
    in_memory, _ = vision.in_memory((images, classes), "cpu")
    assert torch.equal(vision.FromMemory(net)(in_memory), direct)


def test_held_out_pictures_are_equally_many_of_each_class_and_no_others():
    y = torch.arange(40) % 4
    x = torch.arange(40.0)[:, None]
    (kept, kept_y), (held, held_y) = vision.held_out((x, y), 8)
    assert kept_y.bincount().tolist() == [8] * 4
    assert held_y.bincount().tolist() == [2] * 4
    assert sorted(torch.cat([kept, held]).flatten().tolist()) == x.flatten().tolist()
    for wrong in (0, 3, 40):
        with pytest.raises(lab.modes.LabError, match="cannot be held out"):
            vision.held_out((x, y), wrong)
