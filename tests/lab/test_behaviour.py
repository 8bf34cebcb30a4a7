"""The probes of evidence 63 on layers that are off, what they are made of, and where the release comes from."""

import json
import pathlib
import subprocess
import sys

import lab
import pytest
import torch
from lab import LabError, modes, released
from lab.chapters import behaviour, two_processes
from lab.chapters.behaviour import Outcome, judge

import ndlinear

NOTEBOOK = modes.NOTEBOOKS / "evidence" / "63_behaviour.ipynb"


class Off(ndlinear.NdLinear):
    """A layer whose result is half as large again as it should be."""

    def forward(self, x):
        return 1.5 * super().forward(x)


def chapter() -> dict:
    """The probes of evidence 63, by the cells between its setup and its record."""
    space: dict = {"lab": lab}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if "lab.record(" in source:
            return space["probes"]
        if "lab.start(" not in source:
            exec(source, space)
    raise AssertionError("nothing is recorded")


PROBES = chapter()
# What a factor cannot change: an empty batch; derivatives belong to the function, whatever it is; hooks; refusals; other processes.
BLIND = (
    "FLOP counter",
    "replaced forward",
    "empty batch",
    "derivatives against",
    "hook",
    "named",
    "torch.jit.script",
    "processes",
    "product on the last axis",
    "inductor",  # takes long; its checks are those of aot_eager
)


@pytest.mark.parametrize("name", [n for n in PROBES if not any(word in n for word in BLIND)])
def test_a_layer_that_is_off_is_found_out(name):
    assert judge(PROBES[name], Off).outcome == "wrong", judge(PROBES[name], Off)


def test_probes_that_look_elsewhere_can_fail_too():
    class Deaf(ndlinear.NdLinear):
        def forward(self, x):
            with torch.no_grad():  # no gradients
                return ndlinear.ndlinear(x, self.weights, self.biases)  # no hooks

    for word in ("hooks on one mode", "second derivatives against"):
        name = next(n for n in PROBES if word in n)
        assert judge(PROBES[name], Deaf).outcome in ("wrong", "error")

    class Meek(ndlinear.NdLinear):
        def __init__(self, dims, hidden):
            super().__init__(dims, dims)

        def forward(self, x):
            return x

    for word in ("FLOP counter", "replaced forward"):
        name = next(n for n in PROBES if word in n)
        assert judge(PROBES[name], Meek).outcome == "wrong"
    for name in ("input of a wrong shape", "input_dims and hidden_size", "float32 input"):
        name = next(n for n in PROBES if n.startswith(name))
        assert judge(PROBES[name], Meek) == Outcome("wrong", "accepted")


def raised(error):
    raise error


def test_outcomes():
    assert judge(lambda c: "in words", int) == ("right", "in words")
    assert judge(lambda c: 1 / 0, int) == ("error", "ZeroDivisionError: division by zero")
    found = judge(lambda c: raised(ValueError("\n\nfirst " + 200 * "x" + "\nsecond")), int).detail
    assert found.startswith("ValueError: first x") and len(found) < 170
    with pytest.raises(LabError):  # a missing library is not the layer's error
        judge(lambda c: lab.require("no_such_library"), int)


def test_two_processes_find_what_differs(tmp_path):
    """A layer whose result depends on the process: its gradients are not those of one process."""
    file = tmp_path / "differs.py"
    file.write_text(
        "import torch\n"
        "class NdLinear(torch.nn.Linear):\n"
        "    def __init__(self, dims, hidden):\n"
        "        super().__init__(dims[-1], hidden[-1])\n"
        "        self.first = hidden[0]\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x)[:, :1].expand(-1, self.first, -1)\n"
        "        return y * (1 + torch.distributed.get_rank())\n"
    )
    gaps = behaviour.two_processes(two_processes.load(str(file)))
    assert gaps["ddp"] > 1e-3 and gaps["fsdp"] > 1e-3, gaps


# ---------------------------------------------------------------------------------------------------------- the release
@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A place for the release that holds nothing yet."""
    monkeypatch.delitem(sys.modules, "released_ndlinear", raising=False)
    monkeypatch.setenv("NDL_RELEASED", str(tmp_path / "there"))
    yield tmp_path / "there"
    sys.modules.pop("released_ndlinear", None)


def pip(returncode):
    """A stand-in for pip: puts a tiny package into the folder named after --target."""

    def run(command, **options):
        assert command[-1] == "ndlinear==1.0.0" and "--no-deps" in command
        folder = pathlib.Path(command[command.index("--target") + 1]) / "ndlinear"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("class NdLinear: pass\n")
        return subprocess.CompletedProcess(command, returncode, "", "no such address")

    return run


def test_without_the_release(nowhere, monkeypatch):
    assert released.released() is None
    with pytest.raises(LabError, match="a full run fetches it, or set NDL_RELEASED"):
        released.layer_class("released")
    monkeypatch.setattr(subprocess, "run", pip(1))
    with pytest.raises(LabError, match="no such address"):
        released.released(install=True)
    assert not nowhere.exists()


def test_the_release_is_installed_once_beside_ours(nowhere, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip(0))
    module = released.released(install=True)
    assert module.__name__ == "released_ndlinear" and (nowhere / "ndlinear").is_dir()
    monkeypatch.setattr(subprocess, "run", None)
    assert released.released(install=True) is module
    assert released.layer_class("released") is module.NdLinear is not released.layer_class("ours")
