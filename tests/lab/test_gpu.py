"""`make gpu` on a processor: what it keeps when it is killed, when its time is up, and what it refuses to bring home."""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

import pytest
from lab import LabError, machine, modes
from lab.data import files
from lab.records import profiles, store
from lab.tools import cells, gpu, merge, parcel, plan

GPU = "NVIDIA H200"
HERE = pathlib.Path(__file__).parent
TRAIN = """
import missing_library
---
import lab, os, time
grid = [dict(x=x, seed=s) for x in range(3) for s in range(4)]
def train(config):
    with open(os.environ["NDL_TEST_PIDS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.15)
    return {"metrics": {"y": 2.0 * config["x"]}}
---
lab.record("mini", grid, train, data=("digits",))
---
lab.record("later", grid, train)
"""
WRITER = """
import sys, time
for line in open(sys.argv[1]):
    time.sleep(float(sys.argv[3]))
    with open(sys.argv[2], "a") as file:
        file.write(line)
"""


def write_notebook(folder: pathlib.Path, text: str, name: str = "90_mini") -> pathlib.Path:
    parts = [
        {"cell_type": "code", "id": f"90-{i}", "source": part.strip(), "metadata": {}}
        for i, part in enumerate(text.split("---"))
    ]
    path = folder / f"{name}.ipynb"
    path.write_text(json.dumps({"cells": parts}), encoding="utf-8")
    return path


def row(x=0, seed=0, **more) -> dict:
    """A row as a full run writes it, with its checksum."""
    config = more.pop("config", {"x": x, "seed": seed})
    made = {"experiment": "mini", "code": "now", "config": config, "key": store.canonical(config)}
    made |= {"seed": seed, "status": "ok", "metrics": {"y": 1.0}, "seconds": 0.1, "device": GPU}
    made |= {"data": {"digits": "known"}, "versions": {"ndlinear": "1"}} | more
    return made | {"digest": store.digest(made)}


def written(rows) -> str:
    return "".join(store.canonical(r) + "\n" for r in rows)


def note_of(xs, **more) -> dict:
    """What a notebook notes of an experiment: the keys of its grid."""
    keys = [row(x)["key"] for x in xs]
    return {"experiment": "mini", "code": "now", "keys": keys, "data": []} | more


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of records of its own, and a plan of one line."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(modes, "RESULTS", folder)
    monkeypatch.setattr(plan, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(modes, "NOTEBOOKS", tmp_path)
    monkeypatch.setattr(plan, "PLAN", (plan.Item("90_mini", "A test.", ("mini",), seconds=0.01),))
    monkeypatch.setattr(gpu, "START_UP", 0.1)
    monkeypatch.setattr(gpu, "RESERVE", 0.3)
    write_notebook(tmp_path, TRAIN)
    return folder


@pytest.fixture
def writers(monkeypatch):
    """Processes that write given rows at a given pace stand for notebooks; returns what they were told."""
    told = []

    def prepare(rows, pace=0.0):
        def start(notebook, experiment, folder, values, **more):
            told.append(more)
            number, of = map(int, more["NDL_SHARE"].split("/"))
            (folder / "said.txt").write_text("a last word")
            note = note_of([], keys=[r["key"] for r in rows])
            (folder / f"mini{gpu.NOTE}").write_text(json.dumps(note))
            there = {r["digest"] for r in store.parse(folder / "mini.jsonl")[0]}
            own = [r for r in rows if r["digest"] not in there][number::of]
            (folder / "todo").write_text(written(own))
            target = str(folder / "mini.jsonl")
            command = [sys.executable, "-c", WRITER, str(folder / "todo"), target, str(pace)]
            return subprocess.Popen(command)

        monkeypatch.setattr(cells, "start", start)
        return told

    return prepare


def said(out: pathlib.Path) -> str:
    return (out / "log.txt").read_text(encoding="utf-8")


def finished(out: pathlib.Path) -> list[dict]:
    return store.parse(out / "rows-1.jsonl")[0]


# ----------------------------------------------------------------------------------------------------------------- runs


def test_rows_of_several_processes_come_together_once(results, writers, tmp_path, monkeypatch):
    monkeypatch.setitem(profiles.PROFILES, "CPU", gpu.profiles.PROFILES["A100"])
    told = writers([row(x, s) for x in range(3) for s in range(5)])
    out = tmp_path / "out"
    gpu.run(out, 30, "cpu")
    assert len({r["digest"] for r in finished(out)}) == len(finished(out)) == 15
    assert [t["NDL_SHARE"] for t in told] == ["0/4", "1/4", "2/4", "3/4"]
    assert gpu.Out(out).state()["mini"]["missing"] == 0
    assert told[0]["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "1" and told[0]["NDL_DEVICE"] == "cpu"
    gpu.run(out, 30, "cpu")
    assert len(told) == 4 and "mini: complete" in said(out), "nothing is started a second time"
    assert {p.name for p in out.iterdir()} == {"rows-1.jsonl", "log.txt", "state.json"}
    write_notebook(tmp_path, TRAIN.replace("2.0", "3.0"))
    gpu.run(out, 30, "cpu")
    assert len(told) == 8, "it is asked again when code has changed"


def test_the_budget_ends_a_run_in_time_and_keeps_what_is_done(results, writers, tmp_path):
    writers([row(x) for x in range(100)], pace=0.2)
    began = time.monotonic()
    gpu.run(tmp_path / "out", 3.0, "cpu")
    assert time.monotonic() - began < 10, "all rows would take twenty seconds"
    found = gpu.Out(tmp_path / "out")
    assert 1 <= len(found.rows) < 50 and found.state()["mini"]["missing"] == 100 - len(found.rows)
    assert "1 processes were stopped in the middle of a run" in said(tmp_path / "out")
    gpu.run(tmp_path / "none", 0.1, "cpu")
    assert "the time is up; not reached: 90_mini" in said(tmp_path / "none")


def test_nothing_is_begun_that_would_not_finish(results, writers, tmp_path, monkeypatch):
    told = writers([row()])
    slow = plan.Item("90_mini", "A test.", ("mini",), seconds=1.0)
    monkeypatch.setattr(plan, "PLAN", (slow,))
    gpu.run(tmp_path / "out", 5, "cpu")  # a second on an H200 is guessed to be ten here
    assert told == [] and "not begun" in said(tmp_path / "out")
    here = machine.machine("cpu")
    (results / "mini.jsonl").write_text(written([row(device=here, seconds=0.5, together=2)]))
    gpu.run(tmp_path / "out", 5, "cpu")  # its own rows say one second
    assert told[0]["NDL_LONGEST_S"] == "1.0"


def test_what_chooses_settings_comes_first(results, writers, tmp_path, monkeypatch):
    """An experiment that needs another one's rows does not begin before all of them are there."""
    told = writers([row(), row(1, status="failed", error="no", metrics={})])
    item = plan.Item("90_mini", "A test.", ("mini", "later"), seconds=0.01, in_order=True)
    monkeypatch.setattr(plan, "PLAN", (item,))
    gpu.run(tmp_path / "out", 20, "cpu")
    assert len(told) == 1 and "what follows needs all rows of mini" in said(tmp_path / "out")
    assert "1 rows in" in said(tmp_path / "out") and "1 failed, the first" in said(tmp_path / "out")
    assert gpu.Out(tmp_path / "out").state()["mini"]["missing"] == 1


def test_a_process_that_fails_is_reported_and_the_plan_goes_on(results, tmp_path, monkeypatch):
    def start(notebook, experiment, folder, values, **more):
        (folder / "said.txt").write_text("first\nno memory left")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])

    monkeypatch.setattr(cells, "start", start)
    monkeypatch.setattr(plan, "PLAN", (*plan.PLAN, plan.Item("91_absent", "Not here.")))
    gpu.run(tmp_path / "out", 20, "cpu")
    assert "status 7: first | no memory left" in said(tmp_path / "out")
    assert "91_absent: left out, this chapter is not here" in said(tmp_path / "out")
    assert gpu.Out(tmp_path / "out").state()["mini"]["missing"] is None


def test_rows_fill_few_files_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LARGEST", 1500)
    out = gpu.Out(tmp_path)
    with pytest.raises(LabError, match="is full"):
        out.add([row(x) for x in range(1000)])
    sizes = [file.stat().st_size for file in out.files()]
    assert len(sizes) == gpu.FILES and max(sizes) < 1600
    assert len(gpu.Out(tmp_path).rows) == len(out.rows)


def test_without_a_gpu_it_says_how_to_try(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("NDL_DEVICE", raising=False)
    with pytest.raises(SystemExit, match="--device cpu"):
        gpu.main(["run", str(tmp_path / "out")])


def gone(pid: int) -> bool:
    """Whether a process has ended, or only waits for its parent to notice."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_kill_minus_nine_in_the_middle_loses_nothing(results, tmp_path, monkeypatch):
    """The tool and a real notebook: killed, its file torn, called again, and its rows brought home."""
    out, pids = tmp_path / "out", tmp_path / "pids"
    monkeypatch.setenv("NDL_TEST_PIDS", str(pids))
    fork = multiprocessing.get_context("fork")  # it has imported all that it needs
    tool = fork.Process(target=gpu.run, args=(out, 300, "cpu"))
    tool.start()
    deadline = time.time() + 300
    while not (out.is_dir() and len(finished(out)) >= 3) and time.time() < deadline:
        time.sleep(0.05)
    tool.kill()
    tool.join()
    before = (out / "rows-1.jsonl").read_bytes()
    assert 3 <= before.count(b"\n") < 12, "killed in the middle"
    child = int(pids.read_text().split()[0])
    while not gone(child) and time.time() < deadline:
        time.sleep(0.05)
    assert gone(child), "the notebook ends with the tool"
    with open(out / "rows-1.jsonl", "ab") as file:
        file.write(b'{"torn": ')
    with pytest.raises(LabError, match="torn line of 9 bytes"):
        merge.merge(out)
    gpu.run(out, 300, "cpu")
    rows = finished(out)
    assert (out / "rows-1.jsonl").read_bytes().startswith(before), "no finished row changed"
    assert len(rows) == len({r["key"] for r in rows}) == 12, "none lost, none doubled"
    assert (out / "rows-1.jsonl.torn").is_file()
    merge.merge(out, device="cpu")
    assert store.parse(results / "mini.jsonl")[0] == rows


# ---------------------------------------------------------------------------------------------------------------- cells
def test_cells_before_a_record_may_fail_and_the_record_must_be_reached(tmp_path, monkeypatch):
    path = write_notebook(tmp_path, "x = 1\n---\nraise ValueError('no such thing')\n---\ny = x + 1")
    asked = {"experiment": "mini", "values": {}, "folder": str(tmp_path)}
    monkeypatch.setenv("NDL_ONLY", json.dumps(asked))
    before = sys.modules["__main__"]
    try:
        with pytest.raises(SystemExit) as ended:
            cells.run(path)
        assert ended.value.code == cells.NOT_REACHED and sys.modules["__main__"].y == 2
        (tmp_path / f"mini{gpu.NOTE}").touch()
        with pytest.raises(ValueError, match="no such thing"):
            cells.run(path)
    finally:
        sys.modules["__main__"] = before


def test_a_notebook_can_be_given_other_constants():
    source = "é = 1; LARGE = None  # for a GPU\nOTHER = [\n    1,\n]\nprint(LARGE == None)"
    assert cells.replaced(source, {}) == source
    new = cells.replaced(source, {"LARGE": "SCALE | dict(x=1)", "OTHER": "2", "print": "3"})
    assert new == "é = 1; LARGE = SCALE | dict(x=1)  # for a GPU\nOTHER = 2\nprint(LARGE == None)"
    notebook = modes.NOTEBOOKS / "evidence/50_vit_distillation.ipynb"
    assert plan.constants_of(notebook) == {"LARGE": "GPU_SCALE"}


def test_experiments_are_read_from_the_calls_that_record_them(tmp_path):
    text = "lab.record('one', g, f)\nlab.at_scale('two', g, f)\n---\nrecord(name, g)\n"
    text += "f('three', 1)\np = lab.on_devices('one', g)\nlab.on_devices('four', g)"
    path = write_notebook(tmp_path, text)
    assert cells.experiments(path) == ["one", "two", "four"]
    assert cells.words(path) == {"one", "two", "three", "four"}


# ---------------------------------------------------------------------------------------------------------------- merge
@pytest.fixture
def home(results, tmp_path, monkeypatch):
    """Merges rows into records with a given note in place of a notebook; returns what it prints or says."""
    note = note_of(range(9), data=["digits"])
    monkeypatch.setattr(merge, "noted", lambda experiments, rows: {"mini": note})
    monkeypatch.setattr(merge, "known_forms", lambda name: {"known"})

    def bring(rows, **options):
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        (out / "rows-1.jsonl").write_text(written(rows))
        merge.merge(out, **options)
        return store.parse(results / "mini.jsonl")[0]

    return bring


def test_rows_are_appended_behind_those_that_are_there(home, results, capsys):
    old = row(0, device="Tesla T4")
    (results / "mini.jsonl").write_text(written([old])[:-1])  # without its newline
    new = [row(1), row(2), row(3, status="failed", error="x", metrics={})]
    assert home(new) == [old, *new[:2]]
    assert f"2 rows appended (2 from {GPU}); 1 failed runs left out" in capsys.readouterr().out
    assert home(new) == [old, *new[:2]], "a second merge adds nothing"
    assert not list(results.glob("*.merging"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"code": "old"}, "made by other code"),
        ({"device": ""}, "names no device"),
        ({"device": "AMD EPYC, 2 threads"}, "made on a processor"),
        ({"data": {"digits": "strange"}}, "form of digits that is not known here, strange"),
        ({"data": {}}, "it names the data"),
        ({"x": 99}, "has no such configuration"),
        ({"status": "odd"}, "unknown status 'odd'"),
        ({"config": {"machine": "NVIDIA T4", "seed": 0}}, "timed for NVIDIA T4 and ran on"),
    ],
)
def test_one_bad_row_keeps_all_of_them_out(home, results, bad, message):
    with pytest.raises(LabError, match=message) as error:
        home([row(1), row(2), row(**{"x": 3} | bad)])
    assert "the records are as they were" in str(error.value)
    assert not (results / "mini.jsonl").exists()


def test_a_configuration_is_recorded_once(home, results):
    here = "Tesla T4"
    (results / "mini.jsonl").write_text(written([row(1, device=here)]))
    before = (results / "mini.jsonl").read_bytes()
    with pytest.raises(LabError, match=f"another run of it is there already, from {here}"):
        home([row(1)])
    with pytest.raises(LabError, match=f"another run of it is there already, from {GPU}"):
        home([row(2), row(2, seconds=7.0)])
    assert (results / "mini.jsonl").read_bytes() == before
    (results / "mini.jsonl").write_text(written([row(1, device=here, code="old")]))
    assert len(home([row(1)])) == 2, "rows of earlier code do not count"


def test_the_data_has_one_form_that_is_known_or_named(home, results, monkeypatch):
    strange = row(1, data={"digits": "of the publisher"})
    with pytest.raises(LabError, match="name it with --data"):
        home([strange])
    assert home([strange], forms=["digits=of the publisher"]) == [strange]
    monkeypatch.setattr(merge, "known_forms", lambda name: {"known", "of the publisher"})
    with pytest.raises(LabError, match="different forms of digits would stand together"):
        home([row(2)])


def test_a_grid_stays_on_one_kind_of_device(home, results, writers, tmp_path):
    (results / "mini.jsonl").write_text(written([row(1, device="AMD EPYC, 2 threads")]))
    with pytest.raises(LabError, match="1 of its rows are from AMD EPYC, 2 threads; a grid stays"):
        home([row(2)])
    assert plan.elsewhere("mini", "AMD EPYC, 8 threads") == ""
    (results / "mini.jsonl").write_text(written([row(1)]))
    told = writers([row(2)])
    gpu.run(tmp_path / "other", 20, "cpu")
    assert told == [] and f"left out, 1 of its rows are from {GPU}" in said(tmp_path / "other")
    assert plan.elsewhere("mini", "AMD EPYC, 8 threads", ["another grid"]) == ""
    timed = row(config={"machine": GPU, "seed": 0})
    (results / "mini.jsonl").write_text(written([timed]))
    assert plan.elsewhere("mini", "AMD EPYC, 8 threads") == "", "what measures devices takes all"


def test_damaged_rows_strange_folders_and_unknown_experiments_are_refused(home, results, tmp_path):
    with pytest.raises(LabError, match=r"holds no rows-\*\.jsonl"):
        merge.merge(tmp_path)
    with pytest.raises(LabError, match="no notebook of this checkout reaches"):
        home([row(experiment="foreign")])
    assert home([row(1), row(experiment="foreign")], names=["mini"]) == [row(1)]
    file = tmp_path / "out" / "rows-1.jsonl"
    file.write_text(written([row(2)]).replace("1.0", "9.0") + written([row(3)]))
    with pytest.raises(LabError, match="line 1: the row does not match its own checksum"):
        merge.merge(tmp_path / "out")
    file.write_text(written([row(2)]) + '{"torn"')
    with pytest.raises(LabError, match="--without-torn"):
        merge.merge(tmp_path / "out")
    merge.merge(tmp_path / "out", without_torn=True)
    assert len(store.parse(results / "mini.jsonl")[0]) == 2
    assert file.read_text().endswith('{"torn"'), "what came back is not changed"
    (results / "mini.jsonl").write_text(written([row(1)]) + '{"torn"')
    with pytest.raises(LabError, match="its record ends in a torn line"):
        home([row(4)])


def test_a_record_that_changes_meanwhile_is_not_overwritten(results, monkeypatch):
    store.append(results / "mini.jsonl", row(1))
    real = os.fsync

    def someone_else(descriptor):
        real(descriptor)
        monkeypatch.setattr(os, "fsync", real)
        store.append(results / "mini.jsonl", row(5))

    monkeypatch.setattr(os, "fsync", someone_else)
    with pytest.raises(LabError, match="changed meanwhile"):
        merge.append({"mini": [row(2)]})
    assert [r["config"]["x"] for r in store.parse(results / "mini.jsonl")[0]] == [1, 5]


def test_forms_of_data_are_known_from_the_registry_and_the_records(results):
    (results / "a.jsonl").write_text(written([row(data={"cifar100": "recorded"})]))
    known = merge.known_forms("cifar100")
    assert "recorded" in known and len(known) == 2
    assert len(merge.known_forms("digits")) == 1 and "recorded" not in merge.known_forms("digits")


# --------------------------------------------------------------------------------------------------------- plan and list
def test_every_line_of_the_plan_finds_its_experiments():
    for item in plan.PLAN:
        if item.path.is_file():
            assert set(item.experiments) <= set(item.names()), item
            assert item.names() and item.obstacle(profiles.PROFILES["H200"]) == ""
    assert plan.chosen(["cnn-sweep"])[0].notebook == "evidence/40_cnn"
    with pytest.raises(LabError, match="nothing in the plan begins with zzz"):
        plan.chosen(["zzz"])


# A line takes up to half a minute, so one is stepped here; with REHEARSE=all every one.
EVERY = os.environ.get("REHEARSE")
REHEARSED = [item for item in plan.PLAN if EVERY or "ablation-cifar-whole" in item.experiments]


@pytest.mark.parametrize("item", REHEARSED, ids=lambda item: item.experiments[0])
def test_a_step_of_a_line_leaves_no_tensor_on_the_wrong_device(item):
    command = [sys.executable, str(HERE / "absent_gpu.py"), str(item.path)]
    command += [json.dumps(dict(item.constants)), *item.experiments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


def test_what_a_device_cannot_run_is_left_out_with_the_reason(results):
    t4 = profiles.PROFILES["T4"]
    assert "bfloat16" in plan.Item("90_mini", "", bf16=True).obstacle(t4)
    assert plan.Item("90_mini", "", ("other",)).obstacle(t4) == "this chapter does not record it"
    assert plan.Item("90_mini", "").names() == ["mini", "later"]
    assert plan.Item("90_mini", "", alone=True).side_by_side(t4) == 1


def test_the_list_says_what_is_missing_and_how_long_it_takes(
    results, tmp_path, monkeypatch, capsys
):
    here = machine.machine("cpu")
    surveyed = {"mini": note_of(range(10))}
    monkeypatch.setattr(cells, "survey", lambda path, constants, rows: surveyed)
    listed = ["list", "--out", str(tmp_path / "out"), "--device", "cpu"]
    gpu.main(listed)
    assert "10 of 10 rows are missing, about 1 s here (a guess)" in capsys.readouterr().out
    (results / "mini.jsonl").write_text(written([row(1, device=here, seconds=4.0)]))
    gpu.Out(tmp_path / "out").add([row(2, device=here, seconds=2.0)])
    gpu.main(listed)
    text = capsys.readouterr().out
    assert "8 of 10 rows are missing, about 24 s here (by its own rows)" in text
    surveyed.clear()
    gpu.main(listed)
    assert "its record is not reached here" in capsys.readouterr().out


def test_a_device_finds_its_profile_or_is_given_one(monkeypatch):
    monkeypatch.delenv("NDL_PROFILE", raising=False)
    names = {"NVIDIA H200": "H200", "NVIDIA A100-SXM4-40GB": "A100", "Tesla T4": "T4"}
    names |= {"Some GPU of tomorrow": "T4", "AMD EPYC, 2 threads": "CPU"}
    assert {device: profiles.chosen(device).name for device in names} == names
    monkeypatch.setenv("NDL_PROFILE", "A100")
    assert profiles.chosen("Tesla T4").precision == "bfloat16"
    monkeypatch.setattr(profiles.torch.cuda, "is_available", lambda: True)
    assert profiles.facts() == {"tf32": False, "profile": "A100"}
    monkeypatch.setenv("NDL_PROFILE", "B52")
    with pytest.raises(LabError, match="not a profile; there are: H200"):
        profiles.chosen("Tesla T4")


# --------------------------------------------------------------------------------------------------------------- parcel
def source(*names: str) -> files.Source:
    layout = files.Layout(tuple(files.File(n) for n in names), lambda *c: None)
    return files.Source("", "", "", "", (layout,))


def test_a_parcel_takes_whole_data_sets_in_the_order_of_worth(tmp_path, monkeypatch):
    """Three data sets of 3, 2 and 1 MiB, one that is not there, one that needs no files; and the released package."""
    sizes = {"big/a.npz": 2, "big/b.npz": 1, "middle.npz": 2, "small.npz": 1}
    package = "ndlinear-1.0.0/ndlinear/__init__.py"
    for name, mib in (sizes | {package: 1}).items():
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(mib * 2**20))
    sets = {name: source(f"{name}.npz") for name in ("middle", "small", "absent")}
    sets = {"big": source("big/a.npz", "big/b.npz"), **sets, "bundled": source()}
    monkeypatch.setattr(parcel.data, "SOURCES", sets)
    monkeypatch.setattr(parcel, "wanted", lambda names: [(name, "mini") for name in sets])
    monkeypatch.setattr(parcel, "tree_bytes", lambda: parcel.LIMIT - int(5.5 * 2**20))
    monkeypatch.setenv("NDL_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("NDL_RELEASED", raising=False)
    table = parcel.pack(tmp_path / "parcel").set_index("data set")
    assert table["what becomes of it"].to_dict() == {
        "big": "packed",
        "middle": "left out: 1.5 MiB are left",
        "small": "packed",
        "absent": "left out: not in the data folder",
    }
    found = [p for p in (tmp_path / "parcel").rglob("*") if p.is_file()]
    packed = {str(p.relative_to(tmp_path / "parcel")) for p in found}
    assert packed == {"big/a.npz", "big/b.npz", "small.npz", package}
    rest = parcel.pack(tmp_path / "second", limit=4.5, have=[tmp_path / "parcel"])
    earlier = "in an earlier parcel"
    assert list(rest["what becomes of it"])[:3] == [earlier, "packed", earlier]
    with pytest.raises(LabError, match="is not empty"):
        parcel.pack(tmp_path / "parcel")


def test_what_is_wanted_comes_from_the_notebooks_in_the_plans_order(results, tmp_path, monkeypatch):
    notes = {"mini": {"data": ["b", "a"]}, "later": {"data": ["a", "c"]}}
    monkeypatch.setattr(cells, "survey", lambda path, constants: notes)
    monkeypatch.setattr(plan, "PLAN", (plan.Item("90_mini", "A test.", ("later",)), plan.PLAN[0]))
    assert parcel.wanted() == [("a", "later"), ("c", "later"), ("b", "mini")]


def test_the_command_line_reaches_every_tool(results, tmp_path, monkeypatch, writers):
    called = []
    monkeypatch.setattr(parcel, "pack", lambda *given: called.append(("pack", *given)))
    monkeypatch.setattr(merge, "merge", lambda *given: called.append(("merge", *given)))
    gpu.main(["pack", "p", "--limit", "30", "--have", "q", "--only", "cnn"])
    gpu.main(["merge", "o", "--without-torn", "--device", "cpu", "--data", "a=b"])
    p, q, o = map(pathlib.Path, "pqo")
    assert called == [("pack", p, 30.0, [q], ["cnn"]), ("merge", o, [], True, "cpu", ["a=b"])]
    told = writers([row()])
    gpu.main(["run", str(tmp_path / "out"), "--budget", "20", "--device", "cpu", "--only", "mini"])
    assert len(told) == 1
