"""Following what takes a while: bars on a terminal's stderr, silence elsewhere, and figures that are shown again and again."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ckptfs_client import show
from ckptfs_client.client import Client
from ckptfs_client.failures import ClientError, NoMount, NotInTime
from ckptfs_client.mounts import Mount

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

WATCH_EVERY_S = 1.0


def statuses(chosen: Iterable[Mount]) -> list["pb.Status"]:
    """The status of each mount. Raises NoMount for the first that does not answer, once the others have."""
    answers, silent = [], None
    for mount in chosen:
        with Client(mount) as client:
            try:
                answers.append(client.status())
            except NoMount as failure:
                silent = failure
    if silent is not None and not answers:
        raise silent
    if silent is not None:
        print(f"ckptfs: {silent}", file=sys.stderr)
    return answers


def watched(chosen: list[Mount], *, json: bool) -> None:
    """Show the status every second, until interrupted."""
    clients = [Client(mount) for mount in chosen]
    if json:
        while True:
            for client in clients:
                show.emit(show.plain(client.status()), lines=True)
            time.sleep(WATCH_EVERY_S)
    from rich.console import Group
    from rich.live import Live

    with Live(console=show.console(), auto_refresh=False) as live:
        while True:
            live.update(Group(*(show.status(client.status()) for client in clients)), refresh=True)
            time.sleep(WATCH_EVERY_S)


def followed(messages: Iterator["pb.Progress"], what: str, *, json: bool = False) -> None:
    """Follow a wait or a drain to its end. Raises NotInTime, which then says what is left and what holds it up."""
    last: pb.Progress | None = None
    if json:
        messages = _emitted(messages)
    try:
        with Bar(what) as bar:
            for last in messages:
                bar.show(last.bytes_left, _words(last))
    except NotInTime as failure:
        left = f"; left: {_words(last)}" if last is not None else ""
        raise NotInTime(f"{what}: {failure.args[0]}{left}", remedy=failure.remedy or (last.remedy if last is not None else "")) from None
    except ClientError as failure:
        raise type(failure)(f"{what}: {failure.args[0]}", remedy=failure.remedy) from None


def _emitted(messages: Iterator["pb.Progress"]) -> Iterator["pb.Progress"]:
    """The same messages, each printed as a line of JSON on its way."""
    for message in messages:
        show.emit(show.plain(message), lines=True)
        yield message


def verified(messages: Iterator["pb.VerifyProgress"], what: str) -> dict[str, Any]:
    """Follow a verification to its end: files, bytes, and what was found of each copy."""
    findings: list[Any] = []
    last: pb.VerifyProgress | None = None
    with Bar(f"verifying {what}") as bar:
        for last in messages:
            findings.extend(show.plain(finding) for finding in last.findings)
            words = f"{last.files} of {show.counted(last.files_total, 'file')}, {show.size(last.bytes)}"
            bar.show(max(0, last.files_total - last.files), words)
    return {"files": last.files if last else 0, "bytes": last.bytes if last else 0, "findings": findings}


def behind(status: "pb.Status") -> str:
    """What the PFS lacks, in words."""
    figures = status.write_back
    files = show.counted(figures.dirty_files, "file")
    return f"{files} ({show.size(figures.dirty_bytes)}), {show.counted(figures.changes, 'other change')}"


def _words(progress: "pb.Progress") -> str:
    words = [f"{show.counted(progress.files_left, 'file')} ({show.size(progress.bytes_left)})"]
    if progress.changes_left:
        words.append(show.counted(progress.changes_left, "other change"))
    text = ", ".join(words)
    return f"{text}; held up: {progress.obstacle}" if progress.obstacle else text


class Bar:
    """A progress bar whose whole is the largest amount that was ever left. Only on a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._most = 0
        self._progress: Any = None

    def __enter__(self) -> "Bar":
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

    def show(self, left: int, words: str) -> None:
        """So much is left now."""
        self._most = max(self._most, left)
        if self._progress is not None:
            self._progress.update(self._task, total=self._most or None, completed=self._most - left, words=words)
