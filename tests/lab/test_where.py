"""The same grid on a dask cluster of two worker processes: same rows, and a killed worker loses nothing."""

import concurrent.futures
import linecache
import os
import signal
import sys
import threading
import time
import types

import lab
import pytest
from lab import LabError, modes, records
from lab.records import where as cluster

distributed = pytest.importorskip("distributed")


def train(config):
    """A deterministic stand-in for a training run; one configuration kills its own worker once."""
    import torch

    flag = config.get("kill_flag")
    if flag and not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    return {"metrics": {"y": float(torch.rand(()))}}


@pytest.fixture(scope="module")
def scheduler():
    from dask import config
    from distributed import LocalCluster

    with (
        config.set({"distributed.worker.daemon": True}),
        LocalCluster(2, threads_per_worker=1, dashboard_address=None) as local,
    ):
        yield local.scheduler_address


@pytest.fixture
def full(tmp_path, monkeypatch):
    import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as for a function typed into a notebook
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    monkeypatch.setenv("NDL_MODE", "full")
    yield tmp_path
    cloudpickle.unregister_pickle_by_value(here)


def test_same_rows_as_in_process_though_a_worker_is_killed(full, scheduler, monkeypatch):
    flag = full / "killed-once"
    grid = [{"seed": seed, "kill_flag": ""} for seed in range(12)]
    here = records.record("here", grid, train)
    grid[5]["kill_flag"] = str(flag)
    monkeypatch.setenv("NDL_CLUSTER", scheduler)
    there = records.record("there", grid, train)
    assert flag.exists(), "a worker was killed"
    assert here["y"].tolist() == there["y"].tolist() and len(set(here["y"])) == 12
    rows = records.read("there")
    assert len(rows) == 12 and {r["status"] for r in rows} == {"ok"}


def test_a_worker_with_another_lab_is_refused_and_both_are_shown(full, scheduler, monkeypatch):
    """The coordinator's definition of a helper is another one than the workers': as from another checkout."""

    def with_helper(config):
        return {"metrics": {"y": float(lab.stats.above((1, 2)))}}

    monkeypatch.setenv("NDL_CLUSTER", scheduler)
    file = lab.stats.__file__
    source = [line.replace("low > bound", "low > 2 * bound") for line in linecache.getlines(file)]
    monkeypatch.setitem(linecache.cache, file, (0, None, source, file))
    with pytest.raises(records.RecordError, match=r"stats:above is \w+ on the worker and \w+ here"):
        records.record("poisoned", [{"seed": 0}, {"seed": 1}], with_helper)
    assert not (full / "poisoned.jsonl").exists() or not records.read("poisoned")


@pytest.mark.parametrize(("workers", "said"), [({}, True), ({"one": {}}, False)])
def test_waiting_without_workers_is_said(workers, said, capsys):
    client = types.SimpleNamespace(
        scheduler_info=lambda: {"workers": workers},
        scheduler=types.SimpleNamespace(address="tcp://a"),
    )
    future = concurrent.futures.Future()
    threading.Timer(0.5, future.set_result, args=(1,)).start()
    pool = types.SimpleNamespace(_client=client)
    assert list(cluster.as_completed(pool, [future], patience=0.1)) == [future]
    assert ("no worker is connected to tcp://a" in capsys.readouterr().out) == said


def test_a_missing_scheduler_or_dask_says_what_to_do(monkeypatch):
    monkeypatch.setenv("NDL_CLUSTER", "tcp://127.0.0.1:1")
    real = distributed.Client
    soon = lambda address, timeout: real(address, timeout="1s")  # noqa: E731
    monkeypatch.setattr(distributed, "Client", soon)
    with pytest.raises(LabError, match=r"no dask scheduler answers.*start one"), cluster.executor():
        pass
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(LabError, match="pip install"), cluster.executor():
        pass
