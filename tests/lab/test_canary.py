"""Rows stand while the canary of their experiment gives what it gave: harmless edits pass, and edits that change numbers do not."""

import json
import linecache

import lab
import pytest
import torch
from lab import modes
from lab.records import RecordError, canary, store
from lab.tools import canaries

import ndlinear

CODE = """
RATE = {"slow": 0.5, "fast": 0.25}

class Net:
    def __init__(self, width):
        self.width = width

    def answer(self, x):
        return self.width * x + 2

def grown(net, steps, rate):
    total = 1.0
    best = total
    for step in range(steps):
        total = total + rate * net.answer(step)
        if total < best:
            best = total
        if step > 100:
            total = total / 3
        if step == 200:
            print("a long run")
    if steps < 0:
        raise ValueError("no such number of steps")
    return total, best

def run(config):
    net = Net(config["width"])
    total, best = grown(net, config["steps"], RATE[config["speed"]])
    return {"metrics": {"value": total, "best": best}, "parameters": net.width}
"""
GRID = [
    {"width": w, "speed": s, "steps": 1000, "seed": 0} for w in (3, 5) for s in ("slow", "fast")
]
HARMLESS = {
    "a local gets another name": ("total", "amount"),
    "a helper gets another name": ("grown", "trained"),
    "a method gets another name": ("answer", "reply"),
    "a constant gets another name": ("RATE", "RATES"),
    "an annotation": (
        "def grown(net, steps, rate):",
        "def grown(net, steps: int, rate: float) -> tuple:",
    ),
    "the words of an error": ("no such number of steps", "fewer than no steps"),
    "a printed message": ("a long run", "a run that takes long"),
    "a docstring": ("def run(config):", 'def run(config):\n    """Trains."""'),
    "another way to write it": ("total = total + rate", "total += rate"),
    "a local more": ("net = Net(", "width = 0\n    net = Net("),
    "a comment": ("best = total\n    for", "best = total  # so far\n    for"),
}
HARMFUL = {
    "a number": ("* x + 2", "* x + 3"),
    "an operator": ("total + rate", "total - rate"),
    "a constant": ('"fast": 0.25', '"fast": 0.3'),
    "two values exchanged": ('{"slow": 0.5, "fast": 0.25}', '{"slow": 0.25, "fast": 0.5}'),
    "a line that no small run executes": ("total / 3", "total * 3"),
    "a limit that no small run meets": ("step > 100", "step > 99"),
    "lines less that no small run executes": (
        "        if step > 100:\n            total = total / 3\n",
        "",
    ),
    "a count": ('"parameters": net.width', '"parameters": 2 * net.width'),
    "a metric less": (', "best": best}', "}"),
    "another start": ("total = 1.0", "total = 0.0"),
}


def made(source):
    """A function ``run`` as a cell of a notebook would define it."""
    name = f"<cell {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {"__name__": "a_notebook"}
    exec(compile(source, name, "exec"), scope)
    return scope["run"]


@pytest.fixture
def record(monkeypatch):
    """Runs or reads the rows of the experiment in a mode."""

    def called(run, mode):
        monkeypatch.setenv("NDL_MODE", mode)
        return lab.record("made-up", GRID, run, smoke={"steps": 3})

    return called


@pytest.fixture
def small_run(record, tmp_path_factory, monkeypatch):
    """What a smoke run finds, as `make canaries` asks for it."""

    def found(run) -> dict:
        folder = tmp_path_factory.mktemp("found")
        with monkeypatch.context() as patch:
            patch.setenv("NDL_CANARIES", str(folder))
            record(run, "smoke")
        return json.loads((folder / "made-up.json").read_text())

    return found


@pytest.fixture
def recorded(record, small_run, tmp_path, monkeypatch):
    """An experiment with rows and a canary; gives a function that tries another source in smoke and in replay."""
    monkeypatch.setattr(modes, "RESULTS", tmp_path)
    monkeypatch.setattr(canary, "shaken", lambda: [])
    run = made(CODE)
    record(run, "full")
    settled(run, small_run(run), {})

    def tried(source):
        other = made(source)
        again = small_run(other)
        monkeypatch.setattr(canary, "observed", lambda name: again)
        refused = []
        for mode in ("smoke", "replay"):
            try:
                record(other, mode)
            except RecordError as error:
                refused.append(str(error))
        said = settled(other, again, None)  # by `make canaries`
        return refused + [said] * ("STALE" in said)

    return tried


def settled(run, found, made):
    experiment = lab.records.Experiment("made-up", run)
    return canaries.settle("made-up", found, experiment.facts(), made)


@pytest.mark.parametrize("edit", HARMLESS)
def test_a_harmless_edit_leaves_rows_as_they_are(recorded, edit):
    old, new = HARMLESS[edit]
    assert old in CODE and recorded(CODE.replace(old, new)) == []


@pytest.mark.parametrize("edit", HARMFUL)
def test_an_edit_that_changes_numbers_is_refused(recorded, edit):
    old, new = HARMFUL[edit]
    before = canary.place("made-up").read_text()
    assert old in CODE and "STALE" in recorded(CODE.replace(old, new))[-1]
    assert canary.place("made-up").read_text() == before


def test_the_message_names_experiment_metric_both_values_and_the_command(recorded):
    said = recorded(CODE.replace("* x + 2", "* x + 3"))[0]
    for words in ("made-up", "value was", "and is", "make reproduce EXPERIMENT=made-up ADOPT=1"):
        assert words in said


def test_rows_made_by_code_that_does_the_same_stand_beside_the_earlier_ones(
    recorded, small_run, monkeypatch
):
    other = made(CODE.replace("total", "amount"))
    again = small_run(other)
    monkeypatch.setattr(canary, "observed", lambda name: again)
    monkeypatch.setenv("NDL_MODE", "full")
    more = [*GRID, {"width": 7, "speed": "slow", "steps": 1000, "seed": 0}]
    assert len(lab.record("made-up", more, other)) == 5
    rows = store.read("made-up")
    assert len(rows) == 5 and len({row["code"] for row in rows}) == 2, "one run was missing"
    assert len({store.current("made-up", row)[0] for row in rows}) == 1


def test_what_was_judged_once_is_written_down(recorded, record, small_run, monkeypatch):
    other = made(CODE.replace("grown", "trained"))
    assert settled(other, small_run(other), None) == "made-up: stands"
    monkeypatch.setattr(canary, "observed", lambda name: pytest.fail("it is known by now"))
    assert len(record(other, "replay")) == 4


def test_a_canary_of_the_same_code_keeps_its_first_values(recorded, small_run):
    """So a neighbour's file does not change with each machine, and values cannot drift within the tolerance."""
    before = canary.place("made-up").read_text()
    again = small_run(made(CODE))
    for _, numbers in again["values"]:
        numbers.update({k: v * (1 + 1e-7) for k, v in numbers.items() if isinstance(v, float)})
    assert settled(made(CODE), again, None) == "made-up: stands"
    assert canary.place("made-up").read_text() == before
    smaller = again | {"values": again["values"][:1]}
    assert settled(made(CODE), smaller, None) == "made-up: stands"
    assert len(canary.kept("made-up")["values"]) == 1


def test_a_canary_follows_rows_that_were_run_again(recorded, record, small_run, monkeypatch):
    other = made(CODE.replace("* x + 2", "* x + 3"))
    with monkeypatch.context() as patch:
        patch.setattr(canary, "observed", lambda name: None)
        record(other, "full")
    assert settled(other, small_run(other), None).endswith("stands")
    assert len(record(other, "replay")) == 4
    assert store.current("made-up", store.read("made-up")[0])[0] != canary.kept("made-up")["code"]


# --- what no code of the book says ---------------------------------------------------------------------------------


def test_the_layer_and_torch_do_what_they_did():
    assert canary.moved(canary.WORLD, canary.world()) == []


def filled(layer, *_, **__) -> None:
    """Another start of a layer."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.1)


FORWARD = ndlinear.NdLinear.forward
PATCHES = {
    "start of the layer": (ndlinear.NdLinear, "reset_parameters", filled),
    "start of Linear": (torch.nn.Linear, "reset_parameters", filled),
    "forward": (ndlinear.NdLinear, "forward", lambda self, x: 1.001 * FORWARD(self, x)),
    "activation": (torch.nn.ReLU, "forward", lambda self, x: torch.nn.functional.leaky_relu(x)),
    "optimiser": (torch.optim.Adam, "step", lambda self, *a: None),
}


@pytest.mark.parametrize("what", PATCHES)
def test_a_patch_of_torch_or_of_the_layer_is_seen_by_every_replay(what, monkeypatch):
    monkeypatch.setattr(*PATCHES[what])
    canary.shaken.cache_clear()
    try:
        monkeypatch.setenv("NDL_MODE", "replay")
        with pytest.raises(RecordError, match="torch or ndlinear is another"):
            lab.record("template-example", [{"seed": 0}], made(CODE))
    finally:
        canary.shaken.cache_clear()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_float32_matmul_precision("medium"),
    ],
)
def test_global_settings_of_torch_are_part_of_a_canary(recorded, change):
    assert recorded(CODE) == []
    try:
        change()
        assert any("torch is set to" in words for words in recorded(CODE))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def test_settings_that_a_training_function_makes_itself_are_not_those_that_it_finds(small_run):
    sets = "import torch\n\ndef run(config):\n    torch.set_default_dtype(torch.float64)"
    try:
        found = small_run(made(CODE.replace("def run(config):", sets)))
        assert torch.get_default_dtype() == torch.float64 and found["state"][0] == "torch.float32"
    finally:
        torch.set_default_dtype(torch.float32)


def test_differences_are_relative_and_words_differ_or_do_not():
    one = {"a": {"loss": 2.0, "gap": 1e-9, "word": "x", "count": 3}}
    assert {size for size, _ in canary.differences(one, one).values()} == {0.0}
    other = {"a": {"loss": 2.02, "gap": 1e-9, "word": "y"}}
    found = {metric: size for metric, (size, _) in canary.differences(one, other).items()}
    assert found["loss"] == pytest.approx(0.02 / 2.02)
    assert found["word"] == found["count"] == float("inf")


def test_a_curve_gives_its_mean_and_end_and_a_table_of_times_nothing():
    row = {"config": {}, "metrics": {"y": 1.0}}
    points = [{"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    ((_, found),) = canary.values([row | {"curve": points}])
    assert found == {
        "y": 1.0,
        "loss (mean)": 1.5,
        "loss (end)": 1.0,
        "step (mean)": 2,
        "step (end)": 3,
    }
    assert canary.values([row | {"curve": {"dense": [1.0, 2.0]}}]) == [[{}, {"y": 1.0}]]


def test_tolerances_are_ten_times_what_was_measured_and_times_are_not_compared():
    measured = canaries.tolerances({"loss": 2e-5, "seconds": 0.4, "exact": 0.0})
    assert measured == {"loss": 2e-4, "seconds": None}


def test_an_experiment_known_by_its_code_alone_gets_a_canary(recorded, small_run):
    run = made(CODE)
    canary.write("made-up", {"code": lab.records.Experiment("made-up", run).code(), "earlier": []})
    found = small_run(run)
    assert settled(run, found, {}) == "made-up: stands"
    assert canary.kept("made-up")["values"] == found["values"]
