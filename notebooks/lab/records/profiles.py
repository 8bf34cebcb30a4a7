"""What one kind of device can take: precision, and runs side by side.

A profile is chosen by the device's name, or by NDL_PROFILE. What changes a number belongs into a configuration, so that rows made
with different settings never meet in one comparison; a row made on a GPU also says its profile and whether matrix products in float32
were rounded to TF32.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from ..modes import LabError

RUNS_ON_A_PROCESSOR = re.compile(r", \d+ threads$")  # how `machine.processor` ends


@dataclass(frozen=True)
class Profile:
    """Settings for one kind of device.

    Args:
        precision: of products in chapters that train under autocast.
        tf32: whether products in float32 may be rounded to TF32. dtypes: that speed is measured in.
        side_by_side: most processes that train small networks on the device at once.
    """

    name: str
    precision: str
    tf32: bool
    dtypes: tuple[str, ...]
    side_by_side: int


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("H200", "bfloat16", True, ("float32", "bfloat16", "tf32"), 6),
        Profile("A100", "bfloat16", True, ("float32", "bfloat16", "tf32"), 4),
        Profile("T4", "float16", False, ("float32",), 2),
        Profile("CPU", "float32", False, ("float32",), 1),
    )
}
LIKE = {"H200": "H200|H100|GH200|B200", "A100": "A100|A10|L4|L40|RTX", "T4": "T4|P100|V100"}


def of_device(name: str) -> Profile:
    """The profile of a device as `lab.machine.device` names it. A GPU that is not known is taken for the smallest."""
    if RUNS_ON_A_PROCESSOR.search(name):
        return PROFILES["CPU"]
    found = [known for known, pattern in LIKE.items() if re.search(rf"\b({pattern})\b", name)]
    return PROFILES[found[0] if found else "T4"]


def chosen(device: str) -> Profile:
    """The profile that NDL_PROFILE names, else that of the device."""
    name = os.environ.get("NDL_PROFILE", "").strip()
    if name and name not in PROFILES:
        raise LabError(f"NDL_PROFILE={name!r} is not a profile; there are: {', '.join(PROFILES)}")
    return PROFILES[name] if name else of_device(device)


def facts() -> dict[str, object]:
    """What a row made on a GPU says beside the device's name."""
    if not torch.cuda.is_available():
        return {}
    name = os.environ.get("NDL_PROFILE", "").strip()
    rounded = {"tf32": torch.backends.cuda.matmul.allow_tf32}
    return rounded | ({"profile": name} if name else {})
