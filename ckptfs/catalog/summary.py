"""Figures for people: levels of files, places of copies, the figures and troubles of `ckptfs status`.

It writes the table `report` only.

Levels are never stored: this module loads records, and `ckptfs.lifecycle` judges them. No function touches a tier, so all answer at once,
even while the PFS hangs.
"""

import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ckptfs import lifecycle, limits
from ckptfs.catalog import contents, copies, inodes, journal, peer_copies
from ckptfs.catalog.content_rows import CONTENT_COLUMNS_WITHOUT_BLOCKS, HAS_GOOD_COPY, IS_ON_PFS, TOTAL, build_content, count_sizes
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import FileRecord
from ckptfs.model import HISTORY_NAME, Content, ContentState, Copy, CopyState, Level, PublishedRow, Tier

_HAS_ERROR = "(coalesce(json_extract({}.value, '$.error'), '') <> '')"
_SIZE = "CASE WHEN c.state = 2 THEN c.size ELSE i.size END"
_REGULAR = f"(i.mode & {0o170000}) = {stat.S_IFREG}"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One inode in `ckptfs ls`. `has_pending_changes`: the journal has rows about it."""

    inode: int
    mode: int
    size: int
    generation: int
    record: FileRecord
    has_pending_changes: bool

    @property
    def level(self) -> Level:
        return lifecycle.level(self.record)


@dataclass(frozen=True, slots=True)
class WriteBackFigures:
    """The lag of the PFS. `dirty_*`: contents; `changes`: all others; `lag_s`: age of the oldest."""

    dirty_bytes: int
    dirty_files: int
    changes: int
    lag_s: float
    unsealed_files: int


@dataclass(frozen=True, slots=True)
class FileCounts:
    """Totals of files, directories and handles, and files and their bytes by level."""

    files: int
    directories: int
    by_level: dict[Level, int]
    bytes_by_level: dict[Level, int]
    lost: int
    open_handles: int
    writers: int


def load_file_record(db: Database, inode: int) -> FileRecord:
    """Return all that is known of the regular file `inode`. Block digests are left out."""
    with db.read_transaction():
        row = db.row(f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ?", inode)
        return contents.build_file_record(db, inode, None if row is None else build_content(row))


def get_level(db: Database, inode: int) -> Level:
    """Return the level of the regular file `inode`."""
    return lifecycle.level(load_file_record(db, inode))


def list_copy_places(db: Database, inode: int, found: FileRecord) -> list[tuple[str, str, int]]:
    """Return (tier or node, state, when this node verified it or 0) of every copy and the PFS."""
    words = {CopyState.FILLING: "filling", CopyState.GOOD: "good", CopyState.QUARANTINED: "quarantined", CopyState.STALE: "older"}
    ordered = sorted(found.copies, key=lambda copy: copy.tier, reverse=True)
    rows = [(copy.tier.value, words[copy.state], copy.verified_ns) for copy in ordered]
    rows += [(name, words[CopyState.GOOD], 0) for name, _ in (found.clique.holders if found.clique is not None else ())]
    if found.published is not None:
        checked = db.value("SELECT checked_ns FROM pfs_file WHERE inode = ?", inode) or 0
        rows.append((Tier.PFS.value, "published" if lifecycle.is_on_pfs(found) else "stale", int(checked)))
    return rows


def _format_digest(db: Database, inode: int) -> bytes | None:
    """Return the digest of the content that a reader of the file gets. Returns None if it is not known."""
    found = load_file_record(db, inode)
    read = found.published if found.content is None else found.content if found.content.state is ContentState.SEALED else None
    digest = None if read is None else read.digest
    return None if digest is None else digest.hex().encode()


def _format_copies(db: Database, inode: int) -> bytes:
    places = list_copy_places(db, inode, load_file_record(db, inode))
    return " ".join(f"{tier}:{state}" for tier, state, _ in places).encode()


VIRTUAL_XATTR_PREFIX = b"user.ckptfs."
FORMAT_XATTR = b"format"
SET_XATTR = b"set"
LATEST_XATTR_PREFIX = b"latest."
"""Before LEVEL.FIRST.SERIES: what `ckptfs latest` asks a directory for. FIRST: where the search goes on; no SERIES: the only one."""
FLAW_XATTR = b"flaw"
"""What the rules of its kind have against a set: what `ckptfs verify` asks its directory in the history for."""
RULES_XATTR = b"rules"
"""The rules of the configuration for series, which `ckptfs latest` needs as well. Any directory answers."""
# The extended attributes of a regular file: the name behind the prefix, the function for the value (None: not known yet), and the meaning.
# The mount process has its own functions for `format`, which is read from the file itself, and for `set`.
VIRTUAL_XATTRS: dict[bytes, tuple[Callable[[Database, int], bytes | None], str]] = {
    b"level": (lambda db, inode: get_level(db, inode).value.encode(), f"The level that the file has now: {', '.join(Level)}."),
    b"digest": (_format_digest, "Its digest in hexadecimal: xxh3-128 over its blocks' digests and its size. ENODATA until it is sealed."),
    FORMAT_XATTR: (
        lambda db, inode: None,
        "The format that its bytes show (zip, safetensors, HDF5, ..., or unknown), and behind a colon what is wrong with it."
        " ENODATA until it is sealed.",
    ),
    SET_XATTR: (lambda db, inode: None, "SERIES/SET: the newest checkpoint set in the history to which it belongs. ENODATA without one."),
    b"copies": (_format_copies, "TIER:STATE of each copy, separated by blanks; copies on other nodes are NODE:STATE."),
}


def get_listed_file(db: Database, inode: int) -> ListedFile | None:
    """Return the values that `ls` shows. Returns None if there is no such inode."""
    with db.read_transaction():
        row = db.row("SELECT mode, size, generation FROM inode WHERE id = ? AND nlink > 0", inode)
        if row is None:
            return None
        mode, size, generation = row
        found = load_file_record(db, inode) if stat.S_ISREG(mode) else FileRecord(None)
        if found.content is not None and found.content.state is ContentState.SEALED:
            size = found.content.size
        return ListedFile(inode, mode, size, generation, found, has_pending(db, inode))


def load_write_back_figures(db: Database) -> WriteBackFigures:
    """Return the lag of the PFS."""
    with db.read_transaction():
        is_waiting = "state IN (1, 2) AND id IN (SELECT content FROM journal WHERE op = 'content')"
        dirty_files, dirty_bytes = count_sizes(db, "size", f"content WHERE {is_waiting}")
        changes = db.value("SELECT count(*) FROM journal WHERE op NOT IN ('content', 'synced')")
        oldest = db.value("SELECT min(at_ns) FROM journal")
        unsealed = count_unsealed(db)
    lag_s = 0.0 if oldest is None else max(0.0, (time.time_ns() - oldest) / 1e9)
    return WriteBackFigures(dirty_bytes, dirty_files, int(changes), lag_s, unsealed)


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """The regular files in some trees, and the lowest of their levels as far as this node knows it."""

    files: int
    size: int
    level: Level | None


def load_tree_figures(db: Database, roots: Iterable[int]) -> TreeFigures:
    """Return the figures of the regular files at and below these inodes."""
    groups = [*_list_level_groups(db, "inode i", f"i.id IN ({inodes.WITH_TREE} SELECT id FROM tree)", json.dumps([*roots]))]
    lowest = min((level for _, level, *_ in groups if level is not None), key=lambda level: level.rank, default=None)
    return TreeFigures(sum(count for _, _, count, _, _ in groups), sum(size for _, _, _, size, _ in groups), lowest)


LOST_REPORT = "lost"
"""The key of the `contents` that were lost with other nodes, see `find_lost`."""
_LOST_WITH_NODES = (
    f"report r, json_each(r.value, '$.contents') l CROSS JOIN content k ON k.id = l.value JOIN inode i ON i.id = k.inode"
    f" WHERE r.key = '{LOST_REPORT}' AND {peer_copies.HAS_NO_HOLDER}"
)


def load_counts(db: Database) -> FileCounts:
    """Count what applications see; lost files of the history count, too."""
    by_level: Counter[Level] = Counter()
    bytes_by_level: Counter[Level] = Counter()
    lost = 0
    with db.read_transaction():
        directories = db.value("SELECT count(*) FROM inode WHERE (mode & 61440) = 16384 AND nlink > 0 AND history = 0")
        handles, writers = db.row("SELECT count(*), coalesce(sum(writer), 0) FROM handle") or (0, 0)
        for is_history, level, count, size, is_lost in _list_level_groups(db, "inode i", "1", top="i.nlink = i.history"):
            if level is not None and not is_history:
                by_level[level] += count
                bytes_by_level[level] += size
            lost += count if is_lost else 0
        lost += int(db.value(f"SELECT count(*) FROM {_LOST_WITH_NODES}"))
    return FileCounts(sum(by_level.values()), int(directories), dict(by_level), dict(bytes_by_level), lost, int(handles), int(writers))


def find_lost_path(db: Database) -> str:
    """Return the path of a file that `load_counts` counts as lost; empty if there is none."""
    inode = db.value(
        f"SELECT i.id FROM content c JOIN inode i ON i.content = c.id WHERE c.state = {ContentState.LOST} AND i.nlink > 0"
        " AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = i.id)"
        f" UNION ALL SELECT i.id FROM {_LOST_WITH_NODES} LIMIT 1"
    )
    return "" if inode is None else inodes.get_shown_path(db, inode)


def list_lowest_levels(db: Database, directories: Iterable[int]) -> dict[int, Level]:
    """Return the lowest level of the files below directories; without known copies NONE."""
    tree = (
        "WITH RECURSIVE tree(top, id) AS (SELECT value, value FROM json_each(?)"
        " UNION ALL SELECT tree.top, e.child FROM tree JOIN entry e ON e.parent = tree.id JOIN inode s ON s.id = e.child"
        " AND s.mode & 61440 = 16384) "
    )
    files = "tree JOIN entry e ON e.parent = tree.id JOIN inode i ON i.id = e.child"
    lowest: dict[int, Level] = {}
    for top, level, *_ in _list_level_groups(db, files, "1", json.dumps([*directories]), top="tree.top", tables=tree):
        lowest[top] = min(lowest.get(top, Level.PFS), level or Level.NONE, key=lambda level: level.rank)
    return lowest


def _list_level_groups(
    db: Database, source: str, condition: str, *values: str | int, top: str = "0", tables: str = ""
) -> Iterator[tuple[int, Level | None, int, int, bool]]:
    """Yield (`top`, level if known, files, bytes, are they lost) for groups of inodes `i`."""
    with db.read_transaction():
        clique = peer_copies.load_clique_copies(db, None)
        domains, uncommitted = (
            ("0", "0")
            if clique is None
            else (peer_copies.COUNT_OTHER_DOMAINS.format("c"), peer_copies.IS_UNCOMMITTED.format("c.id", "i.id"))
        )
        groups = db.rows(
            f"{tables}SELECT {top}, c.state,"
            f" {HAS_GOOD_COPY.format('c')}, p.inode IS NOT NULL,"
            " coalesce(p.complete AND p.generation = c.generation AND c.digest IS NOT NULL AND p.digest = c.digest, 0),"
            f" coalesce(c.remote, 0), {domains}, {uncommitted}, count(*), {TOTAL.format(_SIZE)}"
            f" FROM {source} LEFT JOIN content c ON c.id = i.content LEFT JOIN pfs_file p ON p.inode = i.id"
            f" WHERE {_REGULAR} AND i.nlink > 0 AND {condition} GROUP BY 1, 2, 3, 4, 5, 6, 7, 8",
            *values,
        )

    @cache
    def judge(
        state: int | None, has_copy: bool, is_published: bool, is_current: bool, peer: int, others: int, is_uncommitted: bool
    ) -> Level | None:
        typical = _build_typical_record(state, has_copy, is_published, is_current, bool(peer))
        if clique is not None:
            if peer and not (has_copy or others or is_current):
                return None  # The holders of what another node wrote are loaded one by one.
            elsewhere = tuple(("", f"/{number}") for number in range(others))
            typical = replace(typical, clique=replace(clique, holders=elsewhere, is_committed=not is_uncommitted))
        return lifecycle.level(typical)

    for group, *facts, count, size in groups:
        level = judge(*facts)
        yield group, level, count, int(size), level is not None and facts[0] == ContentState.LOST and not facts[3]


def _build_typical_record(state: int | None, has_copy: bool, is_published: bool, is_current: bool, is_remote: bool) -> FileRecord:
    published = PublishedRow(1, 1 if is_current else 0, bool(is_current), 0, 0, 1, b"d", None) if is_published else None
    if state is None:
        return FileRecord(None, (), published)
    content = Content(1, 1, 1, ContentState(state), 0, b"d", None, 0, is_remote)
    return FileRecord(content, (Copy(1, Tier.RAM, CopyState.GOOD, 1),) if has_copy else (), published)


def count_copies_by_tier(db: Database) -> dict[Tier, int]:
    """Return the number of good copies in each tier, on the PFS those under ordinary names."""
    counts = {Tier(tier): count for tier, count in db.rows("SELECT tier, count(*) FROM copy WHERE state = 1 GROUP BY tier")}
    return counts | {Tier.PFS: counts.get(Tier.PFS, 0) + int(db.value("SELECT count(*) FROM pfs_file WHERE complete = 1"))}


def get_journal_end(db: Database) -> int:
    """Return the number of the last row of the journal. Later changes get greater ones."""
    return int(db.value("SELECT coalesce(max(seq), 0) FROM journal"))


DEFERRED_TROUBLE = "files set aside"
"""How the names of troubles begin that are about files which the PFS refuses."""

_IS_OF_HISTORY = (
    "(EXISTS (SELECT 1 FROM inode p WHERE p.id = j.parent AND p.history > 0) OR EXISTS (SELECT 1 FROM inode i WHERE i.id = j.inode"
    f" AND i.history > 0 AND (i.nlink = i.history OR (i.mode & {0o170000}) = {stat.S_IFDIR})) OR j.op = 'settle' AND NOT EXISTS"
    " (SELECT 1 FROM pfs_pending w JOIN inode p ON p.id = w.parent WHERE w.inode = j.inode AND p.history = 0))"
)


def _build_waited_condition(db: Database) -> str:
    """Return SQL about the rows up to one that a wait is for: not the history if the PFS refuses that."""
    history = os.fsdecode(HISTORY_NAME)
    is_refused = any(value.get("path") == history for _, value, _ in list_troubles(db, DEFERRED_TROUBLE))
    return f"j.seq <= ? AND NOT {_IS_OF_HISTORY}" if is_refused else "j.seq <= ?"


def has_pending(db: Database, inode: int, up_to: int = 2**63 - 1) -> bool:
    """Return True if the PFS lacks a change of `inode` up to the row `up_to`; a refused history is none."""
    if not journal.has_pending(db, inode, up_to):
        return False
    return db.value(f"SELECT 1 FROM journal j WHERE {_build_waited_condition(db)} AND j.inode = ? LIMIT 1", up_to, inode) is not None


def count_names_left(db: Database, directories: Iterable[int], up_to: int) -> int:
    """Return how many removals and renames in these directories the PFS lacks, up to the row `up_to`.

    Those of a history that the PFS refuses do not count.
    """
    is_inside = "(j.parent IN (SELECT value FROM json_each(?)) OR j.new_parent IN (SELECT value FROM json_each(?)))"
    removals = f"{_build_waited_condition(db)} AND j.op IN ('unlink', 'rmdir', 'rename', 'exchange') AND {is_inside}"
    wanted = json.dumps([*directories])
    return int(db.value(f"SELECT count(*) FROM journal j WHERE {removals}", up_to, wanted, wanted))


def count_journal_left(db: Database, up_to: int) -> tuple[int, int, int]:
    """Return (files, bytes, other changes) up to a row that the PFS lacks and does not refuse."""
    condition = _build_waited_condition(db)
    is_waited_for = f"state IN (1, 2) AND id IN (SELECT j.content FROM journal j WHERE j.op = 'content' AND {condition})"
    files, size = count_sizes(db, "size", f"content WHERE {is_waited_for}", up_to)
    rows = db.value(f"SELECT count(*) FROM journal j WHERE {condition}", up_to)
    return files, size, max(0, int(rows) - files)


HANDLES_REPORT = "handles"
"""The key of the mount process's report of open handles by their way."""
SHARED_ON_PFS_REPORT = "shared:pfs"
"""The key of the `bytes` that the PFS does not store because files share blocks there."""
URGENT_REPORT = "urgent"
"""The key of the order of a drain with a deadline, see `exposure`."""
NOTICE_REPORT = "preemption"
"""The key of the notice that this node is about to be taken away."""


def list_reports(db: Database, prefix: str = "") -> list[tuple[str, str, int]]:
    """Return (key, JSON, time in ns) of the processes' reports whose keys begin with `prefix`."""
    return db.rows("SELECT key, value, at_ns FROM report WHERE substr(key, 1, ?) = ? ORDER BY key", len(prefix), prefix)


def get_report(db: Database, key: str) -> dict[str, Any]:
    """Return the report under `key`; empty without one."""
    text = db.value("SELECT value FROM report WHERE key = ?", key)
    return {} if text is None else dict(json.loads(text))


def count_bytes_in_tier(db: Database, tier: Tier) -> int:
    """Return the bytes of the contents in a tier, as far as their sizes are known."""
    return count_sizes(db, "k.size", "copy c JOIN content k ON k.id = c.content WHERE c.tier = ?", tier)[1]


def count_unsealed(db: Database, closed_ns: int = 2**63 - 1) -> int:
    """Return how many contents were closed up to a time in ns and await their seal."""
    return int(db.value("SELECT count(*) FROM content WHERE state = 1 AND remote = 0 AND closed_ns <= ?", closed_ns))


def count_only_in_ram(db: Database) -> tuple[int, int]:
    """Return (number, bytes) of this node's own contents that a reboot loses."""
    is_safe = copies.IS_SAFE_ELSEWHERE.format(pfs_verify=0)
    has_holder = f"EXISTS (SELECT 1 FROM {peer_copies.HOLDERS.format('k')})"
    is_alone = f"c.tier = 'ram' AND k.state <> 3 AND k.remote = 0 AND NOT {is_safe} AND NOT {has_holder}"
    return count_sizes(db, "k.size", f"copy c JOIN content k ON k.id = c.content WHERE {is_alone}")


def count_leaving_bytes(db: Database, tier: Tier) -> int:
    """Return the bytes of own contents that can leave a tier at once: on the PFS, and closed."""
    can_leave = (
        f"c.tier = ? AND c.state = 1 AND k.state = 2 AND k.remote = 0 AND {IS_ON_PFS.format('k')}"
        " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.inode = k.inode)"
    )
    return count_sizes(db, "k.size", f"copy c JOIN content k ON k.id = c.content WHERE {can_leave}", tier)[1]


@dataclass(frozen=True, slots=True)
class SpaceOutlook:
    """Whether the mover has work that frees space, and numbers that change while it does."""

    is_pending: bool
    progress: tuple[int, ...]


def load_space_outlook(db: Database) -> SpaceOutlook:
    """Return whether work of the mover will free space: seals, write-back, deletions, evictions."""
    with db.read_transaction():
        doomed, closed = db.row("SELECT coalesce(sum(state = 3), 0), coalesce(sum(state = 1 AND remote = 0), 0) FROM content") or (0, 0)
        journal_rows = db.value("SELECT count(*) FROM journal")
        copies_left = db.value("SELECT count(*) FROM copy WHERE state = 1 AND tier <> 'pfs'")
    leaving = count_leaving_bytes(db, Tier.RAM) + count_leaving_bytes(db, Tier.NVME)
    return SpaceOutlook(bool(doomed or closed or journal_rows or leaving), (doomed, closed, journal_rows, copies_left, leaving))


_SPACE_DEMAND = "demand:space"


def set_space_demand(db: Database, size: int) -> None:
    """Tell the evict step that a writer waits for `size` bytes in any tier."""
    set_report(db, _SPACE_DEMAND, {"bytes": size, "until_s": time.time() + limits.NO_SPACE_DEMAND_S})


def get_space_demand(db: Database) -> int:
    """Return the bytes that a writer waits for; 0 if none does."""
    demand = get_report(db, _SPACE_DEMAND)
    return int(demand["bytes"]) if demand.get("until_s", 0) > time.time() else 0


def get_copied_bytes(db: Database) -> dict[int, int]:
    """Return {inode: bytes already on the PFS} of the large file that is being written back."""
    found = get_report(db, "write_back")
    return {int(found["inode"]): int(found.get("copied_bytes", 0))} if "inode" in found else {}


def get_pfs_speed(db: Database) -> float:
    """Return the bytes per second that write-back moved lately, 0 if it was never measured."""
    return float(get_report(db, "pfs_speed").get("bytes_per_s", 0.0))


def record_pfs_speed(db: Database, size_bytes: int, seconds: float) -> None:
    """Record that `size_bytes` were written back in `seconds`. Small amounts say nothing and are left out."""
    if size_bytes >= limits.PFS_SPEED_BYTES_MIN and seconds > 0:
        before = get_pfs_speed(db)
        speed = size_bytes / seconds
        set_report(db, "pfs_speed", {"bytes_per_s": (before + speed) / 2 if before else speed})


def set_report(db: Database, key: str, value: Mapping[str, Any] | None) -> None:
    """Set the report under `key`. It keeps its time until an error comes or goes. None deletes it.

    Bytes of names that are not UTF-8 look like \\xff in it.
    """
    with db.transaction():
        if value is None:
            db.run("DELETE FROM report WHERE key = ?", key)
        else:
            db.run(
                "INSERT INTO report (key, value, at_ns) VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value,"
                f" at_ns = CASE WHEN {_HAS_ERROR.format('report')} <> {_HAS_ERROR.format('excluded')} THEN excluded.at_ns ELSE at_ns END",
                key, json.dumps({name: _make_showable(one) for name, one in value.items()}), time.time_ns(),
            )  # fmt: skip


def _make_showable(value: Any) -> Any:
    return os.fsencode(value).decode(errors="backslashreplace") if isinstance(value, str) else value


_TROUBLE_PREFIX = "trouble:"
_NUMBER = re.compile(r"\d+")


def set_trouble(db: Database, where: str, value: Mapping[str, Any] | None) -> None:
    """Set what `ckptfs status` shows as a trouble: `what`, `path` and `remedy`. None: it is over."""
    set_report(db, _TROUBLE_PREFIX + where, value)


def list_troubles(db: Database, where: str = "") -> list[tuple[str, dict[str, Any], int]]:
    """Return (where, value, time in ns) of the troubles that begin with `where`, in order."""
    found = sorted(list_reports(db, _TROUBLE_PREFIX + where), key=lambda one: _NUMBER.sub(lambda digits: digits[0].zfill(9), one[0]))
    return [(key.removeprefix(_TROUBLE_PREFIX), json.loads(text), at_ns) for key, text, at_ns in found]


def list_obstacles(db: Database) -> list[tuple[str, dict[str, Any], int]]:
    """Return the errors of tiers, and behind them all troubles, in the form of `list_troubles`."""
    tiers = [(key.removeprefix("tier:"), json.loads(text), at_ns) for key, text, at_ns in list_reports(db, "tier:")]
    failed = [(tier, {"what": value.get("error"), "remedy": value.get("remedy")}, at_ns) for tier, value, at_ns in tiers]
    return [one for one in failed + list_troubles(db) if one[1].get("what")]


OBSTACLES_NAMED_MAX = 3


def find_obstacle(db: Database) -> tuple[str, str]:
    """Return (what blocks a drain or a wait, remedies), from lanes and tiers, or empty strings.

    The first OBSTACLES_NAMED_MAX are named, and how many more there are.
    """
    found: dict[str, str] = {}
    for where, value, _ in list_obstacles(db):
        what, subject = value["what"], str(value.get("path") or (where if where in {*Tier} else ""))
        found[f"{subject}: {what}" if subject not in what else what] = str(value.get("remedy") or "")
    named = [*found][:OBSTACLES_NAMED_MAX]
    remedies = dict.fromkeys(found[what] for what in named if found[what])
    more = [f"and {len(found) - len(named)} more"] if len(found) > len(named) else []
    return "; ".join([*named, *more]), "; ".join(remedies)


def delete_reports(db: Database) -> None:
    """Delete the reports of an earlier mover, which may be wrong by now."""
    db.change(f"DELETE FROM report WHERE key LIKE '{_TROUBLE_PREFIX}%' OR key LIKE 'tier:%' OR key IN (?, ?)", URGENT_REPORT, NOTICE_REPORT)
