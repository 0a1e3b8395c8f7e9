"""What a file survives, and when a copy may go: pure functions over a record of frozen values. Owns the meaning of P3 and P5.

Nothing here is stored and nothing acts: the catalog supplies the record, the flows ask before they act.
"""

from dataclasses import dataclass

from ckptfs.model import Content, ContentState, Copy, CopyState, Level, Tier


@dataclass(frozen=True, slots=True)
class PublishedState:
    """What the PFS shows for a file: `complete` says that it is exactly the sealed generation `generation`."""

    generation: int
    is_complete: bool
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class CliqueCopies:
    """Where other nodes that are alive have a verified copy of exactly this generation: failure domains, by the nodes' names.

    `here` is this node's own domain, `demand` in how many domains a copy must lie for the level: never less than two. `told`: the others
    know the file by its name, and that it holds this; what an island made is lost with it, wherever the bytes lie.
    """

    own_domain: str
    required_domains: int
    holders: tuple[tuple[str, str], ...] = ()
    is_committed: bool = True

    @property
    def holder_domains(self) -> frozenset[str]:
        """Those of the other nodes' copies."""
        return frozenset(domain for _, domain in self.holders)


def count_required_domains(factor: int, domains_alive: int) -> int:
    """In how many failure domains a copy must lie: as many as were asked for, as far as so many are alive; one is never enough."""
    return max(2, min(factor, domains_alive))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """All that is known of one regular file: `content` is None when nothing was written here, `handles` counts open files.

    `clique` is None on a node that has none.
    """

    content: Content | None
    copies: tuple[Copy, ...] = ()
    published: PublishedState | None = None
    open_handles: int = 0
    clique: CliqueCopies | None = None


def is_good(copy: Copy) -> bool:
    """Whether this copy holds the content as far as anybody knows."""
    return copy.state is CopyState.GOOD


def is_verified(copy: Copy) -> bool:
    """Whether this copy's digest was checked where it lies (P4)."""
    return is_good(copy) and copy.verified_ns > 0


def is_on_pfs(record: FileRecord) -> bool:
    """Whether the PFS shows exactly this sealed content under its ordinary name."""
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
    """Whether verified copies of this sealed content lie in as many failure domains as it takes (P9)."""
    content, clique = record.content, record.clique
    if content is None or clique is None or not clique.is_committed or content.state is not ContentState.SEALED:
        return False
    own_domains = {clique.own_domain} if any(is_verified(copy) and copy.tier is not Tier.PFS for copy in record.copies) else frozenset()
    return len(clique.holder_domains | own_domains) >= clique.required_domains


def level(record: FileRecord) -> Level:
    """What the file survives now. An open file that lies in a tier survives our processes, and no more than that."""
    if is_on_pfs(record):
        return Level.PFS
    content = record.content
    if content is None:
        # Empty, and its row in the catalog is all of it.
        return Level.CLIQUE if record.clique is not None and record.clique.is_committed else Level.LOCAL
    if is_on_clique(record):
        return Level.CLIQUE
    has_holders = record.clique is not None and content.state is ContentState.SEALED and bool(record.clique.holders)
    if content.state in {ContentState.DOOMED, ContentState.LOST} or not (has_holders or any(map(is_good, record.copies))):
        return Level.NONE
    return Level.LOCAL


def can_drop(record: FileRecord, tier: Tier) -> bool:
    """Whether the copy in `tier` may go without any promise resting on it (P5): sealed, not open, and whole elsewhere.

    A quarantined copy counts for nothing, but while it is the last one a person may still want what is left in it.
    """
    content = record.content
    if content is None or record.open_handles or not any(copy.tier is tier for copy in record.copies):
        return False
    if content.state is ContentState.DOOMED:
        return True
    if content.state is not ContentState.SEALED:
        return False
    return is_on_pfs(record) or any(is_verified(copy) and _outlasts(copy.tier, tier) for copy in record.copies)


def _outlasts(other: Tier, tier: Tier) -> bool:
    """Whether `other` survives all that `tier` survives, and more: a copy in RAM is no reason to drop one on NVMe."""
    order = list(Tier)
    return order.index(other) > order.index(tier)


# What filesystems keep of a time that they were given, in ns: all of it, the steps of NTFS, microseconds, milliseconds, seconds.
_TIME_STEPS = (100, 1_000, 1_000_000, 1_000_000_000)


def is_same_time(known_ns: int, observed_ns: int) -> bool:
    """Whether a file's time that is seen now may be the one that is known: some filesystems show the whole time until they forget
    what is behind the point.
    """
    return known_ns == observed_ns or any(known_ns - known_ns % step == observed_ns for step in _TIME_STEPS)


def is_same_file(known: tuple[int, int, int], observed: tuple[int, int, int]) -> bool:
    """Whether (size, mtime in ns, st_ino) that are seen on the PFS are those of the state that is known."""
    return known[0] == observed[0] and known[2] == observed[2] and is_same_time(known[1], observed[1])
