"""P1: a disconnected node changes what is its own. What others wrote last it reads and removes; to rename or replace it, it waits."""

import errno
import stat
from collections.abc import Awaitable, Callable

import pytest
import trio
from shared_catalogs import Node, async_tests, play_on_nodes, reconnect, settled

from ckptfs import limits
from ckptfs.catalog import contents, namespace, summary
from ckptfs.model import Tier

two_nodes = async_tests(play_on_nodes)
Change = Callable[[Node], Awaitable[object]]


async def write(node: Node, path: str, size: int) -> int:
    """Open, write and close an existing file; its content."""
    inode = (await node.stat(path)).id
    with node.db.transaction():
        content = contents.insert_content(node.db, inode, Tier.RAM)
    with node.db.transaction():
        contents.mark_closed(node.db, inode, content, size, 1, 2)
    await node.sharing.wait_published()
    return content


async def prepare(a: Node, b: Node) -> None:
    """Files and directories of node a, and of node b; b knows all and is cut off."""
    await a.build("theirs", "theirs.dir/", "written", "into/")
    await b.build("own", "own.dir/", "own.dir/f", "taken")
    await write(b, "written", 7)
    await a.stat("taken")
    await write(a, "taken", 8)
    for path in ("theirs", "theirs.dir", "written", "into", "own", "own.dir", "taken"):
        await b.stat(path)
    b.cut(True)
    await b.make("new")
    await b.mkdir("new.dir")


ALLOWED: dict[str, Change] = {
    "a new file over its own": lambda b: b.rename("new", "own"),
    "its own under a new name": lambda b: b.rename("own", "elsewhere"),
    "its own into a directory of others": lambda b: b.rename("own", "into/own"),
    "what it wrote last": lambda b: b.rename("written", "elsewhere"),
    "over what it wrote last": lambda b: b.rename("new", "written"),
    "its own directory under a new name": lambda b: b.rename("own.dir", "elsewhere"),
    "a new directory to anywhere": lambda b: b.rename("new.dir", "into/elsewhere"),
    "two new ones exchanged": lambda b: b.rename("new", "new.dir", namespace.EXCHANGE),
    "a second name": lambda b: b.link("theirs", "elsewhere"),
    "a mode": lambda b: b.set("theirs", mode=0o600),
    "a removal": lambda b: b.unlink("theirs"),
    "a removal of a directory": lambda b: b.rmdir("theirs.dir"),
}
REFUSED: dict[str, Change] = {
    "what others made": lambda b: b.rename("theirs", "elsewhere"),
    "over what others made": lambda b: b.rename("new", "theirs"),
    "what others wrote last": lambda b: b.rename("taken", "elsewhere"),
    "over what others wrote last": lambda b: b.rename("new", "taken"),
    "a directory of others": lambda b: b.rename("theirs.dir", "elsewhere"),
    "over a directory": lambda b: b.rename("new.dir", "theirs.dir"),
    "its own directory into another one": lambda b: b.rename("own.dir", "into/own.dir"),
    "an exchange of what others know": lambda b: b.rename("own", "written", namespace.EXCHANGE),
}


@pytest.mark.parametrize("change", ALLOWED.values(), ids=list(ALLOWED))
@two_nodes
async def test_what_is_its_own_changes_at_once_and_everywhere_after_the_return(a: Node, b: Node, change: Change) -> None:
    await prepare(a, b)
    start = trio.current_time()
    await change(b)
    assert trio.current_time() == start and b.sharing.is_disconnected
    here = await b.tree()
    await reconnect(a, b)
    assert await a.tree() == here


@pytest.mark.parametrize("change", REFUSED.values(), ids=list(REFUSED))
@two_nodes
async def test_what_is_not_its_own_waits_for_the_store(a: Node, b: Node, change: Change) -> None:
    await prepare(a, b)
    start, here = trio.current_time(), await b.tree()
    with pytest.raises(BlockingIOError) as refused:
        await change(b)
    assert refused.value.errno == errno.EAGAIN
    assert 0 < trio.current_time() - start < limits.DISCONNECTED_WAIT_S + 1 and await b.tree() == here
    async with trio.open_nursery() as nursery:
        nursery.start_soon(change, b)
        await trio.sleep(limits.DISCONNECTED_WAIT_S / 5)
        b.cut(False)
    assert not b.sharing.is_disconnected, "it was done as soon as the store was back"


@pytest.mark.parametrize("meanwhile", ["written", "replaced", "renamed", "dressed"])
@two_nodes
async def test_a_removal_counts_only_if_nobody_changed_it_meanwhile(a: Node, b: Node, meanwhile: str) -> None:
    """Rank 0's rotation must not fail, and must not remove what is newer."""
    file = (await a.make("old")).id
    await b.stat("old")
    b.cut(True)
    await b.unlink("old")
    match meanwhile:
        case "written":
            await write(a, "old", 9)
        case "replaced":
            await a.make("newer")
            file = (await a.stat("newer")).id
            await a.rename("newer", "old")
        case "renamed":
            await a.rename("old", "other")
        case "dressed":
            await a.set("old", mode=0o600)
    await reconnect(a, b)
    expected = {"written": {b"/old": file}, "replaced": {b"/old": file}, "renamed": {b"/other": file}, "dressed": {}}[meanwhile]
    for node in (a, b):
        assert {path: inode for path, (inode, _, _, _) in (await node.tree()).items()} == expected


@two_nodes
async def test_a_directory_that_others_changed_meanwhile_is_theirs(a: Node, b: Node) -> None:
    """Both give it a new name: it has the one of the others, with what was made in it here."""
    await b.mkdir("d")
    await a.stat("d")
    b.cut(True)
    await b.rename("d", "here")
    await b.make("here/f")
    await a.rename("d", "there")
    await reconnect(a, b)
    assert await a.names() == [b"there"] and await a.names("there") == [b"f"]
    assert stat.S_ISDIR((await b.stat("there")).mode)


@two_nodes
async def test_the_status_says_that_the_store_is_full(a: Node, b: Node) -> None:
    """P1: also of a store that was away first. When it has room again, all is published."""

    async def shows(words: str) -> None:
        with trio.fail_after(limits.STORE_PROBE_S_MAX * 10):
            while not any(value["what"].startswith(words) for _, value, _ in summary.list_troubles(b.db)):
                await trio.sleep(0.1)

    b.cut(True)
    await b.make("first")
    await shows("etcd does not answer")
    b.store.etcd.is_full = True
    b.cut(False)
    await shows("etcd is full")
    await b.make("second")
    b.store.etcd.is_full = False
    await settled([a, b])  # The other node may have met the full store, too.
    assert summary.list_troubles(b.db) == [] and await a.names() == [b"first", b"second"]
