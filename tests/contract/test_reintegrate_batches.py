"""P1: what an island changed goes in several transactions when it is much. A name and the files that get or lose it go together."""

import stat
from functools import partial
from itertools import groupby

import pytest
import trio
from shared_catalogs import Node, async_tests, play_on_nodes, reconnect, replayed

from ckptfs import limits
from ckptfs.catalog import contents, namespace
from ckptfs.coherence import keys
from ckptfs.model import ROOT, Tier

OTHERS, MORE = ([f"{name}{number}" for number in range(limits.ETCD_OPERATIONS_MAX)] for name in ("other", "more"))
two_nodes = async_tests(partial(play_on_nodes, run=partial(replayed, 0)))


async def cut(node: Node) -> None:
    node.cut(True)
    while not node.sharing.is_disconnected:
        await node.sharing.refresh_name(1, b"anything")
        await trio.sleep(0.1)


@two_nodes
async def test_what_gives_way_to_a_later_file_loses_its_name_with_that(a: Node, b: Node) -> None:
    await cut(b)
    await b.make("best")
    await b.build(*OTHERS)
    theirs = await a.make("best")
    await b.grow("best", 2, 1)
    await reconnect(a, b)
    beside = await a.stat("best.ckptfs-conflict-n2-1")
    assert (beside.id, beside.nlink) == (theirs.id, 1)


@two_nodes
async def test_what_was_renamed_and_changed_much_later_is_called_what_it_is(a: Node, b: Node) -> None:
    await b.make("old")
    await cut(b)
    await b.rename("old", "new")
    await b.build(*OTHERS)
    await b.set("new", mode=0o600)
    await reconnect(a, b)
    assert (await a.stat("new")).nlink == 1


@two_nodes
async def test_a_removed_directory_keeps_its_name_until_it_can_go(a: Node, b: Node) -> None:
    """Another one had its name for a while, and then none."""
    await b.build("d/", "e/")
    await cut(b)
    await b.rmdir("d")
    await b.rename("e", "d")
    await b.rename("d", "e")
    await b.build(*OTHERS)
    await a.make("d/f")
    await reconnect(a, b)
    assert {*await a.tree()} >= {b"/d", b"/d/f", b"/e"}


@two_nodes
async def test_a_file_that_others_wrote_keeps_the_name_that_is_its_last(a: Node, b: Node) -> None:
    """Each side removed one of its two names."""
    await a.make("f")
    await a.link("f", "g")
    await b.names()
    await cut(b)
    await b.unlink("g")
    await a.unlink("f")
    await a.grow("g", 7, 1)
    await reconnect(a, b)
    assert ((await a.stat("g")).size, await a.names()) == (7, [b"g"])


@two_nodes
async def test_a_file_that_this_node_wrote_gets_the_name_back_that_was_its_last(a: Node, b: Node) -> None:
    """Each side removed one of its two names."""
    await b.make("f")
    await b.link("f", "g")
    await cut(b)
    await b.unlink("g")
    await b.grow("f", 7, 1)
    await a.unlink("f")
    await reconnect(a, b)
    assert ((await a.stat("f")).size, await a.names()) == (7, [b"f"])


@two_nodes
async def test_what_was_deleted_there_and_has_new_names_here_keeps_them_all(a: Node, b: Node) -> None:
    await b.make("old")
    await cut(b)
    await b.link("old", "early")
    await b.build(*OTHERS)
    await b.unlink("old")
    await b.build(*MORE)
    await b.link("early", "late")
    await a.make("theirs")
    await a.rename("theirs", "old")
    await reconnect(a, b)
    assert (await a.stat("early")).id == (await a.stat("late")).id != (await a.stat("old")).id


@two_nodes
async def test_a_file_that_loses_all_names_one_after_the_other_keeps_what_others_gave_it(a: Node, b: Node) -> None:
    await b.make("first")
    await b.link("first", "last")
    await cut(b)
    await b.unlink("first")
    await b.build(*OTHERS)
    await b.unlink("last")
    await a.link("last", "theirs")
    await reconnect(a, b)
    assert (await b.stat("theirs")).nlink == 1


@two_nodes
async def test_a_file_that_loses_one_name_here_and_one_there_is_gone(a: Node, b: Node) -> None:
    """Its last name goes in one transaction, the file in another one."""
    await b.build("first", *OTHERS)
    await b.link("first", "last")
    await cut(b)
    for name in ("first", *OTHERS, "last"):
        await b.unlink(name)
    await a.unlink("last")
    await reconnect(a, b)
    assert await a.names() == []


@two_nodes
async def test_nobody_sees_a_directory_under_two_names(a: Node, b: Node) -> None:
    """What has its former name by now is told much later."""
    moved = (await b.mkdir("old")).id
    await cut(b)
    await b.rename("old", "new")
    await b.build(*OTHERS)
    await b.make("old")
    await reconnect(a, b)
    names: dict[bytes, int] = {}
    for _, events in groupby(a.store.etcd.events_from(b"e/", b"e0", 0), key=lambda event: event.revision):
        names |= {event.key: (keys.decode_value(event.item.value if event.item else None) or {"child": 0})["child"] for event in events}
        assert list(names.values()).count(moved) == 1


@two_nodes
async def test_a_restored_file_is_published_with_a_name(a: Node, b: Node) -> None:
    """It was written early, and its name is told again when it turns out that it was deleted there."""
    kept = await b.make("name")
    await cut(b)
    await b.grow("name", 2, 2)
    await b.build(*OTHERS)
    await a.unlink("name")
    await a.mkdir("name")
    await reconnect(a, b)
    assert (await a.stat("name.ckptfs-conflict-n2-1")).id == kept.id


@pytest.mark.parametrize("are_directories", [False, True])
@pytest.mark.parametrize("renamed_first", [False, True])
@two_nodes
async def test_others_always_see_a_member_of_a_rotation(a: Node, b: Node, renamed_first: bool, are_directories: bool) -> None:
    """N2: a reader that finds none begins at zero."""

    async def save(node: Node, number: int) -> None:
        await (node.mkdir if are_directories else node.make)("tmp")
        await node.rename("tmp", f"step_{number}")

    async def remove(node: Node, number: int) -> None:
        name = f"step_{number}"
        if renamed_first:
            await node.rename(name, name := f"old_{number}")
        await (node.rmdir if are_directories else node.unlink)(name)

    await save(b, 1)
    await cut(b)
    await save(b, 2)
    await remove(b, 1)
    await b.build(*OTHERS)
    await save(b, 3)
    await remove(b, 2)
    await reconnect(a, b)
    steps: set[bytes] = set()
    for _, events in groupby(a.store.etcd.events_from(b"e/", b"e0", 0), key=lambda event: event.revision):
        had_steps = bool(steps)
        for event in (one for one in events if b"step_" in one.key):
            (steps.add if event.item else steps.discard)(event.key)
        assert steps or not had_steps
    assert steps


@pytest.mark.parametrize("filled", ["", "run", "run/step"])
@pytest.mark.parametrize("is_large", [False, True])
@two_nodes
async def test_a_directory_that_was_emptied_and_replaced_here_and_filled_there_keeps_its_name(
    a: Node, b: Node, filled: str, is_large: bool
) -> None:
    """P1: the return ends, and both directories are there: the one that others filled under its name, the other one beside it."""
    theirs = (await b.mkdir("run")).id
    await b.build("run/step/", "run/step/old")
    await cut(b)
    await b.build("new/", "new/ours", *(OTHERS if is_large else ()))
    for path in ("run/step/old", "run/step", "run"):
        await (b.unlink if path.endswith("old") else b.rmdir)(path)
    await b.rename("new", "run")
    if filled:
        await a.make(f"{filled}/theirs")
    await reconnect(a, b)
    found = await a.tree()
    assert b"/run.ckptfs-conflict-n2-1/ours" in found if filled else b"/run/ours" in found
    if filled:
        assert found[b"/run"][0] == theirs and f"/{filled}/theirs".encode() in found
    names: dict[bytes, int] = {}
    for _, events in groupby(a.store.etcd.events_from(b"e/", b"e0", 0), key=lambda event: event.revision):
        names |= {event.key: (keys.decode_value(event.item.value if event.item else None) or {"child": 0})["child"] for event in events}
        assert theirs in names.values() or not any(name.startswith(b"e/%016x/" % theirs) and names[name] for name in names)


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("way", ["renamed before", "renamed before many others", "at once"])
@two_nodes
async def test_a_directory_that_was_removed_here_keeps_its_name_if_others_filled_it(a: Node, b: Node, is_filled: bool, way: str) -> None:
    """At once: in one change of the catalog, as with a set of the history; the store applies it in two transactions."""
    step = (await b.mkdir("step")).id
    await b.make("step/old")
    await cut(b)
    if way == "at once":
        with b.db.transaction():
            namespace.unlink(b.db, step, b"old")
            namespace.rmdir(b.db, ROOT, b"step")
    else:
        await b.rename("step", "gone")
        await b.unlink("gone/old")
        await b.build(*(OTHERS if way.endswith("others") else ()))
        await b.rmdir("gone")
    if is_filled:
        await a.make("step/theirs")
    await reconnect(a, b)
    assert sorted({*await a.tree()} - {f"/{name}".encode() for name in OTHERS}) == ([b"/step", b"/step/theirs"] if is_filled else [])


@pytest.mark.parametrize("is_filled", [False, True])
@two_nodes
async def test_a_directory_that_others_deleted_takes_no_name_of_a_directory_that_they_filled(a: Node, b: Node, is_filled: bool) -> None:
    """P1: it was renamed over the other one when the store fell silent. What is in that stays within reach."""
    await b.build("tmp/", "step/")
    await cut(b)
    with b.db.transaction():
        namespace.rename(b.db, ROOT, b"tmp", ROOT, b"step")
    await a.rmdir("tmp")
    if is_filled:
        await a.make("step/theirs")
    await reconnect(a, b)
    assert {*await a.tree()} == ({b"/step", b"/step/theirs", b"/step.ckptfs-conflict-n2-1"} if is_filled else {b"/step"})


@two_nodes
async def test_a_name_in_a_new_directory_is_never_seen_without_it(a: Node, b: Node) -> None:
    """The mark of the directory is that of its last change."""
    await cut(b)
    await b.build("tmp/", "tmp/e/", "tmp/e/f", *OTHERS)
    await b.rename("tmp/e", "tmp/d")
    await b.build(*MORE)
    await b.rename("tmp", "d")
    for path in ("d", "d/d"):
        await b.set(path, mode=stat.S_IFDIR | 0o700)
    await reconnect(a, b)
    seen: set[bytes] = set()
    for _, events in groupby(a.store.etcd.events_from(b"e/", b"j", 0), key=lambda event: event.revision):
        seen |= {event.key for event in events}
        assert {b"i/" + key[2:18] for key in seen if key.startswith(b"e/")} <= seen


@two_nodes
async def test_a_file_is_never_seen_without_its_content(a: Node, b: Node) -> None:
    """P7: its seal, which is the last change of the content, comes much later than its close."""
    await cut(b)
    inode = (await b.make("f")).id
    with b.db.transaction():
        content = contents.insert_content(b.db, inode, Tier.RAM)
        contents.mark_closed(b.db, inode, content, 3, 1, 2)
    await b.build(*OTHERS)
    row = contents.get_content(b.db, content)
    assert row is not None
    contents.mark_sealed(b.db, [contents.SealResult(content, inode, row.change, Tier.RAM, 3, b"d" * 16, b"d" * 16)])
    await reconnect(a, b)
    first = [a.store.etcd.events_from(key, key + b"\0", 0)[0].revision for key in (b"c/%016x" % content, b"i/%016x" % inode)]
    assert first[0] <= first[1]


@two_nodes
async def test_what_others_put_into_a_directory_and_deleted_with_it_stays_deleted(a: Node, b: Node) -> None:
    """Between two transactions of a return, of which the first one took their name over."""
    await b.mkdir("d")
    await cut(b)
    await b.make("d/f")
    await a.make("d/f")
    await a.grow("d/f", 2, 2)
    commit_batch, is_deleted = b.sharing._commit_batch, False

    async def commit_and_delete() -> bool:
        nonlocal is_deleted
        is_answered = await commit_batch()
        if not is_deleted and b.sharing.counts["conflicts"]:
            is_deleted = True
            await a.unlink("d/f")
            await a.rmdir("d")
        return is_answered

    b.sharing._commit_batch = commit_and_delete  # type: ignore[method-assign]
    b.sharing.counts["conflicts"] = 0
    await reconnect(a, b)
    assert is_deleted and list(await a.tree()) == [b"/d", b"/d/f.ckptfs-conflict-n2-1"]


@two_nodes
async def test_a_removed_directory_whose_name_this_node_forgot_is_merged_with_its_successor(a: Node, b: Node) -> None:
    """As after processes that died: the rows are gone, and of the two keys in the store only one is known."""
    made = await b.mkdir("d")
    await cut(b)
    await b.rmdir("d")
    b.db.run("DELETE FROM inode WHERE id = ?", made.id)
    b.db.run("DELETE FROM cached_key WHERE kind = 'e' AND name = ?", b"d")
    await b.build("d/", "d/ours")
    await a.make("d/theirs")
    await reconnect(a, b)
    assert {*await a.tree()} == {b"/d", b"/d/ours", b"/d/theirs"}


@two_nodes
async def test_a_name_leads_to_a_directory_that_others_have_not_removed(a: Node, b: Node) -> None:
    """As after a process that died while its rename was in doubt: the former name is known to be gone, the new one is published again."""
    made = await b.mkdir("tmp")
    await cut(b)
    await b.rename("tmp", "d")
    for table in ("cached_key", "dirty_key"):
        b.db.run(f"DELETE FROM {table} WHERE kind = 'e' AND name = ?", b"tmp")
    await a.rmdir("tmp")
    await a.build("d/", "d/theirs")
    await reconnect(a, b)
    assert {*await a.tree()} == {b"/d", b"/d/theirs"} and (await a.stat("d")).id != made.id


@two_nodes
async def test_a_removed_file_without_a_known_name_that_others_wrote_stays_theirs(a: Node, b: Node) -> None:
    """Its name here is known to be gone, so there is no removal to be undone. The return ends all the same."""
    made = await b.make("f")
    await cut(b)
    await b.unlink("f")
    for table in ("cached_key", "dirty_key"):
        b.db.run(f"DELETE FROM {table} WHERE kind = 'e' AND name = ?", b"f")
    await a.rename("f", "g")
    await a.grow("g", 3, 15)
    await reconnect(a, b)
    assert list(await a.tree()) == [b"/g"] and (await b.stat("g")).id == made.id


@two_nodes
async def test_what_is_removed_during_a_return_goes_after_what_was_saved_before(a: Node, b: Node) -> None:
    """N2: a reader that finds none begins at zero. What is removed then has an earlier change that waits."""
    await b.make("step_1")
    await cut(b)
    await b.build(*OTHERS)
    await b.set("step_1", mode=stat.S_IFREG | 0o600)
    await b.build(*MORE, "step_2")
    commit_batch, is_removed = b.sharing._commit_batch, False

    async def commit_and_remove() -> bool:
        nonlocal is_removed
        is_answered = await commit_batch()
        if not is_removed and b.sharing.counts["commits"] > 1:
            is_removed = True
            await b.unlink("step_1")
        return is_answered

    b.sharing.counts["commits"] = 0
    b.sharing._commit_batch = commit_and_remove  # type: ignore[method-assign]
    await reconnect(a, b)
    steps = [event for event in a.store.etcd.events_from(b"e/", b"j", 0) if b"/step_" in event.key or event.item is None]
    assert is_removed and [event.item is None for event in steps] == [False, False, True, True]
    assert steps[2].revision == steps[3].revision


@two_nodes
async def test_a_file_that_comes_back_after_its_rows_went_has_its_name_beside_the_later_one(a: Node, b: Node) -> None:
    """This node replaced it before it lost the store, another one had written it meanwhile. Its row goes when the kernel forgets it."""
    made = await a.make("best")
    await a.grow("best", 3, 10)
    await cut(a)
    await a.grow("best", 7, 20)
    await b.build("best.tmp")
    await b.rename("best.tmp", "best")
    await cut(b)
    await b.build("best.tmp")
    await b.rename("best.tmp", "best")
    with b.db.transaction():
        namespace.delete_forgotten(b.db, [made.id])
    await reconnect(a)
    await reconnect(a, b)
    tree = await a.tree()
    assert b"/best" in tree and made.id in {inode for inode, *_ in tree.values()}
