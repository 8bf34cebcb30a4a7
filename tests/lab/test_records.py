"""Records survive what happens to them: kill -9, torn lines, edits, second writers, failing runs."""

import json
import multiprocessing
import os
import time

import pytest
from lab import modes, records
from lab.records import RecordError, canonical, digest, golden, store

FACTOR = 2


def double(config):
    """A training function that uses a constant of its module."""
    return {"metrics": {"y": float(FACTOR * config["x"])}}


def grid(n=4):
    return [{"x": x, "seed": 0} for x in range(n)]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    monkeypatch.setenv("NDL_MODE", "full")
    return tmp_path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_full_writes_one_checked_line_per_run_and_replay_reads_them(results, monkeypatch):
    frame = records.record("double", grid(), double, data=("digits",))
    assert list(frame["y"]) == [0, 2, 4, 6] and list(frame["x"]) == [0, 1, 2, 3]
    rows = lines(results / "double.jsonl")
    assert all(row["digest"] == digest(row) for row in rows)
    kept = "config seed metrics seconds peak_memory_mb device versions data code status time"
    assert set(kept.split()) <= set(rows[0])
    monkeypatch.setenv("NDL_MODE", "replay")
    again = records.record("double", grid()[::-1], double, data=("digits",))
    assert list(again["y"]) == [6, 4, 2, 0]


def test_full_runs_only_what_is_missing_and_replay_names_it(results, monkeypatch):
    records.record("double", grid(2), double)
    monkeypatch.setenv("NDL_MODE", "replay")
    with pytest.raises(RecordError, match=r"lacks 2 of 4 rows.*never run.*NDL_MODE=full"):
        records.record("double", grid(4), double)
    monkeypatch.setenv("NDL_MODE", "full")
    path = results / "double.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # a row all the same
    before = path.read_bytes()
    records.record("double", grid(4), double)
    assert path.read_bytes().startswith(before)
    assert [row["config"]["x"] for row in lines(path)] == [0, 1, 2, 3]


def test_a_finished_record_needs_no_data(results, monkeypatch):
    records.record("double", grid(2), double, data=("digits",))
    monkeypatch.setattr("lab.data.checksum", lambda name: pytest.fail(f"{name} was read"))
    assert len(records.record("double", grid(2), double, data=("digits",))) == 2


def test_smoke_runs_every_arm_small_and_leaves_no_file(results, monkeypatch):
    monkeypatch.setenv("NDL_MODE", "smoke")
    seeds = [{"x": x, "epochs": 100, "seed": s} for x in (1, 5) for s in range(10)]
    frame = records.record("double", seeds, double, smoke={"epochs": 1})
    assert len(frame) == 4 and set(frame["epochs"]) == {1} and set(frame["x"]) == {1, 5}
    assert list(results.iterdir()) == []


def test_edited_number_is_refused(results, monkeypatch):
    records.record("double", grid(), double)
    path = results / "double.jsonl"
    path.write_text(path.read_text().replace('"y":4.0', '"y":4.5'))
    for mode in ("replay", "full"):
        monkeypatch.setenv("NDL_MODE", mode)
        with pytest.raises(RecordError, match=r"line 3.*checksum.*restore"):
            records.record("double", grid(), double)


def test_torn_last_line_is_set_aside_and_run_again(results, monkeypatch, capsys):
    records.record("double", grid(3), double)
    before = golden.place("double").read_bytes()
    records.record("double", grid(), double)
    path = results / "double.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(RecordError, match="is not the record that its last run left"):
        records.record("double", grid(), double)
    golden.place("double").write_bytes(before)  # as when the process ends while it writes
    torn = whole[:-20].rpartition(b"\n")[2]
    monkeypatch.setenv("NDL_MODE", "replay")
    with pytest.raises(RecordError, match="lacks 1 of 4"):
        records.record("double", grid(), double)
    assert path.read_bytes() == whole[:-20], "replay writes nothing"
    monkeypatch.setenv("NDL_MODE", "full")
    assert records.record("double", grid(), double)["y"].tolist() == [0, 2, 4, 6]
    assert (results / "double.jsonl.torn").read_bytes().rstrip(b"\n") == torn
    assert "set aside" in capsys.readouterr().out
    assert len(lines(path)) == 4


def test_a_writer_that_got_in_beside_the_lock_is_noticed(results):
    def two_at_once(config):
        store.append(results / "double.jsonl", {"status": "ok", "by": "another process"})
        return {"metrics": {"y": 1.0}}

    with pytest.raises(RecordError, match="changed by another process"):
        records.record("double", grid(2), two_at_once)
    assert len(lines(results / "double.jsonl")) == 1, "the other's row is whole"


def test_a_folder_that_cannot_be_written_is_named(results, monkeypatch):
    monkeypatch.setenv("NDL_RESULTS", "/proc/no-such-folder")
    with pytest.raises(RecordError, match=r"/proc/no-such-folder cannot be written.*NDL_RESULTS"):
        records.record("double", grid(1), double)
    monkeypatch.setenv("NDL_RESULTS", "~no-such-user")
    with pytest.raises(records.LabError, match="name a folder"):
        records.record("double", grid(1), double)


def test_a_full_disk_is_reported_and_keeps_the_rows(results, monkeypatch):
    records.record("double", grid(2), double)
    before = (results / "double.jsonl").read_bytes()

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", no_space)
    with pytest.raises(RecordError, match=r"No space left on device.*run again"):
        records.record("double", grid(3), double)
    assert (results / "double.jsonl").read_bytes().startswith(before)
    (results / "double.jsonl").write_bytes(before + b"torn")
    with pytest.raises(RecordError, match=r"could not be set aside \(No space left.*are safe"):
        records.record("double", grid(3), double)


def test_new_rows_go_where_they_are_asked_to(results, monkeypatch, tmp_path_factory):
    """NDL_RESULTS: the project's rows count as done, its file stays untouched, new rows go to the folder."""
    records.record("double", grid(2), double)
    before = (results / "double.jsonl").read_bytes()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("NDL_RESULTS", str(elsewhere))
    assert list(records.record("double", grid(4), double)["y"]) == [0, 2, 4, 6]
    assert (results / "double.jsonl").read_bytes() == before
    assert [row["config"]["x"] for row in lines(elsewhere / "double.jsonl")] == [2, 3]


def test_a_budget_of_time_begins_nothing_that_would_not_finish(results, monkeypatch, capsys):
    def slow(config):
        time.sleep(0.3)
        return {"metrics": {"y": 1.0}}

    left = time.monotonic() - records.budget.BEGAN + 2.0
    monkeypatch.setenv("NDL_BUDGET_S", str(left))
    monkeypatch.setattr(records.budget, "LEFT_OUT", [])
    with pytest.raises(SystemExit) as ended:
        records.record("slow", grid(20), slow)
    assert ended.value.code == 0
    done = len(lines(results / "slow.jsonl"))
    assert 1 <= done <= 6 and f"{20 - done} runs are left" in capsys.readouterr().out
    monkeypatch.setenv("NDL_BUDGET_S", "soon")
    with pytest.raises(records.LabError, match="not a number of seconds"):
        records.record("slow", grid(20), slow)


def test_second_writer_is_kept_out(results):
    with (
        store.only_writer(results / "double.jsonl"),
        pytest.raises(RecordError, match="being written by another run"),
    ):
        records.record("double", grid(), double)


def test_failed_run_is_recorded_reported_and_tried_again(results, monkeypatch):
    def fragile(config):
        if config["x"] == 2:
            return {"metrics": {"y": float("nan" if not os.environ.get("NDL_TEST_HEALED") else 1)}}
        if config["x"] == 1 and not os.environ.get("NDL_TEST_HEALED"):
            raise FloatingPointError("diverged")
        return {"metrics": {"y": 1.0}}

    with pytest.raises(RecordError, match=r"lacks 2 of 4.*2 failed.*FloatingPointError: diverged"):
        records.record("fragile", grid(4), fragile)
    status = [row["status"] for row in lines(results / "fragile.jsonl")]
    assert status == ["ok", "failed", "failed", "ok"], "the others went on; NaN is no JSON"
    monkeypatch.setenv("NDL_TEST_HEALED", "1")
    assert len(records.record("fragile", grid(4), fragile)) == 4


@pytest.mark.parametrize(
    ("name", "configs", "message"),
    [
        ("Bad Name", grid(), "lower-case"),
        ("ok", [{"x": 1}], "integer 'seed'"),
        ("ok", [{"x": {1, 2}, "seed": 0}], "JSON values only"),
        ("ok", [{"x": float("nan"), "seed": 0}], "JSON values only"),
        ("ok", [{"x": 1, "seed": 0}] * 2, "stands twice"),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(results, name, configs, message):
    with pytest.raises(RecordError, match=message):
        records.record(name, configs, double)
    assert not list(results.glob("*.jsonl"))


EDITS = {
    "a metric": lambda rows: rows[1]["metrics"].update(y=9.0),
    "seconds": lambda rows: rows[1].update(seconds=1.0),
    "a time": lambda rows: rows[1].update(time="2026-01-01T00:00:00+00:00"),
    "a seed": lambda rows: rows[3].update(seed=1),
    "a point of a curve": lambda rows: rows[0].update(curve=[{"epoch": 1, "loss": 0.0}]),
    "a device": lambda rows: rows[0].update(device="NVIDIA H200"),
    "parameters": lambda rows: rows[2].update(parameters=3),
    "a row struck": lambda rows: rows.pop(2),
    "the last row struck": lambda rows: rows.pop(),
    "a row doubled": lambda rows: rows.insert(1, dict(rows[0])),
    "two rows exchanged": lambda rows: rows.insert(0, rows.pop(1)),
    "a row appended": lambda rows: rows.append(rows[0] | {"key": "new", "config": {"x": 7}}),
    "a second run appended": lambda rows: rows.append(rows[0] | {"metrics": {"y": 5.0}}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_whose_checksums_were_made_anew_is_refused(results, monkeypatch, edit):
    records.record("double", grid(), double)
    path = results / "double.jsonl"
    rows = lines(path)
    edit(rows)
    path.write_text("".join(canonical(r | {"digest": digest(r)}) + "\n" for r in rows))
    monkeypatch.setenv("NDL_MODE", "replay")
    for reads in (lambda: records.record("double", grid(), double), lambda: records.read("double")):
        with pytest.raises(
            RecordError, match=r"is not the record that its last run left|not sealed"
        ):
            reads()


def test_a_run_that_was_killed_before_it_sealed_its_row_is_taken_up(results, monkeypatch):
    records.record("double", grid(2), double)
    before = golden.place("double").read_bytes()
    records.record("double", grid(3), double)
    golden.place("double").write_bytes(before)  # as after kill -9 between row and seal
    monkeypatch.setenv("NDL_MODE", "replay")
    with pytest.raises(
        RecordError, match=r"1 rows behind the first 2 are not sealed.*NDL_MODE=full"
    ):
        records.record("double", grid(3), double)
    monkeypatch.setenv("NDL_MODE", "full")
    records.record("double", grid(3), lambda c: pytest.fail("nothing is run again"))
    monkeypatch.setenv("NDL_MODE", "replay")
    assert len(records.record("double", grid(3), double)) == 3
    assert len(lines(results / "double.jsonl")) == 3


def test_two_runs_of_one_configuration_are_refused_in_a_full_run_too(results):
    records.record("double", grid(2), double)
    store.append(results / "double.jsonl", lines(results / "double.jsonl")[0] | {"seconds": 9.0})
    with pytest.raises(RecordError, match=r"two runs of .* stand under version 1"):
        records.record("double", grid(2), double)


def slow(config):
    time.sleep(0.05)
    return {"metrics": {"y": float(config["x"])}}


def test_kill_minus_nine_loses_and_doubles_nothing(results):
    """A process is killed in the middle of a grid, twice, and started again."""
    path = results / "killed.jsonl"
    path.touch()
    seen = 0
    for _ in range(2):
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=records.record, args=("killed", grid(40), slow))
        process.start()
        deadline = time.time() + 60
        while time.time() < deadline and path.read_bytes().count(b"\n") < seen + 5:
            time.sleep(0.02)
        process.kill()
        process.join()
        before = path.read_bytes().rpartition(b"\n")[0]
        assert seen + 5 <= path.read_bytes().count(b"\n") < 40, "killed in the middle"
        seen = path.read_bytes().count(b"\n")
    assert len(records.record("killed", grid(40), slow)) == 40
    assert golden.kept("killed")["record"] == golden.seal(lines(path)), "sealed by the last run"
    assert path.read_bytes().startswith(before), "no finished row changed"
    found = sorted(row["config"]["x"] for row in lines(path))
    assert found == list(range(40)), "none lost, none doubled"


def test_no_committed_record_is_torn():
    """That none was edited is seen where it is read: replay refuses what does not match its checksum."""
    assert canonical({"b": 1, "a": [1, 2]}) == '{"a":[1,2],"b":1}'
    for path in modes.RESULTS.glob("*.jsonl"):
        with open(path, "rb") as file:
            file.seek(-2, os.SEEK_END)
            assert file.read() == b"}\n", path.name


def test_seeds_of_a_configuration_can_run_together_and_a_row_is_still_one_run(results, monkeypatch):
    log = results / "calls.txt"

    def squares(configs):
        with log.open("a") as file:
            file.write(f"{[(c['x'], c['seed']) for c in configs]}\n")
        return [{"metrics": {"y": c["x"] ** 2 + c["seed"]}} for c in configs]

    both = [{"x": x, "seed": seed} for seed in (0, 1, 2) for x in (3, 4)]
    table = records.record("squares", both[:4], squares, together=True)
    assert log.read_text() == "[(3, 0), (3, 1)]\n[(4, 0), (4, 1)]\n"
    assert list(table["y"]) == [9, 16, 10, 17], "rows in the grid's order"
    whole = records.record("squares", both, squares, together=True)
    assert list(whole["y"]) == [9, 16, 10, 17, 11, 18]
    assert log.read_text().endswith("]\n[(3, 2)]\n[(4, 2)]\n"), "only what is missing"
    rows = lines(results / "squares.jsonl")
    assert [r["together"] for r in rows] == [2, 2, 2, 2, 1, 1]
    assert len({r["key"] for r in rows}) == 6
    monkeypatch.setenv("NDL_MODE", "replay")
    again = records.record("squares", both, squares, together=True)
    assert list(again["y"]) == list(whole["y"])


@pytest.mark.parametrize(
    ("answer", "why"),
    [([{"metrics": {}}], "1 results for 2"), (None, "object of type"), ("raise", "bad day")],
)
def test_a_group_that_fails_is_recorded_as_failed_for_each_of_its_seeds(results, answer, why):
    def group(configs):
        if answer == "raise":
            raise ValueError("bad day")
        return answer

    with pytest.raises(RecordError, match=f"2 failed.*{why}"):
        records.record("group", [{"seed": 0}, {"seed": 1}], group, together=True)
    assert [r["status"] for r in lines(results / "group.jsonl")] == ["failed", "failed"]
