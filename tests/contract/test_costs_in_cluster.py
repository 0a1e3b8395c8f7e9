"""What a change in a cluster costs its node: statements of SQL, and round trips to the store."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.open_files.handle_ways import HandleWay, Way
from ckptfs_daemon.mount.open_files.open_file import OpenFile
from ckptfs_daemon.mount.open_files.open_file_table import OpenFileTable
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh
from shared_catalogs import Node, async_tests, play_on_nodes

from ckptfs.catalog import contents, inodes
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import INODE, SharedKey, decode_value
from ckptfs.config import Config
from ckptfs.model import ROOT, Tier
from ckptfs.tiers.storage import Tiers

two_nodes = async_tests(play_on_nodes)
FILES = 40


async def list_statements(node: Node, act: Callable[[], Awaitable[object]]) -> list[str]:
    found: list[str] = []
    node.db.connection.set_trace_callback(found.append)
    await act()
    node.db.connection.set_trace_callback(None)
    return found


async def count_reads(node: Node, act: Callable[[], Awaitable[object]]) -> int:
    before = node.sharing.counts["reads"]
    await act()
    return node.sharing.counts["reads"] - before


async def make_files(node: Node) -> tuple[int, list[int]]:
    directory = await node.mkdir("d")
    return directory.id, [(await node.make(f"d/f{number}")).id for number in range(FILES)]


@two_nodes
async def test_names_that_are_known_cost_nothing_when_their_directory_is_read(a: Node, b: Node) -> None:
    """The tracker of sets reads the directory of each file that was sealed or renamed, again and again."""
    directory, _ = await make_files(a)
    assert len(await list_statements(a, lambda: a.sharing.refresh_directory(directory))) <= 5
    await b.make("d/theirs")
    await b.unlink("d/f0")
    assert await a.names("d") == sorted([b"theirs", *(f"f{number}".encode() for number in range(1, FILES))])
    assert (await a.stat("d/theirs")).id


@two_nodes
async def test_a_directory_is_read_with_its_names(a: Node, b: Node) -> None:
    directory = await a.mkdir("d")
    await b.set("d", mode=0o700)
    assert await count_reads(a, lambda: a.sharing.refresh_directory(directory.id)) == 1
    assert inodes.get(a.db, directory.id).mode & 0o777 == 0o700


@two_nodes
async def test_a_known_name_whose_inode_was_forgotten_leads_to_it_again(a: Node, b: Node) -> None:
    directory, files = await make_files(a)
    await b.set("d/f3", mode=0o600)
    key_state.set_cached(a.db, SharedKey(INODE, files[3]), key_state.ABSENT)
    await a.sharing.refresh_directory(directory)
    assert inodes.get(a.db, files[3]).mode & 0o777 == 0o600


@two_nodes
async def test_a_value_is_decoded_only_if_it_may_lead_further(a: Node, b: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name leads to an inode, an inode to a content. The times of a directory lead nowhere."""
    directory, _ = await make_files(a)
    decoded: list[bytes | None] = []
    monkeypatch.setattr(key_state, "decode_value", lambda raw: decoded.append(raw) or decode_value(raw))
    await a.sharing.refresh_inode(directory)
    assert decoded and all(b'"mode"' in (raw or b"") for raw in decoded)


@two_nodes
async def test_the_tracker_of_sets_asks_for_many_files_at_once(a: Node, b: Node) -> None:
    """And not for names in directories that it must not read now."""
    directory, files = await make_files(a)
    context: Any = SimpleNamespace(db=a.db, shared_namespace=a.sharing, get_inode=lambda inode: inodes.get(a.db, inode))
    refresh = SetRefresh(context, reader=None)  # type: ignore[arg-type]
    await b.set("d/f3", mode=0o600)
    assert await count_reads(a, lambda: refresh.refresh_above(files, [])) <= 2 + len([directory, ROOT])
    assert inodes.get(a.db, files[3]).mode & 0o777 == 0o600
    assert await count_reads(a, lambda: refresh.refresh_above(files, [directory])) <= 2


@two_nodes
async def test_a_file_is_published_once_at_its_close(a: Node, b: Node, tmp_path: Path) -> None:
    """And again only if it was written after close(2), such as by another process that has the descriptor."""
    config = Config(name="n", mountpoint=tmp_path / "mnt", state=tmp_path, ram_bytes=1 << 20, nvme=None, pfs=None)
    tiers, bell = Tiers.from_config(config), SimpleNamespace(notify=lambda message: None)
    files = OpenFileTable(a.db, tiers, None, bell)  # type: ignore[arg-type]
    context: Any = SimpleNamespace(db=a.db, open_files=files, shared_namespace=a.sharing)
    for handle, last in enumerate([b"", b"late"], 1):
        inode = (await a.make(f"f{handle}")).id
        with a.db.transaction():
            content = contents.insert_content(a.db, inode, Tier.RAM)
        fd = tiers[Tier.RAM].create(content)
        file = OpenFile(inode, content, tiers[Tier.RAM], fd, is_writable=True)
        files.add_handle(file, handle, True, HandleWay(Way.BUFFERED))
        os.write(fd, b"saved")
        await FileHandlers(context, None).flush(handle)  # type: ignore[arg-type]
        closed_ns = a.db.value("SELECT closed_ns FROM inode WHERE id = ?", inode)
        os.write(fd, last)
        files.release(handle)
        files.commit_releases()
        assert key_state.is_dirty(a.db, SharedKey(INODE, inode)) is bool(last)
        assert (a.db.value("SELECT closed_ns FROM inode WHERE id = ?", inode) > closed_ns) is bool(last)
        await a.sharing.wait_published()
        assert (await b.stat(f"f{handle}")).size == len(b"saved" + last)
