"""Durability of a file: its level, and the rule that allows to drop a copy. Defines P3 and P5.

Pure functions over a frozen record. The catalog builds the record; flows ask before they act.
"""

from dataclasses import dataclass

from ckptfs.model import Content, ContentState, Copy, CopyState, Level, PublishedRow, Tier

# Resolutions of timestamps on filesystems in ns: NTFS, microseconds, milliseconds, seconds.
_TIME_STEPS = (100, 1_000, 1_000_000, 1_000_000_000)


@dataclass(frozen=True, slots=True)
class CliqueCopies:
    """Verified copies of exactly this generation on other live nodes: (node, failure domain).

    `required_domains` is the number of domains for the level clique, at least two; it does not fall when nodes die. `is_committed`: the
    other nodes know the name and state of the file; what a disconnected node made is lost with it, wherever its copies are.
    """

    own_domain: str
    required_domains: int
    holders: tuple[tuple[str, str], ...] = ()
    is_committed: bool = True

    @property
    def holder_domains(self) -> frozenset[str]:
        return frozenset(domain for _, domain in self.holders)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """All facts about one regular file; no `content` on this node, no `clique` without a cluster: None."""

    content: Content | None
    copies: tuple[Copy, ...] = ()
    published: PublishedRow | None = None
    open_handles: int = 0
    clique: CliqueCopies | None = None
    is_leaving_pfs: bool = False  # The file stays in the history only, and the PFS shows it under a name that goes.


def is_good(copy: Copy) -> bool:
    return copy.state is CopyState.GOOD


def is_verified(copy: Copy) -> bool:
    """Return True if the digest of this copy was verified in its place (P4)."""
    return is_good(copy) and copy.verified_ns > 0


def is_on_pfs(record: FileRecord) -> bool:
    """Return True if the PFS shows exactly this sealed content under its name."""
    content, published = record.content, record.published
    if published is None:
        return False
    if content is None:
        return True
    return (
        content.state in {ContentState.SEALED, ContentState.LOST}
        and published.is_complete
        and published.generation == content.generation
        and content.digest is not None
        and published.digest == content.digest
    )


def is_on_clique(record: FileRecord) -> bool:
    """Return True if verified copies of this sealed content are in enough failure domains (P9)."""
    content, clique = record.content, record.clique
    if content is None or clique is None or not clique.is_committed or content.state is not ContentState.SEALED:
        return False
    own_domains = {clique.own_domain} if any(is_verified(copy) and copy.tier is not Tier.PFS for copy in record.copies) else frozenset()
    return len(clique.holder_domains | own_domains) >= clique.required_domains


def is_readable_elsewhere(record: FileRecord, tier: Tier) -> bool:
    """Return True if a reader can get this sealed content without the copy in `tier`."""
    if record.content is None or record.content.state is not ContentState.SEALED:
        return False
    has_other = any(is_good(copy) and copy.tier is not tier for copy in record.copies)
    return has_other or is_on_pfs(record) or (record.clique is not None and bool(record.clique.holders))


def level(record: FileRecord) -> Level:
    """Return the level of a file. An open file in a tier survives our processes only."""
    if is_on_pfs(record):
        return Level.PFS
    content = record.content
    if content is None:
        # An empty file has no copies, only its row.
        return Level.CLIQUE if record.clique is not None and record.clique.is_committed else Level.LOCAL
    if is_on_clique(record):
        return Level.CLIQUE
    has_holders = record.clique is not None and content.state is ContentState.SEALED and bool(record.clique.holders)
    if content.state in {ContentState.DOOMED, ContentState.LOST} or not (has_holders or any(map(is_good, record.copies))):
        return Level.NONE
    return Level.LOCAL


def can_drop(record: FileRecord, tier: Tier, *, pfs_verify: bool = True) -> bool:
    """Return True if no promise depends on the copy in `tier` (P5): sealed, closed and safe elsewhere.

    With `pfs_verify`, the file on the PFS counts after it was read back (P4). A quarantined copy never counts; but the last one is kept,
    since the user may want to save parts of it.
    """
    content = record.content
    if content is None or record.open_handles or not any(copy.tier is tier for copy in record.copies):
        return False
    if content.state is ContentState.DOOMED:
        return True
    if content.state is not ContentState.SEALED:
        return False
    is_checked = record.published is not None and (record.published.is_checked or not pfs_verify)
    is_safe_on_pfs = is_on_pfs(record) and is_checked and not record.is_leaving_pfs
    return is_safe_on_pfs or any(is_verified(copy) and _outlasts(copy.tier, tier) for copy in record.copies)


def _outlasts(other: Tier, tier: Tier) -> bool:
    """Return True if `other` survives more than `tier`: a copy in RAM does not replace one on NVMe."""
    order = list(Tier)
    return order.index(other) > order.index(tier)


def is_same_time(known_ns: int, observed_ns: int) -> bool:
    """Return True if an observed mtime may be the known one, which the filesystem has rounded since."""
    return known_ns == observed_ns or any(known_ns - known_ns % step == observed_ns for step in _TIME_STEPS)


def is_same_file(known: tuple[int, int, int], observed: tuple[int, int, int]) -> bool:
    """Return True if (size, mtime in ns, st_ino) on the PFS match the known state; st_ino 0 is unknown."""
    return known[0] == observed[0] and (known[2] == observed[2] or 0 in (known[2], observed[2])) and is_same_time(known[1], observed[1])


def count_required_domains(factor: int, domains: int) -> int:
    """Return how many failure domains need a copy: `factor`, or all, dead ones too; at least 2."""
    return max(2, min(factor, domains))
