"""The diffusion transformer of evidence 53: patches, diffusion, sampler and measures against independent formulas."""

import math

import numpy as np
import torch
from lab.chapters import dit
from scipy.linalg import sqrtm
from torch import nn


def test_patches_go_back_where_they_came_from():
    """With the identity as body, the network returns its input: one token a patch and back."""
    model = dit.DiT(side=8, patch=2, channels=1, width=4, depth=0, heads=1, classes=10)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.x_embedder.proj.weight.copy_(torch.eye(4).view(4, 1, 2, 2))
        model.final_layer.linear.weight.copy_(torch.eye(4))
    model.final_layer.norm_final = nn.Identity()
    x = torch.randn(3, 1, 8, 8)
    assert torch.allclose(model(x, torch.arange(3), torch.arange(3)), x, atol=1e-6)


def test_noisy_keeps_the_variance():
    product = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    assert np.allclose(dit.kept_share().numpy(), product, rtol=1e-5)
    torch.manual_seed(0)
    x, noise = torch.randn(4000, 1, 8, 8), torch.randn(4000, 1, 8, 8)
    mixed = dit.noisy(x, torch.full((4000,), 300), noise)
    wanted = product[300] ** 0.5 * x + (1 - product[300]) ** 0.5 * noise
    assert abs(float(mixed.var()) - 1) < 0.01 and torch.allclose(mixed, wanted, atol=1e-5)


class Oracle(nn.Module):
    """Knows that every picture is the one given, so it finds the noise exactly."""

    channels, classes = 1, 10

    def __init__(self, picture):
        super().__init__()
        self.picture = nn.Parameter(picture)

    def forward(self, x, t, y):
        kept = dit.kept_share()[t].view(-1, 1, 1, 1)
        return (x - kept.sqrt() * self.picture) / (1 - kept).sqrt()


def test_sampling_with_an_oracle_gives_the_picture_within_the_clip():
    picture = torch.rand(1, 8, 8) * 1.8 - 0.9
    made = dit.sample(Oracle(picture), torch.arange(5), 8, steps=7, seed=0, batch=2)
    assert made.shape == (5, 1, 8, 8) and torch.allclose(made, picture.expand_as(made), atol=1e-4)
    far = Oracle(torch.full((1, 8, 8), 3.0))
    assert torch.allclose(dit.sample(far, torch.arange(2), 8, steps=5, seed=0), torch.tensor(1.0))


def test_frechet_is_the_formula_with_a_matrix_root():
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(n, 5)) @ draw.normal(size=(5, 5)) + n / 300 for n in (300, 400))
    cov = [np.cov(part.T) for part in (a, b)]
    root = sqrtm(cov[0] @ cov[1]).real
    wanted = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov[0] + cov[1] - 2 * root)
    for other, distance in ((b, wanted), (a, 0)):
        assert abs(dit.frechet(torch.from_numpy(a), torch.from_numpy(other)) - distance) < 1e-8


def test_neighbourhoods_by_loops():
    torch.manual_seed(0)
    real, made = torch.randn(30, 2).double(), torch.randn(25, 2).double() * 0.5 + 0.3
    found = dit.neighbourhoods(real, made, nearest=3)

    def ball(part, i):
        return sorted(float((part[i] - other).norm()) for other in part)[3]

    inside = [[float((r - m).norm()) <= ball(real, i) for m in made] for i, r in enumerate(real)]
    back = [[float((r - m).norm()) <= ball(made, j) for r in real] for j, m in enumerate(made)]
    assert math.isclose(found["precision"], np.mean(np.any(inside, axis=0)))
    assert math.isclose(found["coverage"], np.mean(np.any(inside, axis=1)))
    assert math.isclose(found["recall"], np.mean(np.any(back, axis=0)))
    assert math.isclose(found["density"], np.sum(inside) / 3 / 25)
