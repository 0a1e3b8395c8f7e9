"""P8: a full disk of the catalog does not end the mount process."""

import functools

import pytest
import trio
from ckptfs_daemon.mount.main import outlast
from ckptfs_daemon.mount.open_files.handle_ways import run_reports
from shared_catalogs import in_virtual_time

from ckptfs.catalog import summary
from ckptfs.errors import NoSpace


def test_a_report_that_finds_no_room_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    failures = [NoSpace("the disk of the state directory is full")] * 2

    def set_report(*report: object) -> None:
        if failures:
            raise failures.pop()
        made.append(report)

    monkeypatch.setattr(summary, "set_report", set_report)

    async def play() -> None:
        with trio.move_on_after(600):
            await outlast(functools.partial(run_reports, None, list))  # type: ignore[arg-type]

    in_virtual_time(play)
    assert made == [(None, summary.HANDLES_REPORT, {"ways": []})]
