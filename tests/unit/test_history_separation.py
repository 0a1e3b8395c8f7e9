"""A file of the history that is opened for writing: the history keeps the old bytes, the program writes on (T6, P7, P10)."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from local_node import in_process
from opener import Opener

from ckptfs import limits
from ckptfs.catalog import contents, copies, handles, history, inodes, namespace
from ckptfs.catalog.history import SetRecord
from ckptfs.errors import Busy, ContentLost, NoSpace
from ckptfs.flow.reclaim import Reclaim
from ckptfs.model import ROOT, ContentState, CopyState, Tier

LABELS = ["history:copied", "history:separated", "move:create", "move:copy:read", "move:copy:write", "move:check:read"]


def keep(opener: Opener, number: int = 1) -> int:
    """Make a set of the file."""
    db = opener.node.db
    with db.transaction():
        series = history.insert_series(db, ROOT, b"file*").directory
        directory = history.begin_set(db, series, SetRecord(number, b"file", (number,), 1, 6, 5, is_group=True))
        history.insert_link(db, opener.inode, directory, b"file")
        history.finish_set(db, directory)
    return directory


def read_set(opener: Opener, directory: int) -> bytes:
    ((_, inode),) = history.list_files(opener.node.db, directory)
    if inode.content is None:
        return b""
    ((tier, _),) = opener.node.copies(inode.content).items()
    return opener.node.data(inode.content, tier)


def write(opener: Opener, data: bytes) -> None:
    """Write as a program does that has the file open: to the backing file."""
    with open(opener.node.path(opener.node.shown(opener.inode) or 0), "r+b") as file:
        file.write(data)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
async def test_the_history_keeps_the_bytes_of_a_file_that_is_written(
    opener: Opener, truncates: bool, is_read: bool, is_shared: bool
) -> None:
    directory = keep(opener)
    if is_shared:
        opener.share()
    before = opener.node.path(opener.content).stat().st_ino
    if is_read:
        await opener.open(2, writer=False)
    writer = await opener.open(4, writer=True, truncates=truncates)
    write(opener, b"new")
    opener.files.release(writer)
    opener.files.commit_releases()
    opener.seal()
    assert read_set(opener, directory) == b"sealed"
    shown = opener.node.shown(opener.inode)
    assert shown is not None and opener.node.data(shown) == (b"new" if truncates else b"newled")
    file = inodes.get(opener.node.db, opener.inode)
    ((_, kept),) = history.list_files(opener.node.db, directory)
    assert (file.nlink, file.history, kept.nlink, kept.history) == (1, 0, 1, 1) and kept.id != file.id
    assert namespace.lookup(opener.node.db, ROOT, b"file").id == file.id, "the kernel and open programs know this number"
    if truncates and not is_read:
        assert kept.content == opener.content, "nothing is copied"
    else:
        assert opener.node.path(shown).stat().st_ino == before, "open handles keep their backing file"
    row = opener.node.row(kept.content or 0)
    assert row.state is ContentState.SEALED and row.inode == kept.id and row.digest is not None
    assert row.id in opener.node.files(Tier.RAM)


async def test_a_second_writer_and_a_second_set_separate_once_each(opener: Opener) -> None:
    first = keep(opener)
    async with trio.open_nursery() as nursery:
        for number in (2, 4):
            nursery.start_soon(lambda number=number: opener.open(number, writer=True, truncates=False))  # type: ignore[misc]
    write(opener, b"second")
    for handle in handles.list_all(opener.node.db):
        opener.files.release(handle.id)
    opener.files.commit_releases()
    opener.seal()
    second = keep(opener, 2)
    await opener.open(6, writer=True)
    write(opener, b"third")
    assert (read_set(opener, first), read_set(opener, second)) == (b"sealed", b"second")
    while Reclaim(opener.node.db, opener.node.tiers, opener.node.config, opener.node.told).step():
        pass
    assert len(opener.node.files(Tier.RAM)) == 3, "two sets and the file; no copy is left over"


async def test_a_file_that_has_fewer_names_in_the_history_than_are_counted_is_copied_once(opener: Opener) -> None:
    """P10: the count of an island may be wrong. What it cannot give away is not written in place, and the open ends."""
    directory = keep(opener)
    opener.node.db.change("UPDATE inode SET history = 3, nlink = 4 WHERE id = ?", opener.inode)
    with trio.fail_after(60):
        await opener.open(2, writer=True, truncates=False)
    write(opener, b"new")
    assert read_set(opener, directory) == b"sealed" and len(opener.node.files(Tier.RAM)) == 2


async def test_a_file_of_which_sets_are_made_all_the_time_is_busy(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: each separation copies the file. The open ends before that has filled the tier."""
    made = [keep(opener)]

    async def make_next_set() -> None:
        made.append(keep(opener, len(made) + 1))

    monkeypatch.setattr(opener.context.shared_namespace, "wait_published", make_next_set)
    monkeypatch.setattr(limits, "SHARED_TRIES_MAX", 3)
    with pytest.raises(Busy, match="sets of it are made"), trio.fail_after(60):
        await opener.open(2, writer=True, truncates=False)
    assert len(made) == 4 and {read_set(opener, one) for one in made} == {b"sealed"}


async def test_an_empty_file_is_separated_without_a_copy(opener: Opener) -> None:
    with opener.node.db.transaction():
        opener.inode = namespace.create(opener.node.db, ROOT, b"empty", 0o100644, uid=0, gid=0).id
    directory = keep(opener)
    await opener.open(2, writer=True, truncates=False)
    write(opener, b"new")
    assert read_set(opener, directory) == b""


async def test_a_file_that_is_not_sealed_yet_is_separated(opener: Opener) -> None:
    opener.content = opener.node.write(opener.inode, b"closed")
    directory = keep(opener)
    await opener.open(2, writer=True, truncates=False)
    write(opener, b"new")
    opener.seal()
    ((_, kept),) = history.list_files(opener.node.db, directory)
    assert read_set(opener, directory) == b"closed" and opener.node.row(kept.content or 0).state is ContentState.SEALED


@pytest.mark.parametrize("truncates", [False, True])
async def test_bytes_that_only_the_pfs_has_are_fetched_first(opener: Opener, truncates: bool) -> None:
    directory = keep(opener)
    opener.node.publish(opener.content)
    with opener.node.db.transaction():
        copies.delete_copy(opener.node.db, opener.content, Tier.RAM)
    asked: list[str] = []

    async def fetch(kind: str, inode: int, argument: str, **_: object) -> str:
        asked.append(kind)
        with opener.node.db.transaction() as db:
            db.run("INSERT INTO copy (content, tier, state) VALUES (?, 'ram', 1)", opener.content)
        return "here"

    opener.context.mover_client = SimpleNamespace(request=fetch)
    await opener.open(2, writer=True, truncates=truncates)
    write(opener, b"new")
    assert asked == ["fetch"] and read_set(opener, directory) == b"sealed"


async def test_no_room_for_the_copy_is_enospc_and_changes_nothing(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = keep(opener)
    for name in ("NO_SPACE_WAIT_S", "NO_SPACE_PENDING_WAIT_S", "NO_SPACE_LONGEST_WAIT_S"):
        monkeypatch.setattr(limits, name, 0.0)
    monkeypatch.setattr(type(opener.node.tiers), "choose_tier", Mock(side_effect=NoSpace("every tier is full")))
    with pytest.raises(NoSpace) as full:
        await opener.open(2, writer=True, truncates=False)
    assert full.value.errno == errno.ENOSPC and read_set(opener, directory) == b"sealed"
    assert inodes.get(opener.node.db, opener.inode).history == 1 and opener.node.state(opener.content) is ContentState.SEALED


async def test_a_full_tier_sends_the_copy_to_the_next_one(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = keep(opener)
    create = type(opener.node.tiers[Tier.RAM]).create

    def full(self: Any, content: int, flags: int = os.O_RDWR) -> int:
        if self.tier is Tier.RAM:
            raise OSError(errno.ENOSPC, "full")
        return cast(int, create(self, content, flags))

    monkeypatch.setattr(type(opener.node.tiers[Tier.RAM]), "create", full)
    await opener.open(2, writer=True, truncates=False)
    write(opener, b"new")
    ((_, kept),) = history.list_files(opener.node.db, directory)
    assert opener.node.copies(kept.content or 0) == {Tier.NVME: CopyState.GOOD} and read_set(opener, directory) == b"sealed"


async def test_a_bad_copy_is_not_kept_as_the_history(opener: Opener) -> None:
    """P4: the bytes are verified on the way."""
    keep(opener)
    opener.node.spoil(opener.content, Tier.RAM)
    with pytest.raises((ContentLost, OSError)):
        opener.context.mover_client = SimpleNamespace(request=_refuse)
        await opener.open(2, writer=True, truncates=False)
    assert opener.node.copies(opener.content) == {Tier.RAM: CopyState.QUARANTINED}


async def _refuse(*_: object, **__: object) -> str:
    raise OSError(errno.EIO, "no other copy")


OPEN = """
import trio
from opener import Opener
from ckptfs.catalog import contents
opener = Opener.__new__(Opener)
opener.use(node)
trio.run(lambda: opener.open(2, writer=False))
trio.run(lambda: opener.open(4, writer=True, truncates=False))
with open(node.path(node.shown(opener.inode)), "r+b") as file:
    file.write(b"new")
"""


@pytest.mark.crash
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("action", ["kill", "kill-after"])
async def test_dying_anywhere_tears_neither_the_file_nor_the_history(opener: Opener, tmp_path: Path, label: str, action: str) -> None:
    directory = keep(opener)
    code = in_process(tmp_path, OPEN, fault=f"{label}={action}")
    assert read_set(opener, directory) == b"sealed"
    assert code == -9 and opener.node.data(opener.node.shown(opener.inode) or 0) == b"sealed"
    await opener.files.start(is_resumed=True)
    leftover = [content for content in opener.node.files(Tier.RAM) if opener.node.state(content) is ContentState.OPEN]
    assert leftover == [], "what was copied for nothing goes"
    await opener.open(6, writer=True, truncates=False)
    write(opener, b"new")
    assert read_set(opener, directory) == b"sealed"


ACTIONS = st.sampled_from(["read", "write", "truncate", "bytes", "close", "seal", "keep", "share", "unlink"])


@settings(max_examples=15, deadline=None)
@given(st.lists(ACTIONS, max_size=10))
def test_every_set_shows_what_it_showed_when_it_was_made(actions: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        trio.run(_follow, Opener(Path(root)), actions)


async def _follow(opener: Opener, actions: list[str]) -> None:
    """Do what a program, the seal and the tracker of sets may do in any order."""
    db, opened, expected, number = opener.node.db, list[tuple[int, bool]](), dict[int, bytes](), 0

    async def act(action: str) -> None:
        if action in ("read", "write", "truncate") and len(opened) < 3:
            opened.append((await opener.open(2 * number, writer=action != "read", truncates=action == "truncate"), action != "read"))
        elif action == "bytes" and any(is_writer for _, is_writer in opened):
            write(opener, b"%d" % number)
        elif action == "close" and opened:
            opener.files.release(opened.pop(0)[0])
            opener.files.commit_releases()
        elif action == "seal":
            opener.seal()
        elif action == "keep" and not any(is_writer for _, is_writer in opened) and inodes.get(db, opener.inode).nlink:
            expected[keep(opener, number)] = opener.node.data(opener.node.shown(opener.inode) or 0)
        elif action == "share" and opener.node.state(opener.node.shown(opener.inode) or 0) is ContentState.SEALED:
            opener.content = opener.node.shown(opener.inode) or 0
            opener.share()
        elif action == "unlink" and number == len(actions):
            with db.transaction():
                namespace.unlink(db, ROOT, b"file")

    for action in actions:
        number += 1
        await act(action)
        for directory, data in expected.items():
            assert read_set(opener, directory) == data, (number, action)
        for _, inode in (found for directory in expected for found in history.list_files(db, directory)):
            assert inode.nlink >= inode.history >= 1 and contents.is_current(db, inode.id, inode.content or 0)
