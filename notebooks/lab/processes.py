"""Two processes that work on one thing together: they are started here, and meet at a file."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from .modes import NOTEBOOKS, LabError


def together(arguments: list[str], *, seconds: float = 600) -> object:
    """Start two processes of Python, each with one thread, and give what the first one prints last, read as JSON.

    Args:
        arguments: of Python; behind them come the process's rank, the number of processes and the file at which they meet.

    Raises:
        LabError: they took longer than ``seconds``. RuntimeError: one of them failed; its message is in the error.
    """
    path = os.pathsep.join(filter(None, [str(NOTEBOOKS), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = str(pathlib.Path(folder, "store"))
        ranks = []
        for rank in "01":
            command = [sys.executable, "-W", "ignore", *arguments, rank, "2", store]
            ranks.append(subprocess.Popen(command, env=environment, **pipes))
            stack.callback(ranks[-1].kill)
        try:
            texts = [process.communicate(timeout=seconds) for process in ranks]
        except subprocess.TimeoutExpired as error:
            raise LabError(
                f"two processes took longer than {seconds:.0f} s; is the machine busy?"
            ) from error
    if any(process.returncode for process in ranks):
        said = "; ".join(err.strip()[-300:] for _, err in texts if err.strip())
        raise RuntimeError(f"one of two processes failed: {said}")
    return json.loads(texts[0][0].splitlines()[-1])
