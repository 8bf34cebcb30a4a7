"""Probes of behaviour: the machinery, and the probes of chapter 63 on a layer that is off; the chapter runs them on ours."""

import functools
import json
import pathlib
import subprocess
import sys
import types

import lab
import pandas as pd
import pytest
import torch
from lab import LabError, released
from lab.chapters import behaviour
from lab.chapters.behaviour import Outcome, Wrong, check, judge, refuses, same

import ndlinear

NOTEBOOK = (
    pathlib.Path(__file__).resolve().parents[2] / "notebooks" / "evidence" / "63_behaviour.ipynb"
)


class Off(ndlinear.NdLinear):
    """A layer whose result is half as large again as it should be."""

    def forward(self, x):
        return 1.5 * super().forward(x)


# ---------------------------------------------------------------------------------------------- the probes of the chapter
def chapter() -> behaviour.Sheet:
    """The cells of chapter 63 that define probes, without those that report."""
    space: dict = {"lab": lab, "report": lambda section: None}
    marks = ("@sheet", "sheet.section(", "sheet = behaviour.Sheet()", "def new(", "def reference(")
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and any(mark in source for mark in marks):
            exec(source, space)
    return space["sheet"]


SHEET = chapter()
LIGHT = {name: probe for name, probe in SHEET.probes.items() if not probe.heavy}
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
)


def test_the_chapter_has_probes_in_every_section():
    assert len(SHEET.probes) > 30 and all(SHEET.sections.values())


@pytest.mark.parametrize("name", [n for n in LIGHT if not any(word in n for word in BLIND)])
def test_a_layer_that_is_off_is_found_out(name):
    assert judge(LIGHT[name], Off).outcome == "wrong", judge(LIGHT[name], Off)


def test_probes_that_look_elsewhere_can_fail_too():
    class Deaf(ndlinear.NdLinear):
        def forward(self, x):
            with torch.no_grad():  # no gradients
                return ndlinear.ndlinear(x, self.weights, self.biases)  # no hooks

    for word in ("hooks on one mode", "second derivatives against"):
        name = next(n for n in LIGHT if word in n)
        assert judge(LIGHT[name], Deaf).outcome in ("wrong", "error")

    class Meek(ndlinear.NdLinear):
        def __init__(self, dims, hidden):
            super().__init__(dims, dims)

        def forward(self, x):
            return x

    for word in ("FLOP counter", "replaced forward"):
        name = next(n for n in LIGHT if word in n)
        assert judge(LIGHT[name], Meek).outcome == "wrong"
    for name in SHEET.sections["Refusals"][:3]:
        assert judge(LIGHT[name], Meek) == Outcome("wrong", "accepted")


# ------------------------------------------------------------------------------------------------------------- outcomes
def test_outcomes():
    assert judge(lambda c: None, int) == ("right", "")
    assert judge(lambda c: "in words", int) == ("right", "in words")
    assert judge(lambda c: check(False, "three"), int) == ("wrong", "three")
    assert judge(lambda c: 1 / 0, int) == ("error", "ZeroDivisionError: division by zero")
    found = judge(lambda c: raised(ValueError("\n\nfirst " + 200 * "x" + "\nsecond")), int).detail
    assert found.startswith("ValueError: first x") and len(found) < 170
    with pytest.raises(LabError):  # a missing library is not the layer's error
        judge(lambda c: lab.require("no_such_library"), int)
    seen = []
    for _ in range(2):
        judge(lambda c: seen.append(torch.rand(1).item()), int)
    assert seen[0] == seen[1], "each probe starts from the same seed"


def raised(error):
    raise error


def test_same():
    x = torch.tensor([1.0, 100.0])
    same(x, x + 1e-8)
    same(x + 1e-3, x, tol=1e-4)  # relative to the largest entry
    same(torch.empty(0, 2), torch.empty(0, 2))
    for one, other in ((x[:1], x), (x + 1e-3, x), (x * torch.nan, x), (x[:0], x[:0, None])):
        with pytest.raises(Wrong):
            same(one, other)


def test_refuses():
    call = functools.partial(raised, ValueError("got 3, expected 4\nmore"))
    assert refuses(call, "3", "4") == "got 3, expected 4"
    for error in (TypeError("no"), RuntimeError("3")):  # without the word, of another type
        with pytest.raises(type(error)):
            refuses(functools.partial(raised, error), "3")
    with pytest.raises(Wrong, match="accepted"):
        refuses(lambda: None, "3")


def test_derivatives_are_compared_with_differences():
    class Wrongly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    layer, x = torch.nn.Linear(3, 2).double(), torch.randn(2, 3).double()
    behaviour.against_differences(layer, x)
    layer.forward = lambda x, f=layer.forward: Wrongly.apply(f(x))
    with pytest.raises(Wrong):
        behaviour.against_differences(layer, x)


# ------------------------------------------------------------------------------------------------------------ the sheet
@pytest.fixture
def sheet(monkeypatch):
    """Two probes on integers in place of layers; the "release" is `float`, and absent until a test installs it."""
    sheet = behaviour.Sheet()
    sheet.section("Numbers")

    @sheet
    def whole(kind):
        """halves are kept."""
        check(kind(1.5) == 1.5, "cut")

    @sheet(heavy=True)
    def text(kind):
        """text is refused"""
        kind("x")

    monkeypatch.setattr(
        behaviour, "layer_class", lambda name: {"ours": int, "released": float}[name]
    )
    return sheet


def test_a_sheet_reports_ours_live_and_the_release_from_records(sheet, capsys, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "full")
    grid = sheet.grid("Numbers")
    halves, text = sheet.probes
    pairs = [(halves, "released"), (text, "released"), (text, "ours")]
    assert [(c["behaviour"], c["layer"]) for c in grid] == pairs
    rows = pd.DataFrame([c | sheet.run(c)["metrics"] for c in grid])
    sheet.report("Numbers", rows)
    out = capsys.readouterr().out
    assert "here: cut" in out and "release: ValueError" in out
    assert sheet.named("here", "wrong") == sheet.named("release", "right") == ["halves are kept"]
    counts = sheet.counts().set_index("layer")[["right", "wrong", "error", "not tried"]]
    assert counts.loc["here"].tolist() == [0, 1, 1, 0]


def test_smoke_runs_what_is_there(sheet, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    monkeypatch.setattr(behaviour, "released", lambda: None)
    assert all(sheet.run(c)["metrics"]["outcome"] == "not tried" for c in sheet.grid("Numbers"))
    monkeypatch.setattr(behaviour, "released", lambda: float)
    outcomes = [sheet.run(c)["metrics"]["outcome"] for c in sheet.grid("Numbers")]
    assert outcomes == ["right", "not tried", "not tried"]


def test_probes_need_a_section_and_names_of_their_own(sheet):
    with pytest.raises(LabError, match="name of its own"):
        sheet(types.FunctionType((lambda kind: None).__code__, {}, "halves are kept"))
    with pytest.raises(LabError, match="section"):
        behaviour.Sheet()(lambda kind: None)


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
    monkeypatch.delenv("NDL_RELEASED")
    monkeypatch.setenv("NDL_DATA", str(nowhere))
    assert released.release_folder() == nowhere / "ndlinear-1.0.0"


def test_the_release_is_installed_once_beside_ours(nowhere, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pip(0))
    module = released.released(install=True)
    assert module.__name__ == "released_ndlinear" and (nowhere / "ndlinear").is_dir()
    monkeypatch.setattr(subprocess, "run", None)
    assert released.released(install=True) is module
    assert released.layer_class("released") is module.NdLinear is not released.layer_class("ours")


# --------------------------------------------------------------------------------------------------------- two processes
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
        "        if torch.distributed.get_world_size() < 2:\n"
        "            raise ValueError('alone')\n"
        "        y = super().forward(x)[:, :1].expand(-1, self.first, -1)\n"
        "        return y * (1 + torch.distributed.get_rank())\n"
    )
    gaps = behaviour.two_processes(str(file))
    assert gaps["ddp"] > 1e-3 and gaps["fsdp"] > 1e-3, gaps


def test_two_processes_report_errors(monkeypatch):
    monkeypatch.setattr(
        behaviour, "two_processes", lambda file: {"ddp": "ValueError: no", "fsdp": 0.5}
    )
    ddp, fsdp = (
        judge(lambda c, how=how: behaviour.on_two_processes(c, how), Off) for how in ("ddp", "fsdp")
    )
    assert ddp == ("error", "RuntimeError: ValueError: no")
    assert fsdp == ("wrong", "gradients off by 5.0e-01")
