"""A decoder moved to worked solutions: what a problem becomes, which tokens count, the base and its cache, the training."""

import json

import pytest
import torch
from lab import LabError, data
from lab.chapters import lora, lora_text
from lab.data import tokens
from lab.train import answers
from torch import nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def smoke(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    cached = (tokens.corpus, lora_text._base, lora_text.base_loss, lora_text.problems, data._load)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


class Bytes:
    """An encoding of one token for each byte."""

    @staticmethod
    def encode(text):
        return torch.tensor(list(text.encode())).numpy()


def test_a_problem_is_its_question_and_its_solution_without_the_calculators_marks():
    answer = "2+3 = <<2+3=5>>5.\nSo $<<5*1=5>>5.\n#### 5"
    asked = json.dumps({"question": "How many?", "answer": answer})
    assert answers.worked(asked) == ("How many?\n", "2+3 = 5.\nSo $5.\n#### 5\n\n")
    row, length = answers.encoded(asked, Bytes, 100)
    assert bytes(row.tolist()) == b"How many?\n2+3 = 5.\nSo $5.\n#### 5\n\n" and length == 24


@pytest.mark.parametrize(
    ("context", "kept"), [(10, b"o?\nabcdefgh"), (8, b"\nabcdefgh"), (5, b"\nabcde")]
)
def test_too_long_questions_lose_their_beginning_and_solutions_their_end(
    monkeypatch, context, kept
):
    monkeypatch.setattr(answers, "worked", lambda _: ("Who, so?\n", "abcdefgh"))
    row, answer = answers.encoded("", Bytes, context)
    assert bytes(row.tolist()) == kept and answer == min(8, context)


def test_targets_are_the_solutions_tokens_one_place_earlier():
    chosen = [(torch.tensor([5, 6, 7, 8]), 2), (torch.tensor([1, 2]), 1)]
    x, targets = answers.padded(chosen)
    no = answers.IGNORED
    assert x.tolist() == [[5, 6, 7], [1, 2, 0]]
    assert targets.tolist() == [[no, 7, 8], [2, no, no]]


def test_the_loss_is_the_mean_over_the_solutions_tokens():
    model, problems = lora_text.base(1), lora_text.problems()["test"][:5]
    total, count = 0.0, 0
    with torch.no_grad():
        for row, answer in problems:  # alone, without padding
            logs = model(row[None, :-1])[0].log_softmax(-1)
            places = range(len(row) - 1 - answer, len(row) - 1)
            total -= sum(float(logs[i, row[i + 1]]) for i in places)
            count += answer
    for batch in (2, 32):
        assert answers.answer_loss(model, problems, batch) == pytest.approx(total / count, rel=1e-5)


def test_parts_are_apart_and_those_of_the_data_set():
    parts = lora_text.problems()
    assert {name: len(part) for name, part in parts.items()} == {"val": 10, "train": 30, "test": 12}
    texts = {name: {tuple(row.tolist()) for row, _ in part} for name, part in parts.items()}
    assert not texts["val"] & texts["train"]


@pytest.mark.parametrize("arm", ["lora-1", "all"])
def test_fine_tuning_lowers_the_loss_and_leaves_the_frozen_weights(arm):
    model, problems = lora_text.base(2), lora_text.problems()
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(found) == 6 * lora_text.LAYERS
    lora.attach(model, found, arm)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert bool(frozen) == (arm != "all")
    before = answers.answer_loss(model, problems["train"])
    losses = answers.fine_tune(model, problems["train"], steps=12, lr=1e-2, batch=4, seed=0)
    assert len(losses) == 12 and answers.answer_loss(model, problems["train"]) < before - 0.05
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())


def test_a_step_is_adamws_on_the_first_problems_of_the_order():
    """One step written out: warm-up over one step, so the full rate; the norm cut to one."""
    problems = lora_text.problems()["train"]
    one, other = lora_text.base(1), lora_text.base(1)
    answers.fine_tune(one, problems, steps=1, lr=1e-3, batch=3, seed=7)
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(7)).tolist()
    x, targets = answers.padded([problems[i] for i in order[::-1][:3]])
    loss = F.cross_entropy(other(x).flatten(0, 1), targets.flatten(), ignore_index=answers.IGNORED)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in other.parameters()]).norm()
    for mine, wanted in zip(one.parameters(), other.parameters()):
        gradient = wanted.grad * min(1, 1 / float(norm))
        step = gradient / (gradient.abs() + 1e-8)  # Adam's first
        assert torch.allclose(mine, wanted * (1 - 1e-5) - 1e-3 * step, atol=2e-5)


def test_a_training_that_diverges_raises():
    problems = lora_text.problems()["train"]
    with pytest.raises(LabError, match="lower lr"):
        answers.fine_tune(lora_text.base(1), problems, steps=9, lr=1e20, batch=2, seed=0)


def test_the_base_is_trained_once_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained, train = [], lora_text.language.train

    def watched(*args, **options):
        trained.append(1)
        return train(*args, **options)

    monkeypatch.setattr(lora_text.language, "train", watched)
    smoke = lora_text.base(1)
    assert not list(tmp_path.rglob("*.pt")) and len(trained) == 1
    monkeypatch.setattr(lora_text, "mode", lambda: "full")
    found = []
    for _ in range(2):
        lora_text._base.cache_clear()
        found.append(lora_text.base(1))
    assert len(trained) == 2 and len(list(tmp_path.rglob("novels-1-*.pt"))) == 1
    for model in found:
        for one, other in zip(model.parameters(), smoke.parameters()):
            assert torch.equal(one, other)
    found[0].tokens.weight.data.zero_()
    assert lora_text.base(1).tokens.weight.abs().max() > 0, "a copy"
