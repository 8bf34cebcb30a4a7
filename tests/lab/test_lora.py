"""Adapters: what each trains, the short training, the printed table."""

import copy
import math

import pytest
import torch
from lab import LabError, facts, models
from lab.chapters import encoder, lora
from torch import nn


@pytest.fixture
def bert(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    return encoder.load("minilm", dropout=0.0)


def sentences(tokenizer, repeat=4):
    texts = ["the film is fine", "dull", "the film is the film is dull"] * repeat
    return encoder.tokens(tokenizer, texts, 32), torch.tensor([1, 0, 0] * repeat)


# ------------------------------------------------------------------------------------------------------------- adapters
COUNTS = {  # width 48, inner 96, two blocks: written out
    "head": 0,
    "full": 2 * (4 * (48 * 48 + 48) + 48 * 96 + 96 + 96 * 48 + 48),
    "lora-1": 2 * (4 * 96 + 2 * 144),
    "lora-8": 8 * 2 * (4 * 96 + 2 * 144),
    "ndlinear": 2 * (4 * (6 * 6 + 8 * 8) + 2 * (6 * 8 + 8 * 12)),
    "ndlinear-released": 2 * (4 * (36 + 64 + 14) + (48 + 96 + 20) + (48 + 96 + 14)),
}


@pytest.mark.parametrize("arm", COUNTS)
def test_each_arm_trains_what_it_says(bert, arm):
    model, tokenizer = bert
    x, _ = sentences(tokenizer)
    before = lora.mean_vectors(model, x)
    assert models.size(lora.attach(model, lora.maps(model), arm)) == COUNTS[arm]
    same = torch.allclose(lora.mean_vectors(model, x), before, atol=1e-6)
    assert same == (arm != "ndlinear-released"), "only the released start moves the encoder"


# ---------------------------------------------------------------------------------------------------- models, trainings
def test_vectors_do_not_see_padding(bert):
    model, tokenizer = bert
    x, _ = sentences(tokenizer, 1)
    alone = [lora.mean_vectors(model, row[None]) for row in x]
    assert torch.allclose(lora.mean_vectors(model, x), torch.cat(alone), atol=1e-6)
    wide = torch.cat([x, torch.zeros(3, 2, 9, dtype=x.dtype)], -1)
    assert torch.equal(lora.trim(wide), x)
    hidden = model(x[1:2, 0, :3], x[1:2, 1, :3]).last_hidden_state[0]
    assert torch.allclose(alone[1][0], hidden.mean(0), atol=1e-6), "one word and two ends"


def test_the_head_has_its_own_rate_and_the_rate_falls_to_zero(bert):
    model, tokenizer = bert
    network = lora.Sentences(lora.attach(model, lora.maps(model), "lora-1"))
    data = sentences(tokenizer)
    start = copy.deepcopy(network.state_dict())
    lora.fine_tune(network, data, steps=1, lr=0.0, head_lr=0.1, batch=4, seed=0)
    moved = {k for k, v in network.state_dict().items() if not torch.equal(v, start[k])}
    assert moved == {"head.weight", "head.bias"}
    step = (network.head.weight - start["head.weight"]).abs().max().item()
    assert step == pytest.approx(0.1, rel=0.05), "Adam's first step is the rate, warm-up over"


def test_a_loss_that_is_no_number_is_refused(bert):
    model, tokenizer = bert
    network = lora.Sentences(lora.attach(model, lora.maps(model), "head"))
    nn.init.constant_(network.head.bias, float("nan"))
    with pytest.raises(LabError, match="training loss is nan"):
        lora.fine_tune(network, sentences(tokenizer), steps=1, lr=1.0, head_lr=1.0, batch=4, seed=0)


# ------------------------------------------------------------------------------------------------------------ the table
def test_errors_of_proportions():
    assert lora.standard_error(50, 100) == pytest.approx(5)
    found = lora.printed_differences()
    assert len(found) == 24 and set(found["rank"]) == {4, 8}
    row = found.query("model == 'LLaMA3-8B' and dataset == 'GSM8K' and rank == 8").iloc[0]
    printed = facts("ndlinear_lora", model="LLaMA3-8B", dataset="GSM8K")
    value = {str(r.rank): r.value for r in printed.itertuples()}
    assert row["difference"] == pytest.approx(value[""] - value["8"])
    variance = sum(p * (100 - p) / 1319 for p in (value[""], value["8"]))
    assert row["error"] == pytest.approx(math.sqrt(variance))
    assert row["errors"] == pytest.approx(row["difference"] / row["error"])


# --------------------------------------------------------------------------------------------------------------- tables
@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-0.9, 0.9, "not inferior"),
        (-0.9, -0.1, "not inferior, worse"),
        (-3.0, -1.0, "worse"),
        (-3.0, 1.0, "undecided"),
    ],
)
def test_words_for_points(low, high, words):
    assert lora.word((0.0, low, high)) == words


@pytest.mark.parametrize(
    ("low", "high", "words", "alone"),
    [
        (0.001, 0.004, "higher, equivalent", "higher"),
        (0.001, 0.04, "higher", "higher"),
        (-0.01, 0.01, "equivalent", "undecided"),
        (-0.03, 0.01, "not inferior", "undecided"),
        (-0.03, 0.02, "undecided", "undecided"),
        (-0.01, -0.005, "lower, equivalent", "lower"),
        (-0.03, -0.005, "lower", "lower"),
    ],
)
def test_words_for_a_loss_with_a_margin_and_without(low, high, words, alone):
    assert lora.loss_word((0.0, low, high), 0.02) == words
    assert lora.loss_word((0.0, low, high)) == alone
