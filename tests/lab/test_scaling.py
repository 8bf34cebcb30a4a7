"""The model of a step, and the processes behind its measurement."""

import math

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
    assert found == pytest.approx(link) and times[0] == pytest.approx(2 * 5e-5 + 1024 / 2e9)
    assert scaling.fit_link([1e3, 1e6], [2e-3, 1e-3], 2).bandwidth == math.inf  # times do not grow


# -------------------------------------------------------------------------------------------------------- the processes
TRAINING = {"task": "train", "arm": "dense", "lr": 1e-2, "steps": 30, "batch": 64, "seeds": [0]}


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
    if arm == "dense":
        assert found["accuracy"] > (0.3 if rank else 0.6)
    assert "ProcessGroup" in {type(one).__name__ for one in kept}
    assert not torch.distributed.is_initialized()


def test_two_processes_train_as_one_does(monkeypatch):
    """One process with the whole batch, two with a half each: averaged gradients are the same up to rounding, also compressed."""
    monkeypatch.setenv("NDL_MODE", "smoke")
    (alone,) = scaling.together(TRAINING | {"rank": 1})
    monkeypatch.setenv("NDL_MODE", "full")
    (two,) = scaling.together(TRAINING | {"rank": 1})
    assert two["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
    assert two["bytes"] == alone["bytes"]


def test_a_process_that_fails_and_one_that_hangs_are_said(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit('broken file')")
    with pytest.raises(RuntimeError, match=r"one of 2 processes failed: .*broken file"):
        processes.together([str(tmp_path / "broken.py")])
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    with pytest.raises(LabError, match="longer than 0 s; is the machine busy"):
        processes.together([str(tmp_path / "slow.py")], seconds=0.2)


def test_processes_are_told_who_they_are(tmp_path):
    file = tmp_path / "says.py"
    file.write_text("import json, sys; print('first'); print(json.dumps(sys.argv[1:4]))")
    assert processes.together([str(file), "task"], world=3) == ["task", "0", "3"]
