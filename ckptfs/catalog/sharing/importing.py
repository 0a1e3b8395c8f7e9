"""What a visit asks of the store, so that nodes which visit one directory import every name once, and none that a node of theirs made.

A listing is older than what is read here: whatever another node was about to show there then has its name or an intention in the store.
If we die here: what was read is in the catalog.
"""

from collections.abc import Sequence

from ckptfs import limits
from ckptfs.catalog import epoch
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import applying, reading, touching
from ckptfs.catalog.sharing.applying import Recent, Told
from ckptfs.catalog.sharing.kinds import INODE, NAME, PLACE, SHOWN, Key
from ckptfs.catalog.store import Store


def refresh(db: Database, store: Store, directory: int, names: Sequence[bytes]) -> set[bytes]:
    """The catalog knows what the store does of these names in a directory. Those of them that must be left alone: another node is at
    them, or takes them away. Raises Unreachable.
    """
    epoch.demand_told(db)
    left: set[bytes] = set()
    for start in range(0, len(names), limits.ETCD_OPERATIONS_MAX // 2):
        left |= _refresh(db, store, directory, names[start : start + limits.ETCD_OPERATIONS_MAX // 2])
    return left


def _refresh(db: Database, store: Store, directory: int, names: Sequence[bytes]) -> set[bytes]:
    keys = [Key(kind, directory, name) for name in names for kind in (NAME, PLACE)]
    told = reading.answers(keys, store.read(reading.gets(keys)))
    subjects = {value["child"] for key in keys if key.kind == NAME and (value := told[key].seen.content)}
    subjects |= {value["inode"] for key in keys if key.kind == PLACE and (value := told[key].seen.content)}
    more = [Key(kind, inode) for inode in sorted(subjects - {0}) for kind in (INODE, SHOWN)]
    if more:
        told |= reading.answers(more, store.read(reading.gets(more)))
    applying.take_over(db, {key: one for key, one in told.items() if key.kind in {PLACE, SHOWN} or one.seen.value is not None}, Recent())
    return {name for name in names if _is_in_hand(db, told, directory, name)}


def _is_in_hand(db: Database, told: dict[Key, Told], directory: int, name: bytes) -> bool:
    """Whether another node is about to change what the PFS shows under a name, or has changed what it leads to and is not known here."""
    named, place = Key(NAME, directory, name), Key(PLACE, directory, name)
    if "by" in (told[place].seen.content or {}) or touching.is_touched(db, named):
        return True
    here = db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", directory, name)
    there = (told[named].seen.content or {"child": None})["child"]
    return here != there or (there is None and told[place].seen.value is not None)
