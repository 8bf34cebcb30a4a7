"""Records survive what happens to them: kill -9, torn lines, edits, second writers, failing runs."""

import json
import multiprocessing
import time

import pytest
from lab import modes, records
from lab.records import RecordError, canonical, digest, golden, store


def double(config):
    return {"metrics": {"y": float(2 * config["x"])}, "curve": {9: 1.0, 10: 2.0}}  # not text


def nothing(config):
    pytest.fail("nothing is run again")


def grid(n=4):
    return [{"x": x, "seed": 0} for x in range(n)]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Runs or reads the experiment "double" in a mode; its file and its folder are attributes."""
    monkeypatch.setattr(modes, "RESULTS", tmp_path)

    def called(mode, configs, run=double, **options):
        monkeypatch.setenv("NDL_MODE", mode)
        return records.record("double", configs, run, **options)

    called.folder, called.path = tmp_path, tmp_path / "double.jsonl"
    return called


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_full_writes_one_checked_line_per_run_and_runs_only_what_is_missing(record, monkeypatch):
    frame = record("full", grid(2), data=("digits",))
    assert list(frame["y"]) == [0, 2] and list(frame["x"]) == [0, 1]
    rows, before = lines(record.path), record.path.read_bytes()
    assert all(row["digest"] == digest(row) for row in rows)
    kept = "config seed metrics seconds peak_memory_mb device versions data code status time"
    assert set(kept.split()) <= set(rows[0])
    with pytest.raises(RecordError, match=r"lacks 2 of 4 rows.*never run.*NDL_MODE=full"):
        record("replay", grid(4))
    record("full", grid(4), data=("digits",))
    assert record.path.read_bytes().startswith(before)
    assert [row["config"]["x"] for row in lines(record.path)] == [0, 1, 2, 3]
    assert list(record("replay", grid()[::-1])["y"]) == [6, 4, 2, 0]
    monkeypatch.setattr("lab.data.checksum", lambda name: pytest.fail(f"{name} was read"))
    assert len(record("full", grid(4), nothing, data=("digits",))) == 4


def test_smoke_runs_every_arm_small_and_leaves_no_file(record):
    seeds = [{"x": x, "epochs": 100, "seed": s} for x in (1, 5) for s in range(10)]
    frame = record("smoke", seeds, smoke={"epochs": 1})
    assert len(frame) == 4 and set(frame["epochs"]) == {1} and set(frame["x"]) == {1, 5}
    assert list(record.folder.iterdir()) == []


def test_edited_number_is_refused(record):
    record("full", grid())
    record.path.write_text(record.path.read_text().replace('"y":4.0', '"y":4.5'))
    for mode in ("replay", "full"):
        with pytest.raises(RecordError, match=r"line 3.*checksum.*restore"):
            record(mode, grid())


def test_torn_last_line_is_set_aside_and_run_again(record, capsys):
    record("full", grid(3))
    before = golden.place("double").read_bytes()
    record("full", grid())
    whole = record.path.read_bytes()[:-20]
    record.path.write_bytes(whole)
    golden.place("double").write_bytes(before)  # as when the process ends while it writes
    with pytest.raises(RecordError, match="lacks 1 of 4"):
        record("replay", grid())
    assert record.path.read_bytes() == whole, "replay writes nothing"
    assert record("full", grid())["y"].tolist() == [0, 2, 4, 6]
    aside = (record.folder / "double.jsonl.torn").read_bytes()
    assert aside.rstrip(b"\n") == whole.rpartition(b"\n")[2]
    assert "set aside" in capsys.readouterr().out and len(lines(record.path)) == 4


def test_a_second_writer_is_kept_out(record):
    busy = pytest.raises(RecordError, match="being written by another run")
    with store.only_writer(record.path), busy:
        record("full", grid())


def test_a_full_disk_or_a_closed_folder_is_reported_and_keeps_the_rows(record, monkeypatch):
    record("full", grid(2))
    before = record.path.read_bytes()
    with monkeypatch.context() as there:
        there.setenv("NDL_RESULTS", "/proc/no-such-folder")
        with pytest.raises(RecordError, match=r"/no-such-folder/.* cannot be written.*NDL_RESULTS"):
            record("full", grid(3))

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", no_space)
    with pytest.raises(RecordError, match=r"No space left on device.*run again"):
        record("full", grid(3))
    assert record.path.read_bytes().startswith(before)
    record.path.write_bytes(before + b"torn")
    with pytest.raises(RecordError, match=r"torn cannot be written \(No space left"):
        record("full", grid(3))
    assert record.path.read_bytes() == before + b"torn"


def test_a_budget_of_time_begins_nothing_that_would_not_finish(record, monkeypatch, capsys):
    def slow(config):
        time.sleep(0.3)
        return {"metrics": {"y": 1.0}}

    monkeypatch.setenv("NDL_BUDGET_S", str(time.monotonic() - records.budget.BEGAN + 2.0))
    with pytest.raises(SystemExit) as ended:
        record("full", grid(20), slow)
    assert ended.value.code == 0
    done = len(lines(record.path))
    assert 1 <= done <= 6 and f"{20 - done} runs are left" in capsys.readouterr().out
    monkeypatch.setenv("NDL_BUDGET_S", "soon")
    with pytest.raises(records.LabError, match="not a number of seconds"):
        record("full", grid(20), slow)
    monkeypatch.setattr(records.budget, "seconds_left", lambda: 5.0)  # recorded rows tell as well
    assert list(records.budget.within(["a"], [{"seconds": 6.0, "together": 10}])) == []
    assert list(records.budget.within(["a"], [{"seconds": 1.0}])) == ["a"]


def test_failed_run_is_recorded_reported_and_tried_again(record):
    def fragile(config):
        if config["x"] == 1:
            raise FloatingPointError("diverged")
        return {"metrics": {"y": float("nan") if config["x"] == 2 else 1.0}}

    with pytest.raises(RecordError, match=r"lacks 2 of 4.*2 failed.*FloatingPointError: diverged"):
        record("full", grid(4), fragile)
    status = [row["status"] for row in lines(record.path)]
    assert status == ["ok", "failed", "failed", "ok"], "the others went on; NaN is no JSON"
    assert list(record("full", grid(4))["y"]) == [1, 2, 4, 1]


@pytest.mark.parametrize(
    ("name", "configs", "message"),
    [
        ("Bad Name", grid(), "lower-case"),
        ("ok", [{"x": 1}], "integer 'seed'"),
        ("ok", [{"x": 1, "seed": 0}] * 2, "stands twice"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(name, configs, message):
    with pytest.raises(RecordError, match=message):
        records.record(name, configs, nothing)


EDITS = {
    "a metric": lambda rows: rows[1]["metrics"].update(y=9.0),
    "a row struck": lambda rows: rows.pop(2),
    "the last row struck": lambda rows: rows.pop(),
    "a row doubled": lambda rows: rows.insert(1, dict(rows[0])),
    "two rows exchanged": lambda rows: rows.insert(0, rows.pop(1)),
    "a row appended": lambda rows: rows.append(rows[0] | {"key": "new", "config": {"x": 7}}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_whose_checksums_were_made_anew_is_refused(record, edit):
    record("full", grid())
    rows = lines(record.path)
    edit(rows)
    record.path.write_text("".join(canonical(r | {"digest": digest(r)}) + "\n" for r in rows))
    with pytest.raises(
        RecordError, match=r"not the record that its last run left|not sealed.*NDL_MODE=full"
    ):
        record("replay", grid())


def test_kill_minus_nine_loses_and_doubles_nothing(record):
    """A process is killed in the middle of a grid, twice, and started again."""

    def slow(config):
        time.sleep(0.05)
        return double(config)

    record.path.touch()
    seen = 0
    for _ in range(2):
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=record, args=("full", grid(40), slow))
        process.start()
        deadline = time.time() + 60
        while time.time() < deadline and record.path.read_bytes().count(b"\n") < seen + 5:
            time.sleep(0.02)
        process.kill()
        process.join()
        before = record.path.read_bytes().rpartition(b"\n")[0]
        assert seen + 5 <= record.path.read_bytes().count(b"\n") < 40, "killed in the middle"
        seen = record.path.read_bytes().count(b"\n")
    assert len(record("full", grid(40), slow)) == 40
    golden.sign("double", lines(record.path)[:-1])  # as after kill -9 between row and seal
    record("full", grid(40), nothing)
    assert golden.kept("double")["record"] == golden.seal(lines(record.path)), "by the last run"
    assert record.path.read_bytes().startswith(before), "no finished row changed"
    found = sorted(row["config"]["x"] for row in lines(record.path))
    assert found == list(range(40)), "none lost, none doubled"


def test_seeds_of_a_configuration_can_run_together_and_a_row_is_still_one_run(record):
    asked = []

    def squares(configs):
        asked.append([(c["x"], c["seed"]) for c in configs])
        return [{"metrics": {"y": c["x"] ** 2 + c["seed"]}} for c in configs]

    both = [{"x": x, "seed": seed} for seed in (0, 1, 2) for x in (3, 4)]
    record("full", both[:4], squares, together=True)
    whole = record("full", both, squares, together=True)
    assert asked == [[(3, 0), (3, 1)], [(4, 0), (4, 1)], [(3, 2)], [(4, 2)]]
    assert list(whole["y"]) == [9, 16, 10, 17, 11, 18], "rows in the grid's order"
    rows = lines(record.path)
    assert [r["together"] for r in rows] == [2, 2, 2, 2, 1, 1]
    assert len({r["key"] for r in rows}) == 6


@pytest.mark.parametrize(
    ("answer", "why"),
    [([{"metrics": {}}], "1 results for 2"), (None, "of type"), ([{"y": 1}] * 2, "'metrics'")],
)
def test_a_group_that_fails_is_recorded_as_failed_for_each_of_its_seeds(record, answer, why):
    with pytest.raises(RecordError, match=f"2 failed.*{why}"):
        record("full", [{"seed": 0}, {"seed": 1}], lambda configs: answer, together=True)
    assert [r["status"] for r in lines(record.path)] == ["failed", "failed"]
