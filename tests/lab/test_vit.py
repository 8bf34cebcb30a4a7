"""Distilled vision Transformers: the student against the released computation written out, the loss against its formula."""

import numpy as np
import pytest
import torch
from lab.chapters import vit
from torch import nn
from torch.nn import functional as F

SHAPE = {"side": 8, "patch": 4, "heads": 2, "size": 3}


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
        parts = F.linear(attention.norm(x), attention.qkv.weight, attention.qkv.bias).chunk(3, -1)
        heads = [part.unflatten(-1, (-1, SHAPE["size"])).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, attention.out[0].weight, attention.out[0].bias)
        x = x + block(norm(x))
    x = net.norm(x)
    own = F.linear(x[:, 0], net.classify.weight, net.classify.bias)
    return own, F.linear(x[:, full - 1], net.imitate.weight, net.imitate.bias)


def test_the_student_computes_what_the_release_computes():
    blocks = [nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))] * 2
    net, images = vit.Student(blocks, 6, 5, **SHAPE), torch.randn(3, 3, 8, 8)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        taught, plain = released(net, images, True), released(net, images, False)
        for found, expected in zip(net.train()(images), taught):
            assert torch.allclose(found, expected, atol=1e-5)
        assert torch.allclose(net.eval()(images), plain[0], atol=1e-5)
    assert not torch.allclose(taught[0], plain[0], atol=1e-3)  # the token of zeros is another one


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
