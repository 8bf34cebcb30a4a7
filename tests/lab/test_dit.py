"""The diffusion transformer of chapter 53: network, diffusion, sampler and measures against independent formulas."""

import math

import numpy as np
import torch
from lab.chapters import dit
from scipy.linalg import sqrtm
from torch import nn
from torch.nn import functional as F

TINY = {"side": 8, "patch": 2, "channels": 1, "width": 16, "depth": 2, "heads": 4, "classes": 10}


def tiny():
    torch.manual_seed(0)
    return dit.start(dit.DiT(**TINY))


def batch(n=3, seed=1):
    torch.manual_seed(seed)
    return torch.randn(n, 1, 8, 8), torch.randint(1000, (n,)), torch.randint(10, (n,))


# ---------------------------------------------------------------------------------------- network
def test_parameters_have_the_names_of_the_public_checkpoints():
    block = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"]
    layers = ["x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "final_layer.linear"]
    layers += [
        "final_layer.adaLN_modulation.1",
        *(f"blocks.{k}.{n}" for k in (0, 1) for n in block),
    ]
    wanted = {f"{layer}.{what}" for layer in layers for what in ("weight", "bias")}
    assert set(tiny().state_dict()) == wanted | {"pos_embed", "y_embedder.embedding_table.weight"}


def test_frequencies_are_cosines_then_sines():
    found = dit.frequencies(torch.tensor([0, 7]), 8)
    omega = [10_000 ** (-k / 4) for k in range(4)]
    wanted = [math.cos(7 * w) for w in omega] + [math.sin(7 * w) for w in omega]
    assert torch.allclose(found[1], torch.tensor(wanted), atol=1e-6)
    assert found[0].tolist() == [1] * 4 + [0] * 4


def test_positions_tell_columns_from_rows():
    grid = dit.positions(16, 3).view(3, 3, 16)
    assert torch.equal(grid[0, :, :8], grid[2, :, :8])
    assert torch.equal(grid[:, 0, 8:], grid[:, 2, 8:])
    omega = [10_000 ** (-k / 4) for k in range(4)]
    wanted = [math.sin(2 * w) for w in omega] + [math.cos(2 * w) for w in omega]
    assert torch.allclose(grid[1, 2, :8], torch.tensor(wanted), atol=1e-6)
    assert torch.allclose(grid[2, 1, 8:], torch.tensor(wanted), atol=1e-6)


def test_attention_is_softmax_of_scaled_products():
    layer, x = dit.Attention(8, 2), torch.randn(2, 5, 8)
    q, k, v = layer.qkv(x).chunk(3, dim=2)
    heads = []
    for h in (slice(0, 4), slice(4, 8)):
        scores = torch.softmax(q[..., h] @ k[..., h].transpose(1, 2) / 2, dim=2)
        heads.append(scores @ v[..., h])
    assert torch.allclose(layer(x), layer.proj(torch.cat(heads, 2)), atol=1e-6)


def test_a_block_is_gated_by_the_condition():
    block, x, c = dit.Block(8, 2, dit.MLP(8)), torch.randn(2, 5, 8), torch.randn(2, 8)
    nn.init.normal_(block.adaLN_modulation[1].weight)
    one = [part[:, None] for part in block.adaLN_modulation(c).split(8, dim=1)]

    def norm(z):
        return F.layer_norm(z, (8,), eps=1e-6)

    y = x + one[2] * block.attn(norm(x) * (1 + one[1]) + one[0])
    y = y + one[5] * block.mlp(norm(y) * (1 + one[4]) + one[3])
    assert torch.allclose(block(x, c), y, atol=1e-5)


def test_patches_go_back_where_they_came_from():
    """With the identity as body, the network returns its input: one token a patch and back."""
    model = dit.DiT(**TINY | {"width": 4, "heads": 1, "depth": 0})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.x_embedder.proj.weight.copy_(torch.eye(4).view(4, 1, 2, 2))
        model.final_layer.linear.weight.copy_(torch.eye(4))
    model.final_layer.norm_final = nn.Identity()
    x, t, y = batch()
    assert torch.allclose(model(x, t, y), x, atol=1e-6)


# -------------------------------------------------------------------------------------- diffusion
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


# --------------------------------------------------------------------------------------- measures
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
