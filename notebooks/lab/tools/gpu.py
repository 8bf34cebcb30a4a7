"""Fill the rows that need a GPU, most valuable first: ``python -m lab.tools.gpu COMMAND`` (``make gpu OUT=DIR BUDGET=540``).

run OUT [--budget S] [--device D]                   run the plan until the budget is spent; call again to go on
list [--out OUT]                                    the plan, what is missing, and how long it would take
pack DIR [--limit MIB] [--have DIR]                 the data files that the plan needs, cut to a limit
merge OUT [--without-torn] [--data SET=CHECKSUM]    check the rows of a run and append them to the records

OUT gets rows-1.jsonl to rows-5.jsonl (15 MiB at most each), log.txt and state.json; the project's records stay as they are.
--only NAME ... takes a part of the plan: beginnings of notebooks' or experiments' names. NDL_PROFILE names another profile.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from .. import machine
from ..modes import NOTEBOOKS, ROOT, LabError
from ..records import profiles, store
from ..records.budget import NOTE
from ..records.profiles import Profile
from . import cells, merge, parcel, plan
from .plan import Item

FILES, LARGEST = 5, 15 * 2**20  # of rows in OUT
LOG = 4 * 2**20  # bytes of log.txt at most
RESERVE = 5.0  # seconds of the budget kept for ending in good order
START_UP = 30.0  # seconds until a notebook reaches its record, until one has


class Out:
    """The folder of a run: rows in a few files, a log, and what is known to be complete."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict] = []
        for file in self.files():
            rows, torn = store.parse(file)
            if torn:
                store.set_torn_aside(file, torn)
            self.rows += rows
        self.known = {row["digest"] for row in self.rows}

    def files(self) -> list[pathlib.Path]:
        return sorted(self.folder.glob("rows-*.jsonl"))

    def add(self, rows: list[dict]) -> int:
        """Append the rows that are new; returns how many."""
        fresh = [row for row in rows if row["digest"] not in self.known]
        for row in fresh:
            store.append(self._place(len(store.canonical(row))), row)
            self.rows.append(row)
            self.known.add(row["digest"])
        return len(fresh)

    def _place(self, size: int) -> pathlib.Path:
        """The first file that has room for a row."""
        for number in range(1, FILES + 1):
            file = self.folder / f"rows-{number}.jsonl"
            if not file.is_file() or file.stat().st_size + size < LARGEST:
                return file
        raise LabError(f"{self.folder} is full: merge its rows and go on in an empty folder")

    def of(self, experiment: str) -> list[dict]:
        return [row for row in self.rows if row["experiment"] == experiment]

    def say(self, text: str) -> None:
        """Print a line and keep it in the log."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}  {text}"
        print(line, flush=True)
        log = self.folder / "log.txt"
        if not log.is_file() or log.stat().st_size < LOG:
            with open(log, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def state(self) -> dict:
        """Experiment -> what the last run found out about it."""
        place = self.folder / "state.json"
        return json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}

    def note(self, experiment: str, **found) -> None:
        state = self.state() | {experiment: found}
        fresh = self.folder / "state.tmp"
        fresh.write_text(json.dumps(state, indent=1), encoding="utf-8")
        fresh.replace(self.folder / "state.json")


def tree(notebook: pathlib.Path) -> str:
    """Digest of the code that an experiment of a notebook can reach: an experiment that was complete stays so while it is equal."""
    files = [
        notebook,
        *sorted(ROOT.glob("ndlinear*.py")),
        *sorted((NOTEBOOKS / "lab").rglob("*.py")),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


class Session:
    """One call of ``run``: the time that is left, and the processes that it started."""

    def __init__(self, out: Out, budget: float, device: str, profile: Profile):
        self.out = out
        self.device = device
        self.profile = profile
        self.end = time.time() + budget
        self.start_up = START_UP
        self.processes: list[subprocess.Popen] = []

    def left(self) -> float:
        return self.end - RESERVE - time.time()

    def run(self, item: Item) -> None:
        """The experiments of one line of the plan, as far as the time allows."""
        obstacle = item.obstacle(self.profile)
        if obstacle:
            self.out.say(f"{item.notebook}: left out, {obstacle}")
            return
        for experiment in item.names():
            if self.left() <= 0:
                return
            known = self.out.state().get(experiment, {})
            longest = self.longest(item, experiment)
            other = "" if item.constants else plan.elsewhere(experiment, self.here())
            if other:
                self.out.say(
                    f"{experiment}: left out, {other}, and a grid stays on one kind of device"
                )
            elif known.get("missing") == 0 and known.get("tree") == tree(item.path):
                self.out.say(f"{experiment}: complete")
            elif self.left() < self.start_up + longest:
                self.out.say(
                    f"{experiment}: not begun, {max(self.left(), 0):.0f} s are left; it needs {self.start_up:.0f} s to "
                    f"get there and {longest:.0f} s for its longest group"
                )
            else:
                self.fill(item, experiment, longest)
            if item.in_order and self.out.state().get(experiment, {}).get("missing") != 0:
                self.out.say(f"{item.notebook}: what follows needs all rows of {experiment}")
                return

    def longest(self, item: Item, experiment: str) -> float:
        """Seconds of the longest group of runs so far on this device; where there is none, the plan's guess."""
        found = groups(self.out.of(experiment) + store.read(experiment), self.here())
        return max(found, default=item.guess(self.profile))

    def here(self) -> str:
        return machine.machine(self.device)

    def fill(self, item: Item, experiment: str, longest: float) -> None:
        """Run one experiment in as many processes as the profile allows, and keep each row as it comes."""
        count, before = item.side_by_side(self.profile), len(self.out.rows)
        began = time.time()
        with tempfile.TemporaryDirectory(prefix="ndl-gpu-") as work:
            folders = [pathlib.Path(work, f"share-{i}") for i in range(count)]
            for number, folder in enumerate(folders):
                cells.hand_out(self.out.rows, folder)
                more = self.environment(item, f"{number}/{count}", longest)
                self.processes.append(cells.start(item.path, experiment, folder, {}, **more))
            try:
                self._watch(experiment, folders, began)
            finally:
                self.stop()
                self._collect(experiment, folders)
                self._conclude(item, experiment, folders, time.time() - began, before)

    def environment(self, item: Item, share: str, longest: float) -> dict[str, str]:
        """What one process is told beside the experiment."""
        threads = max(1, (os.cpu_count() or 1) // item.side_by_side(self.profile))
        more = {
            "NDL_SHARE": share,
            "NDL_UNTIL": str(self.end - RESERVE),
            "NDL_LONGEST_S": str(longest),
            "NDL_PROFILE": self.profile.name,
            "NDL_DEVICE": self.device,
            "NDL_CONSTANTS": json.dumps(dict(item.constants)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        }
        if self.profile.tf32 and not item.alone:  # what measures times sets this by itself
            more["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
        return more

    def _watch(self, experiment: str, folders: list[pathlib.Path], began: float) -> None:
        """Until all processes have ended or the time is up, keep their rows."""
        reached = False
        while any(process.poll() is None for process in self.processes) and self.left() > 0:
            time.sleep(0.2)
            self._collect(experiment, folders)
            if not reached and all((f / f"{experiment}{NOTE}").is_file() for f in folders):
                reached, self.start_up = True, time.time() - began

    def stop(self) -> None:
        """End the processes of this session that still run; what they have finished is on disk."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _collect(self, experiment: str, folders: list[pathlib.Path]) -> None:
        for folder in folders:
            self.out.add(store.parse(folder / f"{experiment}.jsonl")[0])

    def _conclude(self, item: Item, experiment: str, folders, seconds: float, before: int) -> None:
        """Say what came of an experiment, and note whether something is missing."""
        statuses = [process.returncode for process in self.processes]
        self.processes = []
        fresh = self.out.rows[before:]
        failed = [row for row in fresh if row["status"] != "ok"]
        notes = [folder / f"{experiment}{NOTE}" for folder in folders]
        note = next((json.loads(p.read_text(encoding="utf-8")) for p in notes if p.is_file()), None)
        missing = len(missing_keys(note, self.out.of(experiment))) if note else None
        left = "the record was not reached" if missing is None else f"{missing} left"
        text = f"{experiment}: {len(fresh) - len(failed)} rows in {seconds:.0f} s, {left}"
        if failed:
            text += f"; {len(failed)} failed, the first with {failed[0]['error']!r}"
        self.out.say(text)
        stopped = statuses.count(-signal.SIGKILL)
        if stopped and missing is not None:
            self.out.say(f"{experiment}: {stopped} processes were stopped in the middle of a run")
        for folder, status in zip(folders, statuses):
            if status not in (0, -signal.SIGKILL):
                said = (folder / "said.txt").read_text(encoding="utf-8").splitlines()[-6:]
                self.out.say(
                    f"{experiment}: a process ended with status {status}: {' | '.join(said)}"
                )
        self.out.note(experiment, missing=missing, tree=tree(item.path), device=self.here())


def groups(rows: list[dict], device: str) -> list[float]:
    """Seconds of the groups of runs that a device has finished."""
    return [
        row["seconds"] * row.get("together", 1)
        for row in rows
        if row["status"] == "ok" and row.get("device") == device
    ]


def missing_keys(note: dict, rows: list[dict]) -> set[str]:
    """The configurations of an experiment for which neither the records nor these rows hold a current row."""
    rows = store.read(note["experiment"]) + rows
    return set(note["keys"]) - store.by_key(note["experiment"], rows, note["code"]).keys()


# ------------------------------------------------------------------------------------------------------------- commands
def place(asked: str) -> tuple[str, Profile]:
    """Device and profile of this machine."""
    device = asked or machine.accelerator()
    if not device:
        raise LabError("there is no GPU here; --device cpu makes a dry run on the processor")
    return device, profiles.chosen(machine.machine(device))


def run(folder: pathlib.Path, budget: float, asked: str = "", names=()) -> None:
    """Fill what is missing, line by line of the plan, until the budget of seconds is spent."""
    device, profile = place(asked)
    out = Out(folder)
    session = Session(out, budget, device, profile)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that rows are kept on the way out
    out.say(f"{budget:.0f} s on {session.here()}, profile {profile.name}")
    items = plan.chosen(list(names))
    for at, item in enumerate(items):
        if session.left() <= 0:
            rest = dict.fromkeys(item.notebook for item in items[at:])
            out.say(f"the time is up; not reached: {', '.join(rest)}")
            break
        session.run(item)
    seconds = budget - (session.end - time.time())
    out.say(f"ended after {seconds:.0f} s with {len(out.rows)} rows in {folder}")


def show(folder: pathlib.Path | None, names=(), asked: str = "") -> None:
    """Print the plan: what is missing, how long that would take here, and why it stands where it stands. NDL_PROFILE names
    another kind of device, for which the plan's guesses are taken."""
    device = asked or machine.accelerator() or "cpu"
    profile = profiles.chosen(machine.machine(device))
    out = Out(folder) if folder else None
    print(f"{machine.machine(device)}, profile {profile.name}")
    surveys: dict[pathlib.Path, dict] = {}
    for item in plan.chosen(list(names)):
        print(f"\n{item.notebook}. {item.why}")
        obstacle = item.obstacle(profile)
        if obstacle:
            print(f"  left out: {obstacle}")
        for experiment in item.names():
            if item.path not in surveys:
                surveys[item.path] = cells.survey(
                    item.path, plan.constants_of(item.path), out.rows if out else []
                )
            rows = out.of(experiment) if out else []
            note = surveys[item.path].get(experiment)
            print(f"  {experiment}: {forecast(item, experiment, note, rows, device)}")


def forecast(item: Item, experiment: str, note: dict | None, rows: list[dict], device: str) -> str:
    """What is missing of one experiment and how many seconds that takes: runs over processes, by own rows or by the plan's guess."""
    if note is None:
        return "its record is not reached here"
    here = machine.machine(device)
    profile = profiles.chosen(here)
    own = profile == profiles.of_device(here)
    known = groups(rows + store.read(experiment), here) if own else []
    each = sum(known) / len(known) if known else item.guess(profile)
    missing = len(missing_keys(note, rows))
    seconds = missing * each / item.side_by_side(profile)
    by = "by its own rows" if known else "a guess"
    return f"{missing} of {len(note['keys'])} rows are missing, about {seconds:,.0f} s here ({by})"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m lab.tools.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name) for name in ("run", "list", "pack", "merge")}
    made["list"].add_argument("--out", type=pathlib.Path)
    for name in ("run", "pack", "merge"):
        made[name].add_argument("folder", type=pathlib.Path)
    for name in ("run", "list", "merge"):
        made[name].add_argument("--device", default="")
    made["run"].add_argument("--budget", type=float, default=540.0)
    made["pack"].add_argument(
        "--limit", type=float, default=None, help="MiB; default: 64 less the tree"
    )
    made["pack"].add_argument("--have", action="append", type=pathlib.Path, default=[])
    made["merge"].add_argument("--without-torn", action="store_true")
    made["merge"].add_argument("--data", action="append", default=[], metavar="SET=CHECKSUM")
    for command in made.values():
        command.add_argument("--only", nargs="+", default=[], metavar="NAME", dest="names")
    return top


def main(arguments: list[str] | None = None) -> None:
    """Command line; what a reader can put right ends in one line."""
    asked = parser().parse_args(arguments)
    try:
        if asked.command == "run":
            run(asked.folder, asked.budget, asked.device, asked.names)
        elif asked.command == "list":
            show(asked.out, asked.names, asked.device)
        elif asked.command == "pack":
            parcel.pack(asked.folder, asked.limit, asked.have, asked.names)
        else:
            merge.merge(asked.folder, asked.names, asked.without_torn, asked.device, asked.data)
    except LabError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
