"""The model of an all-reduce, and the processes that train together."""

import pytest
import torch
from lab import LabError, models, processes
from lab.chapters import scaling
from lab.chapters.scaling import Link


def exchange(workers, nbytes):
    """Recursive doubling, played: (messages one after another, bytes that one process sends), until all have all terms."""
    heard, sent, distance = [{me} for me in range(workers)], 0, 1
    while any(len(own) < workers for own in heard):
        heard = [heard[me] | heard[me ^ distance] for me in range(workers)]
        sent, distance = sent + nbytes, 2 * distance
    return sent // nbytes, sent


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_short_messages_take_those_of_the_exchange_and_long_ones_the_fewest_bytes(workers):
    link = Link(1e-5, 1e9)
    messages, sent = exchange(workers, 1000)
    expected = messages * link.latency + sent / link.bandwidth
    assert scaling.all_reduce_seconds(1000, workers, link) == pytest.approx(expected)
    least = 2 * (workers - 1) / workers  # seconds for as many gigabytes
    assert scaling.all_reduce_seconds(1e9, workers, link) == pytest.approx(least, rel=1e-3)


TRAINING = {"arm": "dense", "rank": 1, "lr": 1e-2, "steps": 30, "batch": 64, "seeds": [0]}


def sent_by_powersgd(model, rank):
    """Two factors of each matrix that gets smaller by it, in 4 bytes a number; a tensor's first axis are its rows."""
    total = 0
    for p in model.parameters():
        factors = rank * (p.shape[0] + p[0].numel())
        total += factors if p.dim() > 1 and 2 * factors < p.numel() else p.numel()
    return 4 * total


@pytest.mark.parametrize(("arm", "rank"), [("dense", 0), ("dense", 1), ("ndlinear", 1)])
def test_bytes_sent_per_step_and_the_group_outlives_its_threads(monkeypatch, arm, rank):
    """A thread of the group that drops the last reference to it would wait for itself, which ends the process."""
    kept = []
    monkeypatch.setattr(scaling.atexit, "register", lambda call, *given: kept.extend(given))
    monkeypatch.setenv("NDL_MODE", "smoke")
    model = scaling.digit_network(arm)
    (found,) = scaling.together(TRAINING | {"arm": arm, "rank": rank})
    assert found["bytes"] == (sent_by_powersgd(model, rank) if rank else 4 * models.size(model))
    assert "ProcessGroup" in {type(one).__name__ for one in kept}
    assert not torch.distributed.is_initialized()


def test_two_processes_train_as_one_does(monkeypatch):
    """One process with the whole batch, two with a half each: averaged gradients are the same up to rounding, also compressed."""
    monkeypatch.setenv("NDL_MODE", "smoke")
    (alone,) = scaling.together(TRAINING)
    monkeypatch.setenv("NDL_MODE", "full")
    (two,) = scaling.together(TRAINING)
    assert two["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
    assert two["bytes"] == alone["bytes"]


def test_a_process_that_fails_and_one_that_hangs_are_said(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit('broken file')")
    with pytest.raises(RuntimeError, match=r"one of two processes failed: .*broken file"):
        processes.together([str(tmp_path / "broken.py")])
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    with pytest.raises(LabError, match="longer than 0 s; is the machine busy"):
        processes.together([str(tmp_path / "slow.py")], seconds=0.2)
