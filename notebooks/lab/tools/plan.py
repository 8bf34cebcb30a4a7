"""What a GPU is used for, in the order of worth: the first lines answer most per minute."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

from ..modes import NOTEBOOKS, LabError
from ..page.scale import on_gpu
from ..records import store
from ..records.profiles import Profile
from . import cells

# How many times longer than on an H200 a run takes: a guess, used until a device has rows of its own.
SLOWER = {"H200": 1, "A100": 2, "T4": 8, "CPU": 10}


@dataclass(frozen=True)
class Item:
    """One line of the plan.

    Args:
        notebook: its name without the ending. experiments: what it records for this line; none: all that it records.
        why: what these rows are worth. seconds: of its longest group of runs on an H200, guessed until there are rows.
        alone: its rows hold times, so nothing else may run beside them. bf16: it trains under autocast to bfloat16.
        constants: other values for names that the notebook assigns, as (name, expression), where it says that a GPU needs them.
        in_order: each experiment chooses settings for the next, which must not begin before all rows are there.
    """

    notebook: str
    why: str
    experiments: tuple[str, ...] = ()
    seconds: float = 60
    alone: bool = False
    bf16: bool = False
    constants: tuple[tuple[str, str], ...] = ()
    in_order: bool = False

    @property
    def path(self):
        return NOTEBOOKS / f"{self.notebook}.ipynb"

    def names(self) -> list[str]:
        """The experiments that this line runs; none where the chapter does not exist."""
        if not self.path.is_file():
            return []
        if not self.experiments:
            return cells.experiments(self.path)
        words = cells.words(self.path)
        return [name for name in self.experiments if name in words]

    def obstacle(self, profile: Profile) -> str:
        """Why a device cannot run this line; "" if it can."""
        if not self.path.is_file():
            return "this chapter is not here"
        if not self.names():
            return "this chapter does not record it"
        if self.bf16 and profile.precision == "float16":
            return f"it trains in bfloat16, which a {profile.name} only imitates"
        return ""

    def side_by_side(self, profile: Profile) -> int:
        """How many processes share the device."""
        return 1 if self.alone else profile.side_by_side

    def guess(self, profile: Profile) -> float:
        """Seconds of the longest group of runs, before any is known."""
        return self.seconds * SLOWER[profile.name]


PLAN = (
    Item(
        "evidence/63_behaviour",
        "Whether the layer is right on CUDA at all; a minute, and a wrong answer there would matter more than any time.",
        ("behaviour-gpu",),
        seconds=2,
    ),
    Item(
        "evidence/61_overhead",
        "The paper's table of overheads was measured on GPUs: a CNN, an RNN and a Vision Transformer with and without the layer.",
        ("overhead-gpu",),
        seconds=8,
        alone=True,
    ),
    Item(
        "evidence/33_ablations",
        "Order, axes and hidden sizes on CIFAR-100, all pictures from end to end in place of a part of them.",
        ("ablation-cifar-whole",),
        seconds=20,
        bf16=True,
    ),
    Item(
        "evidence/40_cnn",
        "The paper's twelve settings, all pictures from end to end in place of a part of them.",
        ("cnn-sweep-whole",),
        seconds=30,
        bf16=True,
    ),
    Item(
        "evidence/51_opt_pretraining",
        "Decoders of three million parameters, thirty times those of a processor: the paper's benefit is said to grow with scale.",
        ("opt-larger-rates", "opt-larger"),
        seconds=10,
        in_order=True,
    ),
    Item(
        "evidence/50_vit_distillation",
        "The only chapter of part 5 whose verdicts a GPU alone can change: six tables at the paper's widths.",
        ("vit-printed",),
        seconds=120,
        constants=(("LARGE", "GPU_SCALE"),),
    ),
    Item(
        "evidence/52_lora",
        "Adapters with five times the steps, five seeds and a second task, each at its own best rate.",
        ("lora-rates", "lora-adapters"),
        seconds=40,
        constants=(("PROFILE", '"gpu"'),),
        in_order=True,
    ),
    Item(
        "evidence/53_dit",
        "Diffusion from scratch on pictures of 32 pixels in place of digits; the printed distances need weights that are not ours.",
        ("dit-rates", "dit-digits"),
        seconds=150,
        constants=(("PROFILE", '"cifar10"'),),
        in_order=True,
    ),
    Item(
        "evidence/60_speed",
        "Every sentence of the book on time is about processors; this is the layer on a GPU, in five shapes, eager and as CUDA graphs.",
        ("speed-gpu",),
        seconds=1,
        alone=True,
    ),
)


def elsewhere(experiment: str, device: str, keys: list[str] | None = None) -> str:
    """Why rows of a device would not belong beside those that are recorded: a grid stays on one kind of device.

    Experiments that name the machine in their configurations measure devices, and take them all.

    Args:
        keys: of the grid, where it is known; else all current rows of the experiment are taken for it.
    """
    rows = [row for row in store.read(experiment) if row["status"] == "ok"]
    made = zip(rows, store.counted(experiment, rows))
    made = [(row, code) for row, (code, key) in made if keys is None or key in keys]
    if not made or "machine" in made[-1][0]["config"]:
        return ""
    current = [row["device"] for row, code in made if code == made[-1][1]]
    other = [name for name in current if on_gpu(name) != on_gpu(device)]
    return f"{len(other)} of its rows are from {other[0]}" if other else ""


def constants_of(path: pathlib.Path) -> dict[str, str]:
    """The values that the plan gives to names of a notebook."""
    return {name: value for item in PLAN if item.path == path for name, value in item.constants}


def chosen(names: list[str]) -> list[Item]:
    """The lines of the plan whose notebook or experiment begins with one of these words; all of them without words."""
    if not names:
        return list(PLAN)
    found = [
        item
        for item in PLAN
        if any(text.startswith(n) for n in names for text in (item.path.stem, *item.experiments))
    ]
    if not found:
        raise LabError(f"nothing in the plan begins with {', '.join(names)}")
    return found
