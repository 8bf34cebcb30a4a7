"""The canaries of the book: ``python -m lab.tools.canaries [NOTEBOOK ...]`` (``make canaries``), in notebooks/.

Each notebook is run small. An experiment whose code is unknown is judged by what its canary says, and where nothing speaks
against it, its rows count as rows of the present code from then on. An experiment without a canary gets one, with the tolerance
that other threads and other kernels need: the notebook is run once more for each of `VARIANTS`.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

from .. import machine, modes
from ..modes import NOTEBOOKS, LabError
from ..records import canary, store
from . import cells, reproduce

VARIANTS = {  # other threads, other instructions
    "2 threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    "AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "SSE4": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}


def observe(
    notebook: pathlib.Path, folder: pathlib.Path, variant: dict[str, str] | None = None
) -> None:
    """Run a notebook small, and write into ``folder`` what its experiments gave."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file = pathlib.Path(place, f"{notebook.stem}.py")
        file.write_text(cells.script(notebook), encoding="utf-8")
        found = pathlib.Path(place, "found")
        environment = os.environ | cells.ANY_RUN
        environment |= {"NDL_MODE": "smoke", "NDL_CANARIES": str(found)}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        for name in ("NDL_ONLY", "NDL_READS", "NDL_RESULTS"):
            environment.pop(name, None)
        subprocess.run(
            [sys.executable, str(file)],
            cwd=NOTEBOOKS,
            env=environment | (variant or {}),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for path in found.glob("*.json"):
            path.replace(folder / path.name)


def spread(base: pathlib.Path, others: list[pathlib.Path], name: str) -> dict[str, float]:
    """The largest relative difference of each metric between the runs of an experiment."""
    before = canary.by_key(read(base, name)["values"])
    found: dict[str, float] = {}
    for folder in others:
        after = canary.by_key(read(folder, name)["values"])
        for metric, (size, _) in canary.differences(before, after).items():
            found[metric] = max(size, found.get(metric, 0.0))
    return found


def tolerances(spread: dict[str, float]) -> dict[str, float | None]:
    """What is allowed of each metric: `MARGIN` times what was measured. A time, or noise, is not compared."""
    return {
        metric: None if size > canary.ROUGH else float(f"{canary.MARGIN * size:.1e}")
        for metric, size in sorted(spread.items())
        if canary.MARGIN * size > canary.FINEST
    }


def read(folder: pathlib.Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def settle(name: str, found: dict | None, note: dict, made: dict | None = None) -> str:
    """Keep what was found of an experiment, if nothing speaks against it; in words what came of it.

    Args:
        found: its smoke run, if it has one. note: its present code. made: tolerances, where it is new.
    """
    known, code = canary.kept(name), note["code"]
    same = code == known.get("code") or canary.stands_for(name, code) is not None
    again = _ran_again(name, known, code)
    problems = [] if again or not known else _problems(name, known, found, note, same)
    if problems:
        return f"{name}: STALE, {problems[0]}"
    if not again and made is None and _says_the_same(known, found, code):
        return f"{name}: stands"  # its file keeps the first values, not those of this machine
    content = {"code": known["code"] if same else code, "versions": _versions()}
    if found:
        tolerance = known.get("tolerance", {}) if made is None else made
        content |= {"state": found["state"], "tolerance": tolerance, "numbers": note["numbers"]}
        content["measured"] = sorted(VARIANTS) if made is not None else known.get("measured", [])
        content |= {field: found[field] for field in ("dark", "values", "like") if field in found}
    canary.write(name, content | {"earlier": [] if again else known.get("earlier", [])})
    if known and not same and not again:
        canary.join(name, known["code"], "its canary")
    return f"{name}: stands"


def _says_the_same(known: dict, found: dict | None, code: str) -> bool:
    """Whether a canary, which did not move, is of the present code, versions and smallest sizes."""
    if not found or not known.get("values") or ("dark" in found) != ("dark" in known):
        return False
    sizes = [canary.by_key(side["values"]).keys() for side in (known, found)]
    return code == known["code"] and known["versions"] == _versions() and sizes[0] == sizes[1]


def _versions() -> dict[str, str]:
    return {
        what: version.partition("+")[0]
        for what, version in machine.versions().items()
        if what in ("torch", "ndlinear")
    }


def _ran_again(name: str, known: dict, code: str) -> bool:
    """Whether the newest row was made by code, or with versions, that the canary does not know yet and that are here."""
    rows = [row for row in store.read(name) if row["status"] == "ok"]
    if not rows or not known or rows[-1]["code"] != code:
        return False
    made = {what: rows[-1]["versions"][what].partition("+")[0] for what in _versions()}
    return made == _versions() and (code != known["code"] or made != known.get("versions", made))


def _problems(name: str, known: dict, found: dict | None, note: dict, same: bool) -> list[str]:
    """What speaks against the rows of an experiment, in words."""
    if not known.get("values"):
        return [] if same else ["it has no canary, and its code changed"]
    if not found:
        return ["its smoke run does not reach it"]
    problems = canary.moved(name, found["values"])
    if same:  # another smallest size of the same code is as good
        return [] if problems and problems[0].startswith("none of its") else problems
    return problems + (
        canary.against(known, found, note) if "dark" in found else ["its rows are times"]
    )


def keep(notebook: pathlib.Path) -> list[str]:
    """The canaries of a notebook; in words what came of each."""
    with tempfile.TemporaryDirectory() as place:
        base = pathlib.Path(place, "base")
        observe(notebook, base)
        names = {path.stem for path in base.glob("*.json")}
        others = []
        notes = cells.survey(notebook)
        new = [name for name in sorted(notes) if "tolerance" not in canary.kept(name)]
        if new:
            what = f"{', '.join(new)} without canary, so {len(VARIANTS)} more small runs"
            print(f"{modes.slug(notebook)}: {what}", flush=True)
            for variant, settings in VARIANTS.items():
                observe(notebook, pathlib.Path(place, variant), settings)
                others.append(pathlib.Path(place, variant))
        said = []
        for name, note in sorted(notes.items()):
            found = read(base, name) if name in names else _alike(base, note["shape"])
            made = None
            if found and name in new:
                made = tolerances(spread(base, others, found.get("like", name)))
            said.append(settle(name, found, note, made))
    return said


def _alike(base: pathlib.Path, shape: str) -> dict | None:
    """The smoke run of another experiment that trains by the same code: for one that no smoke run reaches."""
    for path in sorted(base.glob("*.json")):
        found = read(base, path.stem)
        if found["shape"] == shape and "dark" in found:
            return found | {"like": path.stem}
    return None


def main(arguments: list[str]) -> int:
    """Exit status 0 when the rows of all experiments stand."""
    if arguments[:1] == ["observe"]:
        observe(reproduce.owner(arguments[1]), pathlib.Path(arguments[2]))
        return 0
    chosen = [
        path
        for path in modes.chapters()
        if not arguments or any(part in modes.slug(path) for part in arguments)
    ]
    if not chosen:
        raise LabError(
            f"no notebook has {' or '.join(arguments)} in its name, as evidence/33 would"
        )
    if not canary.place(canary.WORLD).is_file():
        canary.write(
            canary.WORLD, {"torch": torch.__version__, "tolerance": {}, "values": canary.world()}
        )
    said = [
        line for notebook in chosen if "lab." in cells.script(notebook) for line in keep(notebook)
    ]
    stale = [line for line in said if "STALE" in line]
    print("\n".join(stale))
    print(f"{len(said) - len(stale)} canaries stand, {len(stale)} do not")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
