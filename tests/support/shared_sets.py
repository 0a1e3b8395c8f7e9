"""Sets of nodes whose catalogs share one store: made, read and separated as the tracker of sets and opens do it."""

from shared_catalogs import Node

from ckptfs.catalog import contents, history, inodes, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SetRecord
from ckptfs.coherence import keys
from ckptfs.model import ROOT, Inode, Tier


async def make_closed(node: Node, inode: int) -> int:
    """Give a file a new content in RAM, as its last close does. Return its id."""
    with node.db.transaction() as db:
        content = contents.insert_content(db, inode, Tier.RAM)
        db.run("UPDATE copy SET state = 1 WHERE content = ?", content)
        contents.mark_closed(db, inode, content, 3, 1, 2)
    await node.sharing.wait_published()
    return content


async def read_history(node: Node) -> dict[bytes, int]:
    """Path -> inode of all files of the history, after a look at the store."""
    await node.sharing.refresh_name(ROOT, history.NAME)
    found: dict[bytes, int] = {}
    todo = [(b"", root)] if (root := history.find_root(node.db)) is not None else []
    while todo:
        path, directory = todo.pop()
        await node.sharing.refresh_directory(directory)
        for entry, _ in list(namespace.iterate_entries(node.db, directory)):
            await node.sharing.refresh_inode(entry.child)
            if inodes.get(node.db, entry.child).is_directory:
                todo.append((path + entry.name + b"/", entry.child))
            else:
                found[path + entry.name] = entry.child
    return found


async def keep(
    node: Node, *files: str, number: int = 1, name: bytes = b"f", pattern: bytes = b"f*", numbers: tuple[int, ...] | None = None
) -> None:
    """Make a set of files in the root, as the tracker does."""
    found = [await node.stat(file) for file in files]
    await read_history(node)

    def make(db: Database) -> None:
        series = history.insert_series(db, ROOT, pattern).directory
        directory = history.begin_set(db, series, SetRecord(number, name, numbers or (number,), len(files), 0, 5, is_group=True))
        for path, file in zip(files, found, strict=True):
            history.insert_link(db, file.id, directory, path.encode())
        history.finish_set(db, directory)

    await node._agreed(make, (), [file.id for file in found])


def delete_whole_set(db: Database, directory: int) -> None:
    """Remove a set, in the caller's transaction."""
    while not history.delete_set(db, directory, 100):
        pass


async def separate(node: Node, file: str) -> Inode:
    """What an open for writing does."""
    inode = await node.stat(file)
    if not inode.is_file or not inode.history:
        return inode
    await node.sharing.refresh_change(keys.list_unread_history(node.db, inode.id))
    await node._agreed(lambda db: inodes.get(db, inode.id).history and history.separate(db, inode.id), (), [inode.id])
    return inodes.get(node.db, inode.id)
