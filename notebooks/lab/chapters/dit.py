"""Diffusion transformers (DiT) small enough for one processor core: the network, its training and
sampling, and what is measured on the samples.

The network has the parameter names of the public DiT checkpoints. The module that the evidence
exchanges, the timestep embedder, is handed in.

No distance here is an FID: features come from a classifier that is trained in this module.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import data
from ..train import loop

TIMES = 1000  # steps of the diffusion
FREQUENCIES = 256  # numbers that a timestep is turned into


# -------------------------------------------------------------------------------------- the network
def frequencies(t: Tensor, size: int = FREQUENCIES) -> Tensor:
    """(B,) timesteps -> (B, size) cosines and sines of size / 2 frequencies from 1 to 1/10,000."""
    falling = torch.arange(size // 2, dtype=torch.float32, device=t.device) / (size // 2)
    angles = t[:, None].float() * torch.exp(-math.log(10_000) * falling)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def positions(width: int, side: int) -> Tensor:
    """(1, side * side, width) fixed sines and cosines of column and row, a half of the width each."""
    at = torch.arange(side, dtype=torch.float64)
    omega = 10_000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    waves = torch.cat([(at[:, None] * omega).sin(), (at[:, None] * omega).cos()], dim=1)
    columns = waves[None].expand(side, side, -1)
    rows = waves[:, None].expand(side, side, -1)
    return torch.cat([columns, rows], dim=2).reshape(1, side * side, width).float()


class Attention(nn.Module):
    """Self-attention of ``heads`` heads, (B, tokens, width) -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind()
        found = F.scaled_dot_product_attention(queries, keys, values)
        return self.proj(found.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """width -> four widths -> width with a GELU between, on the last axis."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def shifted(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(B, tokens, width) scaled and shifted by (B, width) each."""
    return x * (1 + scale[:, None]) + shift[:, None]


def norm(width: int) -> nn.LayerNorm:
    """A layer norm without weights of its own."""
    return nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)


def modulation(width: int, pieces: int) -> nn.Sequential:
    """(B, width) -> (B, pieces * width): shifts, scales and gates from timestep and class."""
    return nn.Sequential(nn.SiLU(), nn.Linear(width, pieces * width))


class Block(nn.Module):
    """Attention and MLP on normalised tokens, each shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = norm(width)
        self.attn = Attention(width, heads)
        self.norm2 = norm(width)
        self.mlp = MLP(width)
        self.adaLN_modulation = modulation(width, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        one = self.adaLN_modulation(condition).chunk(6, dim=1)
        x = x + one[2][:, None] * self.attn(shifted(self.norm1(x), one[0], one[1]))
        return x + one[5][:, None] * self.mlp(shifted(self.norm2(x), one[3], one[4]))


class DiT(nn.Module):
    """A diffusion transformer: noisy pictures (B, channels, side, side), timesteps and classes (B,) -> the noise in the pictures.

    Args:
        side, channels: of the pictures. patch: side of a token's square. classes: without "no class", the last row of the table.
    """

    def __init__(
        self,
        *,
        side: int,
        patch: int,
        channels: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
    ):
        super().__init__()
        self.channels, self.patch, self.classes = channels, patch, classes
        # names as in the public checkpoints
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(channels, width, patch, stride=patch)})
        self.t_embedder = nn.ModuleDict({"mlp": dense_embedder(width)})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(classes + 1, width)})
        self.pos_embed = nn.Parameter(positions(width, side // patch), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        numbers = patch * patch * channels
        last = {"norm_final": norm(width), "linear": nn.Linear(width, numbers)}
        self.final_layer = nn.ModuleDict(last | {"adaLN_modulation": modulation(width, 2)})

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        side, last = x.shape[-1] // self.patch, self.final_layer
        condition = self.t_embedder.mlp(frequencies(t)) + self.y_embedder.embedding_table(y)
        tokens = self.x_embedder.proj(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens, condition)
        found = last.adaLN_modulation(condition).chunk(2, dim=1)
        out = last.linear(shifted(last.norm_final(tokens), *found))
        out = out.view(len(x), side, side, self.patch, self.patch, -1).permute(0, 5, 1, 3, 2, 4)
        return out.reshape(len(x), -1, side * self.patch, side * self.patch)


def dense_embedder(width: int) -> nn.Sequential:
    """256 -> width -> width with a SiLU between."""
    return nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))


def started(module: nn.Module, draw: Callable = nn.init.xavier_uniform_) -> nn.Module:
    """Give every `nn.Linear`, also those inside of NdLinear, weights that are drawn, Xavier uniform, and no bias."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            draw(layer.weight)
            nn.init.zeros_(layer.bias)
    return module


def normal(module: nn.Module) -> nn.Module:
    """As `started`, with normal weights of deviation 0.02."""
    return started(module, functools.partial(nn.init.normal_, std=0.02))


def start(model: DiT) -> DiT:
    """Start the weights as the released code does; returns the model.

    After `started`, the label table and a dense timestep embedder are normal with deviation 0.02;
    all modulations and the last layer are zero.
    """
    started(model)
    patches, last = model.x_embedder.proj, model.final_layer
    nn.init.xavier_uniform_(patches.weight.view(len(patches.weight), -1))
    nn.init.zeros_(patches.bias)
    nn.init.normal_(model.y_embedder.embedding_table.weight, std=0.02)
    normal(model.t_embedder.mlp)
    zero = [block.adaLN_modulation[1] for block in model.blocks]
    for layer in (*zero, last.adaLN_modulation[1], last.linear):
        nn.init.zeros_(layer.weight)
    return model


# ------------------------------------------------------------------------------------- the diffusion
@functools.cache
def kept_share() -> Tensor:
    """(1000,) share of the picture's variance that is left after each step of the diffusion."""
    return torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, dtype=torch.float64), 0).float()


def noisy(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Pictures after ``t`` steps of the diffusion."""
    kept = kept_share()[t].view(-1, 1, 1, 1)
    return kept.sqrt() * x + (1 - kept).sqrt() * noise


def train(
    model: DiT,
    pictures: tuple[Tensor, Tensor],
    *,
    steps: int,
    lr: float,
    batch: int,
    seed: int,
    decay: float,
) -> tuple[DiT, list[dict[str, float]]]:
    """Train with AdamW on the squared error of the noise, as the released code does; a tenth of the
    samples have "no class" in place of theirs.

    Args:
        pictures: (n, channels, side, side) in [-1, 1], and classes. Batches are drawn with replacement.
        seed: of pictures, times, noise and dropped classes, so that models of one seed see the same.
        decay: of the moving average of the weights.

    Returns:
        A copy of the model with the averaged weights, and the mean training loss of each tenth.
    """
    x, y = pictures
    draw = torch.Generator().manual_seed(seed)
    averaged = copy.deepcopy(model)
    weights, slow = ([p for p in m.parameters() if p.requires_grad] for m in (model, averaged))
    adam = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        index = torch.randint(len(x), (batch,), generator=draw)
        t = torch.randint(TIMES, (batch,), generator=draw)
        noise = torch.randn(batch, *x.shape[1:], generator=draw)
        dropped = torch.rand(batch, generator=draw) < 0.1
        labels = torch.where(dropped, model.classes, y[index])
        seen = noisy(x[index], t, noise), t, labels
        losses.append(loop.step(lambda each: model(*each), seen, noise, F.mse_loss, adam))
        with torch.no_grad():
            torch._foreach_lerp_(slow, weights, 1 - decay)
    return averaged, _tenths(torch.stack(losses), lr)


def _tenths(losses: Tensor, lr: float) -> list[dict[str, float]]:
    """Means over ten equal parts of a training."""
    curve, step = [], 0
    for part in losses.tensor_split(10):
        if len(part):
            step += len(part)
            mean = float(part.double().mean())
            loop.check_finite(mean, step, lr)
            curve.append({"step": step, "train_loss": float(f"{mean:.5g}")})
    return curve


@torch.no_grad()
def fixed_loss(model: DiT, pictures: tuple[Tensor, Tensor], draws: int = 20) -> float:
    """Mean squared error of the noise in pictures, always at the same times and with the same noise.

    Each picture is used ``draws`` times; the times of one picture are spread evenly over all 1,000.
    """
    x, y = pictures
    draw = torch.Generator().manual_seed(0)
    total = 0.0
    for k in range(draws):
        t = ((torch.rand(len(x), generator=draw) + k) * TIMES / draws).long()
        noise = torch.randn(x.shape, generator=draw)
        total += F.mse_loss(model(noisy(x, t, noise), t, y), noise).item()
    return total / draws


@torch.no_grad()
def sample(
    model: DiT, labels: Tensor, side: int, *, steps: int, seed: int, batch: int = 256
) -> Tensor:
    """Pictures of the given classes by DDIM without added noise, (n, channels, side, side) with values within one of zero.

    Equal seeds begin with equal noise, whatever the model.
    """
    draw = torch.Generator().manual_seed(seed)
    begin = torch.randn(len(labels), model.channels, side, side, generator=draw)
    times = torch.linspace(TIMES - 1, 0, steps).round().long().tolist()
    kept = [*kept_share()[times].tolist(), 1.0]
    made = []
    for x, y in zip(begin.split(batch), labels.split(batch)):
        for k, t in enumerate(times):
            noise = model(x, torch.full_like(y, t), y)
            clean = ((x - math.sqrt(1 - kept[k]) * noise) / math.sqrt(kept[k])).clamp(-1, 1)
            noise = (x - math.sqrt(kept[k]) * clean) / math.sqrt(1 - kept[k])
            x = math.sqrt(kept[k + 1]) * clean + math.sqrt(1 - kept[k + 1]) * noise
        made.append(x)
    return torch.cat(made)


# ------------------------------------------------------------------------------- the measuring device
GREYS = "0123456789abcdefg"  # the 17 grey values of a digit, as letters of a record


@functools.cache
def pictures() -> loop.Split:
    """Digits (n, 1, 8, 8) with values from -1 to 1, in training, validation and test part."""
    found = data.load("digits")
    x, parts = found.x[:, None] / 8 - 1, (0.7, 0.15, 0.15)
    return data.split(x, found.y, seed=0, parts=parts, standardise="none")


@functools.cache
def classifier(epochs: int) -> nn.Sequential:
    """The network whose features and answers measure samples, trained on the training pictures: its
    ``body`` gives 64 features, its ``last`` layer ten classes."""
    loop.seed_everything(0)
    body = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    model = nn.Sequential(OrderedDict(body=body, last=nn.Linear(64, 10)))
    setting = {"epochs": epochs, "lr": 2e-3, "batch_size": 64, "seed": 0}
    loop.train_epochs(model, pictures().train, loss=F.cross_entropy, **setting)
    return model.eval()


@torch.no_grad()
def features(judge: nn.Sequential, x: Tensor) -> Tensor:
    """(n, 64) features of pictures, in float64."""
    return loop.predict(judge.body, x, batch=1024).double()


def frechet(a: Tensor, b: Tensor) -> float:
    """Fréchet distance of the normal distributions with the means and covariances of two samples.

    ``a``, ``b``: (n, features) in float64.
    """
    shift = (a.mean(0) - b.mean(0)).square().sum()
    covariances = [torch.cov(part.T) for part in (a, b)]
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp_min(0).sqrt().sum()
    return float(shift + sum(c.trace() for c in covariances) - 2 * mixed)


def neighbourhoods(real: Tensor, made: Tensor, nearest: int = 5) -> dict[str, float]:
    """Precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020).

    Each picture has a ball that reaches to its ``nearest``-th neighbour of its own kind.
    """
    across = torch.cdist(real, made)
    balls = [
        torch.cdist(part, part).kthvalue(nearest + 1, dim=1).values for part in (real, made)
    ]  # + 1: each is its own neighbour
    in_real = across <= balls[0][:, None]
    in_made = across <= balls[1][None]
    return {
        "precision": in_real.any(0).double().mean().item(),
        "recall": in_made.any(1).double().mean().item(),
        "density": in_real.double().sum(0).mean().item() / nearest,
        "coverage": in_real.any(1).double().mean().item(),
    }


def judged(made: list[Tensor], labels: Tensor, epochs: int) -> dict[str, float]:
    """What is measured on several sets of samples of the same classes.

    Returns:
        "frechet": distance of all sets together to the training pictures, in features of the
        classifier; "frechet_0" and so on: of each set; "agreement" of the classifier with the
        classes asked for; and the neighbourhoods of the first set.
    """
    judge = classifier(epochs)
    real = features(judge, pictures().train[0])
    sets = [features(judge, part) for part in made]
    everything = torch.cat(sets)
    answers = loop.predict(judge.last, everything.float()).argmax(1)
    return {
        "frechet": frechet(real, everything),
        **{f"frechet_{k}": frechet(real, part) for k, part in enumerate(sets)},
        "agreement": (answers == labels.repeat(len(made))).double().mean().item(),
        **neighbourhoods(real[: len(labels)], sets[0]),
    }


def as_text(digits: Tensor) -> list[str]:
    """Digits (n, 1, 8, 8) as one letter a pixel, for a record."""
    levels = ((digits + 1) * 8).round().clamp(0, 16).long().flatten(1)
    return ["".join(GREYS[k] for k in row) for row in levels.tolist()]


def from_text(rows: list[str]) -> Tensor:
    """(n, 8, 8) digits from the letters of a record."""
    levels = torch.tensor([[GREYS.index(letter) for letter in row] for row in rows])
    return (levels / 8 - 1).view(-1, 8, 8)
