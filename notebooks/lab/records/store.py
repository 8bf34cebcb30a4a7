"""The file of a record, results/<experiment>.jsonl: checked when it is read, appended to by one writer, never overwritten."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable

from ..modes import LabError


class RecordError(LabError):
    """A record is missing, stale, damaged or in use."""


def canonical(value) -> str:
    """JSON with sorted keys and no spaces: equal text for equal values."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def key(config: dict, without: Iterable[str] = ()) -> str:
    """A configuration as text, without some of its fields: equal for those that differ in nothing else."""
    return canonical({k: v for k, v in config.items() if k not in without})


def digest(row: dict) -> str:
    """Checksum of a row without its own ``digest`` field."""
    return hashlib.sha256(key(row, ("digest",)).encode()).hexdigest()[:16]


def parse(path: pathlib.Path) -> list[dict]:
    """The rows of a record file, without a torn last line."""
    lines = path.read_bytes().splitlines(True) if path.is_file() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    return [_intact(path, number, line) for number, line in enumerate(whole, 1)]


def _intact(path: pathlib.Path, number: int, line: bytes) -> dict:
    """The row of a line, which must match its own checksum."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        row = json.loads(line)
        if row["digest"] == digest(row):
            return row
    raise RecordError(
        f"{path.name}, line {number}: the row does not match its own checksum, so it was edited or damaged. "
        "Records are written by full runs only: restore the file from version control."
    )


def append(path: pathlib.Path, *rows: dict) -> list[dict]:
    """Add rows, on disk before this returns; gives them with their checksums. RecordError where the file cannot be written."""
    signed = [row | {"digest": digest(row)} for row in rows]
    _add(path, "".join(canonical(row) + "\n" for row in signed).encode())
    return signed


def _add(path: pathlib.Path, content: bytes) -> None:
    with writing(path), open(path, "ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing(path: pathlib.Path):
    """What a full disk or a closed folder means for who runs the notebook."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written ({error.strerror}): make room, or make its folder writable, or name another one with "
            "NDL_RESULTS, and run again; the rows written before are kept"
        ) from error


@contextlib.contextmanager
def only_writer(path: pathlib.Path):
    """Keep a second writer of the same record out while this one works; a torn last line is set aside first."""
    import filelock

    lock = filelock.FileLock(f"{path}.lock")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise RecordError(
                f"{path.name} is being written by another run; wait for it or stop it"
            ) from error
    try:
        _set_torn_aside(path)
        yield
    finally:
        lock.release()


def _set_torn_aside(path: pathlib.Path) -> None:
    """Move what stands behind the last whole line to <name>.torn, first there, then away from here."""
    content = path.read_bytes() if path.is_file() else b""
    if rest := content.rpartition(b"\n")[2]:
        _add(path.with_name(path.name + ".torn"), rest + b"\n")
        os.truncate(path, len(content) - len(rest))
        print(
            f"{path.name}: a torn last line ({len(rest)} bytes) was set aside in {path.name}.torn"
        )
