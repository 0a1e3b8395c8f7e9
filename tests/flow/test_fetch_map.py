"""N3, P4, P7, G4: a running fetch publishes verified blocks only. The blocks that a reader waits for come first."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from clique_world import LocalCluster, Node, bring, fetch_of, make_cluster, replicated
from pfs_world import World, bytes_here, corrupt, lose_copies

from ckptfs import disk, limits
from ckptfs.catalog import mover_requests
from ckptfs.model import Content, Tier
from ckptfs.tiers import fetch_map
from ckptfs.tiers.fetch_map import FetchMap
from ckptfs.tiers.storage import TierStorage

BLOCK = limits.BLOCK_BYTES
BLOCKS = 6


class Reader:
    """What a mount process does while a content arrives, between one block and the next."""

    def __init__(
        self, storage: TierStorage, content: int, want: Callable[[], mover_requests.MoverRequest | None], data: bytes, first: list[int]
    ) -> None:
        self.order: list[int] = []
        self.counts: list[int] = []
        self._storage, self._content, self._want, self._data, self._first = storage, content, want, data, first

    def look(self) -> None:
        """Everything that is published is right; then ask for what is to come next."""
        found = FetchMap.find(self._storage.root, self._content)
        assert found is not None and found.is_published
        row = self._want()
        assert row is not None and (row.state, row.result) == (mover_requests.OPEN, mover_requests.READABLE)
        with os.fdopen(self._storage.open(self._content), "rb") as file:
            assert found.is_for(file.fileno())
            for number in range(found.block_count):
                if found.has_blocks(range(number, number + 1)) and number not in self.order:
                    self.order.append(number)
                if number in self.order:
                    file.seek(number * BLOCK)
                    assert file.read(BLOCK) == self._data[number * BLOCK : (number + 1) * BLOCK]
        self.counts.append(found.present_count)
        if self._first:
            asked = self._first.pop(0)
            found.request_blocks(range(asked, asked + 1))
            assert (asked in found.list_awaited()) is (asked not in self.order)


def arriving(node: Node, content: int, data: bytes, first: list[int], monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Fetch from peers while a reader looks at it before every block."""
    want = mover_requests.insert_request(node.db, mover_requests.FETCH, node.inode(content))
    reader = Reader(node.tiers[Tier.RAM], content, lambda: mover_requests.get(node.db, want), data, first)
    real = FetchMap.list_awaited

    def asked(self: FetchMap) -> list[int]:
        if threading.current_thread() is threading.main_thread() and not looking:
            looking.append(True)
            reader.look()
            looking.clear()
        return real(self)

    looking: list[bool] = []
    monkeypatch.setattr(FetchMap, "list_awaited", asked)
    assert bring(node, node.inode(content)).result == mover_requests.FETCHED
    return reader


def test_what_somebody_waits_for_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _, _, three, *_ = make_cluster(tmp_path, 3)
    data = os.urandom(BLOCKS * BLOCK - 9)
    content = replicated(cluster, b"a", data)
    reader = arriving(three, content, data, [5, 3, 3], monkeypatch)
    assert reader.order[:2] == [5, 3] and reader.counts[0] == 0
    assert three.data(content) == data
    assert FetchMap.find(three.tiers[Tier.RAM].root, content) is None, "what is whole is not on its way"


def test_holes_and_what_an_older_generation_had_are_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"a", data := bytes(BLOCK) + os.urandom(3 * BLOCK))
    bring(three, one.inode(content))
    content = one.rewrite(content, lambda whole: whole.__setitem__(2 * BLOCK, whole[2 * BLOCK] ^ 1))
    changed = bytearray(data)
    changed[2 * BLOCK] ^= 1
    reader = arriving(three, content, bytes(changed), [], monkeypatch)
    assert reader.counts[0] == 3 and sorted(reader.order) == [0, 1, 3]


def test_a_small_file_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path, 3)
    content = replicated(cluster, b"a", os.urandom(BLOCK))
    monkeypatch.setattr(FetchMap, "publish", lambda *_: pytest.fail("it is here sooner than anybody could begin to read"))
    assert bring(cluster.nodes[2], cluster.nodes[0].inode(content)).result == mover_requests.FETCHED


def test_without_room_for_what_is_published_a_file_comes_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LocalCluster(tmp_path, 3)
    content = replicated(cluster, b"a", data := os.urandom(2 * BLOCK))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    three = cluster.nodes[2]
    assert fetch_of(three).step() is False
    assert bring(three, cluster.nodes[0].inode(content)).result == mover_requests.FETCHED and three.data(content) == data


def stored(root: Path) -> tuple[TierStorage, Content]:
    """A tier, and a content of two blocks in it."""
    (node,) = LocalCluster(root, 1).nodes
    return node.tiers[Tier.RAM], node.row(node.written(b"a", os.urandom(2 * BLOCK)))


def test_what_a_dead_mover_published_is_not_believed_of_the_next_one_s_file(tmp_path: Path) -> None:
    """P7: the marks are those of another file, with blocks that are not in this one."""
    storage, content = stored(tmp_path)
    with os.fdopen(storage.create(1000), "wb") as before, os.fdopen(storage.create(1001), "wb") as after:
        old = FetchMap.publish(storage.root, content, Tier.RAM, before.fileno(), [1])
        found = FetchMap.find(storage.root, content.id)
        assert found is not None and found.is_for(before.fileno()) and not found.is_for(after.fileno())
        fetch_map.delete_all(storage.root)
        assert not found.is_published and not found.is_for(before.fileno()) and FetchMap.find(storage.root, content.id) is None
        FetchMap.publish(storage.root, content, Tier.RAM, after.fileno(), [0, 1])
        assert not found.is_published, "another one under the same name"
        old.close()
        assert found.is_closed


@pytest.fixture
def staged(tmp_path: Path) -> World:
    """A file on the PFS only, of which the blocks' digests are known."""
    world = World(tmp_path)
    (world.pfs / "d").mkdir()
    (world.pfs / "d" / "file").write_bytes(os.urandom(BLOCKS * BLOCK + 7))
    world.visit("", "d")
    world.bring("d/file")
    lose_copies(world, "d/file")
    return world


def test_a_file_on_the_pfs_is_read_as_it_comes(staged: World, monkeypatch: pytest.MonkeyPatch) -> None:
    content, data = int(str(staged.column("d/file", "content"))), (staged.pfs / "d" / "file").read_bytes()
    want = mover_requests.insert_request(staged.db, mover_requests.FETCH, staged.inode("d/file"))
    reader = Reader(staged.tiers[Tier.RAM], content, lambda: mover_requests.get(staged.db, want), data, [6, 2])
    real = disk.act

    def act(label: str, *values: object, **named: object) -> object:
        if label == "fetch:read":
            reader.look()
        return real(label, *values, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "act", act)
    assert staged.bring("d/file").result == mover_requests.FETCHED
    # It was asked when the first block was being read already; what follows comes after it, then the rest.
    assert reader.order == [0, 6, 2, 3, 4, 5]
    assert bytes_here(staged, "d/file") == (Tier.RAM, data)
    staged.check()


def test_a_bad_block_on_the_pfs_is_never_shown(staged: World, caplog: pytest.LogCaptureFixture) -> None:
    """P4: what comes before it was right, and the reader of it gets an error."""
    corrupt(staged.pfs / "d" / "file")
    answer = staged.bring("d/file")
    assert (answer.state, answer.error) == (mover_requests.FAILED, 5) and "d/file cannot be read" in caplog.text
    assert list(staged.tiers[Tier.RAM].contents()) == [] and not list(fetch_map.get_directory(staged.tiers[Tier.RAM].root).iterdir())
    staged.check()


def test_what_is_published_and_damaged_is_nothing(tmp_path: Path) -> None:
    """P7: no reader looks beyond what is mapped, or fails for another reason than that nothing arrives."""
    storage, content = stored(tmp_path)
    with os.fdopen(storage.create(1000), "wb") as target:
        FetchMap.publish(storage.root, content, Tier.RAM, target.fileno(), [1])
    (path,) = fetch_map.get_directory(storage.root).iterdir()
    whole = path.read_bytes()
    beyond = [b"", whole[:10], whole[:-1], whole + b"\0", whole[:32] + b"\xff" * 16 + whole[48:]]
    for damaged in (*beyond, b"x" + whole[1:], whole[:48] + b"\xff" * 20):
        path.unlink()
        path.write_bytes(damaged)
        assert FetchMap.find(storage.root, content.id) is None, damaged


def test_publishing_cuts_off_nothing_that_is_mapped(tmp_path: Path) -> None:
    storage, content = stored(tmp_path)
    fetch_map.get_directory(storage.root).mkdir()
    left = fetch_map.get_directory(storage.root) / f"{content.id:016x}.new"
    left.write_bytes(bytes(10_000))
    with open(left, "rb") as mapped, os.fdopen(storage.create(1000), "wb") as target:
        FetchMap.publish(storage.root, content, Tier.RAM, target.fileno(), [1])
        assert os.fstat(mapped.fileno()).st_size == 10_000
