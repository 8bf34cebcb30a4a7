"""The same grid on many machines: NDL_CLUSTER names a dask scheduler. Workers train, the coordinator alone writes."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator

from ..machine import module_digest, require, versions
from ..modes import NOTEBOOKS, ROOT, LabError

ALONE = (
    threading.Lock()
)  # a worker may have several threads, torch's generator and the clock are one for all


def origin() -> dict[str, str]:
    """What must be alike on the coordinator and its workers: ndlinear.py, the lab's files and what stands beside them, versions."""
    lab, guide = NOTEBOOKS / "lab", ROOT / "ndlinear_guide"
    files = [*lab.rglob("*.py"), *(lab / "data").glob("*.[cy]*"), *guide.rglob("*.py")]
    files = sorted([*files, *ROOT.glob("ndlinear_*.py")])
    lab = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return {"ndlinear.py": module_digest(), "lab": lab} | versions()


def _on_worker(run: Callable, group: list[dict], here: dict[str, str]):
    there = origin()
    if there != here:
        apart = {name: (there[name], here[name]) for name in here if there[name] != here[name]}
        raise LabError(f"a worker differs from this process, (there, here): {apart}; update it")
    with ALONE:
        return run(group)


def spread(run: Callable, groups: list) -> Iterator:
    """(group, what ``run`` gives for it) as they finish on the workers; one whose worker dies is run again elsewhere."""
    address = os.environ["NDL_CLUSTER"].strip()
    client_of, as_completed = require("distributed").Client, require("distributed").as_completed
    try:
        client = client_of(address, timeout="10s")
        client.wait_for_workers(1, timeout="60s")
    except (OSError, ValueError) as error:
        raise LabError(
            f"NDL_CLUSTER={address!r}: no scheduler with a worker answers ({error}); see `dask scheduler`, `dask worker`"
        ) from error
    with client:
        here, each = origin(), {"pure": False, "retries": 3}
        asked = {client.submit(_on_worker, run, group, here, **each): group for group in groups}
        for future in as_completed(asked):
            yield asked[future], future.result()
