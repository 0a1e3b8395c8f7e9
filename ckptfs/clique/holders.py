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
from ckptfs.catalog import holding, peers
from ckptfs.catalog.database import Database
from ckptfs.catalog.holding import Heard
from ckptfs.catalog.peers import PeerCopy
from ckptfs.catalog.sharing import kinds
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, PLACE, SHOWN, Key
from ckptfs.catalog.store import Compare, Delete, Get, Item, Operation, Put, Store, Target, prefix_end
from ckptfs.model import Content, ContentState

LOOKED_AT_MAX = limits.ETCD_OPERATIONS_MAX // 2


@dataclass(frozen=True, slots=True)
class Shared:
    """What the store says of a content: its last writer and what that wrote (None: no such content), and every copy elsewhere."""

    writer: int | None
    heard: Heard | None
    copies: tuple[PeerCopy, ...]
    items: tuple[Item, ...] = ()
    former_ns: int | None = None
    """It is what its file held before, kept for the case that what it holds now is lost: the time of change that it had with this."""
    lost: bool = False
    """Its writer lives and has it no more."""
    before: tuple[int, int] | None = None
    """(generation, the file's time of change with it) of what other nodes had of it when it was opened again for writing."""

    away: bool = False
    """Its writer lives and has not what it wrote last: it comes back to it from the others."""

    @property
    def holders(self) -> list[int]:
        """The nodes that have exactly what was written last, the writer first."""
        heard = self.heard
        if heard is None or self.writer is None or heard.digest is None:
            return []
        others = [node for node in self.having(heard.generation, heard.digest) if node != self.writer]
        return others if self.away else [self.writer, *others]

    def having(self, generation: int, digest: bytes) -> list[int]:
        """The nodes that say that they have a copy of exactly this."""
        return [copy.node for copy in self.copies if (copy.generation, copy.digest) == (generation, digest)]

    def newest(self, nodes: Container[int]) -> tuple[int, bytes]:
        """(generation, digest) of the newest of which one of these nodes has a copy."""
        return max(((copy.generation, copy.digest) for copy in self.copies if copy.node in nodes), default=(0, b""))


def content_key(content: int) -> bytes:
    """Where the last writer says what it wrote."""
    return kinds.wire(Key(CONTENT, content))


def inode_key(inode: int) -> bytes:
    """Where the nodes say what a file is; there is no such key once it is gone."""
    return kinds.wire(Key(INODE, inode))


def shown_key(inode: int) -> bytes:
    """Where the nodes say what the PFS shows of an inode."""
    return kinds.wire(Key(SHOWN, inode))


def copies_key(content: int) -> bytes:
    """What the keys of all copies of a content begin with."""
    return b"p/%016x/" % content


def copy_key(content: int, node: int) -> bytes:
    """Where a node says that it has a copy."""
    return copies_key(content) + b"%08x" % node


def read(store: Store, contents: Sequence[int]) -> dict[int, Shared]:
    """What the store says of these contents, at most LOOKED_AT_MAX at once."""
    assert len(contents) <= LOOKED_AT_MAX
    asked = [get for number in contents for get in gets(number)]
    results = store.read(asked).results if asked else ()
    return {number: shared(number, results[2 * place], results[2 * place + 1]) for place, number in enumerate(contents)}


@dataclass(frozen=True, slots=True)
class File:
    """A file as the store has it: `content` is what it holds, None for nothing; `missed` what catalog/sharing/falling_back.py says
    of it, if anything."""

    content: int | None
    value: dict[str, Any]
    item: Item

    @property
    def missed(self) -> dict[str, Any] | None:
        """What it should hold and does not."""
        raw = self.value.get("missed")
        return None if raw is None else dict(json.loads(raw))

    @property
    def instead(self) -> dict[str, Any] | None:
        """`missed`, while the file shows what was shown instead: nobody has written it since. Who fetches what the PFS has gives that a
        content.
        """
        missed = self.missed
        if missed is None or self.value["generation"] != missed["shown"] or missed["shows"] not in (None, self.content):
            return None
        return missed

    @property
    def from_pfs(self) -> int | None:
        """The generation that the file shows because the PFS was all that had any; None: it is no such file."""
        missed = self.instead
        return None if missed is None or missed["shows"] is not None else int(missed["shown"])

    @property
    def should_hold(self) -> dict[str, Any]:
        """`content`, `generation` and `mtime_ns` of what it holds; where the PFS is all that had any, of what is missed, and its `node`."""
        missed = self.instead if self.from_pfs is not None else None
        return missed or {name: self.value.get(name) for name in ("content", "generation", "mtime_ns")}


def files(store: Store, inodes: Sequence[int]) -> dict[int, File]:
    """These files as the store has them. Files that are gone are left out."""
    results = store.read([Get(inode_key(inode)) for inode in inodes]).results if inodes else ()
    found: dict[int, File] = {}
    for inode, items in zip(inodes, results, strict=True):
        if items:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                value = json.loads(items[0].value)
                found[inode] = File(value["content"], value, items[0])
    return found


@dataclass(frozen=True, slots=True)
class OnPfs:
    """What the PFS shows of a file, as the store says. Not `complete`: what was fsynced of a file that was open. `in_hand`: a node is
    about to change that. `replaces`: it is what the PFS shows of that file, which is gone, under the name that this one has now, and older
    than all that this one held; `rests_on` is what else the store says of that.
    """

    generation: int
    complete: bool
    size: int
    mtime_ns: int
    in_hand: bool
    value: dict[str, Any]
    item: Item
    replaces: int = 0
    rests_on: tuple[Item, ...] = ()

    def puts(self, inode: int, *, complete: bool) -> list[tuple[bytes, dict[str, Any] | None]]:
        """What to tell the store, so that it is what the PFS shows of `inode`."""
        published = self.value["published"]
        value = {**self.value, "published": [self.generation, int(complete), *published[2:]]}
        if not self.replaces:
            return [] if complete == self.complete else [(self.item.key, value)]
        return [(self.item.key, None), (shown_key(inode), value), (self.rests_on[0].key, {"inode": inode})]


def on_pfs(store: Store, inode: int) -> OnPfs | None:
    """What the PFS shows of a file; None: nothing that is known."""
    (items,) = store.read([Get(shown_key(inode))]).results
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        return _on_pfs(items[0])
    return None


def _on_pfs(item: Item) -> OnPfs:
    value = json.loads(item.value)
    generation, complete, size, mtime_ns = value["published"][:4]
    return OnPfs(int(generation), bool(complete), int(size), int(mtime_ns), "by" in value, value, item)


def replaced_on_pfs(store: Store, inode: int, file: File) -> OnPfs | None:
    """What the PFS shows under the name of a file of which it shows nothing: of the file that had that name before, and no other one. None:
    there is no such thing.
    """
    for parent, name in file.value.get("names", ()):
        (places,) = store.read([Get(kinds.wire(Key(PLACE, parent, name.encode("latin-1"))))]).results
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            place = json.loads(places[0].value)
            replaces = int(place["inode"])
            shown, alive, own = store.read([Get(shown_key(replaces)), Get(inode_key(replaces)), Get(shown_key(inode))]).results
            found = _on_pfs(shown[0])
            if replaces != inode and not (alive or own) and found.value["names"] == [[parent, name]]:
                rests_on = (places[0], *(Item(key, b"", 0, 0) for key in (inode_key(replaces), shown_key(inode))))
                return replace(found, generation=0, in_hand=found.in_hand or "by" in place, replaces=replaces, rests_on=rests_on)
    return None


def refresh(db: Database, store: Store, contents: Sequence[int], here: int) -> dict[int, Shared]:
    """The same, and the catalog learns of it."""
    found = read(store, contents)
    with db.change():
        for number, one in found.items():
            learn(db, number, one, here)
    return found


def learn(db: Database, number: int, shared: Shared, here: int) -> None:
    """The catalog learns what the store says of a content. Joins the caller's transaction."""
    if shared.heard is None:
        return
    copies = [copy for copy in shared.copies if copy.node != here]
    if shared.writer == here:
        # What peers said they have verified they may not have told the store yet.
        for copy in copies:
            peers.peer_has(db, copy)
        return
    if holding.is_untold(db, number):
        return
    holding.hear(db, shared.heard)
    if shared.writer is not None and shared.heard.digest is not None and not (shared.lost or shared.away):
        copies.append(PeerCopy(number, shared.writer, shared.heard.generation, shared.heard.digest))
    peers.peers_have(db, number, copies)


def tell(store: Store, node: int, news: Iterable[tuple[Content, bool]], *, own_are_away: bool = False) -> None:
    """This node has copies of these contents (True), or no longer has. `own_are_away`: it lacks those that it wrote (True), or has them."""
    changes: list[Operation] = []
    for content, here in news:
        key = copy_key(content.id, node)
        changes.append(Put(key, _value(content, away=own_are_away and not content.peer)) if here else Delete(key))
    for start in range(0, len(changes), limits.ETCD_OPERATIONS_MAX):
        store.commit([], changes[start : start + limits.ETCD_OPERATIONS_MAX])


def release(store: Store, node: int, content: int, relied_on: Sequence[Item]) -> bool:
    """Take back the word that this node has a copy, if the keys of the others are still what they were: they rest on one another."""
    compares = [Compare(item.key, Target.MOD, "=", item.mod_revision) for item in relied_on]
    return store.commit(compares, [Delete(copy_key(content, node))]).succeeded


def bury(store: Store, content: int, shared: Shared) -> None:
    """The file of a content is gone, and so is the node that wrote it: its last word goes too, unless somebody has spoken since."""
    written = [item for item in shared.items if item.key == content_key(content)]
    if written:
        store.commit([Compare(written[0].key, Target.MOD, "=", written[0].mod_revision)], [Delete(written[0].key)])


def forget(store: Store, contents: Sequence[int]) -> set[tuple[int, int]]:
    """These contents, at most LOOKED_AT_MAX, are gone here: so is every copy of those that nobody else has either. (content, node) of
    all that said that they have one: whoever fetched it to read it is known by that alone.
    """
    told = read(store, contents)
    gone = [number for number in contents if all(item.key != content_key(number) for item in told[number].items)]
    if gone:
        compares = [Compare(content_key(number), Target.VERSION, "=", 0) for number in gone]
        store.commit(compares, [Delete(copies_key(number), prefix_end(copies_key(number))) for number in gone])
    return {(number, copy.node) for number in gone for copy in told[number].copies}


def gets(number: int) -> tuple[Get, Get]:
    """What to ask of the store about a content."""
    return Get(content_key(number)), Get(copies_key(number), prefix_end(copies_key(number)))


def _value(content: Content, *, away: bool) -> bytes:
    digest = b"" if content.digest is None else content.digest
    value = {"generation": content.generation, "digest": digest.hex(), **({"away": True} if away else {})}
    return json.dumps(value, separators=(",", ":")).encode()


def shared(number: int, written: Sequence[Item], told: Sequence[Item]) -> Shared:
    """The answers to `gets`."""
    copies = tuple(copy for item in told if (copy := _copy(number, item)) is not None)
    items = (*written, *told)
    if not written:
        return Shared(None, None, copies, items)
    try:
        value = json.loads(written[0].value)
        digest = None if value["digest"] is None else bytes.fromhex(value["digest"])
        is_open = value["state"] == ContentState.OPEN
        heard = Heard(number, int(value["inode"]), int(value["generation"]), int(value["size"]), digest, open=is_open)
        before = (int(value["before"][0]), int(value["before"][1])) if "before" in value else None
        writer = int(value["node"])
        away = any(_is_away(item, heard) for item in told if item.key == copy_key(number, writer))
        return Shared(writer, heard, copies, items, value.get("former_ns"), value["state"] == ContentState.LOST, before, away)
    except (ValueError, KeyError, TypeError):
        return Shared(None, None, copies, items)


def _copy(number: int, item: Item) -> PeerCopy | None:
    """A copy that the store tells of; None for what is no such value."""
    try:
        value = json.loads(item.value)
        if "away" in value:
            return None
        return PeerCopy(number, int(item.key.rpartition(b"/")[2], 16), int(value["generation"]), bytes.fromhex(value["digest"]))
    except (ValueError, KeyError, TypeError):
        return None


def _is_away(item: Item, heard: Heard) -> bool:
    """Whether its writer says that it has not what was heard of."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        value = json.loads(item.value)
        return "away" in value and (int(value["generation"]), bytes.fromhex(value["digest"])) == (heard.generation, heard.digest)
    return False
