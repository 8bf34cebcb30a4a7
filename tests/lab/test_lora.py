"""Adapters: their algebra against written-out formulas, the short training, the printed table, costs, LoKr checkpoints."""

import copy
import math

import numpy as np
import pytest
import torch
from lab import LabError, facts, models
from lab.chapters import encoder, lora
from torch import nn

from ndlinear import nearest_kronecker
from ndlinear_lora import NdLinearLoRA, apply_ndlinear_lora


@pytest.fixture
def bert(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    return encoder.load("minilm", dropout=0.0)


def sentences(tokenizer, repeat=4):
    texts = ["the film is fine", "dull", "the film is the film is dull"] * repeat
    return encoder.tokens(tokenizer, texts, 32), torch.tensor([1, 0, 0] * repeat)


# ------------------------------------------------------------------------------------------------------------- adapters
def test_low_rank_is_the_base_plus_a_product():
    base = nn.Linear(7, 5).double()
    layer = models.LoRA(base, 3)
    x = torch.randn(4, 7).double()
    assert torch.equal(layer(x), base(x)), "zero at the start"
    assert 0 < layer.down.weight.abs().max() <= 1 / math.sqrt(7)
    layer.up.weight.data.normal_()
    wanted = x @ (base.weight + layer.up.weight @ layer.down.weight).T + base.bias
    assert torch.allclose(layer(x), wanted)
    assert not base.weight.requires_grad and models.size(layer) == 3 * (7 + 5)


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


@pytest.mark.parametrize("fold", [(6, 8), (3, 20)])
def test_the_size_of_the_released_start_is_that_of_its_formula(fold):
    width, squares = math.prod(fold), []
    x = torch.randn(4000, width)
    for _ in range(40):
        base = nn.Linear(width, width)
        layer = NdLinearLoRA(base, fold, fold, alpha=2.0, bias=True, transform_outer=False)
        layer.adapter.reset_parameters()
        squares.append((layer(x) - base(x)).detach().square().mean().item())
    assert math.sqrt(np.mean(squares)) == pytest.approx(lora.released_rms(fold, 2.0), rel=0.06)


# ---------------------------------------------------------------------------------------------------- models, trainings
def test_vectors_do_not_see_padding(bert):
    model, tokenizer = bert
    x, _ = sentences(tokenizer, 1)
    alone = [lora.mean_vectors(model, row[None]) for row in x]
    assert torch.allclose(lora.mean_vectors(model, x), torch.cat(alone), atol=1e-6)
    wide = torch.cat([x, torch.zeros(3, 2, 9, dtype=x.dtype)], -1)
    assert torch.equal(lora.trim(wide), x)
    hidden = model(x[1:2, 0, :3], x[1:2, 1, :3])[0]
    assert torch.allclose(alone[1][0], hidden.mean(0), atol=1e-6), "one word and two ends"


@pytest.mark.parametrize("arm", ["ndlinear", "full"])
def test_training_changes_what_it_should_and_lowers_the_loss(bert, arm):
    model, tokenizer = bert
    torch.manual_seed(0)
    network = lora.Sentences(lora.attach(model, lora.maps(model), arm), 48)
    data = sentences(tokenizer)
    frozen = {k: v.clone() for k, v in network.named_parameters() if not v.requires_grad}
    trained = {k: v.clone() for k, v in network.named_parameters() if v.requires_grad}
    before = lora.score(network, data)
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6), "the head starts at zero"
    losses = lora.fine_tune(network, data, steps=40, lr=5e-3, head_lr=5e-2, batch=6, seed=0)
    now = dict(network.named_parameters())
    assert len(losses) == 40 and lora.score(network, data)["loss"] < 0.8 * before["loss"]
    assert all(torch.equal(now[k], v) for k, v in frozen.items())
    assert all(not torch.equal(now[k], v) for k, v in trained.items())


def test_the_head_has_its_own_rate_and_the_rate_falls_to_zero(bert):
    model, tokenizer = bert
    network = lora.Sentences(lora.attach(model, lora.maps(model), "lora-1"), 48)
    data = sentences(tokenizer)
    start = copy.deepcopy(network.state_dict())
    lora.fine_tune(network, data, steps=1, lr=0.0, head_lr=0.1, batch=4, seed=0)
    moved = {k for k, v in network.state_dict().items() if not torch.equal(v, start[k])}
    assert moved == {"head.weight", "head.bias"}
    step = (network.head.weight - start["head.weight"]).abs().max().item()
    assert step == pytest.approx(0.1, rel=0.05), "Adam's first step is the rate, warm-up over"


def test_a_loss_that_is_no_number_is_refused(bert):
    model, tokenizer = bert
    network = lora.Sentences(lora.attach(model, lora.maps(model), "head"), 48)
    nn.init.constant_(network.head.bias, float("nan"))
    with pytest.raises(LabError, match="training loss is nan"):
        lora.fine_tune(network, sentences(tokenizer), steps=1, lr=1.0, head_lr=1.0, batch=4, seed=0)


# -------------------------------------------------------------------------------------------------------- shares, folds
@pytest.mark.parametrize("fold", [((4, 6), (3, 2)), ((24, 1), (1, 6)), ((8, 3), (3, 2))])
def test_shares_are_what_the_nearest_kronecker_sum_keeps(fold):
    matrix = torch.randn(6, 24).double()
    found = lora.shares(matrix, fold, most=3)
    for rank in range(1, len(found) + 1):
        enough = math.prod(h * d for d, h in zip(*fold)) // max(d * h for d, h in zip(*fold))
        if rank <= enough:
            _, error = nearest_kronecker(matrix, *fold, rank=rank)
            assert 1 - found[rank - 1] == pytest.approx(error**2, abs=1e-10)


def test_the_fold_one_is_an_outer_product_and_all_folds_have_one_size():
    matrix = torch.randn(36, 24).double()
    values = torch.linalg.svdvals(matrix).square()
    found = lora.shares(matrix, lora.crossed(24, 36, 1))[0]
    assert found == pytest.approx((values[0] / values.sum()).item())
    for k in (1, 2, 3, 4, 6, 12):
        (d1, d2), (h1, h2) = lora.crossed(24, 36, k)
        assert (d1 * d2, h1 * h2, d1 * h1 + d2 * h2) == (24, 36, 24 + 36)
    assert lora.square(384, 1536) == ((16, 24), (32, 48))


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


@pytest.mark.parametrize("model", lora.DECODERS)
def test_sizes_are_those_of_the_models_built(model):
    with torch.device("meta"):
        ours = apply_ndlinear_lora(models.decoder(**models.DECODERS[model]), models.TARGETS)
        theirs = models.apply_lora(models.decoder(**models.DECODERS[model]), 2)
    assert lora.costs(model, "ndlinear")["parameters"] == models.size(ours)
    assert lora.costs(model, "product")["parameters"] == models.size(ours)
    assert lora.costs(model, "lora", 2)["parameters"] == models.size(theirs)


def test_costs_of_one_map_written_out():
    nd = lora.cost(2048, 6144, "ndlinear")  # folds (32, 64) -> (64, 96)
    macs = min(64 * 32 * 64 + 64 * 64 * 96, 96 * 64 * 32 + 96 * 32 * 64)
    assert nd == {"parameters": 32 * 64 + 64 * 96, "macs": macs}
    assert lora.cost(2048, 6144, "product")["macs"] == 2048 * 6144
    assert lora.cost(10, 20, "lora", 3) == {"parameters": 90, "macs": 90}


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
