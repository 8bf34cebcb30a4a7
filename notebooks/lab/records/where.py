"""Where a grid runs: in this process, or on the workers of a dask scheduler named by NDL_CLUSTER."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator

from ..modes import LabError


@contextlib.contextmanager
def executor():
    """With NDL_CLUSTER=<scheduler address> the executor of `dask.distributed`, the same code on many machines; else None.

    Raises:
        LabError: dask.distributed is not installed, or no scheduler answers at the address.
    """
    address = os.environ.get("NDL_CLUSTER", "").strip()
    if not address:
        yield None
        return
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise LabError(
            "NDL_CLUSTER needs dask.distributed: pip install 'dask[distributed]'"
        ) from error
    try:
        client = Client(address, timeout="10s")
    except (OSError, ValueError) as error:
        raise LabError(
            f"no dask scheduler answers at NDL_CLUSTER={address!r} ({error}); start one with `dask scheduler`"
        ) from error
    with client:
        yield client.get_executor(
            pure=False, retries=3
        )  # a task whose worker dies is run again elsewhere


def as_completed(pool, futures, patience: float = 30.0) -> Iterator:
    """The futures as they finish; says so when none does for a while because no worker is connected."""
    open_ones = set(futures)
    said = False
    while open_ones:
        done, open_ones = concurrent.futures.wait(
            open_ones, patience, concurrent.futures.FIRST_COMPLETED
        )
        yield from done
        client = getattr(pool, "_client", None)
        alone = not done and client is not None and not client.scheduler_info()["workers"]
        if alone and not said:
            print(
                f"no worker is connected to {client.scheduler.address}; {len(open_ones)} groups of runs wait: "
                "start one with `dask worker <address>`"
            )
            said = True
