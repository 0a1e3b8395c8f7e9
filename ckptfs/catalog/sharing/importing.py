"""What a visit asks of the store, so that nodes which visit one directory import every name once, and none that a node of theirs made.

A listing is older than what is read here: whatever another node was about to show there then has its name or an intention in the store.
If we die here: what was read is in the catalog.
"""

from collections.abc import Sequence

from ckptfs import limits
from ckptfs.catalog import epoch
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import applying, reading, touching
from ckptfs.catalog.sharing.applying import RecentDeletes, StoreValue
from ckptfs.catalog.sharing.kinds import INODE, NAME, PFS_NAME, PFS_STATE, SharedKey
from ckptfs.catalog.store import Store


def refresh_names(db: Database, store: Store, directory: int, names: Sequence[bytes]) -> set[bytes]:
    """The catalog knows what the store does of these names in a directory. Those of them that must be left alone: another node is at
    them, or takes them away. Raises Unreachable.
    """
    epoch.require_rebuilt(db)
    left: set[bytes] = set()
    for start in range(0, len(names), limits.ETCD_OPERATIONS_MAX // 2):
        left |= _refresh_batch(db, store, directory, names[start : start + limits.ETCD_OPERATIONS_MAX // 2])
    return left


def _refresh_batch(db: Database, store: Store, directory: int, names: Sequence[bytes]) -> set[bytes]:
    keys = [SharedKey(kind, directory, name) for name in names for kind in (NAME, PFS_NAME)]
    told = reading.parse_outcome(keys, store.read(reading.build_gets(keys)))
    subjects = {value["child"] for key in keys if key.kind == NAME and (value := told[key].value.fields)}
    subjects |= {value["inode"] for key in keys if key.kind == PFS_NAME and (value := told[key].value.fields)}
    more = [SharedKey(kind, inode) for inode in sorted(subjects - {0}) for kind in (INODE, PFS_STATE)]
    if more:
        told |= reading.parse_outcome(more, store.read(reading.build_gets(more)))
    applying.apply_values(
        db, {key: one for key, one in told.items() if key.kind in {PFS_NAME, PFS_STATE} or one.value.raw is not None}, RecentDeletes()
    )
    return {name for name in names if _is_changed_elsewhere(db, told, directory, name)}


def _is_changed_elsewhere(db: Database, store_values: dict[SharedKey, StoreValue], directory: int, name: bytes) -> bool:
    """Whether another node is about to change what the PFS shows under a name, or has changed what it leads to and is not known here."""
    named, place = SharedKey(NAME, directory, name), SharedKey(PFS_NAME, directory, name)
    if "by" in (store_values[place].value.fields or {}) or touching.is_dirty(db, named):
        return True
    here = db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", directory, name)
    there = (store_values[named].value.fields or {"child": None})["child"]
    return here != there or (there is None and store_values[place].value.raw is not None)
