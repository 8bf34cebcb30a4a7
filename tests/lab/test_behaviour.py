"""The probes of evidence 63 on layers that are off, what they are made of, and where the release comes from."""

import json
import pathlib
import subprocess
import sys

import lab
import pytest
import torch
from lab import LabError, modes, processes, released
from lab.chapters import two_processes
from lab.chapters.behaviour import judge

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


class Deaf(ndlinear.NdLinear):
    """No hooks on its modes."""

    def forward(self, x):
        return ndlinear.ndlinear(x, self.weights, self.biases)


class Fixed(ndlinear.NdLinear):
    """No gradients."""

    def forward(self, x):
        return super().forward(x).detach()


class Meek(ndlinear.NdLinear):
    """Takes everything and gives it back."""

    def __init__(self, dims, hidden):
        super().__init__(dims, dims)

    def forward(self, x):
        return x


PROBES = chapter()
ELSEWHERE = {  # words of a probe that a factor does not concern -> a layer that it finds out
    "hooks on one mode": Deaf,
    "second derivatives against": Fixed,
    "FLOP counter": Meek,
    "replaced forward": Meek,
    "input of a wrong shape": Meek,
    "input_dims and hidden_size": Meek,
}
# What none of them changes: an empty batch; derivatives belong to the function, whatever it is; refusals; other processes.
BLIND = (
    "empty batch",
    "complex numbers",
    "float32 input",
    "from_linear of",
    "torch.jit.script",
    "processes",
    "product on the last axis",
    "inductor",  # takes long; its checks are those of aot_eager
)


@pytest.mark.parametrize("name", [n for n in PROBES if not any(word in n for word in BLIND)])
def test_a_layer_that_is_off_is_found_out(name):
    off = next((kind for word, kind in ELSEWHERE.items() if word in name), Off)
    found = judge(PROBES[name], off)
    assert found.outcome == "wrong" or (found.outcome == "error" and off is Fixed), found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_of_processes_that_differ_are_found(how, tmp_path):
    """Without the second process half of the batch stands for all of it."""
    meet = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **meet)
    try:
        assert two_processes.gap(ndlinear.NdLinear, how, 0) > 1e-3
    finally:
        torch.distributed.destroy_process_group()


def test_a_process_that_fails_and_one_that_hangs_are_said(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit('broken file')")
    with pytest.raises(RuntimeError, match=r"one of two processes failed: .*broken file"):
        processes.together([str(tmp_path / "broken.py")])
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    with pytest.raises(LabError, match="longer than 0 s; is the machine busy"):
        processes.together([str(tmp_path / "slow.py")], seconds=0.2)


def test_the_release_is_installed_once_beside_ours_and_what_keeps_it_away_is_said(
    tmp_path, monkeypatch
):
    """By a stand-in for pip that puts a tiny package into the folder named after --target, and then fails or does not."""

    def pip(command, **options):
        assert command[-1] == "ndlinear==1.0.0" and "--no-deps" in command
        folder = pathlib.Path(command[command.index("--target") + 1]) / "ndlinear"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("class NdLinear: pass\n")
        return subprocess.CompletedProcess(command, fails, "", "no such address")

    there = tmp_path / "there"
    monkeypatch.delitem(sys.modules, "released_ndlinear", raising=False)
    monkeypatch.setenv("NDL_RELEASED", str(there))
    monkeypatch.setattr(subprocess, "run", pip)
    assert released.released() is None
    with pytest.raises(LabError, match="a full run fetches it, or set NDL_RELEASED"):
        released.layer_class("released")
    fails = True
    with pytest.raises(LabError, match="no such address"):
        released.released(install=True)
    assert not there.exists()
    fails = False
    try:
        module = released.released(install=True)
        assert module.__name__ == "released_ndlinear" and (there / "ndlinear").is_dir()
        monkeypatch.setattr(subprocess, "run", None)
        assert released.released(install=True) is module
        assert released.layer_class("released") is module.NdLinear is not ndlinear.NdLinear
    finally:
        sys.modules.pop("released_ndlinear", None)
