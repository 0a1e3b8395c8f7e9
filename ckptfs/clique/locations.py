"""Locations of contents in the store: one row for the last writer, one for each verified copy.

The last writer's row is `c/<content>`, that of a copy `p/<content>/<node>`.

The writer's own copy has no row under `p/`: `c/` implies it. If the writer lost that copy while others have theirs, it puts `away` under
`p/` until its copy is back. A row under `p/` with another generation or digest than `c/` belongs to an older generation and does not count.

Crash safety: transactions are applied or not; a node announces its copies again.
"""

import re
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfs import limits
from ckptfs.catalog import peer_copies, remote_contents
from ckptfs.catalog.contents import mark_found
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.coherence import chain, key_state, keys, merge, value_checks
from ckptfs.coherence.chain import ChainedStore
from ckptfs.coherence.keys import CONTENT, COPY, INODE, PFS_NAME, PFS_STATE, SharedKey
from ckptfs.model import Content, ContentState
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, Operation, Put, Store, Transactions, prefix_end, split_changes

LOAD_CONTENTS_MAX = limits.ETCD_OPERATIONS_MAX // 2


@dataclass(frozen=True, slots=True)
class ContentLocations:
    """The writer of a content, the state it wrote (None: no such content), and the copies on other nodes."""

    writer: int | None
    state: RemoteState | None
    copies: tuple[PeerCopy, ...]
    items: tuple[Item, ...] = ()
    superseded_mtime_ns: int | None = None
    """Set if the content was superseded and is kept until its successor is safe: the mtime of the file with it."""
    is_lost: bool = False  # Its writer is alive and has lost it.
    is_away: bool = False  # Its writer is alive and fetches its last state back from other nodes.

    @property
    def holders(self) -> list[int]:
        """Return the nodes with exactly the last written state, the writer first."""
        state = self.state
        if state is None or self.writer is None or state.digest is None:
            return []
        others = [node for node in self.list_holders_of(state.generation, state.digest) if node != self.writer]
        return others if self.is_away else [self.writer, *others]

    def list_holders_of(self, generation: int, digest: bytes) -> list[int]:
        """Return the nodes that announced a copy of exactly this state."""
        return [copy.node for copy in self.copies if (copy.generation, copy.digest) == (generation, digest)]

    def get_newest(self, nodes: Container[int]) -> tuple[int, bytes]:
        """Return (generation, digest) of the newest copy on these nodes."""
        return max(((copy.generation, copy.digest) for copy in self.copies if copy.node in nodes), default=(0, b""))


def build_content_key(content: int) -> bytes:
    """Return the key of the state that the last writer wrote."""
    return keys.encode_key(SharedKey(CONTENT, content))


def build_inode_key(inode: int) -> bytes:
    """Return the key of an inode; it does not exist once the file is gone."""
    return keys.encode_key(SharedKey(INODE, inode))


def build_pfs_state_key(inode: int) -> bytes:
    """Return the key of what the PFS shows of an inode."""
    return keys.encode_key(SharedKey(PFS_STATE, inode))


def build_copies_prefix(content: int) -> bytes:
    return keys.encode_key(SharedKey(COPY, content))


def build_copy_key(content: int, node: int) -> bytes:
    return build_copies_prefix(content) + b"%08x" % node


def load(store: Store, contents: Sequence[int]) -> dict[int, ContentLocations]:
    """Load the locations of these contents, at most LOAD_CONTENTS_MAX."""
    assert len(contents) <= LOAD_CONTENTS_MAX
    asked = [get for number in contents for get in build_gets(number)]
    results = store.read(asked).results if asked else ()
    return {number: parse(number, results[2 * place], results[2 * place + 1]) for place, number in enumerate(contents)}


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file in the store. `content` None: empty. `missed` is described in `salvage_records`."""

    content: int | None
    value: dict[str, Any]
    item: Item

    @property
    def is_readable(self) -> bool:
        """Return False if the value in the store is invalid: the file exists, and nothing else is known."""
        return bool(self.value)

    @property
    def salvaged(self) -> dict[str, Any] | None:
        """Return the state that the file should have and lost last, if any."""
        return next(iter(self.missed), None)

    @property
    def missed(self) -> list[dict[str, Any]]:
        """Return all states that the file should have had and lost, the last one first."""
        return merge.list_missed(self.value)

    def misses(self, content: int) -> bool:
        """Return whether a content was taken for lost: its writer may return with it."""
        return any(record["content"] == content for record in self.missed)

    @property
    def active_salvage(self) -> dict[str, Any] | None:
        """Return `salvaged` while the file shows the replacement and was not written since."""
        return self.salvaged if merge.is_showing_previous(self.value) else None

    @property
    def pfs_generation(self) -> int | None:
        """Return the generation that the file shows because only the PFS had one; None for other files."""
        missed = self.active_salvage
        return None if missed is None or missed["shows"] is not None else int(missed["shown"])

    @property
    def expected_state(self) -> dict[str, Any]:
        """Return the state of the file; if only the PFS had one, the lost state."""
        missed = self.active_salvage if self.pfs_generation is not None else None
        return missed or {name: self.value.get(name) for name in ("content", "generation", "mtime_ns")}


def load_files(store: Store, inodes: Sequence[int]) -> dict[int, SharedFile]:
    """Load these files from the store; files that are gone are left out."""
    results = store.read([Get(build_inode_key(inode)) for inode in inodes]).results if inodes else ()
    found: dict[int, SharedFile] = {}
    for inode, items in zip(inodes, results, strict=True):
        if items:
            value = value_checks.decode_item(items[0]) or {}
            found[inode] = SharedFile(value.get("content"), value, items[0])
    return found


@dataclass(frozen=True, slots=True)
class SharedPfsState:
    """What the PFS shows of a file, according to the store."""

    generation: int
    is_complete: bool  # False for an fsynced state of an open file.
    size: int
    mtime_ns: int
    in_hand: bool  # A node is about to change it, or to show the file for the first time (generation 0).
    value: dict[str, Any]
    item: Item
    replaces: int = 0  # The deleted file that had the name before, if this is the state of it: older than this file's contents.
    rests_on: tuple[Item, ...] = ()  # The other rows that this depends on.

    def build_puts(self, inode: int) -> list[tuple[bytes, dict[str, Any] | None]]:
        """Return the rows that make this the complete state of `inode`."""
        value = {**self.value, "published": [self.generation, 1, *self.value["published"][2:]]}
        if not self.replaces:
            return [] if self.is_complete else [(self.item.key, value)]
        return [(self.item.key, None), (build_pfs_state_key(inode), value), (self.rests_on[0].key, {"inode": inode})]


def load_pfs_state(store: Store, inode: int) -> SharedPfsState | None:
    """Load what the PFS shows of a file; None if unknown."""
    return _parse_pfs_state(store.read([Get(build_pfs_state_key(inode))]).results[0])


def _parse_pfs_state(items: Sequence[Item]) -> SharedPfsState | None:
    value = value_checks.decode_item(items[0]) if items else None
    if value is None or ("published" not in value and "by" not in value):
        return None
    generation, complete, size, mtime_ns = value.get("published", (0, 0, 0, 0))[:4]
    return SharedPfsState(generation, bool(complete), size, mtime_ns, "by" in value, value, items[0])


def find_replaced_pfs_state(store: Store, inode: int, file: SharedFile) -> SharedPfsState | None:
    """Find what the PFS shows of the deleted file that had exactly the name of this file before."""
    for parent, name in file.value.get("names", ()):
        (places,) = store.read([Get(keys.encode_key(SharedKey(PFS_NAME, parent, name.encode("latin-1"))))]).results
        place = value_checks.decode_item(places[0]) if places else None
        if place is None or place["inode"] in (0, inode):
            continue
        replaces = place["inode"]
        gone, own = build_inode_key(replaces), build_pfs_state_key(inode)
        shown, alive, others = store.read([Get(build_pfs_state_key(replaces)), Get(gone), Get(own)]).results
        found = _parse_pfs_state(shown)
        if found is not None and not (alive or others) and found.value["names"] == [[parent, name]]:
            rests_on = (places[0], *(Item(key, b"", 0, 0) for key in (gone, own)))
            return replace(found, generation=0, in_hand=found.in_hand or "by" in place, replaces=replaces, rests_on=rests_on)
    return None


def refresh(db: Database, store: Store, contents: Sequence[int], own_number: int) -> dict[int, ContentLocations]:
    """Load the locations of these contents and record them in the catalog."""
    found = load(store, contents)
    with db.transaction():
        for number, one in found.items():
            record(db, number, one, own_number)
    return found


def record(db: Database, number: int, shared: ContentLocations, own_number: int) -> None:
    """Record the locations of a content in the catalog. Joins the caller's transaction."""
    if shared.state is None:
        return
    copies = [copy for copy in shared.copies if copy.node != own_number]
    if shared.writer == own_number:
        # Peers may have confirmed copies that they have not announced yet.
        for copy in copies:
            peer_copies.insert_peer_copy(db, copy)
        mark_found(db, number)
        is_fresh = key_state.get_cached(db, SharedKey(CONTENT, number)).revision <= shared.items[0].mod_revision
        if is_fresh and shared.superseded_mtime_ns is None:  # This node died after it had put that, if the content is not its own yet.
            remote_contents.mark_own(db, number, shared.state.inode, shared.state.generation, time.time_ns())
        remote_contents.mark_copy_changed(db, number)
        return
    if remote_contents.is_own_unpublished(db, number):
        return
    remote_contents.record_remote(db, shared.state, is_from_store=True)
    if shared.writer is not None and shared.state.digest is not None and not (shared.is_lost or shared.is_away):
        copies.append(PeerCopy(number, shared.writer, shared.state.generation, shared.state.digest))
    peer_copies.replace_peer_copies(db, number, copies)


class CopyRecords:
    """The keys `p/<content>/<node>` of this node. A chain, so a late put leaves no phantom. Any thread."""

    def __init__(self, store: Transactions, db: Database, node: int) -> None:
        self._store = ChainedStore(store, db, chain.COPIES_CHAIN)
        self._node = node

    def announce(self, contents: Iterable[tuple[Content, bool]], *, is_own_away: bool = False) -> None:
        """Announce for each content whether this node has a copy.

        Raises StoreUnreachable. `is_own_away`: it lacks the contents that it wrote (True), or has them.
        """
        changes: list[Operation] = []
        for content, is_present in contents:
            key, digest = build_copy_key(content.id, self._node), content.digest or b""
            away = {"away": True} if is_own_away and not content.is_remote else {}
            value = keys.encode_fields({"generation": content.generation, "digest": digest.hex(), **away})
            changes.append(Put(key, value) if is_present else Delete(key))
        self._announce(changes)

    def withdraw_all(self, contents: Iterable[int]) -> None:
        """Announce that this node has no copies of these contents."""
        self._announce([Delete(build_copy_key(content, self._node)) for content in contents])

    def withdraw(self, content: int, relied_on: Sequence[Item]) -> bool:
        """Withdraw a copy if the rows `relied_on` are unchanged. Return False if they are not."""
        compares = [Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in relied_on]
        return self._store.commit(compares, [Delete(build_copy_key(content, self._node))]).succeeded

    def _announce(self, changes: Sequence[Operation]) -> None:
        for batch in split_changes(changes):
            self._store.commit([], batch)


def delete_content(store: Store, content: int, shared: ContentLocations) -> None:
    """Delete the row of a dead writer whose file is gone, unless it was changed since."""
    written = [item for item in shared.items if item.key == build_content_key(content)]
    if written:
        store.commit([Compare(written[0].key, CompareTarget.MOD, "=", written[0].mod_revision)], [Delete(written[0].key)])


def delete_copies(store: Store, contents: Sequence[int]) -> set[tuple[int, int]]:
    """Delete copies of contents without a writer's row. Return (content, node) of all announced copies."""
    locations = load(store, contents)
    gone = [number for number in contents if all(item.key != build_content_key(number) for item in locations[number].items)]
    if gone:
        compares = [Compare(build_content_key(number), CompareTarget.VERSION, "=", 0) for number in gone]
        store.commit(compares, [Delete(build_copies_prefix(number), prefix_end(build_copies_prefix(number))) for number in gone])
    return {(number, copy.node) for number in gone for copy in locations[number].copies}


def build_gets(number: int) -> tuple[Get, Get]:
    """Return the reads for one content."""
    return Get(build_content_key(number)), Get(build_copies_prefix(number), prefix_end(build_copies_prefix(number)))


def parse(number: int, written: Sequence[Item], announced: Sequence[Item]) -> ContentLocations:
    """Parse the results of `build_gets`."""
    holders = [found for item in announced if (found := _parse_copy(number, item)) is not None]
    copies = tuple(copy for copy, is_away in holders if not is_away)
    items = (*written, *announced)
    value = value_checks.decode_item(written[0]) if written else None
    if value is None:
        return ContentLocations(None, None, copies, items)
    digest = None if value["digest"] is None else bytes.fromhex(value["digest"])
    is_open, is_lost = value["state"] == ContentState.OPEN, value["state"] == ContentState.LOST
    state = RemoteState(number, value["inode"], value["generation"], value["size"], digest, is_open=is_open)
    own = [copy for copy, is_away in holders if is_away and copy.node == value["node"]]
    is_away = any((copy.generation, copy.digest) == (state.generation, state.digest) for copy in own)
    return ContentLocations(value["node"], state, copies, items, value.get("former_ns"), is_lost, is_away)


def _parse_copy(number: int, item: Item) -> tuple[PeerCopy, bool] | None:
    """Parse an announced copy, and whether its writer says that it lacks it; None for other values."""
    value = value_checks.decode_item(item)
    node = item.key.removeprefix(build_copies_prefix(number)).decode("latin-1")
    if value is None or not re.fullmatch("[0-9a-f]{8}", node):
        return None
    return PeerCopy(number, int(node, 16), value["generation"], bytes.fromhex(value["digest"])), "away" in value
