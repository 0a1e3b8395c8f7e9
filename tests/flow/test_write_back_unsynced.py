"""P1, P3: a directory of the PFS that cannot be made durable holds up nobody else, and nothing in it counts as on the PFS."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from write_back_world import Mount, rest

from ckptfs.catalog import summary
from ckptfs.errors import TierUnavailable
from ckptfs.flow.recover import Recover
from ckptfs.flow.write_back import WriteBack
from ckptfs.model import ContentState, Level, Tier

pytestmark = pytest.mark.usefixtures("no_retries")


@pytest.fixture
def flow(mount: Mount) -> WriteBack:
    for name in (b"bad", b"good"):
        mount.mkdir(name)
    mount.settle()
    return mount.write_back()


@contextmanager
def unsynced(end: bytes = b"/bad") -> Iterator[list[bytes]]:
    """The paths of which fsync was called meanwhile. It fails for paths that end like this."""
    calls, original = [], os.fsync

    def fsync(fd: int) -> None:
        calls.append(os.readlink(b"/proc/self/fd/%d" % fd))
        if calls[-1].endswith(end):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield calls


def level(mount: Mount, path: bytes) -> Level:
    listed = summary.get_listed_file(mount.db, mount.number(path))
    assert listed is not None
    return listed.level


def test_others_go_on_and_its_files_do_not_count(mount: Mount, flow: WriteBack) -> None:
    with unsynced() as calls:
        for name in (b"bad/f", b"good/f", b"bad/g", b"top"):
            mount.put(name, name)
        rest(flow)
        mount.put(b"good/later", b"later")
        rest(flow)
        assert {level(mount, name) for name in (b"good/f", b"good/later", b"top")} == {Level.PFS}
        assert {level(mount, name) for name in (b"bad/f", b"bad/g")} == {Level.LOCAL}
        assert {trouble["path"] for trouble in mount.troubles()} == {"bad/f", "bad/g"}
        count = len(calls)
        rest(flow)
        assert len(calls) == count, "it is not tried again before its time"
        flow.retry_now()
        rest(flow)
        assert len(calls) > count and level(mount, b"bad/f") is Level.LOCAL
    flow.retry_now()
    mount.settle_exactly(flow)
    assert level(mount, b"bad/f") is Level.PFS and mount.troubles() == []


def test_what_is_below_a_directory_that_was_made_in_it_does_not_count(mount: Mount, flow: WriteBack) -> None:
    with unsynced():
        mount.mkdir(b"bad/new")
        mount.put(b"bad/new/f", b"data")
        mount.put(b"good/f", b"data")
        rest(flow)
        assert level(mount, b"bad/new/f") is Level.LOCAL and level(mount, b"good/f") is Level.PFS
    flow.retry_now()
    mount.settle_exactly(flow)
    assert level(mount, b"bad/new/f") is Level.PFS


def test_changes_of_names_go_on(mount: Mount, flow: WriteBack) -> None:
    for name in (b"bad/f", b"bad/gone", b"good/f"):
        mount.put(name, name)
    mount.settle(flow)
    with unsynced():
        mount.put(b"bad/f", b"new")
        mount.rename(b"bad/f", b"bad/renamed")
        mount.unlink(b"bad/gone")
        mount.put(b"bad/gone", b"again")
        mount.link(b"bad/renamed", b"good/linked")
        mount.rename(b"bad/gone", b"good/out")
        rest(flow)
        assert level(mount, b"bad/renamed") is Level.LOCAL
        flow = mount.write_back()  # The mover was killed.
        rest(flow)
        assert level(mount, b"bad/renamed") is Level.LOCAL
    flow.retry_now()
    mount.settle_exactly(flow)


def test_an_fsync_of_an_open_file_waits(mount: Mount, flow: WriteBack) -> None:
    """With fsync=pfs."""
    content = mount.put(b"bad/open", b"first", closed=False)
    with unsynced():
        mount.synced(content)
        rest(flow)
        assert summary.has_pending(mount.db, mount.number(b"bad/open"))
    flow.retry_now()
    mount.settle(flow)


def test_the_bytes_that_the_pfs_shows_are_used_when_nothing_else_is_left(mount: Mount, flow: WriteBack) -> None:
    content = mount.put(b"bad/f", b"data")
    with unsynced():
        rest(flow)
    mount.tiers[Tier.RAM].remove(content)
    Recover(mount.db, mount.tiers, mount.told).run()
    assert mount.state(content) is not ContentState.LOST
    assert level(mount, b"bad/f") is Level.PFS


def test_nothing_is_set_aside_if_the_top_cannot_be_synced(mount: Mount, flow: WriteBack) -> None:
    with unsynced(end=b"/pfs"):
        mount.put(b"top", b"data")
        with pytest.raises(TierUnavailable):
            rest(flow, failures_max=3)
        assert mount.troubles() == []
    mount.settle_exactly(flow)


def test_no_more_is_synced_than_before(mount: Mount, flow: WriteBack) -> None:
    """One file, one directory: one call for each."""
    with unsynced(end=b"nothing") as calls:
        mount.put(b"good/f", b"data")
        rest(flow)
    assert [os.path.basename(path) for path in calls if path.endswith(b"/good")] == [b"good"] and len(calls) == 2
