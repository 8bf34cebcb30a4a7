"""Runs the notebooks ahead of the build, two at a time, and only those of which something that they read has changed.

MyST-NB takes the outputs from its cache afterwards. While a notebook runs, the lab writes down what it reads (`lab.reads`); the
hashes of that are kept beside the cache. A notebook that fails here is left to MyST-NB, which runs it again and reports it.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import time

import nbformat
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from lab.modes import read_yaml
from lab.page.ledger import belongs
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from sphinx.util import logging

AT_A_TIME = 2
log = logging.getLogger(__name__)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class State:
    """Hashes of what chapters can read, as the project stands now."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        ledger = root / "book" / "paper" / "claims.yml"
        self.claims = read_yaml(ledger)["claims"] if ledger.is_file() else []

    def of(self, kind: str, name: str) -> str:
        """The hash of a file, of one claim, of the claims of a chapter, or of all."""
        if kind == "file":
            path = self.root / name
            return _digest(path.read_bytes()) if path.is_file() else "absent"
        chosen = {
            "claim": [c for c in self.claims if c["id"] == name],
            "claims of": [c for c in self.claims if belongs(c, name)],
            "claims": self.claims,
        }[kind]
        return _digest(json.dumps(chosen, sort_keys=True, default=str).encode())


def same(kept: pathlib.Path, state: State, versions: str) -> bool:
    """Whether everything that a chapter read when it ran is as it was."""
    if not kept.is_file():
        return False
    old = json.loads(kept.read_text(encoding="utf-8"))
    return old["versions"] == versions and all(
        state.of(kind, name) == found for kind, name, found in old["reads"]
    )


def _run(path: pathlib.Path, timeout: int, trace: pathlib.Path):
    """Execute one notebook in a kernel that writes down what it reads: (notebook, seconds), or None if a cell fails."""
    trace.unlink(missing_ok=True)
    notebook = nbformat.read(path, 4)
    timeout = notebook.metadata.get("mystnb", {}).get("execution_timeout", timeout)
    place = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=timeout, resources=place, record_timing=False)
    environ = {"OMP_NUM_THREADS": "1"} | os.environ | {"NDL_READS": str(trace)}
    began = time.perf_counter()
    try:
        client.execute(env=environ)
    except (CellExecutionError, CellTimeoutError):
        return None
    return notebook, time.perf_counter() - began


def _cached(cache, path: pathlib.Path):
    """What the cache has for this notebook, or None."""
    try:
        return cache.match_cache_notebook(nbformat.read(path, 4))
    except KeyError:
        return None


def prepare(
    root: pathlib.Path, folder: pathlib.Path, names: list[str], versions: str, timeout: int
):
    """Bring the cache in ``folder`` up to date for these notebooks; returns those that were run."""
    cache, state = get_cache(str(folder)), State(root)
    (folder / "reads").mkdir(parents=True, exist_ok=True)
    stale = {}
    for name in names:
        path = root / f"{name}.ipynb"
        # a chapter and its evidence have the same stem
        trace = folder / "reads" / f"{path.parent.name}-{path.stem}.txt"
        kept = _cached(cache, path)
        if not (kept and same(trace.with_suffix(".json"), state, versions)):
            if kept:
                cache.remove_cache(kept.pk)
            stale[name] = path, trace
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        futures = {
            pool.submit(_run, path, timeout, trace): (path, trace) for path, trace in stale.values()
        }
        for future in concurrent.futures.as_completed(futures):
            path, trace = futures[future]
            done = future.result()
            if done is None:
                log.info("%s stopped with an error; it is run again to show it", path.name)
                continue
            notebook, seconds = done
            bundle = CacheBundleIn(notebook, str(path), data={"execution_seconds": seconds})
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
            lines = trace.read_text(encoding="utf-8").splitlines() if trace.is_file() else []
            pairs = [line.split("\t", 1) for line in lines]
            reads = [[kind, name, state.of(kind, name)] for kind, name in pairs]
            kept = {"versions": versions, "reads": reads}
            trace.with_suffix(".json").write_text(json.dumps(kept), encoding="utf-8")
            trace.unlink(missing_ok=True)
            log.info("%s ran in %.0f s", path.name, seconds)
    return list(stale)
