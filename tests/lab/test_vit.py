"""Distilled vision Transformers: the student against the released computation written out, the loss against
its formula, what the largest teacher is asked."""

from unittest import mock

import numpy as np
import pytest
import torch
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


# --- pictures and teachers -----------------------------------------------------------------------


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
    both = vit.distilled((own, imitated), (labels, said)).item()
    assert both == pytest.approx(0.5 * plain + 0.5 * apart)


def test_a_student_trains_the_same_whether_its_teacher_was_at_hand_or_not(stand_in):
    c = {"data": stand_in, "images": 100, "teacher": "random head", "epochs": 1, "lr": 3e-3}
    c |= {"batch": 10, "seed": 3}
    curves = []
    for _ in range(2):  # the second finds its teacher at hand
        loop.seed_everything(3)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))]
        net = vit.Student(blocks, 16, 10, side=32, patch=16, heads=2, size=8)
        curves.append(vit.fitted(net, c)[0])
    assert curves[0] == curves[1]
