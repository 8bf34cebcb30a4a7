"""Vision Transformers that learn from labels and from a teacher: the student of the released code
at any size, teachers and their answers, and the training.

What stands in the place of the feed-forward block is the caller's; everything around it is here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import load
from ..data.splits import few_of_each
from ..machine import require
from ..modes import LabError
from ..stats import differences
from ..train import loop
from ..train.scores import accuracy, top_five

DROPOUT, DROPOUT_OF_EMBEDDING = 0.1, 0.3  # as in the released script
TEMPERATURE, ALPHA = 3, 0.5  # the same
WEIGHT_DECAY, WARM_UP = 1e-4, 10  # the same; steps
TEACHERS = ("trained", "random head", "vit-b-16")


# ------------------------------------------------------------------------------------- the student
class Attention(nn.Module):
    """Attention of ``heads`` heads of ``size``, whatever the width of the tokens, on normalised
    tokens."""

    def __init__(self, width: int, heads: int, size: int):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv = nn.Linear(width, 3 * heads * size)
        self.out = nn.Sequential(nn.Linear(heads * size, width), nn.Dropout(DROPOUT))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((self.drop(weights) @ v).transpose(1, 2).flatten(2))


class Student(nn.Module):
    """The distilled Vision Transformer of the released code, with the given feed-forward blocks.

    In training the tokens are class, patches and distillation, and the answer is a pair: logits of
    the class token and of the distillation token. In evaluation the distillation token is left out,
    and a token of zeros takes its place, which is what the padding of the release amounts to.

    Args:
        blocks: feed-forward blocks, (B, patches + 2, width) -> the same, without norm.
        side, patch: of the pictures and of a patch, in pixels. heads, size: of the attention.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        width: int,
        classes: int,
        *,
        side: int,
        patch: int,
        heads: int,
        size: int,
    ):
        super().__init__()
        numbers = 3 * patch * patch
        self.side, self.patch = side, patch
        self.embed = nn.Sequential(
            nn.LayerNorm(numbers), nn.Linear(numbers, width), nn.LayerNorm(width)
        )
        self.positions = nn.Parameter(torch.randn(1, patches(side, patch) + 1, width))
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.distillation = nn.Parameter(torch.randn(1, 1, width))
        self.drop = nn.Dropout(DROPOUT_OF_EMBEDDING)
        self.attention = nn.ModuleList(Attention(width, heads, size) for _ in blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in blocks)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.classify, self.imitate = nn.Linear(width, classes), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embed(F.unfold(images, self.patch, stride=self.patch).mT)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        last = self.distillation if self.training else torch.zeros_like(self.distillation)
        x = self.drop(torch.cat([x, last.expand(len(x), -1, -1)], 1))
        for attention, norm, block in zip(self.attention, self.norms, self.blocks):
            x = x + attention(x)
            x = x + block(norm(x))
        x = self.norm(x)
        if not self.training:
            return self.classify(x[:, 0])
        return self.classify(x[:, 0]), self.imitate(x[:, -1])


def patches(side: int, patch: int) -> int:
    """Patches of a square picture."""
    return (side // patch) ** 2


def parameters(student: nn.Module) -> int:
    """Parameters that answer: without the distillation token and its classifier, which are thrown
    away after the training."""
    spent = student.distillation.numel() + sum(p.numel() for p in student.imitate.parameters())
    return sum(p.numel() for p in student.parameters()) - spent


# ------------------------------------------------------------------------------------ the pictures
@functools.lru_cache(maxsize=1)
def pictures(name: str, images: int) -> loop.Split:
    """``images`` training pictures, the same for every run, a tenth of them for validation, and the
    official test part; each channel centred and scaled."""
    return few_of_each(load(name), images)


def resized(images: Tensor, side: int) -> Tensor:
    """Pictures of another size, in between bilinear."""
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, (side, side), mode="bilinear", align_corners=False)


# ------------------------------------------------------------------------------------- the teacher
class Teacher(nn.Module):
    """A small convolutional classifier: pictures at half their side, 96 normalised features, one
    linear layer."""

    def __init__(self, classes: int, features: int = 96):
        super().__init__()
        self.body = nn.Sequential(
            nn.AvgPool2d(2),
            *_convolution(3, 32),
            *_convolution(32, 64),
            nn.MaxPool2d(2),
            *_convolution(64, features),
            *_convolution(features, features),
            nn.MaxPool2d(2),
            *_convolution(features, features),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.LayerNorm(features),
        )
        self.head = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images.contiguous(memory_format=torch.channels_last)))


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]


def half(model: nn.Module) -> Callable:
    """A model under autocast to bfloat16, its answers in float32."""

    def forward(images: Tensor):
        with torch.autocast(images.device.type, torch.bfloat16):
            out = model(images)
        return tuple(o.float() for o in out) if isinstance(out, tuple) else out.float()

    return forward


TEACHER_SEED = 1000
PASSES = {1e-3: 4, 1e-4: 1}  # rate: passes over the pictures and their mirror images


def trained_teacher(split: loop.Split, classes: int) -> Teacher:
    """A teacher trained with Adam on the training pictures and their mirror images."""
    loop.seed_everything(TEACHER_SEED)
    teacher = Teacher(classes).to(loop.default_device(), memory_format=torch.channels_last)
    x, y = split.train
    both = torch.cat([x, x.flip(-1)]), torch.cat([y, y])
    how = {"batch_size": 128, "seed": TEACHER_SEED, "forward": half(teacher)}
    for lr, passes in PASSES.items():
        loop.train_epochs(teacher, both, loss=F.cross_entropy, epochs=passes, lr=lr, **how)
    return teacher


def _random_head(teacher: nn.Module, features: int, classes: int) -> nn.Linear:
    """A classifier that was never trained, as in the released script."""
    loop.seed_everything(TEACHER_SEED + 1)
    return nn.Linear(features, classes).to(next(teacher.parameters()).device)


def _answers(teacher: nn.Module, images: Tensor, side: int = 32, batch: int = 500) -> Tensor:
    """(2, n, classes) logits of a teacher: of the pictures and of their mirror images."""
    teacher.eval()
    forward, device = half(teacher), next(teacher.parameters()).device
    found = []
    with torch.no_grad():
        for flipped in (False, True):
            parts = (resized(part.to(device), side) for part in images.split(batch))
            found.append(
                torch.cat([forward(part.flip(-1) if flipped else part).cpu() for part in parts])
            )
    return torch.stack(found)


@functools.lru_cache(maxsize=2)
def taught(data: str, images: int) -> dict[str, Tensor]:
    """Logits of the trained teacher and of the same one with a random head, and the accuracy of both
    on the test part."""
    split, classes = pictures(data, images), len(load(data).names)
    teacher, found = trained_teacher(split, classes), {}
    untrained = _random_head(teacher, teacher.head.in_features, classes)
    x, y = split.test
    for name, head in (("trained", teacher.head), ("random head", untrained)):
        teacher.head = head
        found[name] = _answers(teacher, split.train[0])
        found[f"{name}, accuracy"] = accuracy(_answers(teacher, x)[0], y)
    return found


@functools.lru_cache(maxsize=1)
def released_teacher(name: str, images: int) -> Tensor:
    """Logits of the released teacher: torchvision's ViT-B/16 with ImageNet weights (346 MB) and a
    head that was never trained. For a GPU."""
    zoo, classes = require("torchvision").models, len(load(name).names)
    teacher = zoo.vit_b_16(weights=zoo.ViT_B_16_Weights.IMAGENET1K_V1).to(loop.default_device())
    teacher.heads.head = _random_head(teacher, teacher.heads.head.in_features, classes)
    return _answers(teacher, pictures(name, images).train[0], side=224)


def answers(teacher: str, name: str, images: int) -> Tensor:
    """What a teacher says to the training pictures and their mirror images: (2, n, classes) logits."""
    if teacher not in TEACHERS:
        raise LabError(f"teacher {teacher!r} is not one of {', '.join(map(repr, TEACHERS))}")
    if teacher == "vit-b-16":
        return released_teacher(name, images)
    return taught(name, images)[teacher]


# ------------------------------------------------------------------------------------ the training
def distilled(out: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Tensor:
    """The released loss: cross-entropy of the class token and, half and half, the divergence of the
    distillation token's answer from the teacher's at a temperature.

    ``wanted``: labels, and the teacher's logits.
    """
    (own, imitated), (labels, soft) = out, wanted
    student = F.log_softmax(imitated / TEMPERATURE, dim=-1)
    teacher = F.softmax(soft / TEMPERATURE, dim=-1)
    apart = F.kl_div(student, teacher, reduction="batchmean") * TEMPERATURE**2
    return (1 - ALPHA) * F.cross_entropy(own, labels) + ALPHA * apart


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a short linear start, then half a cosine down to
    zero."""
    if step < WARM_UP:
        return step / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))))


def train(
    student: Student,
    split: loop.Split,
    soft: Tensor,
    *,
    epochs: int,
    lr: float,
    batch: int,
    seed: int,
) -> list[dict[str, float]]:
    """Train in place for a fixed number of epochs with AdamW; pictures are mirrored at random.

    Args:
        soft: the teacher's logits, as `answers` gives them. seed: order and mirroring; the caller
            seeds the weights.

    Returns:
        Training loss, and validation loss and accuracy, of every epoch.
    """
    device = loop.default_device()
    student.to(device)
    data = [part.to(device) for part in (*split.train, soft)]
    updates = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    steps = epochs * math.ceil(len(data[0]) / batch)
    rate = torch.optim.lr_scheduler.LambdaLR(updates, lambda now: schedule(now, steps))
    order, curve = torch.Generator().manual_seed(seed), []
    for now in range(1, epochs + 1):
        student.train()
        total = torch.zeros((), device=device)
        for index in loop.batches(len(data[0]), batch, order):
            mirrored = torch.rand(len(index), generator=order) < 0.5
            pair = batch_of(data, index.to(device), mirrored.to(device))
            value = loop.step(answering(student), *pair, distilled, updates)
            rate.step()
            total += value * len(index)
        loop.check_finite(float(total), now, lr)
        found = {f"val_{name}": value for name, value in evaluate(student, split.val).items()}
        curve.append({"epoch": now, "train_loss": float(total) / len(data[0])} | found)
    return curve


def batch_of(data, index: Tensor, mirrored: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Pictures, some of them mirrored, and what `distilled` wants: the teacher answers for what the
    student sees."""
    x, y, soft = data
    images = torch.where(mirrored[:, None, None, None], x[index].flip(-1), x[index])
    return images, (y[index], soft[mirrored.long(), index])


def answering(student: Student) -> Callable:
    """Pictures of any size -> the student's answer."""
    return lambda images: half(student)(resized(images, student.side))


def evaluate(student: Student, part: tuple[Tensor, Tensor], batch: int = 500) -> dict[str, float]:
    """Loss, accuracy and Acc@5 of the class token."""
    device = next(student.parameters()).device
    part = tuple(tensor.to(device) for tensor in part)
    functions = {"accuracy": accuracy, "top_five": top_five}
    return loop.evaluate(student, part, F.cross_entropy, functions, batch, answering(student))


def fitted(student: Student, c: dict) -> tuple[list[dict[str, float]], loop.Split]:
    """Train a student by its configuration: the curve, and the pictures."""
    split = pictures(c["data"], c["images"])
    soft = answers(c["teacher"], c["data"], c["images"])
    loop.seed_everything(c["seed"])  # of the dropout, whether the teacher was at hand or not
    settings = {key: c[key] for key in ("epochs", "lr", "batch", "seed")}
    return train(student, split, soft, **settings), split


def tested(student: Student, split: loop.Split, c: dict) -> dict[str, float]:
    """Scores on the official test part, and the accuracy there of a teacher that was made here."""
    found = {f"test_{name}": value for name, value in evaluate(student, split.test).items()}
    if c["teacher"] == "vit-b-16":
        return found
    accuracies = taught(c["data"], c["images"])
    return found | {"teacher_accuracy": float(accuracies[f"{c['teacher']}, accuracy"])}


# ------------------------------------------------------------------------------------- comparisons
METRIC = {"cifar10": "test_accuracy", "cifar100": "test_top_five"}  # what the paper prints of each


def with_student(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with a column that names the student, "ndlinear 50", and the score in percent."""
    score = 100 * runs.apply(lambda run: run[METRIC[run["data"]]], axis=1)
    return runs.assign(student=runs["arm"] + " " + runs["width"].astype(str), percent=score)


def points(runs: pd.DataFrame, one: str, other: str) -> pd.Series:
    """Score of a student minus that of another in points, seed by seed."""
    return differences(runs, "percent", one, other, by="student")
