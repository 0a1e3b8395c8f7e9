"""Progress of long operations: a bar if stderr is a terminal, or lines of JSON."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client import render
from ckptfs_client.errors import ClientError, NotInTime
from ckptfs_client.json_answers import VerifyJson

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb


def follow_progress(messages: Iterator["pb.Progress"], what: str, done: str, *, json: bool = False) -> None:
    """Follow a wait or a drain to its end, and print `done`. Raises NotInTime with what is left and why."""
    last: pb.Progress | None = None
    began_s = time.monotonic()
    if json:
        messages = _print_each(messages)
    try:
        with ProgressBar(what) as bar:
            for last in messages:
                bar.update(last.bytes_left, describe_progress(last))
    except NotInTime as failure:
        if not json:
            _print_safety(last)
        left = f"; left: {describe_progress(last)}" if last is not None else ""
        raise NotInTime(f"{what}: {failure.args[0]}{left}", remedy=failure.remedy or (last.remedy if last is not None else "")) from None
    except ClientError as failure:
        raise type(failure)(f"{what}: {failure.args[0]}", remedy=failure.remedy) from None
    if not json:
        _print_safety(last)
        print(f"{render.escape_unprintable(done)} (after {format_duration(time.monotonic() - began_s)})")


def _print_safety(last: "pb.Progress | None") -> None:
    """Print which checkpoints are safe, if the daemon has said it."""
    if last is None or not last.HasField("safety"):
        return
    from ckptfs.series.urgency import list_safety_lines

    for line in list_safety_lines(last.safety):
        print(render.escape_unprintable(line))


def _print_each(messages: Iterator["pb.Progress"]) -> Iterator["pb.Progress"]:
    """Print each message as a line of JSON, and pass it on."""
    for message in messages:
        render.print_json(render.message_to_dict(message), lines=True)
        yield message


def follow_verification(messages: Iterator["pb.VerifyProgress"], what: str) -> VerifyJson:
    """Follow a verification to its end; return files, bytes and the finding of each copy."""
    findings: list[Any] = []
    last: pb.VerifyProgress | None = None
    with ProgressBar(f"verifying {what}") as bar:
        for last in messages:
            findings.extend(render.message_to_dict(finding) for finding in last.findings)
            words = f"{last.files} of {format_count(last.files_total, 'file')}, {format_size(last.bytes)}"
            bar.update(max(0, last.files_total - last.files), words)
    return {"files": last.files if last else 0, "bytes": last.bytes if last else 0, "findings": findings, "formats": []}


def describe_write_back(status: "pb.Status") -> str:
    """Return the amount of pending write-back in words."""
    figures = status.write_back
    files = format_count(figures.dirty_files, "file")
    return f"{files} ({format_size(figures.dirty_bytes)}), {format_count(figures.changes, 'other change')}"


def describe_progress(progress: "pb.Progress") -> str:
    """Return what is left, and what blocks it."""
    words = [f"{format_count(progress.files_left, 'file')} ({format_size(progress.bytes_left)})"]
    if progress.changes_left:
        words.append(format_count(progress.changes_left, "other change"))
    text = ", ".join(words)
    return f"{text}; blocked: {progress.blocked_by}" if progress.blocked_by else text


class ProgressBar:
    """A progress bar. Its total is the largest amount that was ever left."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._most = 0
        self._progress: Any = None

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[words]}", markup=False))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=None, words="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, left: int, words: str) -> None:
        """Set the amount that is left, and the text."""
        self._most = max(self._most, left)
        if self._progress is not None:
            self._progress.update(self._task, total=self._most or None, completed=self._most - left, words=words)
