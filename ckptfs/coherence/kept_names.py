"""Names in the history of a file that this node writes: they keep the content in the store (T6, P7).

An open for writing separates a file from the sets that this node knows (`history.separate`). Others may have made sets of it since: this
node was disconnected, or has had the file open for longer. The transaction that would show them the new content waits for this.

Crash safety: the separation is one change of the catalog. The next process builds the transaction from it.
"""

from ckptfs.catalog import handles, identity, journal, set_members
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state, keys
from ckptfs.coherence.commit import StoreTransaction
from ckptfs.coherence.keys import CONTENT, INODE, NAME, SharedKey, Value

_MOVE_CONTENT = (
    "UPDATE content SET inode = ?, superseded_mtime_ns = NULL, change = change + 1,"
    " state = CASE WHEN state = 3 AND digest IS NOT NULL THEN 2 ELSE state END WHERE id = ?"
)


def list_replaced(db: Database, transaction: StoreTransaction) -> dict[int, Value]:
    """Return files of the history whose content a transaction replaces, and their values in the store."""
    found = {}
    for key, raw in transaction.new_values.items():
        known = key_state.get_cached(db, key).fields if key.kind == INODE else None
        if not known or known.get("content") is None or not keys.count_in_history(known["names"]):
            continue
        now = keys.decode_value(raw)
        if (
            now
            and known["content"] != now.get("content")
            and keys.count_in_history([name for name in now["names"] if name in known["names"]])
        ):
            found[key.number] = known
    return found


def list_needed_keys(known: Value) -> list[SharedKey]:
    """Return the keys to read first: the content, and the names in the history."""
    names = [SharedKey(NAME, *name) for name in keys.decode_names(known["names"]) if identity.is_history_directory(name[0])]
    return [SharedKey(CONTENT, known["content"]), *names]


def separate(db: Database, inode: int, known: Value) -> bool:
    """Give the names in the history to a new inode, with the content in the store. False: there are none."""
    names = [key for key in list_needed_keys(known)[1:] if (keys.get_value(db, key) or {}).get("child") == inode]
    if not names:
        return False
    content = SharedKey(CONTENT, known["content"])
    xattrs = {name: held for name, held in known.get("xattrs", {}).items() if name != set_members.CLAIM_XATTR.decode()}
    with db.transaction():
        made = identity.allocate_id(db, "inode") or 0
        value = {**known, "xattrs": xattrs, "names": [[key.number, key.name.decode("latin-1")] for key in names]}
        keys.write_value(db, SharedKey(INODE, made), keys.omit_fields(value, "missed"))
        if db.value("SELECT 1 FROM content WHERE id = ?", content.number) is None:
            keys.write_value(db, content, key_state.get_cached(db, content).fields)  # It is forgotten here, and must not go in the store.
        db.run(_MOVE_CONTENT, made, content.number)
        key_state.mark_dirty(db, content)
        for key in names:
            keys.write_value(db, key, {"child": made})
            journal.append(db, "make" if key == names[0] else "link", made, parent=key.number, name=key.name)
        writer = (key_state.get_cached(db, content).fields or {}).get("node", 0)  # It no longer finds this content in its file.
        journal.append(db, "content", made, content=content.number, origin=0 if writer == identity.get_node_number(db) else writer)
        handles.move_shown(db, inode, made, content.number)
        keys.set_link_count(db, inode)
    return True
