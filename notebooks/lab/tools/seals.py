"""The ledger's words, sealed: a number that is changed in a claim, or a record on which it rests, asks for a look at the sentences.

The ledger's own numbers (an interval in a correction, a rule's thresholds, the sizes of a scope) were held against the records by a
person. The seal says at which numbers, and with which rows of the records. It does not know whether the person was right.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re

from ..modes import PAPER, LabError, read_yaml
from ..page.ledger import claims
from ..page.quote import bare
from ..records import golden

PLACE = PAPER / "seals.json"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def seal(claim: dict) -> str:
    """Digest of a claim's rule, word by word, of all its other numbers, and of the seals of its records."""
    rule = re.sub(r"\s+", " ", bare(claim.get("rule", "")))
    rest = json.dumps({key: value for key, value in claim.items() if key != "rule"})
    records = [golden.kept(name)["record"] for name in claim.get("records", [])]
    return _digest(rule, NUMBER.findall(rest), records)


def current() -> dict[str, str]:
    """The seal of every claim by its id, and that of every entry of the log of corrections, which nobody rewrites."""
    log = read_yaml(PAPER / "corrections.yml")["corrections"]
    entries = {
        f"correction {number}": _digest(json.dumps(e, default=str))
        for number, e in enumerate(log, 1)
    }
    return {claim["id"]: seal(claim) for claim in claims()} | entries


def broken() -> list[str]:
    """What is not as it was sealed: edited, new, or gone."""
    kept, now = json.loads(PLACE.read_text(encoding="utf-8")), current()
    return sorted(name for name in kept | now if kept.get(name) != now.get(name))


def main(arguments: list[str]) -> None:
    """Seal these claims anew, or say which are not as they were sealed."""
    asked = argparse.ArgumentParser(prog="lab seals", description=__doc__)
    asked.add_argument("claims", nargs="*", metavar="CLAIM")
    names, changed = asked.parse_args(arguments).claims, broken()
    if unknown := set(names) - {name.partition(" ")[0] for name in changed}:
        raise LabError(f"nothing has changed in {', '.join(sorted(unknown))}")
    kept, now = json.loads(PLACE.read_text(encoding="utf-8")), current()
    for name in changed:
        if name.partition(" ")[0] not in names:
            print(f"{name}: not as it was sealed. Hold its sentences against its records, then:")
            print(f"    python -m lab seals {name.partition(' ')[0]}")
        elif name in now:
            kept[name] = now[name]
        else:
            del kept[name]
    PLACE.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
