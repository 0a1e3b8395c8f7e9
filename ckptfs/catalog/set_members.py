"""Rows for the tracker of sets: places of an inode, files of a member, known sets, claims of writers.

Functions that change rows join the caller's transaction.
"""

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptfs import limits
from ckptfs.catalog import handles, history, identity, inodes, namespace, peer_copies
from ckptfs.catalog.content_rows import HAS_GOOD_COPY, count_sizes
from ckptfs.catalog.database import Database
from ckptfs.model import ContentState, Inode

PRODUCER_XATTR = b"ckptfs.producer"
COMMIT_XATTR = b"ckptfs.commit"
CLAIM_XATTR = b"ckptfs.writer"
MANIFEST_NAMES = (b"MANIFEST.json", b"MANIFEST.xxh128")
"""Files that the tracker adds to a set."""
_TYPE_BITS, _FILE, _DIRECTORY = 0o170000, stat.S_IFREG, stat.S_IFDIR


# --- where a candidate belongs ----------------------------------------------------------------------------------------


def list_places(db: Database, inode: int) -> list[tuple[int, bytes]]:
    """Return (directory, name) of all names of an inode in directories of the application."""
    return load_places(db, [inode])[inode]


def load_places(db: Database, numbers: Iterable[int]) -> dict[int, list[tuple[int, bytes]]]:
    """Return what `list_places` returns of each of these inodes."""
    places: dict[int, list[tuple[int, bytes]]] = {number: [] for number in numbers}
    query = (
        "SELECT e.child, e.parent, e.name FROM json_each(?) n CROSS JOIN entry e ON e.child = n.value"
        " CROSS JOIN inode d ON d.id = e.parent AND d.history = 0"
    )
    for inode, directory, name in db.rows(query, json.dumps([*places])):
        places[inode].append((directory, bytes(name)))
    return places


def list_possible_members(db: Database, directory: int) -> dict[bytes, tuple[int, bool]]:
    """Return {name: (inode, is it a directory)} of the files and directories of a directory."""
    query = (
        f"SELECT e.name, e.child, i.mode & {_TYPE_BITS} = {_DIRECTORY} FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ?"
        f" AND (i.mode & {_TYPE_BITS} = {_FILE} OR (i.mode & {_TYPE_BITS} = {_DIRECTORY} AND i.history = 0))"
    )
    return {bytes(name): (child, bool(is_directory)) for name, child, is_directory in db.rows(query, directory)}


def list_sets_of_file(db: Database, inode: int) -> list[tuple[int, int]]:
    """Return (series, set) of all directories of sets in which a file has a name."""
    query = (
        "WITH RECURSIVE up(id, parent) AS (SELECT d.id, d.parent FROM entry e JOIN inode d ON d.id = e.parent AND d.history = 1"
        " WHERE e.child = ? UNION SELECT inode.id, inode.parent FROM inode JOIN up ON inode.id = up.parent WHERE inode.parent > 1)"
        " SELECT up.parent, up.id FROM up JOIN xattr x ON x.inode = up.parent AND x.name = ?"
    )
    return db.rows(query, inode, history.SERIES_XATTR)


def is_finished(db: Database, set_directory: int) -> bool:
    """Return True if a set of the history is neither being made nor being removed."""
    return db.value("SELECT 1 FROM entry WHERE child = ? AND substr(name, 1, 1) <> x'2e'", set_directory) is not None


# --- the files of a member --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetFile:
    """A sealed file of a member. Two are equal if nothing was written in between."""

    inode: int
    generation: int
    size: int
    mtime_ns: int
    digest: bytes | None = field(compare=False)
    producer: str = field(compare=False)  # JSON of the process that wrote it, "" where it is not known.


@dataclass(frozen=True, slots=True)
class SetTree:
    """What belongs to a member, by path: directories, each after those above it; files; and symlinks."""

    directories: dict[bytes, Inode]
    files: dict[bytes, SetFile]
    symlinks: dict[bytes, Inode]


def find_set_file(db: Database, inode: int) -> SetFile | None:
    """Return a file of a member. Returns None if it is gone, open, claimed by a writer, or not sealed yet."""
    row = db.row(
        "SELECT i.generation, i.size, i.mtime_ns, k.state, k.digest, p.digest, x.value, i.content, w.value FROM inode i"
        " LEFT JOIN content k ON k.id = i.content LEFT JOIN pfs_file p ON p.inode = i.id"
        " LEFT JOIN xattr x ON x.inode = i.id AND x.name = ? LEFT JOIN xattr w ON w.inode = i.id AND w.name = ?"
        " WHERE i.id = ? AND i.nlink > 0",
        PRODUCER_XATTR, CLAIM_XATTR, inode,
    )  # fmt: skip
    if row is None:
        return None
    generation, size, mtime_ns, state, own_digest, pfs_digest, producer, content, claim = row
    if state in (ContentState.OPEN, ContentState.CLOSED) or _is_claimed(db, claim, content, generation):
        return None
    digest = pfs_digest if state is None else own_digest
    return SetFile(inode, generation, size, mtime_ns, digest, "" if producer is None else bytes(producer).decode())


def insert_claim(db: Database, inode: int) -> None:
    """Record that this node is about to write the content of a file: no set may take that any more.

    The claim ends with that generation of the file, or with the node, or when the node's mount starts again (`delete_own_claims`). Other
    nodes must see it before the first byte is written. A content that this node has open needs no claim: a further writer begins no
    generation, and only that would end the claim.
    """
    row = db.row("SELECT i.content, i.generation, k.state FROM inode i LEFT JOIN content k ON k.id = i.content WHERE i.id = ?", inode)
    content, generation, state = row or (None, 0, ContentState.OPEN)
    if state != ContentState.OPEN:
        fields = {"node": identity.get_node_number(db), "content": content, "generation": generation}
        inodes.set_internal_xattr(db, inode, CLAIM_XATTR, json.dumps(fields).encode())


def delete_claim(db: Database, inode: int) -> None:
    """End a claim: nothing was written."""
    inodes.set_internal_xattr(db, inode, CLAIM_XATTR, None)


def delete_own_claims(db: Database) -> None:
    """Delete the claims of this node on files that no process writes, and note these files.

    The node died before the open, so each file may belong to a set now.
    """
    is_own = "json_extract(CAST(value AS TEXT), '$.node') = ?"
    rows = db.rows(f"SELECT inode FROM xattr WHERE name = ? AND {is_own}", CLAIM_XATTR, identity.get_node_number(db))
    ended = [row[0] for row in rows if not handles.has_writer(db, row[0])]
    for inode in ended:
        delete_claim(db, inode)
    namespace.insert_candidates(db, ended)


def insert_candidates_of_dead(db: Database, node: int) -> None:
    """Note the newest files of a dead node that this one has copies of, and those it had claimed."""
    first, last = (number << limits.ID_COUNTER_BITS for number in (node, node + 1))
    written = (
        "SELECT inode FROM content WHERE remote = 1 AND state = 2 AND inode > 0 AND id >= ? AND id < ?"
        f" AND {HAS_GOOD_COPY.format('content')} ORDER BY id DESC LIMIT ?"
    )
    claimed = "SELECT inode FROM xattr WHERE name = ? AND json_extract(CAST(value AS TEXT), '$.node') = ? LIMIT ?"
    most = limits.SET_CANDIDATES_MAX
    rows = [*db.rows(written, first, last, most), *db.rows(claimed, CLAIM_XATTR, node, most)]
    namespace.insert_candidates(db, {row[0] for row in rows})


def is_claimed_elsewhere(db: Database, claim: bytes | None, content: int | None, generation: int) -> bool:
    """Return True if another node has this claim on a file that still has this content."""
    return _is_claimed(db, claim, content, generation) and json.loads(claim or b"")["node"] != identity.get_node_number(db)


def _is_claimed(db: Database, claim: bytes | None, content: int | None, generation: int) -> bool:
    fields = {} if claim is None else json.loads(claim)
    is_present = bool(fields) and (fields["content"], fields["generation"]) == (content, generation)
    return is_present and fields["node"] in peer_copies.list_live_nodes(db)


def load_set_tree(db: Database, members: Iterable[tuple[bytes, int]]) -> SetTree | None:
    """Return what belongs to a member; None if a file is not sealed, or there are none or too many."""
    tree = SetTree({}, {}, {})
    with db.read_transaction():
        todo = [(path, inodes.get(db, inode)) for path, inode in members]
        while todo:
            path, inode = todo.pop()
            if inode.is_directory:
                if path:
                    tree.directories[path] = inode
                todo += [(path + b"/" + entry.name if path else entry.name, one) for entry, one in namespace.iterate_entries(db, inode.id)]
            elif inode.target is not None:
                tree.symlinks[path] = inode
            elif inode.is_file:
                file = find_set_file(db, inode.id)
                if file is None or len(tree.files) == limits.SET_FILES_MAX:
                    return None
                tree.files[path] = file
    return tree if tree.files else None


def has_set_of(db: Database, series: int, files: Iterable[int]) -> bool:
    """Return True if one set of a series has all these files, as they are now."""
    query = (
        "WITH RECURSIVE up(file, id) AS (SELECT e.child, d.id FROM json_each(?2) j JOIN entry e ON e.child = j.value"
        " JOIN inode d ON d.id = e.parent AND d.history = 1 UNION"
        " SELECT up.file, i.parent FROM up JOIN inode i ON i.id = up.id WHERE i.parent > 1)"
        " SELECT 1 FROM entry s JOIN up ON up.id = s.child WHERE s.parent = ?1 AND substr(s.name, 1, 1) <> x'2e'"
        " GROUP BY s.child HAVING count(DISTINCT up.file) = json_array_length(?2) LIMIT 1"
    )
    return db.value(query, series, json.dumps(sorted(set(files)))) is not None


def list_known_sets(db: Database, directories: Iterable[int]) -> dict[int, bool]:
    """Return {directory: has the application all files} of those sets that this node knows whole."""
    query = (
        "WITH RECURSIVE below(top, id) AS (SELECT value, value FROM json_each(?) UNION ALL SELECT below.top, e.child"
        f" FROM below JOIN entry e ON e.parent = below.id JOIN inode i ON i.id = e.child WHERE i.mode & {_TYPE_BITS} = {_DIRECTORY}),"
        " figures(top, known, in_place) AS (SELECT below.top, count(*), sum(f.nlink > f.history) FROM below"
        f" JOIN entry e ON e.parent = below.id JOIN inode f ON f.id = e.child WHERE f.mode & {_TYPE_BITS} = {_FILE} GROUP BY below.top),"
        " counts(top, known, in_place, files) AS (SELECT top, known, in_place, json_extract(CAST(x.value AS TEXT), '$.files')"
        " FROM figures JOIN xattr x ON x.inode = top AND x.name = ?)"
        " SELECT top, in_place >= files FROM counts WHERE known >= files"
    )
    return {row[0]: bool(row[1]) for row in db.rows(query, json.dumps([*directories]), history.SET_XATTR)}


def count_history_bytes(db: Database) -> int:
    """Return the bytes of the files that only the history holds."""
    return count_sizes(db, "size", f"inode WHERE history > 0 AND nlink = history AND mode & {_TYPE_BITS} = {_FILE}")[1]


# --- what is noted on a member ----------------------------------------------------------------------------------------


def set_producers(db: Database, producers: Mapping[int, str]) -> None:
    """Note which processes wrote files; an empty text forgets it."""
    for inode, producer in producers.items():
        inodes.set_internal_xattr(db, inode, PRODUCER_XATTR, producer.encode() or None)


def list_committed(db: Database, members: Iterable[int]) -> list[int]:
    """Return the inodes that a user marked as complete members."""
    return db.column(
        "SELECT x.inode FROM json_each(?) j JOIN xattr x ON x.inode = j.value AND x.name = ?", json.dumps([*members]), COMMIT_XATTR
    )


def delete_commit(db: Database, members: Iterable[int]) -> None:
    """Delete the mark that `list_committed` reads."""
    db.run("DELETE FROM xattr WHERE name = ? AND inode IN (SELECT value FROM json_each(?))", COMMIT_XATTR, json.dumps(list(members)))


def is_manifest(db: Database, inode: int) -> bool:
    """Return True for a file that the tracker added to a set."""
    names = ", ".join(f"x'{name.hex()}'" for name in MANIFEST_NAMES)
    return db.value(f"SELECT 1 FROM entry WHERE child = ? AND name NOT IN ({names}) LIMIT 1", inode) is None
