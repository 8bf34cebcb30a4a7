"""The model of a step, and the processes behind its measurement."""

import math

import pytest
import torch
from lab import LabError, models
from lab.chapters import scaling
from lab.chapters.scaling import Link
from torch import nn

from ndlinear import NdLinear


@pytest.mark.parametrize(("workers", "steps"), [(2, 1), (8, 3), (9, 4), (1024, 10)])
def test_each_round_doubles_the_processes_heard_from(workers, steps):
    assert scaling.rounds(workers) == steps


def exchange(workers, nbytes):
    """Recursive doubling, played: (messages one after another, bytes that one process sends), until all have all terms."""
    heard, sent, distance = [{me} for me in range(workers)], 0, 1
    while any(len(own) < workers for own in heard):
        heard = [heard[me] | heard[me ^ distance] for me in range(workers)]
        sent, distance = sent + nbytes, 2 * distance
    return sent // nbytes, sent


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_recursive_doubling_takes_the_messages_and_bytes_of_the_exchange(workers):
    link = Link(1e-5, 1e9)
    messages, sent = exchange(workers, 1000)
    expected = messages * link.latency + sent / link.bandwidth
    assert scaling.doubling_seconds(1000, workers, link) == pytest.approx(expected)


def test_short_messages_are_doubled_and_long_ones_halved():
    link = Link(1e-5, 1e9)
    assert scaling.all_reduce_seconds(8, 2, link) == pytest.approx(1e-5 + 8e-9)
    assert scaling.all_reduce_seconds(8, 64, link) == pytest.approx(6e-5, rel=1e-2)
    assert scaling.all_reduce_seconds(1e9, 8, link) == pytest.approx(6 * 1e-5 + 2 * 7 / 8 * 1.0)


def test_the_fit_finds_the_link_that_made_the_times():
    link = Link(5e-5, 2e9)
    sizes = [4 * 2**k for k in range(8, 23)]
    times = [scaling.halving_seconds(n, 2, link) for n in sizes]
    found = scaling.fit_link(sizes, times, 2)
    assert found.latency == pytest.approx(5e-5) and found.bandwidth == pytest.approx(2e9)
    assert times[0] == pytest.approx(2 * 5e-5 + 1024 / 2e9)


def test_times_that_do_not_grow_have_no_bandwidth():
    assert scaling.fit_link([1e3, 1e6], [2e-3, 1e-3], 2).bandwidth == math.inf


def test_break_even_is_where_both_send_the_same():
    (D1, D2), (H1, H2), p = (6, 10), (4, 8), 5
    found = scaling.break_even((D1, D2), (H1, H2), p)
    batch = found["ndlinear"]
    tensor = (p - 1) / p * 4 * batch * H1 * D2 / p
    assert tensor == pytest.approx(2 * (p - 1) / p * 2 * (D1 * H1 + D2 * H2))
    assert found["dense"] * D1 * D2 == D1 * D2 * H1 * H2


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_layer_in_pieces_is_the_layer(workers):
    layer = NdLinear((4, 6), (3, 5), bias=False).double()
    x = torch.randn(2, 4, 6).double()
    y, sent = scaling.cut_forward(layer, x, workers)
    assert torch.allclose(y, layer(x), atol=1e-12)
    inside = scaling.cut_forward(layer, x, 1)[1]
    assert inside == 0
    if workers == 2:  # 2 samples, 3 x 3 numbers here, of axis 1 the smaller part goes over
        assert sent == 2 * 1 * 3


def test_powersgd_sends_two_factors_of_large_matrices_only():
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(3, 2))
    assert scaling.power_bytes(model, 2) == 4 * (2 * (100 + 50) + 50 + 3 * 2 + 2)


TRAINING = {"task": "train", "arm": "dense", "lr": 1e-2, "steps": 30, "batch": 64, "seeds": [0]}


@pytest.mark.parametrize("rank", [0, 1])
def test_bytes_sent_per_step(monkeypatch, rank):
    monkeypatch.setenv("NDL_MODE", "smoke")
    model = scaling.digit_network("dense")
    (found,) = scaling.together(TRAINING | {"rank": rank})
    wanted = scaling.power_bytes(model, rank) if rank else 4 * models.size(model)
    assert found["bytes"] == wanted and found["accuracy"] > (0.3 if rank else 0.6)


def test_two_processes_train_as_one_does(monkeypatch):
    """One process with the whole batch, two with a half each: averaged gradients are the same up to rounding, also compressed."""
    monkeypatch.setenv("NDL_MODE", "smoke")
    (alone,) = scaling.together(TRAINING | {"rank": 1})
    monkeypatch.setenv("NDL_MODE", "full")
    (two,) = scaling.together(TRAINING | {"rank": 1})
    assert two["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
    assert two["bytes"] == alone["bytes"]


def test_the_group_outlives_its_threads(monkeypatch):
    """A thread of the group that drops the last reference to it waits for itself, which ends the process."""
    task = TRAINING | {"arm": "ndlinear", "rank": 1, "steps": 3}
    kept, register = [], scaling.atexit.register

    def seen(call, *given, **named):
        kept.extend(given)
        return register(call, *given, **named)

    monkeypatch.setattr(scaling.atexit, "register", seen)
    monkeypatch.setenv("NDL_MODE", "smoke")
    (found,) = scaling.together(task)
    assert found["bytes"] == scaling.power_bytes(scaling.digit_network("ndlinear"), 1)
    assert "ProcessGroup" in {type(one).__name__ for one in kept}
    assert not torch.distributed.is_initialized()


def test_an_unknown_task_and_a_failing_process_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("NDL_MODE", "full")
    with pytest.raises(LabError, match="no task 'dance'; there are: times, train"):
        scaling.together({"task": "dance"})
    python = tmp_path / "python"  # starts at once
    python.write_text("#!/bin/sh\necho 'KeyError: rank' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(scaling.sys, "executable", str(python))
    with pytest.raises(LabError, match="KeyError"):
        scaling.together({"task": "train", "seeds": [0]}, world=1)


def test_processes_that_hang_are_ended(monkeypatch):
    monkeypatch.setenv("NDL_MODE", "full")
    with pytest.raises(LabError, match="took longer than"):
        scaling.together({"task": "times"}, seconds=0.01)
