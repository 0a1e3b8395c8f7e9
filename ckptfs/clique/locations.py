"""Owns what the store says of who holds a content: `p/<content>/<node>`, put by the node that has a verified copy of it, and the reading
of it together with `c/<content>`, which its last writer puts.

The writer's own copy is not under `p/`: that it wrote it says as much. When it has lost that, and others have theirs, it says so there
(`away`), until its copy has come back. A key under `p/` that does not have the generation and digest of `c/` is of an older one and does
not count.
If we die here: each transaction is whole or absent, and whoever has a copy tells of it again.
"""

import contextlib
import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfs import limits
from ckptfs.catalog import peer_copies, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.coherence import keys
from ckptfs.coherence.keys import CONTENT, INODE, PFS_NAME, PFS_STATE, SharedKey
from ckptfs.model import Content, ContentState
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, Operation, Put, Store, prefix_end

LOAD_CONTENTS_MAX = limits.ETCD_OPERATIONS_MAX // 2


@dataclass(frozen=True, slots=True)
class ContentLocations:
    """What the store says of a content: its last writer and what that wrote (None: no such content), and every copy elsewhere."""

    writer: int | None
    state: RemoteState | None
    copies: tuple[PeerCopy, ...]
    items: tuple[Item, ...] = ()
    superseded_mtime_ns: int | None = None
    """It is what its file held before, kept for the case that what it holds now is lost: the time of change that it had with this."""
    is_lost: bool = False
    """Its writer lives and has it no more."""
    replicated_before: tuple[int, int] | None = None
    """(generation, the file's time of change with it) of what other nodes had of it when it was opened again for writing."""

    is_away: bool = False
    """Its writer lives and has not what it wrote last: it comes back to it from the others."""

    @property
    def holders(self) -> list[int]:
        """The nodes that have exactly what was written last, the writer first."""
        heard = self.state
        if heard is None or self.writer is None or heard.digest is None:
            return []
        others = [node for node in self.list_holders_of(heard.generation, heard.digest) if node != self.writer]
        return others if self.is_away else [self.writer, *others]

    def list_holders_of(self, generation: int, digest: bytes) -> list[int]:
        """The nodes that say that they have a copy of exactly this."""
        return [copy.node for copy in self.copies if (copy.generation, copy.digest) == (generation, digest)]

    def get_newest(self, nodes: Container[int]) -> tuple[int, bytes]:
        """(generation, digest) of the newest of which one of these nodes has a copy."""
        return max(((copy.generation, copy.digest) for copy in self.copies if copy.node in nodes), default=(0, b""))


def build_content_key(content: int) -> bytes:
    """Where the last writer says what it wrote."""
    return keys.encode_key(SharedKey(CONTENT, content))


def build_inode_key(inode: int) -> bytes:
    """Where the nodes say what a file is; there is no such key once it is gone."""
    return keys.encode_key(SharedKey(INODE, inode))


def build_pfs_state_key(inode: int) -> bytes:
    """Where the nodes say what the PFS shows of an inode."""
    return keys.encode_key(SharedKey(PFS_STATE, inode))


def build_copies_prefix(content: int) -> bytes:
    """What the keys of all copies of a content begin with."""
    return b"p/%016x/" % content


def build_copy_key(content: int, node: int) -> bytes:
    """Where a node says that it has a copy."""
    return build_copies_prefix(content) + b"%08x" % node


def load(store: Store, contents: Sequence[int]) -> dict[int, ContentLocations]:
    """What the store says of these contents, at most LOOKED_AT_MAX at once."""
    assert len(contents) <= LOAD_CONTENTS_MAX
    asked = [get for number in contents for get in build_gets(number)]
    results = store.read(asked).results if asked else ()
    return {number: parse(number, results[2 * place], results[2 * place + 1]) for place, number in enumerate(contents)}


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file as the store has it: `content` is what it holds, None for nothing; `missed` what catalog/sharing/falling_back.py says
    of it, if anything."""

    content: int | None
    value: dict[str, Any]
    item: Item

    @property
    def salvaged(self) -> dict[str, Any] | None:
        """What it should hold and does not."""
        raw = self.value.get("missed")
        return None if raw is None else dict(json.loads(raw))

    @property
    def active_salvage(self) -> dict[str, Any] | None:
        """`missed`, while the file shows what was shown instead: nobody has written it since. Who fetches what the PFS has gives that a
        content.
        """
        missed = self.salvaged
        if missed is None or self.value["generation"] != missed["shown"] or missed["shows"] not in (None, self.content):
            return None
        return missed

    @property
    def pfs_generation(self) -> int | None:
        """The generation that the file shows because the PFS was all that had any; None: it is no such file."""
        missed = self.active_salvage
        return None if missed is None or missed["shows"] is not None else int(missed["shown"])

    @property
    def expected_state(self) -> dict[str, Any]:
        """`content`, `generation` and `mtime_ns` of what it holds; where the PFS is all that had any, of what is missed, and its `node`."""
        missed = self.active_salvage if self.pfs_generation is not None else None
        return missed or {name: self.value.get(name) for name in ("content", "generation", "mtime_ns")}


def load_files(store: Store, inodes: Sequence[int]) -> dict[int, SharedFile]:
    """These files as the store has them. Files that are gone are left out."""
    results = store.read([Get(build_inode_key(inode)) for inode in inodes]).results if inodes else ()
    found: dict[int, SharedFile] = {}
    for inode, items in zip(inodes, results, strict=True):
        if items:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                value = json.loads(items[0].value)
                found[inode] = SharedFile(value["content"], value, items[0])
    return found


@dataclass(frozen=True, slots=True)
class SharedPfsState:
    """What the PFS shows of a file, as the store says. Not `complete`: what was fsynced of a file that was open. `in_hand`: a node is
    about to change that. `replaces`: it is what the PFS shows of that file, which is gone, under the name that this one has now, and older
    than all that this one held; `rests_on` is what else the store says of that.
    """

    generation: int
    is_complete: bool
    size: int
    mtime_ns: int
    in_hand: bool
    value: dict[str, Any]
    item: Item
    replaces: int = 0
    rests_on: tuple[Item, ...] = ()

    def build_puts(self, inode: int, *, complete: bool) -> list[tuple[bytes, dict[str, Any] | None]]:
        """What to tell the store, so that it is what the PFS shows of `inode`."""
        published = self.value["published"]
        value = {**self.value, "published": [self.generation, int(complete), *published[2:]]}
        if not self.replaces:
            return [] if complete == self.is_complete else [(self.item.key, value)]
        return [(self.item.key, None), (build_pfs_state_key(inode), value), (self.rests_on[0].key, {"inode": inode})]


def load_pfs_state(store: Store, inode: int) -> SharedPfsState | None:
    """What the PFS shows of a file; None: nothing that is known."""
    (items,) = store.read([Get(build_pfs_state_key(inode))]).results
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        return _parse_pfs_state(items[0])
    return None


def _parse_pfs_state(item: Item) -> SharedPfsState:
    value = json.loads(item.value)
    generation, complete, size, mtime_ns = value["published"][:4]
    return SharedPfsState(int(generation), bool(complete), int(size), int(mtime_ns), "by" in value, value, item)


def find_replaced_pfs_state(store: Store, inode: int, file: SharedFile) -> SharedPfsState | None:
    """What the PFS shows under the name of a file of which it shows nothing: of the file that had that name before, and no other one. None:
    there is no such thing.
    """
    for parent, name in file.value.get("names", ()):
        (places,) = store.read([Get(keys.encode_key(SharedKey(PFS_NAME, parent, name.encode("latin-1"))))]).results
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            place = json.loads(places[0].value)
            replaces = int(place["inode"])
            shown, alive, own = store.read(
                [Get(build_pfs_state_key(replaces)), Get(build_inode_key(replaces)), Get(build_pfs_state_key(inode))]
            ).results
            found = _parse_pfs_state(shown[0])
            if replaces != inode and not (alive or own) and found.value["names"] == [[parent, name]]:
                rests_on = (places[0], *(Item(key, b"", 0, 0) for key in (build_inode_key(replaces), build_pfs_state_key(inode))))
                return replace(found, generation=0, in_hand=found.in_hand or "by" in place, replaces=replaces, rests_on=rests_on)
    return None


def refresh(db: Database, store: Store, contents: Sequence[int], own_number: int) -> dict[int, ContentLocations]:
    """The same, and the catalog learns of it."""
    found = load(store, contents)
    with db.transaction():
        for number, one in found.items():
            record(db, number, one, own_number)
    return found


def record(db: Database, number: int, shared: ContentLocations, own_number: int) -> None:
    """The catalog learns what the store says of a content. Joins the caller's transaction."""
    if shared.state is None:
        return
    copies = [copy for copy in shared.copies if copy.node != own_number]
    if shared.writer == own_number:
        # What peers said they have verified they may not have told the store yet.
        for copy in copies:
            peer_copies.insert_peer_copy(db, copy)
        return
    if remote_contents.is_own_unpublished(db, number):
        return
    remote_contents.record_remote(db, shared.state)
    if shared.writer is not None and shared.state.digest is not None and not (shared.is_lost or shared.is_away):
        copies.append(PeerCopy(number, shared.writer, shared.state.generation, shared.state.digest))
    peer_copies.replace_peer_copies(db, number, copies)


def announce(store: Store, node: int, news: Iterable[tuple[Content, bool]], *, is_own_away: bool = False) -> None:
    """This node has copies of these contents (True), or no longer has. `own_are_away`: it lacks those that it wrote (True), or has them."""
    changes: list[Operation] = []
    for content, here in news:
        key = build_copy_key(content.id, node)
        changes.append(Put(key, _encode_copy(content, away=is_own_away and not content.is_remote)) if here else Delete(key))
    for start in range(0, len(changes), limits.ETCD_OPERATIONS_MAX):
        store.commit([], changes[start : start + limits.ETCD_OPERATIONS_MAX])


def withdraw_copy(store: Store, node: int, content: int, relied_on: Sequence[Item]) -> bool:
    """Take back the word that this node has a copy, if the keys of the others are still what they were: they rest on one another."""
    compares = [Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in relied_on]
    return store.commit(compares, [Delete(build_copy_key(content, node))]).succeeded


def delete_content(store: Store, content: int, shared: ContentLocations) -> None:
    """The file of a content is gone, and so is the node that wrote it: its last word goes too, unless somebody has spoken since."""
    written = [item for item in shared.items if item.key == build_content_key(content)]
    if written:
        store.commit([Compare(written[0].key, CompareTarget.MOD, "=", written[0].mod_revision)], [Delete(written[0].key)])


def delete_copies(store: Store, contents: Sequence[int]) -> set[tuple[int, int]]:
    """These contents, at most LOOKED_AT_MAX, are gone here: so is every copy of those that nobody else has either. (content, node) of
    all that said that they have one: whoever fetched it to read it is known by that alone.
    """
    told = load(store, contents)
    gone = [number for number in contents if all(item.key != build_content_key(number) for item in told[number].items)]
    if gone:
        compares = [Compare(build_content_key(number), CompareTarget.VERSION, "=", 0) for number in gone]
        store.commit(compares, [Delete(build_copies_prefix(number), prefix_end(build_copies_prefix(number))) for number in gone])
    return {(number, copy.node) for number in gone for copy in told[number].copies}


def build_gets(number: int) -> tuple[Get, Get]:
    """What to ask of the store about a content."""
    return Get(build_content_key(number)), Get(build_copies_prefix(number), prefix_end(build_copies_prefix(number)))


def _encode_copy(content: Content, *, away: bool) -> bytes:
    digest = b"" if content.digest is None else content.digest
    value = {"generation": content.generation, "digest": digest.hex(), **({"away": True} if away else {})}
    return json.dumps(value, separators=(",", ":")).encode()


def parse(number: int, written: Sequence[Item], told: Sequence[Item]) -> ContentLocations:
    """The answers to `gets`."""
    copies = tuple(copy for item in told if (copy := _parse_copy(number, item)) is not None)
    items = (*written, *told)
    if not written:
        return ContentLocations(None, None, copies, items)
    try:
        value = json.loads(written[0].value)
        digest = None if value["digest"] is None else bytes.fromhex(value["digest"])
        is_open = value["state"] == ContentState.OPEN
        heard = RemoteState(number, int(value["inode"]), int(value["generation"]), int(value["size"]), digest, is_open=is_open)
        before = (int(value["before"][0]), int(value["before"][1])) if "before" in value else None
        writer = int(value["node"])
        away = any(_is_away(item, heard) for item in told if item.key == build_copy_key(number, writer))
        return ContentLocations(writer, heard, copies, items, value.get("former_ns"), value["state"] == ContentState.LOST, before, away)
    except (ValueError, KeyError, TypeError):
        return ContentLocations(None, None, copies, items)


def _parse_copy(number: int, item: Item) -> PeerCopy | None:
    """A copy that the store tells of; None for what is no such value."""
    try:
        value = json.loads(item.value)
        if "away" in value:
            return None
        return PeerCopy(number, int(item.key.rpartition(b"/")[2], 16), int(value["generation"]), bytes.fromhex(value["digest"]))
    except (ValueError, KeyError, TypeError):
        return None


def _is_away(item: Item, heard: RemoteState) -> bool:
    """Whether its writer says that it has not what was heard of."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        value = json.loads(item.value)
        return "away" in value and (int(value["generation"]), bytes.fromhex(value["digest"])) == (heard.generation, heard.digest)
    return False
