"""Runs a command whose notebooks begin with the large libraries loaded: python notebooks/lab/tools/warm.py COMMAND ...

Four of the six seconds that a short notebook takes are imports, and a build with its tests starts more than a hundred kernels.
Here one process imports once, and every kernel is a fork of it that has seen no code of the project. A kernel that is asked for
with another interpreter or other SETTINGS starts as kernels always do; so do all of them where torch was built for a GPU, which
does not outlive a fork. This file imports nothing but the standard library: the interpreter that asks for a kernel has no other.
"""

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile

# Not pandas: how wide its tables are is decided when it is imported, by whether that is in a notebook.
LIBRARIES = ("ipykernel.kernelapp", "torch._dynamo", "matplotlib.pyplot", "scipy.stats")
SETTINGS = ("OMP_NUM_THREADS", "PYTHONOPTIMIZE", "PYTHONWARNINGS")
# What matplotlib and ipykernel read when they are imported: figures go into the notebook, and there is a parent.
READ_ONCE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "JPY_PARENT_PID": "1"}


def settings() -> list:
    """What a kernel and the process it is forked from must have in common."""
    return [str(pathlib.Path(sys.executable).parent), *map(os.environ.get, SETTINGS)]


def python_path() -> list[str]:
    """The folders of PYTHONPATH: the project's code stands there, and none of the libraries."""
    return [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def run(command: list[str]) -> int:
    """Run a command that finds warm kernels under the name of the ordinary ones; returns its exit status."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        kernels = pathlib.Path(folder, "kernels", "python3")
        kernels.mkdir(parents=True)
        # with -S and -I the interpreter that only asks starts in 20 ms
        argv = ["python", "-I", "-S", __file__, "--ask", address, "{connection_file}"]
        spec = {"argv": argv, "interrupt_mode": "message"}
        spec |= {"display_name": "Python 3", "language": "python"}
        (kernels / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
        environ = {"OMP_NUM_THREADS": "1"} | os.environ | READ_ONCE
        serving = [sys.executable, __file__, "--serve", address]
        server = subprocess.Popen(serving, env=environ, stdin=subprocess.PIPE)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("JUPYTER_PATH"))))
        try:
            return subprocess.run(
                command, env=os.environ | {"JUPYTER_PATH": path}, check=False
            ).returncode
        finally:
            server.stdin.close()
            server.wait()


def serve(address: str) -> None:
    """Import the libraries, then fork a kernel for each that asks, until whoever holds the other end of stdin is gone."""
    sys.path.pop(0)  # the folder of this file
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)  # whoever asks from now on is answered when all is imported
        if importlib.import_module("torch").version.cuda:
            return
        for name in LIBRARIES:
            importlib.import_module(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            asked, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(keep(asked))
            asked.close()


def keep(asked: socket.socket) -> int:
    """Fork the kernel and send back how it ended; when the one that asked is gone, the kernel goes too."""
    said = json.loads(asked.makefile().readline())
    if said["settings"] != settings():
        asked.sendall(b"no\n")
        return 0
    kernel = os.fork()
    if kernel == 0:
        asked.close()
        become(said)
    ended = os.pidfd_open(kernel)
    if asked in select.select([asked, ended], [], [])[0]:
        os.kill(kernel, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(kernel, 0)[1])
    with contextlib.suppress(OSError):
        asked.sendall(f"{status}\n".encode())
    return 0


def become(said: dict) -> None:
    """From here on this process is the kernel that was asked for."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(said["folder"])
    before = python_path()
    os.environ.clear()
    os.environ.update(READ_ONCE | said["environ"])
    rest = [place for place in sys.path if place not in before]
    # "" stands first as in any process, and the kernel takes it away
    sys.path[:] = ["", *python_path(), *rest]
    sys.argv = said["kernel"]
    runpy.run_module("ipykernel_launcher", run_name="__main__")
    sys.exit()


def ask(address: str, connection: str, *options: str) -> int:
    """Stand for a kernel in the eyes of Jupyter: ask for a fork and end as it ends; without an answer, become a kernel."""
    kernel = ["ipykernel_launcher", "-f", connection, *options]
    request = {"kernel": kernel, "folder": os.getcwd()}
    request |= {"environ": dict(os.environ), "settings": settings()}
    answer = ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        server.sendall(f"{json.dumps(request)}\n".encode())
        answer = server.makefile().readline().strip()
    if answer in ("", "no"):
        os.execv(sys.executable, [sys.executable, "-m", *kernel])
    return int(answer)


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    tasks = {"--serve": serve, "--ask": ask}
    sys.exit(tasks[first](*rest) if first in tasks else run([first, *rest]))
