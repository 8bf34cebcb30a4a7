"""Kernels that are forks of one process: the settings they are given, what they begin with, and their end."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from lab.tools import warm

# Starts three kernels by Jupyter's own manager and prints what a first cell finds in each.
PROGRAM = """
import json, os, sys
from jupyter_client.manager import start_new_kernel

CELL = "import os, sys; print('torch' in sys.modules, os.getcwd(), os.environ.get('WORD'), 'lab' in sys.modules, sys.path[0])"

def first_cell(**environ):
    manager, client = start_new_kernel(env=os.environ | environ, cwd=os.environ["PLACE"])
    said = []
    hook = lambda message: said.append(message["content"].get("text", ""))
    client.execute_interactive(CELL, output_hook=hook, timeout=60)
    client.execute_interactive("print(os.getpid())", output_hook=hook, timeout=60)
    print(json.dumps("".join(said).split()), flush=True)
    return manager

first_cell(WORD="one", PYTHONPATH="/code").shutdown_kernel()
first_cell(WORD="two", OMP_NUM_THREADS="3").shutdown_kernel()
manager = first_cell(WORD="three")
os.kill(manager.provisioner.pid, 9)
sys.exit(7)
"""


def gone(pid: int) -> bool:
    """Whether no such process runs; one that has ended and was not asked for its status counts as gone."""
    stat = pathlib.Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_kernels_are_forks_with_their_own_settings_and_end_with_who_asked(tmp_path):
    environ = {"PLACE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, warm.__file__, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    *found, last = map(json.loads, done.stdout.splitlines())
    place = str(tmp_path)
    assert found[0][:-1] == ["True", place, "one", "False", "/code"]
    assert found[1][:-2] == ["False", place, "two", "False"], "other threads: an ordinary kernel"
    assert last[:-2] == ["True", place, "three", "False"]
    assert gone(int(last[-1])), "the kernel ends with the process that stood for it"


def test_the_process_of_the_libraries_ends_with_the_command_even_if_that_is_killed():
    waits = "import time; print('runs', flush=True); time.sleep(60)"
    command = [sys.executable, warm.__file__, sys.executable, "-c", waits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline() == "runs\n"
        children = (
            pathlib.Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        )
        driver.kill()
        driver.stdout.close()
    server, ran = map(int, children)
    os.kill(ran, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not gone(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gone(server)
