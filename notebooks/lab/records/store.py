"""The file of a record, results/<experiment>.jsonl: checked when it is read, appended to by one writer, never overwritten."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib

from ..modes import LabError


class RecordError(LabError):
    """A record is missing, stale, damaged or in use."""


# ---------------------------------------------------------------------------------------------------------------- the file
def canonical(value) -> str:
    """JSON with sorted keys and no spaces: equal text for equal values."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(row: dict) -> str:
    """Checksum of a row without its own ``digest`` field."""
    content = canonical({k: v for k, v in row.items() if k != "digest"})
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def parse(path: pathlib.Path) -> tuple[list[dict], bytes]:
    """The rows of a record file and what is torn at its end.

    A last line that lacks only its newline is a row: it holds its own checksum.
    """
    if not path.is_file():
        return [], b""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    rows = []
    for number, line in enumerate((whole + newline).splitlines(), 1):
        row = _intact(line)
        if row is None:
            raise RecordError(
                f"{path.name}, line {number}: the row does not match its own checksum, so it was edited or damaged. "
                "Records are written by full runs only: restore the file from version control."
            )
        rows.append(row)
    last = _intact(torn)
    return (rows, torn) if last is None else ([*rows, last], b"")


def _intact(line: bytes) -> dict | None:
    """The row of a line, or None where it does not match its own checksum."""
    try:
        row = json.loads(line)
        return row if row["digest"] == digest(row) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def append(path: pathlib.Path, *rows: dict, at: int | None = None) -> list[dict]:
    """Add rows, on disk before this returns; gives them with their checksums.

    Args:
        at: the size of the file as its one writer left it.

    Raises:
        RecordError: the file has another size, by a second writer that got in although it was locked; or the disk is full or the
            folder cannot be written. The rows before this one are safe.
    """
    if at not in (None, size(path)):
        raise RecordError(
            f"{path.name} was changed by another process while this one writes it: was its .lock file deleted? "
            "All rows are kept; stop the other run and run again"
        )
    signed = [row | {"digest": digest(row)} for row in rows]
    lines = "".join(canonical(row) + "\n" for row in signed).encode()
    try:
        with open(path, "a+b") as file:
            if file.tell() and not _ends_with_newline(file):
                lines = b"\n" + lines
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(
            f"{path} could not be written ({error.strerror}): make room or make the folder writable, and run again; "
            "the rows written before are kept"
        ) from error
    return signed


def _ends_with_newline(file) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def set_torn_aside(path: pathlib.Path, torn: bytes) -> None:
    """Move a torn last line to <name>.torn, first there, then away from here."""
    try:
        with open(path.with_name(path.name + ".torn"), "ab") as aside:
            aside.write(torn + b"\n")
            aside.flush()
            os.fsync(aside.fileno())
    except OSError as error:
        raise RecordError(
            f"{path.name} ends in a torn line, which could not be set aside ({error.strerror}): make room and run again; "
            "the rows before it are safe"
        ) from error
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - len(torn))
    print(f"{path.name}: a torn last line ({len(torn)} bytes) was set aside in {path.name}.torn")


@contextlib.contextmanager
def only_writer(path: pathlib.Path):
    """Keep a second writer of the same record out while this one works."""
    import filelock

    lock = filelock.FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RecordError(
            f"{path.name} is being written by another run; wait for it or stop it"
        ) from error
    except OSError as error:
        raise RecordError(
            f"the results folder {path.parent} cannot be written ({error.strerror}): "
            "make it writable, or name another one with NDL_RESULTS"
        ) from error
    try:
        yield
    finally:
        lock.release()
