"""P11: what the store holds is checked like what a peer says. A value that is none costs its own name or inode, and nothing else."""

import base64
import errno
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import trio
from ckptfs_daemon.control import cluster_status
from ckptfs_daemon.mount.cluster.shared_namespace import TROUBLE, UNSHARED_TROUBLE
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, async_tests, in_virtual_time, reconnect, running, settled, stored_tree

from ckptfs import limits
from ckptfs.catalog import identity, namespace, summary
from ckptfs.catalog.inodes import get
from ckptfs.clique import locations, membership
from ckptfs.coherence import key_state, keys, store_loss, unreadable_keys, value_checks
from ckptfs.coherence.keys import CONTENT, COPY, INODE, JOURNAL_ROW, LAST_COMMIT, NAME, PFS_NAME, PFS_STATE, TIMES, SharedKey
from ckptfs.errors import InvalidArgument, StoreTooNew
from ckptfs.flow.check_values import TROUBLE as TROUBLE_OF_VALUES
from ckptfs.flow.check_values import CheckValues
from ckptfs.limits import KIB
from ckptfs.model import ROOT
from ckptfs.protocol import control_pb2
from ckptfs.series.patterns import Series
from ckptfs.series.search import KnownSets, _Search
from ckptfs.store.kv import Delete, Get, Item, Outcome, Put


def play(root: Path, act: Callable[[Node, Node], Awaitable[None]]) -> None:
    """Two nodes on one store, which need not hold a tree in the end."""
    etcd = MemoryEtcd()
    nodes = [Node(root / str(number), number, MemoryStore(etcd)) for number in (1, 2)]
    in_virtual_time(lambda: running(nodes, lambda: act(*nodes)))


two_nodes = async_tests(play)
FILE = {
    "mode": 0o100644, "uid": 0, "gid": 0, "rdev": 0, "atime_ns": 1, "birth_ns": 1, "target": None, "content": None, "generation": 0,
    "parent": 0, "complete": 1, "names": [[1, "f"]], "size": 0, "mtime_ns": 1, "ctime_ns": 1,
}  # fmt: skip
MISSED = '{"content":%s,"generation":1,"mtime_ns":1,"node":1,"shown":0,"shows":null}'
BAD_FILES: list[dict[str, Any]] = [
    {"mode": "0644"}, {"uid": -1}, {"uid": 2**32 - 1}, {"gid": 2**32}, {"rdev": 2**32},
    {"uid = 7777, gid": 0}, {"names": [[1, "../../x"]]}, {"names": [[1, ".."]]}, {"names": [[1, "a\0"]]},
    {"names": "f"}, {"size": True}, {"size": 2**63}, {"content": 0}, {"xattrs": {"user.x": "no base64"}}, {"missed": "{"}, {"mode": 0o644},
    {"target": "a\0b"}, {"target": ""}, {"target": 4096 * "x"}, {"names": [[1, "f"], [1, "f"]]}, {"names": [[1, ".ckptfs.0a0a0a0a.1"]]},
    {"names": [[1, ".ckptfs"]]}, {"names": [[2, ".ckptfs.history"]]}, {"mode": 0o040755}, {"generation": 2**62 + 1},
    {"xattrs": {"user.a\0b": ""}}, {"xattrs": {"": ""}}, {"xattrs": {"security.capability": ""}}, {"xattrs": {"user." + 251 * "x": ""}},
    {"target": 7}, {"xattrs": {"user.x": "\xe9"}}, {"missed": "[" * 100_000}, {"missed": '{"content":7}'}, {"missed": MISSED % "[]"},
]  # fmt: skip
SAMPLES: dict[str, dict[str, Any]] = {
    NAME: {"child": 7, "type": 0o100000}, INODE: FILE, TIMES: {"mtime_ns": 1, "ctime_ns": 1},
    CONTENT: {"node": 1, "inode": 1, "generation": 1, "state": 2, "size": 1, "digest": 32 * "0", "closed_ns": 1},
    COPY: {"generation": 1, "digest": 32 * "0"}, LAST_COMMIT: {"deleted": []}, PFS_NAME: {"inode": 1}, PFS_STATE: {"names": [[1, "f"]]},
    JOURNAL_ROW: {"op": "content", "inode": 1, "mode": 1, "at_ns": 1},
}  # fmt: skip
NEVER: list[object] = [{"a": []}, [[]], [{}], [[[], "f"]], 1.5, float("inf"), float("nan"), 2**64, "\ud800", [[1, "\ud800"]]]
"""What no field of any kind holds."""


def put(node: Node, key: SharedKey, raw: bytes) -> None:
    assert MemoryStore(node.store.etcd).commit([], [Put(keys.encode_key(key), raw)]).succeeded


async def fails(act: Callable[[], Awaitable[object]]) -> int | None:
    try:
        await act()
    except (OSError, value_checks.ValueUnreadable) as failure:
        return failure.errno
    return 0


@pytest.mark.parametrize("fields", BAD_FILES, ids=str)
def test_only_known_fields_of_their_types_are_a_value(fields: dict[str, Any]) -> None:
    key = SharedKey(INODE, 9)
    assert value_checks.find_fault(key, keys.encode_fields(FILE)) == ""
    assert value_checks.find_fault(key, keys.encode_fields({**FILE, **fields})) != ""


@pytest.mark.parametrize("kind", value_checks.REQUIRED)
def test_a_field_of_a_wrong_type_is_a_fault_and_no_exception(kind: str) -> None:
    key = SharedKey(kind, 9)
    assert value_checks.find_fault(key, keys.encode_fields(SAMPLES[kind])) == ""
    for name in {**value_checks.REQUIRED[kind], **value_checks.OPTIONAL[kind], "unknown": None}:
        for held in NEVER:
            assert value_checks.find_fault(key, keys.encode_fields({**SAMPLES[kind], name: held})), (name, held)


ANY: list[object] = [
    None, 0, 1, -1, True, 2**63 - 1, 1 - 2**63, "", "x", 32 * "0", 0o040755, 0o120777, [], {}, [[1, "f"]], [[2**63 - 1, "f"], [1, "f"]],
    [None, None, None, None], [1, 1, 1, 1], [1, None], *([1, 1, 1, 1, ino, digest] for ino in (None, 1) for digest in (None, 32 * "0")),
]  # fmt: skip


@pytest.mark.parametrize("kind", value_checks.REQUIRED)
def test_what_is_a_value_can_be_written_to_a_catalog(tmp_path: Path, kind: str) -> None:
    node, key = Node(tmp_path, 1, MemoryStore(MemoryEtcd())), SharedKey(kind, 9, b"n" if keys.KINDS[kind].has_name else b"")
    values = [{**SAMPLES[kind], name: held} for name in {**value_checks.REQUIRED[kind], **value_checks.OPTIONAL[kind]} for held in ANY]
    good = [value for value in values if not value_checks.find_fault(key, keys.encode_fields(value))]
    assert len(good) > 1
    for value in good:
        with key_state.change_unmarked(node.db):
            keys.write_value(node.db, key, value)
            keys.get_value(node.db, key)


RECORDS: dict[str, dict[str, Any]] = {
    "ckptfs.series": {"origin": 7, "pattern": "step_*", "next": 3}, "ckptfs.rollback": {"number": 2, "at_ns": 1},
    "ckptfs.set": {
        "number": 1, "name": "step_1", "numbers": [10**30], "files": 1, "size": 1, "completed_ns": 1, "is_group": True,
        "producers": [["host", 1], ["host", 1, "\udcff", "", ""]],
    },
    "ckptfs.writer": {"node": 1, "content": None, "generation": 1}, "ckptfs.producer": {"host": "a", "pid": 1, "command": "\udcff"},
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_a_set_that_is_none_is_a_fault(name: str) -> None:
    """Whoever reads sets reads the records of all."""

    def find_fault(record: str) -> str:
        return value_checks.find_fault(
            SharedKey(INODE, 9), keys.encode_fields({**FILE, "xattrs": {name: base64.b64encode(record.encode()).decode()}})
        )

    assert find_fault(json.dumps(RECORDS[name])) == ""
    for record in ("", "7", "[]", "{}", "[" * 100_000, json.dumps({**RECORDS[name], "unknown": 1})):
        assert find_fault(record)
    for field in RECORDS[name]:
        for held in ({"a": []}, [[]], 1.5, "x" if not isinstance(RECORDS[name][field], str) else 7):
            assert find_fault(json.dumps({**RECORDS[name], field: held})), (field, held)


@pytest.mark.parametrize("fields", [{"op": "format"}, {"op": "unlink"}, {"op": "rename", "parent": 1, "name": "f"}], ids=str)
def test_a_change_that_write_back_does_not_know_is_no_value(fields: dict[str, Any]) -> None:
    assert value_checks.find_fault(SharedKey(JOURNAL_ROW, 9), keys.encode_fields({**SAMPLES[JOURNAL_ROW], **fields}))


def test_the_record_of_a_lost_state_is_readable() -> None:
    assert value_checks.find_fault(SharedKey(INODE, 9), keys.encode_fields({**FILE, "missed": MISSED % 7})) == ""


@pytest.mark.parametrize(
    "raw",
    [b"[" * 100_000, b"[1e999,1,1,1,1,1,1]", b"\xff", b'[1,"\\ud800","a",0,"d",0,"i"]', b'[1,"n","a",-1,"d",0,"i"]', b"[%d]" % 10**400],
)
def test_a_record_of_a_node_that_is_none_is_passed_over(raw: bytes) -> None:
    assert membership.decode_node(raw) is None
    member = control_pb2.Member()
    cluster_status._set_figures(member, raw)
    assert not member.has_figures
    store = MemoryStore(MemoryEtcd())
    store.commit([], [Put(membership.name_key("n"), raw)])
    with pytest.raises(InvalidArgument, match="number/n"):
        membership.register(store, "n", "catalog")


@pytest.mark.parametrize("raw", [b'{"version":1e999,"release":""}', b"[" * 100_000, b"\xff"])
def test_a_format_that_is_none_is_a_newer_one(raw: bytes) -> None:
    with pytest.raises(StoreTooNew, match="an unknown version"):
        value_checks.check_format((Item(value_checks.FORMAT_KEY, raw, 1, 1),), "0.3.0")


def test_a_field_name_never_becomes_sql(tmp_path: Path) -> None:
    """Nor what comes to the rows by another way than `parse_value`."""
    node = Node(tmp_path, 1, MemoryStore(MemoryEtcd()))
    put(node, SharedKey(INODE, 9), keys.encode_fields({**FILE, "uid = 7777, gid": 0}))
    assert not locations.load_files(node.store, [9])[9].is_readable
    with key_state.change_unmarked(node.db):
        keys.write_value(node.db, SharedKey(INODE, 9), {**FILE, "uid = 7777, gid": 0})
    assert get(node.db, 9).uid == 0


@pytest.mark.parametrize(
    ("parent", "name", "is_refused"),
    [
        (ROOT, b".ckptfs", True), (8, b".ckptfs", False), (ROOT, b".ckptfs.history", False), (8, b".ckptfs.history", True),
        (8, b".ckptfs.0a0a0a0a.1", True), (8, b".ckptfs.parked.1", True), (8, b"f.ckptfs-conflict-a-1", False), (8, b".ckptfsx", False),
    ],
)  # fmt: skip
def test_no_name_of_the_tree_is_one_that_write_back_uses_itself(parent: int, name: bytes, is_refused: bool) -> None:
    """Write-back of any node would remove such a file from the PFS as a leftover, or put it in place of its work directory."""
    row = {**SAMPLES[JOURNAL_ROW], "op": "make", "parent": parent, "name": name.decode()}
    move = {**row, "op": "rename", "name": "f", "new_parent": parent, "new_name": name.decode()}
    values = [(NAME, SAMPLES[NAME]), (INODE, {**FILE, "names": [[parent, name.decode()]]}), (JOURNAL_ROW, row), (JOURNAL_ROW, move)]
    for kind, value in values:
        key = SharedKey(kind, parent if kind == NAME else 9, name if kind == NAME else b"")
        assert ("reserved" in value_checks.find_fault(key, keys.encode_fields(value))) == is_refused, kind


def test_a_sealed_content_is_no_larger_than_what_is_ever_sealed() -> None:
    """A file on the PFS, or one whose writer passed the end by far, may be larger: it has no digest."""
    key, content = SharedKey(CONTENT, 9), {**SAMPLES[CONTENT], "size": limits.FILE_BYTES_MAX}
    assert not value_checks.find_fault(key, keys.encode_fields(content))
    assert value_checks.find_fault(key, keys.encode_fields({**content, "size": limits.FILE_BYTES_MAX + 1}))
    assert not value_checks.find_fault(key, keys.encode_fields({**content, "size": 2**62, "digest": None, "state": 1}))


@pytest.mark.parametrize("deleted", ["garbage", f"i/{2**63:016x}", "e/1/x", "\u0100"])
def test_a_chain_that_names_no_keys_does_not_end_the_next_process(tmp_path: Path, deleted: str) -> None:
    etcd = MemoryEtcd()
    node = Node(tmp_path, 1, MemoryStore(etcd))
    put(node, SharedKey(LAST_COMMIT, 1), keys.encode_fields({"sequence": 7, "deleted": [deleted]}))

    async def act() -> None:
        await node.make("f")
        assert not node.sharing.is_disconnected and b"/f" in stored_tree(etcd)

    in_virtual_time(lambda: running([node], act))


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"id":7}', b"[" * 100_000])
def test_an_epoch_that_is_none_makes_an_island_that_names_the_key(raw: bytes, tmp_path: Path) -> None:
    etcd = MemoryEtcd()
    MemoryStore(etcd).commit([], [Put(store_loss.EPOCH_KEY, raw), Put(b"taken/zz", b"\xff"), Put(b"taken/", b"")])
    node = Node(tmp_path, 1, MemoryStore(etcd))

    async def wait_island() -> None:
        while "the key epoch of etcd" not in str(summary.list_reports(node.db)):
            await trio.sleep(1)

    in_virtual_time(lambda: running([node], wait_island))


def test_numbers_that_are_none_are_passed_over() -> None:
    taken = [Item(b"taken/zz", b"\xff", 1, 1), Item(membership.taken_key(3), b"\xff", 1, 1)]
    assert membership.list_awaited(taken, [], b"e") == [3]
    assert "node \ufffd" in membership.find_number_conflict("n", 3, taken)
    store = MemoryStore(MemoryEtcd())
    store.commit([], [Put(membership.name_key("n"), b"\xff")])
    with pytest.raises(InvalidArgument, match="number/n"):
        membership.register(store, "n", "catalog")


@pytest.mark.parametrize("name", FILE)
def test_a_field_that_is_missing_is_noticed(name: str) -> None:
    value = {field: held for field, held in FILE.items() if field != name}
    assert name in value_checks.find_fault(SharedKey(INODE, 9), keys.encode_fields(value))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b'"x"', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("kind", value_checks.REQUIRED)
def test_what_is_no_object_is_no_value(kind: str, raw: bytes) -> None:
    assert value_checks.find_fault(SharedKey(kind, 9), raw)


@pytest.mark.parametrize("raw", [b"e/1/x", b"e/%016x/a/b" % 1, b"e/%016x/.." % 1, b"E/%016x" % 1, b"e", b"", b"e/%016x/" % 1 + 256 * b"a"])
def test_a_key_that_ckptfs_never_makes_is_no_key(raw: bytes) -> None:
    assert value_checks.parse_key(raw) is None


def test_a_newer_format_is_refused_by_both_versions() -> None:
    memory = MemoryStore()
    for expected in (True, False):
        (found,) = memory.read([Get(value_checks.FORMAT_KEY)]).results
        change = value_checks.check_format(found, "0.3.0")
        assert (change is not None) == expected
        if change is not None:
            memory.commit([change[0]], [change[1]])
    newer = {"version": value_checks.FORMAT_VERSION + 1, "release": "9.8.7"}
    memory.commit([], [Put(value_checks.FORMAT_KEY, json.dumps(newer).encode())])
    with pytest.raises(
        StoreTooNew, match=f"format {value_checks.FORMAT_VERSION + 1}.* 9.8.7.* 0.3.0 .*format {value_checks.FORMAT_VERSION}"
    ):
        value_checks.check_format(memory.read([Get(value_checks.FORMAT_KEY)]).results[0], "0.3.0")


def test_a_node_that_knows_less_than_the_store_says_so_and_takes_no_part(tmp_path: Path) -> None:
    """P1: it goes on alone, and the status names both versions."""
    etcd = MemoryEtcd()
    newer = {"version": value_checks.FORMAT_VERSION + 1, "release": "9.8.7"}
    MemoryStore(etcd).commit([], [Put(value_checks.FORMAT_KEY, json.dumps(newer).encode())])
    node = Node(tmp_path / "1", 1, MemoryStore(etcd))

    async def act() -> None:
        await node.make("f")
        assert node.sharing.is_disconnected and not MemoryStore(etcd).read([Get(b"e/", b"e0")]).results[0]
        ((_, report, _),) = summary.list_troubles(node.db, TROUBLE)
        assert "9.8.7" in report["what"] and f"format {value_checks.FORMAT_VERSION}" in report["what"]

    in_virtual_time(lambda: running([node], act))


@pytest.mark.parametrize("raw", [b"{", b'{"child": 7}', b'{"child": 7, "type": 32768, "uid = 0": 1}'])
@two_nodes
async def test_a_name_that_is_unreadable_answers_eio(a: Node, b: Node, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The node that never saw it, and the one that made it; the others of the directory go on."""
    await a.build("bad", "good")
    put(a, SharedKey(NAME, ROOT, b"bad"), raw)
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        assert await fails(lambda: a.stat("bad")) == await fails(lambda: b.stat("bad")) == errno.EIO
    assert await b.names() == [b"good"] and (await b.stat("good")).nlink == 1
    assert sum("bad" in record.getMessage() for record in caplog.records) == 1
    assert not a.sharing.is_disconnected and not b.sharing.is_disconnected
    put(a, SharedKey(NAME, ROOT, b"bad"), keys.encode_fields({"child": (await b.stat("good")).id, "type": 0o100000}))
    assert await fails(lambda: b.stat("bad")) == 0


def look(node: Node) -> dict[str, Any] | None:
    """What the status names after the mount and then the mover of a node have looked."""
    unreadable_keys.record_found(node.db)
    CheckValues(node.db, MemoryStore(node.store.etcd), "run").step()
    found = summary.list_troubles(node.db, TROUBLE_OF_VALUES)
    return found[0][1] if found else None


@two_nodes
async def test_the_status_names_what_is_unreadable_until_it_is_put_right(a: Node, b: Node) -> None:
    """The count, one key with its path, and what to do. Another bad value is found by the next look, a deleted key ends it."""
    await a.build("one", "two")
    made = await a.stat("one")
    before = MemoryStore(a.store.etcd).read([Get(keys.encode_key(SharedKey(INODE, made.id)))]).results[0][0].value
    assert look(a) is None
    put(a, SharedKey(INODE, made.id), b"garbage")
    put(a, SharedKey(NAME, ROOT, b"two"), b"{}")
    assert await fails(lambda: a.stat("one")) == await fails(lambda: a.stat("two")) == errno.EIO
    for _ in range(2):
        found = look(a)
        assert found is not None and found["what"].startswith("2 keys of etcd") and found["path"] in ("one", "two")
        assert f"/ckptfs/run/{'i/' if found['path'] == 'one' else 'e/'}" in found["what"] and "before revision" in found["remedy"]
    put(a, SharedKey(INODE, made.id), b"other garbage")
    MemoryStore(a.store.etcd).commit([], [Delete(keys.encode_key(SharedKey(NAME, ROOT, b"two")))])
    look(a)
    found = look(a)
    assert found is not None and found["what"].startswith("a key of etcd is") and found["path"] == "one"
    put(a, SharedKey(INODE, made.id), before)
    assert look(a) is None and (await b.stat("one")).id == made.id


@two_nodes
async def test_an_inode_that_is_unreadable_is_put_right_by_the_next_change(a: Node, b: Node) -> None:
    """It is not taken for deleted."""
    made = await a.make("f")
    await b.stat("f")
    put(a, SharedKey(INODE, made.id), b"garbage")
    assert await fails(lambda: a.stat("f")) == await fails(lambda: b.stat("f")) == errno.EIO
    with a.db.transaction() as db:
        db.run("UPDATE inode SET mode = ? WHERE id = ?", 0o100600, made.id)
    assert await a.sharing.wait_published()
    assert (await b.stat("f")).mode & 0o777 == 0o600


@two_nodes
async def test_what_a_disconnected_node_made_under_an_unreadable_name_is_shared(a: Node, b: Node) -> None:
    """P1."""
    await a.make("other")
    b.cut(True)
    await b.make("f")
    put(a, SharedKey(NAME, ROOT, b"f"), b"garbage")
    await reconnect(a, b)
    assert await a.names() == [b"f", b"other"]


@two_nodes
async def test_a_directory_with_a_key_that_is_none_can_be_read(a: Node, b: Node) -> None:
    await a.build("d/", "d/f")
    directory = (await a.stat("d")).id
    store = MemoryStore(a.store.etcd)
    store.commit([], [Put(b"e/%016x/a/b" % directory, b"{}")])
    assert await b.names("d") == [b"f"]
    await a.unlink("d/f")
    assert await fails(lambda: a.rmdir("d")) == errno.EAGAIN
    store.commit([], [Put(b"e/%016x/g" % directory, b"{}")])
    assert await b.names("d") == []


@two_nodes
async def test_a_name_that_leads_nowhere_answers_eio(a: Node, b: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Also under a name that both nodes know."""
    await a.build("was", "other")
    await b.stat("was")
    for name in (b"was", b"new"):
        put(a, SharedKey(NAME, ROOT, name), keys.encode_fields({"child": 9 << 40, "type": 0o100000}))
    caplog.set_level(logging.ERROR)
    for node in (a, b):
        for path in ("was", "new"):
            assert await fails(lambda node=node, path=path: node.stat(path)) == errno.EIO  # type: ignore[misc]
    assert [record.getMessage().count("no such inode") for record in caplog.records] == [1, 1]
    assert b"other" in await b.names()


@pytest.mark.parametrize("named_first", [False, True])
@two_nodes
async def test_directories_that_are_in_each_other_make_no_loop_in_a_catalog(a: Node, b: Node, named_first: bool) -> None:
    """Whoever walks up or down in a catalog comes to an end. What is outside goes on."""
    await a.build("one/", "one/two/", "f")
    one, two = (await a.stat("one")).id, (await a.stat("one/two")).id
    await b.tree()
    stored_one = MemoryStore(a.store.etcd).read([Get(keys.encode_key(SharedKey(INODE, one)))]).results[0][0]
    loop = [
        (SharedKey(INODE, one), {**(keys.decode_value(stored_one.value) or {}), "parent": two}),
        (SharedKey(NAME, two, b"loop"), {"child": one, "type": 0o040000}),
    ]
    for key, value in reversed(loop) if named_first else loop:
        put(a, key, keys.encode_fields(value))
        for node in (a, b):
            for path in ("one", "one/two", "one/two/loop", "one/two/loop/two"):
                await fails(lambda node=node, path=path: node.stat(path))  # type: ignore[misc]
            await node.sharing.refresh_inodes([one, two])
            await node.sharing.refresh_directory(two)
            assert not (namespace.is_inside(node.db, one, two) and namespace.is_inside(node.db, two, one))
            below = [*namespace.iterate_names_below(node.db, ROOT), *namespace.iterate_names_below(node.db, one)]
            assert len(below) < 9
    assert await b.stat("f")
    await b.make("g")
    assert await a.stat("g")


@pytest.mark.parametrize("walk", ["tree", "members", "way", "sets"])
@two_nodes
async def test_who_reads_directories_one_after_the_other_comes_to_an_end(a: Node, b: Node, walk: str) -> None:
    """D1: each read finds the next one in another place, for ever."""
    await a.build("step_1/", "step_1/part/")
    one, two = (await a.stat("step_1")).id, (await a.stat("step_1/part")).id
    file = (await a.make("step_1/f")).id
    store, bit = MemoryStore(a.store.etcd), identity.HISTORY_DIRECTORY_BIT if walk == "sets" else 0
    values = [keys.decode_value(store.read([Get(keys.encode_key(SharedKey(INODE, number)))]).results[0][0].value) for number in (one, two)]
    for number, value, parent, name in zip((one, two), values, (two, one), (b"loop", b"part"), strict=True):
        put(a, SharedKey(INODE, number | bit), keys.encode_fields({**(value or {}), "parent": parent | bit}))
        put(a, SharedKey(NAME, parent | bit, name), keys.encode_fields({"child": number | bit, "type": 0o040000}))
    context: Any = SimpleNamespace(
        db=b.db, shared_namespace=b.sharing, get_inode=lambda inode: replace(get(b.db, inode), is_imported=True),
        open_files=SimpleNamespace(is_open_for_writing=lambda inode: False),
    )  # fmt: skip
    reader = MountMemberReader(context, SimpleNamespace(refresh_inode=b.sharing.refresh_inode))  # type: ignore[arg-type]
    refresh, reads, read_soon = SetRefresh(context, reader), itertools.count(), b.store.read_soon

    def count_read(gets: Sequence[Get], **how: float) -> Future[Outcome]:
        assert next(reads) < 100
        return read_soon(gets, **how)

    with mock.patch.object(b.store, "read_soon", count_read):
        match walk:
            case "tree":
                assert [*await reader.list_tree(one)] == [b"f"]
            case "members":
                search: Any = _Search(Series((b"step_*",)), [], {}, reader, KnownSets())
                assert [*await search._list_below([(b"", one)])] == [b"f"]
            case "way":
                await refresh.refresh_way(two)
            case "sets":
                put(b, SharedKey(INODE, file), keys.encode_fields({**FILE, "names": [[one | bit, "f"]]}))
                await b.sharing.refresh_inode(file)
                assert await refresh.list_sets_of_file(file) == []


@pytest.mark.parametrize("key", [SharedKey(INODE, 9), SharedKey(NAME, 9, b"x")], ids=str)
def test_a_directory_that_is_in_itself_is_no_value(key: SharedKey) -> None:
    value = {**FILE, "mode": 0o040755, "parent": 9} if key.kind == INODE else {"child": 9, "type": 0o040000}
    assert "itself" in value_checks.find_fault(key, keys.encode_fields(value))


@two_nodes
async def test_a_change_that_the_store_refuses_for_ever_stays_here_and_the_others_go_on(a: Node, b: Node) -> None:
    """P1: no island; one line and the status name the path; the next change of the file is tried again."""
    etcd = a.store.etcd
    etcd.request_bytes_max = 8 * KIB
    await a.build("d/", "d/large", "d/small")
    large = (await a.stat("d/large")).id
    with a.db.transaction() as db:
        db.run("INSERT INTO xattr (inode, name, value) VALUES (?, ?, ?)", large, b"user.x", bytes(16 * KIB))
    for number in range(5):
        with a.db.transaction() as db:
            db.run("UPDATE inode SET mode = ? WHERE id = ?", 0o100600 + number, (await a.stat("d/small")).id)
    await settled([a])
    assert not a.sharing.is_disconnected
    await a.make("d/later")
    assert await b.names("d") == [b"large", b"later", b"small"]
    assert (await b.stat("d/small")).mode & 0o777 == 0o604
    ((_, report, _),) = summary.list_troubles(a.db, UNSHARED_TROUBLE)
    assert report["path"] == "d/large"
    etcd.request_bytes_max = 100 * KIB
    await a.set("d/large", mode=0o600)
    assert b.db.value("SELECT 1 FROM xattr WHERE inode = ?", (await b.stat("d/large")).id)
    assert await a.tree() == await b.tree() == stored_tree(etcd)


@two_nodes
async def test_a_store_that_permits_too_few_operations_forgets_no_change(a: Node, b: Node) -> None:
    """P1: the status names the option; what was changed meanwhile is shared when the operator has set it right."""
    etcd = a.store.etcd
    await a.build("d/", "d/before")
    etcd.operations_max = 3
    with a.db.transaction() as db:
        db.run("UPDATE inode SET mode = ? WHERE id = ?", 0o100600, (await a.stat("d/before")).id)
    await a.build("d/1", "d/2", "d/3")
    ((_, report, _),) = summary.list_troubles(a.db, TROUBLE)
    assert "--max-txn-ops=128" in report["remedy"] and "too few operations" in report["what"]
    assert summary.list_troubles(a.db, UNSHARED_TROUBLE) == []
    etcd.operations_max = limits.ETCD_TRANSACTION_MAX
    await settled([a, b])
    assert summary.list_troubles(a.db, TROUBLE) == []
    assert await b.names("d") == [b"1", b"2", b"3", b"before"] and (await b.stat("d/before")).mode & 0o777 == 0o600
    assert await a.tree() == await b.tree() == stored_tree(etcd)


@pytest.mark.parametrize("has_name", [True, False])
@two_nodes
async def test_a_name_that_leads_nowhere_keeps_no_disconnected_node_away(a: Node, b: Node, has_name: bool) -> None:
    """P1: the name is that of the node that returns."""
    await a.make("other")
    if has_name:
        await b.make("f")
    b.cut(True)
    if has_name:
        await b.unlink("f")
    await b.make("f")
    put(a, SharedKey(NAME, ROOT, b"f"), keys.encode_fields({"child": 8589934591, "type": 0o100000}))
    await reconnect(b)
    assert (await a.stat("f")).id == (await b.stat("f")).id
