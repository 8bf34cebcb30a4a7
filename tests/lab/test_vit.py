"""Distilled vision Transformers: the student against the released computation written out, the loss against
its formula, teachers, the training on pictures of one colour per class."""

import csv
import math
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from lab import modes
from lab.chapters import vit
from lab.train import loop
from torch import nn
from torch.nn import functional as F

SHAPE = {"side": 8, "patch": 4, "heads": 2, "size": 3}


def small_student(width: int = 6, depth: int = 2, classes: int = 5) -> vit.Student:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width))] * depth
    return vit.Student(blocks, width, classes, **SHAPE)


@pytest.fixture
def stand_in(monkeypatch):
    """CIFAR-10's stand-in of smoke runs."""
    monkeypatch.setenv("NDL_MODE", "smoke")
    functions = vit.pictures, vit.taught, vit.released_teacher
    for cached in functions:
        cached.cache_clear()
    yield "cifar10"
    for cached in functions:
        cached.cache_clear()


# --- the student --------------------------------------------------------------------------------


def attend(a: vit.Attention, x, size: int):
    """With the attention of PyTorch."""
    parts = F.linear(a.norm(x), a.qkv.weight, a.qkv.bias).chunk(3, -1)
    heads = [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts]
    mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    return F.linear(mixed, a.out[0].weight, a.out[0].bias)


def released(net: vit.Student, images, distilling: bool):
    """The released forward pass without dropout: patches cut by hand, zeros added in front of every block."""
    p, full = net.patch, vit.patches(net.side, net.patch) + 2
    cut = [
        images[:, :, i : i + p, j : j + p].flatten(1)
        for i in range(0, net.side, p)
        for j in range(0, net.side, p)
    ]
    x = net.embed(torch.stack(cut, 1))
    x = torch.cat([net.token.repeat(len(x), 1, 1), x], 1) + net.positions
    if distilling:
        x = torch.cat([x, net.distillation.repeat(len(x), 1, 1)], 1)
    for attention, norm, block in zip(net.attention, net.norms, net.blocks):
        x = torch.cat([x, torch.zeros(len(x), full - x.shape[1], x.shape[2])], 1)
        x = x + attend(attention, x, SHAPE["size"])
        x = x + block(norm(x))
    x = net.norm(x)
    own = F.linear(x[:, 0], net.classify.weight, net.classify.bias)
    return own, F.linear(x[:, full - 1], net.imitate.weight, net.imitate.bias)


def test_the_student_computes_what_the_release_computes():
    net, images = small_student(), torch.randn(3, 3, 8, 8)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        taught, plain = released(net, images, True), released(net, images, False)
        for found, expected in zip(net.train()(images), taught):
            assert torch.allclose(found, expected, atol=1e-5)
        assert torch.allclose(net.eval()(images), plain[0], atol=1e-5)
    assert not torch.allclose(taught[0], plain[0], atol=1e-3)  # the token of zeros is another one


def test_parameters_dropout_and_tokens_are_those_of_the_release():
    net = small_student(width=400, depth=2, classes=5)
    imitates = 400 + (400 * 5 + 5)
    assert vit.parameters(net) == sum(p.numel() for p in net.parameters()) - imitates
    rates = {name: m.p for name, m in net.named_modules() if isinstance(m, nn.Dropout)}
    inside = {f"attention.{i}.{place}": 0.1 for i in (0, 1) for place in ("drop", "out.1")}
    assert rates == {"drop": 0.3} | inside
    for part in (net.positions, net.token, net.distillation):
        assert 0.8 < part.std().item() < 1.2  # normal, deviation one
    assert net.positions.shape == (1, vit.patches(8, 4) + 1, 400)


# --- pictures and teachers -----------------------------------------------------------------------


def test_pictures_of_another_size():
    images = torch.arange(12.0).view(1, 3, 2, 2)
    assert vit.resized(images, 2) is images
    larger = vit.resized(images, 4)
    assert larger.shape == (1, 3, 4, 4) and larger[0, 0, 1, 1].item() == pytest.approx(0.75)


def test_a_teacher_answers_for_pictures_and_for_their_mirror_images(stand_in):
    split = vit.pictures(stand_in, 100)
    teacher = vit.trained_teacher(split, 10)
    found = vit._answers(teacher, split.train[0], batch=20)
    forward = vit.half(teacher.eval())
    with torch.no_grad():
        own, mirrored = forward(split.train[0]), forward(split.train[0].flip(-1))
    apart = (own - mirrored).abs().mean()
    for answer, expected in zip(found, (own, mirrored)):
        assert (answer - expected).abs().mean() < 0.2 * apart
    assert found.shape == (2, 50, 10) and found.dtype == torch.float32


def test_the_trained_teacher_learns_and_the_random_head_does_not(stand_in, monkeypatch):
    monkeypatch.setattr(vit, "PASSES", {1e-3: 15})
    learned, random = (
        vit.teacher_accuracy(teacher, stand_in, 100)["teacher_accuracy"]
        for teacher in ("trained", "random head")
    )
    assert learned > 0.5 > 0.35 > random
    learned, random = (vit.answers(t, stand_in, 100) for t in ("trained", "random head"))
    assert F.softmax(random, -1).amax(-1).mean() < F.softmax(learned, -1).amax(-1).mean()
    assert vit.teacher_accuracy("none", stand_in, 100) == {}
    assert vit.answers("none", stand_in, 100) is None
    with pytest.raises(modes.LabError, match="'cnn' is not one of 'trained'"):
        vit.answers("cnn", stand_in, 100)


def test_the_released_teacher_gets_large_pictures_and_a_new_head(stand_in, monkeypatch):
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"head": nn.Linear(7, 1000)})
            self.sizes = set()

        def forward(self, images):
            self.sizes.add(tuple(images.shape[2:]))
            return self.heads.head(images.mean((1, 2, 3))[:, None].expand(-1, 7))

    big, torchvision = Big(), mock.Mock()
    torchvision.models.vit_b_16.return_value = big
    monkeypatch.setattr(vit, "require", lambda name: torchvision)
    assert vit.answers("vit-b-16", stand_in, 100).shape == (2, 50, 10)
    assert big.sizes == {(224, 224)} and big.heads.head.weight.shape == (10, 7)
    pretrained = torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1
    torchvision.models.vit_b_16.assert_called_once_with(weights=pretrained)


# --- the training ---------------------------------------------------------------------------------


def test_the_loss_is_half_labels_and_half_teacher():
    own, imitated, said = (torch.randn(4, 5, dtype=torch.float64) for _ in range(3))
    labels = torch.tensor([0, 3, 3, 1])

    def softmax(z):
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    plain = -np.log(softmax(own.numpy())[range(4), labels.numpy()]).mean()
    p, q = softmax(said.numpy() / 3), softmax(imitated.numpy() / 3)
    apart = 9 * (p * np.log(p / q)).sum() / 4
    assert vit.distilled((own, imitated), labels, None).item() == pytest.approx(plain)
    both = vit.distilled((own, imitated), labels, said).item()
    assert both == pytest.approx(0.5 * plain + 0.5 * apart)


def test_the_rate_rises_for_ten_steps_and_falls_along_half_a_cosine():
    rates = [vit.schedule(step, 110) for step in range(112)]
    assert rates[:11] == pytest.approx([k / 10 for k in range(11)])
    assert rates[60] == pytest.approx(0.5) and rates[110] == pytest.approx(0) == rates[111]
    assert rates[35] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert vit.schedule(1, 5) == 0.1  # a training shorter than the start


def test_a_mirrored_picture_gets_the_answer_for_the_mirrored_picture(monkeypatch):
    net, images = small_student(), torch.randn(4, 3, 8, 8)
    soft, labels = torch.randn(2, 4, 5), torch.arange(4)
    seen = []
    monkeypatch.setattr(vit, "half", lambda model: seen.append)
    monkeypatch.setattr(vit, "distilled", lambda out, y, said: (y, said))
    index, mirrored = torch.tensor([2, 0]), torch.tensor([True, False])
    y, said = vit._loss(net, (images, labels, soft), index, mirrored)
    assert torch.equal(seen[0][0], images[2].flip(-1)) and torch.equal(seen[0][1], images[0])
    assert torch.equal(said, torch.stack([soft[1, 2], soft[0, 0]])) and y.tolist() == [2, 0]
    assert vit._loss(net, (images, labels, None), index, mirrored)[1] is None


def configuration(**changes) -> dict:
    kept = {"data": "cifar10", "images": 100, "teacher": "none", "side": 32, "patch": 16}
    return kept | {"epochs": 8, "lr": 3e-3, "batch": 10, "seed": 3} | changes


def student_of(c: dict) -> vit.Student:
    loop.seed_everything(c["seed"])
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))]
    return vit.Student(blocks, 16, 10, side=c["side"], patch=c["patch"], heads=2, size=8)


def test_a_student_learns_and_the_same_seed_gives_the_same_student(stand_in):
    curves = []
    for _ in range(2):
        net = student_of(configuration())
        curve, split = vit.fitted(net, configuration())
        curves.append(curve)
    assert curves[0] == curves[1] and [point["epoch"] for point in curve] == [*range(1, 9)]
    assert curve[-1]["train_loss"] < curve[0]["train_loss"] - 0.2
    found = vit.tested(net, split, configuration())
    assert found["test_accuracy"] > 0.3 and found["test_top_five"] > found["test_accuracy"]
    assert set(curve[0]) == {"epoch", "train_loss", "val_loss", "val_accuracy", "val_top_five"}


def test_a_student_trains_the_same_whether_its_teacher_was_at_hand_or_not(stand_in):
    c = configuration(teacher="random head", epochs=1)
    nets = [student_of(c) for _ in range(2)]  # the second finds its teacher at hand
    (first, split), (second, _) = (vit.fitted(net, c) for net in nets)
    assert first == second != vit.fitted(student_of(c), configuration(epochs=1))[0]
    assert 0 <= vit.tested(nets[0], split, c)["teacher_accuracy"] <= 1


def test_a_rate_at_which_training_breaks_is_refused(stand_in):
    c = configuration(lr=1e6, epochs=3)
    net = student_of(c)
    with torch.no_grad():
        net.classify.weight.fill_(math.inf)
    with pytest.raises(modes.LabError, match="training loss is"):
        vit.fitted(net, c)


# --- tables and figures ---------------------------------------------------------------------------


def test_the_printed_gaps_are_differences_of_the_printed_cells():
    with open(modes.PAPER / "tables" / "vit_scaling.csv", encoding="utf-8") as file:
        cells = {(r["dataset"], r["blocks"], r["embed_dim"]): r for r in csv.DictReader(file)}
    gaps = vit.printed_gaps()
    assert len(gaps) == 18
    for row in gaps.itertuples():
        one = cells[row.dataset, str(row.blocks), str(row.width)]
        other = cells[row.dataset, str(row.blocks), "500"]
        assert row.gap == pytest.approx(float(one["value"]) - float(other["value"]))
        assert row.std**2 == pytest.approx(float(one["std"]) ** 2 + float(other["std"]) ** 2)


def test_students_are_compared_in_points_seed_by_seed():
    rows = [
        (arm, width, seed, 1000 * width, 5 * width, score + seed / 100)
        for arm, width, score in (("ndlinear", 50, 0.40), ("standard", 125, 0.42))
        for seed in range(3)
    ]
    columns = ["arm", "width", "seed", "parameters", "macs", "test_accuracy"]
    made = pd.DataFrame(rows, columns=columns).assign(data="cifar10", lr=1e-3)
    runs = vit.with_student(made)
    assert vit.points(runs, "ndlinear 50", "standard 125").tolist() == pytest.approx([-2] * 3)
    table = vit.scores(runs)
    assert table["percent"].tolist() == ["41.0 [38.5, 43.5]", "43.0 [40.5, 45.5]"]
    hundred = made.assign(data="cifar100", test_top_five=0.9)
    assert vit.with_student(hundred)["percent"].tolist() == [90.0] * 6
