"""The same grid on a dask cluster of two worker processes: same rows, a killed worker loses nothing, a different one is refused."""

import os
import signal
import sys
import time

import pytest
from lab import LabError, modes, records
from lab.records import cluster

distributed = pytest.importorskip("distributed")


def train(config):
    """A stand-in for a training run that reads data; one configuration kills its own worker once."""
    import torch
    from lab import data

    flag = config.get("kill_flag")
    if flag and not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)  # another thread of the worker would draw from the same generator
    return {"metrics": {"y": float(torch.rand(()) + data.load("digits").x.mean())}}


@pytest.fixture(scope="module")
def scheduler():
    from dask import config

    alone = {"distributed.worker.daemon": True, "distributed.scheduler.worker-saturation": 1.0}
    with (
        config.set(alone),
        distributed.LocalCluster(2, threads_per_worker=2, dashboard_address=None) as local,
    ):
        yield local.scheduler_address


def test_two_workers_give_the_rows_of_one_process(tmp_path, scheduler, monkeypatch):
    import cloudpickle

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as for a function typed into a notebook
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    monkeypatch.setenv("NDL_MODE", "full")
    flag = tmp_path / "killed-once"
    grid = [{"seed": seed, "kill_flag": ""} for seed in range(6)]
    alone = records.record("alone", grid, train, data=("digits",))
    grid[2]["kill_flag"] = str(flag)
    monkeypatch.setenv("NDL_CLUSTER", scheduler)
    spread = records.record("spread", grid, train, data=("digits",))
    assert flag.exists(), "a worker was killed"
    assert alone["y"].tolist() == spread["y"].tolist() and len(set(alone["y"])) == 6
    assert len(records.read("spread")) == 6
    other = cluster.origin() | {"ndlinear.py": "0000"}
    monkeypatch.setattr(cluster, "origin", lambda: other)
    with pytest.raises(LabError, match=r"a worker differs.*'ndlinear.py': \('\w+', '0000'\)"):
        records.record("poisoned", grid, train)
    assert records.read("poisoned") == []
    cloudpickle.unregister_pickle_by_value(here)


def test_without_a_scheduler_it_says_what_to_start(monkeypatch):
    monkeypatch.setenv("NDL_CLUSTER", "tcp://127.0.0.1:1")
    real = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda address, timeout: real(address, timeout="1s"))
    with pytest.raises(LabError, match=r"no scheduler with a worker answers.*dask scheduler"):
        list(cluster.spread(train, [[{"seed": 0}]]))
