"""P3, P8: an open that fails half way leaves nothing half open."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import trio
from ckptfs_daemon.fuse.request import Request, get_errno
from ckptfs_daemon.mount.handlers import file_handlers
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.open_files.handle_ways import Reason
from ckptfs_daemon.mount.open_files.open_file import OpenFile
from ckptfs_daemon.mount.opening import open_attempt, tier_choice
from ckptfs_daemon.mount.opening.open_attempt import OpenAttempt
from ckptfs_daemon.mount.opening.open_request import OpenRequest
from local_node import Node
from loop_disk import mounted
from opener import Opener

from ckptfs import disk, limits
from ckptfs.catalog import contents, handles, inodes, mover_requests
from ckptfs.errors import Busy, ContentLost, TimedOut
from ckptfs.flow.reclaim import Reclaim
from ckptfs.model import ROOT, ContentState, Tier
from ckptfs.tiers import local_copies, transfer
from ckptfs.tiers.storage import TierStorage


def refuse_writers(monkeypatch: pytest.MonkeyPatch, meanwhile: Any = None) -> None:
    """Somebody else has a lease on every file, and does not give it up."""
    taken = TierStorage.open

    def leased(place: TierStorage, content: int, flags: int = os.O_RDONLY) -> int:
        if flags & os.O_RDWR:
            if meanwhile is not None:
                meanwhile()
            raise BlockingIOError
        return taken(place, content, flags)

    monkeypatch.setattr(TierStorage, "open", leased)
    monkeypatch.setattr(limits, "LEASE_WAIT_S", 0.0)


async def test_a_truncation_that_comes_too_late_leaves_the_file_closed(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    await opener.open(2, writer=False)
    with monkeypatch.context() as patch:
        refuse_writers(patch)
        with pytest.raises(TimedOut):
            await opener.open(4, writer=True)
    assert opener.node.state(opener.content) is ContentState.CLOSED, "its seal and its write-back would never come"
    opener.seal()
    assert opener.node.state(opener.content) is ContentState.SEALED and opener.node.data(opener.content) == b"sealed"
    assert [handle.is_writer for handle in handles.list_all(opener.node.db)] == [False]


async def test_a_truncation_whose_reader_leaves_meanwhile_leaves_the_old_content_to_be_dropped(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await opener.open(2, writer=False)
    with monkeypatch.context() as patch:
        refuse_writers(patch, lambda: opener.files.release(reader))
        await opener.open(4, writer=True)
    assert opener.node.state(opener.content) is ContentState.DOOMED, "nobody would ever give its room back"
    shown = opener.node.shown(opener.inode)
    assert shown is not None and opener.node.state(shown) is ContentState.OPEN


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
async def test_a_content_that_another_node_has_never_changes(opener: Opener, truncates: bool, is_read: bool) -> None:
    """P7: the file goes on in a new content, with the same backing file; so open descriptors stay valid."""
    opener.share()
    before = opener.node.path(opener.content).stat().st_ino
    if is_read:
        await opener.open(2, writer=False)
    await opener.open(4, writer=True, truncates=truncates)
    shown = opener.node.shown(opener.inode)
    assert shown not in (None, opener.content) and opener.node.state(shown) is ContentState.OPEN
    assert opener.node.state(opener.content) is ContentState.SEALED
    assert {handle.content for handle in handles.list_all(opener.node.db)} == {shown} == {opener.files.by_inode[opener.inode].content}
    if truncates and not is_read:
        assert opener.node.files(Tier.RAM) == {opener.content, shown}, "a truncation of a file that nobody has open begins with no bytes"
        return
    assert opener.node.files(Tier.RAM) == {shown} and opener.node.copies(opener.content) == {}
    assert opener.node.path(shown).stat().st_ino == before and opener.node.data(shown) == (b"" if truncates else b"sealed")


async def test_an_open_that_fails_twice_undoes_each_attempt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: a descriptor that is closed again may be that of another file meanwhile."""
    opener, closed = Opener(tmp_path), list[str]()
    close = os.close

    def count_close(fd: int) -> None:
        closed.append(os.readlink(f"/proc/self/fd/{fd}"))
        close(fd)

    attempt = OpenAttempt(opener.context, OpenRequest(opener.inode, True, True, Request(4, False, False)))
    monkeypatch.setattr(handles, "insert", Mock(side_effect=Busy("refused")))
    monkeypatch.setattr(os, "close", count_close)
    for _ in range(2):
        with pytest.raises(Busy):
            await attempt.run()
    assert len([path for path in closed if "/contents/" in path]) == 2
    assert opener.node.files(Tier.RAM) == {opener.content}


def test_a_pfs_without_hard_links_lends_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Node(tmp_path).tiers[Tier.PFS]
    os.close(storage.create(5))
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no hard links here")))
    local_copies.link_successor(storage, 5, 6)
    assert storage.exists(6) and not storage.exists(5)
    with pytest.raises(FileNotFoundError):
        local_copies.link_successor(storage, 5, 7)


async def test_two_writers_begin_one_successor(opener: Opener, caplog: pytest.LogCaptureFixture) -> None:
    """The second one finds that the first has taken the file, which is no error."""
    opener.share()
    async with trio.open_nursery() as nursery:
        for number in (2, 4):
            nursery.start_soon(lambda number=number: opener.open(number, writer=True, truncates=False))  # type: ignore[misc]
    shown = opener.node.shown(opener.inode)
    assert {handle.content for handle in handles.list_all(opener.node.db)} == {shown}
    assert [row[0] for row in opener.node.db.rows("SELECT id FROM content WHERE state = 0")] == [shown]
    assert "is missing" not in caplog.text


@pytest.mark.parametrize("where", ["link", "record"])
async def test_a_successor_that_cannot_begin_leaves_the_content_as_it_was(
    opener: Opener, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener.share()

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(*((TierStorage, "link", fail) if where == "link" else (contents, "record_successor", fail)))
        with pytest.raises(OSError, match="injected"):
            await opener.open(2, writer=True, truncates=False)
    assert opener.node.shown(opener.inode) == opener.content and opener.node.state(opener.content) is ContentState.SEALED
    Reclaim(opener.node.db, opener.node.tiers, opener.node.config, opener.node.told).step()
    assert opener.node.files(Tier.RAM) == {opener.content} and opener.node.data(opener.content) == b"sealed"


async def test_a_file_whose_name_another_node_took_away_is_looked_up_again(tmp_path: Path) -> None:
    """P7: between look-up and open. The kernel does that at ESTALE, and finds what has the name now."""
    opener = gone_elsewhere(tmp_path)
    opener.node.db.run("DELETE FROM copy")
    assert await opened(opener) == errno.ESTALE


async def test_a_file_whose_name_another_node_took_away_is_opened_while_its_bytes_are_here(tmp_path: Path) -> None:
    """P7: as it was looked up, in the same system call; not with the bytes of a former generation."""
    opener = gone_elsewhere(tmp_path)
    assert await opened(opener) == 0
    opener.node.db.run("DELETE FROM handle")
    opener.files.by_inode.clear()
    opener.node.db.run("UPDATE inode SET generation = generation + 1")
    assert await opened(opener) == errno.ESTALE


def gone_elsewhere(root: Path) -> Opener:
    """The file lost its last name, and its content is to be dropped."""
    opener = Opener(root)
    with opener.node.db.transaction() as db:
        db.run("UPDATE inode SET nlink = 0 WHERE id = ?", opener.inode)
        contents.set_state(db, opener.content, ContentState.DOOMED)
    return opener


async def opened(opener: Opener) -> int:
    """Open it for reading; 0, or the errno."""
    try:
        await opener.open(2, writer=False)
    except OSError as failure:
        return failure.errno or 0
    return 0


class Mover:
    """Answers the wants of a mount: with `code`, when the file came (`comes`) or did not."""

    def __init__(self, opener: Opener, code: int, *, comes: bool) -> None:
        self._opener, self._code, self._comes = opener, code, comes
        self._copies = opener.node.db.rows("SELECT * FROM copy")
        self.asked: list[str] = []
        opener.node.db.run("DELETE FROM copy")

    async def request(self, kind: str, inode: int, argument: str = "", **bounds: object) -> str:
        self.asked.append(kind)
        db = self._opener.node.db
        if self._comes:
            contents.set_state(db, self._opener.content, ContentState.SEALED)
            for row in self._copies:
                db.run(f"INSERT INTO copy VALUES ({','.join('?' * len(row))})", *row)
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return mover_requests.FETCHED


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.PFS])
async def test_an_island_writes_no_content_in_place_unless_the_pfs_has_it(opener: Opener, tier: Tier) -> None:
    """P7: others may make a set of it. P5: on a PFS without links, a crash between two names would cost the only one."""
    opener.context.shared_namespace = SimpleNamespace(is_shared=True, is_disconnected=True)
    if tier is Tier.PFS:
        storage = opener.node.tiers[tier]
        with os.fdopen(storage.create(opener.content), "wb") as file:
            file.write(b"sealed")
        opener.node.db.run("UPDATE copy SET tier = 'pfs' WHERE content = ?", opener.content)
    await opener.open(2, writer=True, truncates=False)
    shown = opener.node.shown(opener.inode)
    assert (shown == opener.content) is (tier is Tier.PFS)
    assert shown is not None and opener.node.state(shown) is ContentState.OPEN and opener.node.data(shown, tier) == b"sealed"


@pytest.mark.parametrize(
    ("code", "comes", "ends"), [(0, True, 0), (errno.EIO, True, 0), (errno.EIO, False, errno.EIO), (errno.ENOSPC, False, errno.ENOSPC)]
)
def test_what_is_lost_here_is_looked_for_elsewhere_once(opener: Opener, code: int, comes: bool, ends: int) -> None:
    """P9: on the node that wrote it too; and whoever opens it gets an answer."""
    mover = Mover(opener, code, comes=comes)
    opener.context.shared_namespace, opener.context.mover_client = SimpleNamespace(is_shared=True, is_disconnected=False), mover
    contents.set_state(opener.node.db, opener.content, ContentState.LOST)

    async def scenario() -> int:
        try:
            await opener.open(2, writer=False)
        except (OSError, ContentLost) as failure:
            return failure.errno or 0
        return 0

    assert trio.run(scenario) == ends and mover.asked == [mover_requests.FETCH]


async def test_a_file_that_is_replaced_on_the_pfs_after_the_mover_looked_is_asked_for_again(opener: Opener) -> None:
    """P7: the answer was that the PFS's own file may be read. Another file is there by now, and ESTALE would reach the program."""
    mover = Mover(opener, 0, comes=True)
    answers = [mover_requests.DIRECT]

    async def request(*_: object, **__: object) -> str:
        return answers.pop() if answers else await mover.request(mover_requests.FETCH, opener.inode)

    opener.context.config, opener.context.mover_client = opener.node.config, SimpleNamespace(request=request)
    assert await opened(opener) == 0 and mover.asked == [mover_requests.FETCH]


def test_a_read_never_says_estale(opener: Opener) -> None:
    """P8: the mount process has restarted, and its file on the PFS was replaced meanwhile. The kernel walks again only for paths."""
    opener.context.config = opener.node.config
    file = OpenFile(opener.inode, None, None, -1)
    with pytest.raises(ContentLost):
        trio.run(FileHandlers(opener.context, cast(Any, None)).ensure_open, file)
    expected = {"open": errno.ESTALE, "lookup": errno.ESTALE, "read": errno.EIO, "fsync": errno.EIO, "readdir": errno.ENOENT}
    assert {where: get_errno(OSError(errno.ESTALE, "stale"), where) for where in expected} == expected


@pytest.mark.parametrize(
    ("uid", "mode", "flags", "expected"),
    [
        (0, 0o000, os.O_RDWR, 0), (7, 0o600, os.O_RDWR, 0), (7, 0o400, os.O_RDONLY, 0), (7, 0o400, os.O_WRONLY, errno.ESTALE),
        (8, 0o666, os.O_RDONLY, errno.ESTALE), (0, 0o600, os.O_RDWR | os.O_EXCL, errno.EEXIST),
    ],
)  # fmt: skip
def test_a_create_that_meets_the_file_of_another_node_opens_it(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, uid: int, mode: int, flags: int, expected: int
) -> None:
    """P2: at ESTALE the kernel looks the name up once more, checks permissions and opens the file; a second one reaches the program."""
    opener.node.db.run("UPDATE inode SET uid = 7, mode = ? WHERE id = ?", 0o100000 | mode, opener.inode)

    async def met(*_: object, **__: object) -> None:
        raise FileExistsError(errno.EEXIST, "another node made it")

    async def nothing(_: Request) -> None:
        return None

    context = SimpleNamespace(
        **vars(opener.context), build_reply=lambda inode: inode, get_inode=lambda number: inodes.get(opener.node.db, number)
    )
    monkeypatch.setattr(file_handlers, "get_current_request", lambda: Request(9, False, False))
    names = FileHandlers(cast(Any, context), cast(Any, SimpleNamespace(commit_shared=met, get_replayed_reply=nothing)))

    async def create() -> int:
        try:
            opened, found = await names.create(ROOT, b"file", 0o644, os.O_CREAT | flags, cast(Any, SimpleNamespace(uid=uid, gid=0, pid=1)))
        except OSError as failure:
            return failure.errno or 0
        return 0 if found.id == opener.inode and opened.fh in opener.files.by_handle else -1

    assert trio.run(create) == expected


@pytest.mark.root
async def test_old_bytes_that_are_shared_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: the kernel writes without asking. A write over a block that the history shares takes a new one."""
    needed = []

    def find_reason(_: object, storage: TierStorage, expected_bytes: int, *__: object) -> Reason:
        needed.append(expected_bytes)
        return Reason.DATA_PATH

    monkeypatch.setattr(tier_choice, "find_buffered_reason", find_reason)
    with mounted("xfs", tmp_path) as place:
        opener = Opener(tmp_path / "node")
        node = Node(place / "node")
        content = node.make(b"file", os.urandom(limits.MIB), tier=Tier.NVME)
        opener.use(node)
        opener.seal()
        storage = node.tiers[Tier.NVME]
        with disk.closing(storage.open(content)) as fd:
            os.close(local_copies.copy_open(fd, storage, content + 1, transfer.read(fd, label="seal")[:2]))
        await opener.open(4, writer=True, truncates=False)
    assert {*needed} == {limits.MIB}


@pytest.mark.parametrize("is_written_meanwhile", [False, True])
async def test_a_file_on_nvme_gets_the_times_of_its_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written_meanwhile: bool
) -> None:  # fmt: skip
    """P2: before it is open. That happens in a thread; a program that writes the file meanwhile has set its times."""
    opener, node = Opener(tmp_path / "node"), Node(tmp_path / "other")
    content = node.make(b"file", b"bytes", tier=Tier.NVME)
    opener.use(node)
    opener.seal()
    node.db.change("UPDATE inode SET atime_ns = 5, mtime_ns = 7 WHERE id = ?", opener.inode)
    storage = node.tiers[Tier.NVME]

    async def run_in_thread(_: Tier, act: Callable[[], None]) -> None:
        if is_written_meanwhile:
            storage.set_times(content, 8, 9)
        act()

    monkeypatch.setattr(open_attempt, "run_in_thread", run_in_thread)
    await opener.open(2, writer=False)
    status = storage.stat(content)
    assert status is not None and (status.st_atime_ns, status.st_mtime_ns) == ((8, 9) if is_written_meanwhile else (5, 7))
