"""Trainings that share nothing, side by side on a GPU.

A small network leaves a GPU idle while the processor launches kernel after kernel. Here one CUDA graph holds a step of every
training, each in a branch of its own, and a single call replays it. On a processor the steps are taken in turn, with the numbers
of `lab.fit` and `language.train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from . import language, loop
from .loop import Best, Fit, Split

WARM = 3  # calls before the capture: the optimiser's state and the libraries' workspaces appear in them


class SideBySide:
    """Steps that share nothing, taken together at each call.

    Args:
        steps: functions without arguments. On a GPU a step must neither read a number back nor touch a tensor that is replaced
            between two calls, because after ``WARM`` calls all steps are captured once and replayed from there on.
        device: where they compute.
    """

    def __init__(self, steps: Sequence[Callable[[], None]], device: torch.device):
        self.steps = steps
        self.streams = [torch.cuda.Stream(device) for _ in steps] if device.type == "cuda" else []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self) -> None:
        if not self.streams:
            for step in self.steps:
                step()
            return
        if self.calls == WARM:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._branch()
        self.calls += 1
        if self.graph is None:
            self._branch()
        else:
            self.graph.replay()

    def _branch(self) -> None:
        """Each step on its own stream; the present stream goes on when all have ended."""
        here = torch.cuda.current_stream()
        for step, stream in zip(self.steps, self.streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                step()
        for stream in self.streams:
            here.wait_stream(stream)


# ---------------------------------------------------------------------------------------- by epochs, on samples
class _Member:
    """One training: model, optimiser, order of the batches, and what came of it so far."""

    def __init__(
        self, model: nn.Module, data: Split, seed: int, loss: Callable, lr: float, batch_size: int
    ):
        self.data, self.loss, self.batch_size = data, loss, batch_size
        x, _ = data.train
        self.model = model.to(x.device)
        on_gpu = {"fused": True, "capturable": True} if x.device.type == "cuda" else {}
        self.adam = torch.optim.Adam(self.model.parameters(), lr=lr, **on_gpu)
        self.order = torch.Generator().manual_seed(seed)
        self.whole = len(x) // batch_size  # batches of full size in an epoch
        self.drawn = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.at = torch.zeros(1, dtype=torch.long, device=x.device)
        self.total = torch.zeros((), device=x.device)
        self.best, self.curve = Best(), []

    def begin(self) -> None:
        """Draw the order of an epoch."""
        self.model.train()
        self.drawn.copy_(torch.randperm(len(self.drawn), generator=self.order))
        self.at.zero_()
        self.total.zero_()

    def step(self) -> None:
        """A step on the next batch of full size."""
        batches = self.drawn[: self.whole * self.batch_size].view(self.whole, self.batch_size)
        self._step_on(batches.index_select(0, self.at)[0])
        self.at += 1

    def end(self) -> None:
        """A step on the samples that are left over."""
        rest = self.drawn[self.whole * self.batch_size :]
        if len(rest):
            self._step_on(rest)

    def _step_on(self, index: Tensor) -> None:
        x, y = self.data.train
        value = loop.step(self.model, x[index], y[index], self.loss, self.adam)
        self.total += value * len(index)

    def look(self, now: int, scores: dict[str, Callable]) -> None:
        """Note losses and scores of an epoch; keep its weights if they are the best."""
        train_loss = float(self.total) / len(self.drawn)
        loop.check_finite(train_loss, now, self.adam.param_groups[0]["lr"])
        found = loop.evaluate(self.model, self.data.val, self.loss, scores)
        point = {"epoch": now, "train_loss": train_loss}
        self.curve.append(point | {f"val_{name}": value for name, value in found.items()})
        self.best.offer(found["loss"], now, self.model)

    def result(self, scores: dict[str, Callable], seconds: float) -> Fit:
        """The best epoch's weights, tested once."""
        self.best.restore(self.model)
        metrics = dict(self.curve[self.best.when - 1])
        del metrics["epoch"]
        tested = loop.evaluate(self.model, self.data.test, self.loss, scores)
        metrics |= {f"test_{name}": value for name, value in tested.items()}
        return Fit(self.model, metrics, self.best.when, len(self.curve), seconds, self.curve)


def fit(
    make: Callable[[], nn.Module],
    data: Split,
    *,
    seeds: Sequence[int],
    loss: Callable,
    scores: dict[str, Callable] | None = None,
    epochs: int,
    lr: float,
    batch_size: int,
    device: str | torch.device | None = None,
) -> list[Fit]:
    """`lab.fit` with Adam for several seeds, side by side; one result for each, in their order.

    Args:
        make: builds a model; called for each seed right after seeding, so that a member starts as it would alone. Dropout is
            drawn from one generator for all members, so a member's draws are others than alone.
        seeds: at least one; also the order of each member's batches. batch_size: at least 1. Everything else: as in `lab.fit`.

    Raises:
        LabError: a training loss is not finite.
    """
    scores, device = scores or {}, loop.default_device(device)
    data = data.to(device)
    members = []
    for seed in seeds:
        loop.seed_everything(seed)
        members.append(_Member(make(), data, seed, loss, lr, batch_size))
    take_a_step = SideBySide([member.step for member in members], device)
    began = time.perf_counter()
    for now in range(1, epochs + 1):
        for member in members:
            member.begin()
        for _ in range(members[0].whole):
            take_a_step()
        for member in members:
            member.end()
        for member in members:
            member.look(now, scores)
    seconds = (time.perf_counter() - began) / len(members)
    return [member.result(scores, seconds) for member in members]


# ---------------------------------------------------------------------------------------- by steps, on a text
class _Reader:
    """One training of a decoder: its windows of text, its rate at every step, and the loss since the last look."""

    def __init__(
        self, model: nn.Module, tokens: Tensor, plan: language.Plan, context: int, seed: int
    ):
        self.model, self.plan = model, plan
        device = next(model.parameters()).device
        order = torch.Generator().manual_seed(seed)
        seen = [language.windows(tokens, context, plan.batch, order) for _ in range(plan.steps)]
        self.seen = torch.stack(seen).to(device)
        self.rates = torch.tensor([plan.rate(step) for step in range(plan.steps)], device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.since = torch.zeros((), device=device)
        self.adam = torch.optim.AdamW(
            language.groups(model, plan.decay),
            lr=self.rates[0].clone(),
            betas=language.BETAS,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.curve: language.Curve = []

    def step(self) -> None:
        """A step on the next windows, at its rate."""
        for group in self.adam.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.at)[0])
        seen = self.seen.index_select(0, self.at)[0]
        self.adam.zero_grad(set_to_none=True)
        loss = language.next_token_loss(self.model(seen[:, :-1]), seen[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.adam.step()
        self.since += loss.detach()
        self.at += 1

    def look(self, step: int, held: Tensor, context: int) -> None:
        """Note the mean training loss since the last look, and the loss on a held-out text."""
        mean = float(self.since) / (step - (self.curve[-1]["step"] if self.curve else 0))
        if mean != mean:
            raise language.Diverged(
                f"the training loss is {mean} at step {step}: lower lr={self.plan.lr}"
            )
        held_loss = language.held_out_loss(self.model, held, context, language.LOOK)
        self.curve.append({"step": step, "train_loss": mean, "held_loss": held_loss})
        self.since.zero_()
        self.model.train()


def pretrain(
    models: Sequence[nn.Module],
    tokens: Tensor,
    plan: language.Plan,
    *,
    context: int,
    seeds: Sequence[int],
    held: Tensor,
) -> list[language.Curve]:
    """`language.train` for several decoders, side by side; the last weights stay in the models.

    Args:
        seeds: of each model's windows. Everything else: as in `language.train`, but ``plan.parts``, which is passed over.
    """
    readers = [_Reader(m.train(), tokens, plan, context, s) for m, s in zip(models, seeds)]
    device = next(models[0].parameters()).device
    take_a_step = SideBySide([reader.step for reader in readers], device)
    looks = {round(plan.steps * (i + 1) / plan.looks) for i in range(plan.looks)}
    for step in range(1, plan.steps + 1):
        take_a_step()
        if step in looks:
            for reader in readers:
                reader.look(step, held, context)
    return [reader.curve for reader in readers]
