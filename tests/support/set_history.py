"""The history of sets as tests see it: through the catalog, and as plain files on the PFS."""

import json
import zipfile
from pathlib import Path

from daemon_under_test import Area, DaemonUnderTest, eventually

_SETS = (
    "WITH RECURSIVE up(top, id, path) AS (SELECT x.inode, x.inode, '' FROM xattr x WHERE x.name = CAST('ckptfs.set' AS BLOB) UNION ALL"
    " SELECT up.top, e.parent, CAST(e.name AS TEXT) || '/' || up.path FROM up JOIN entry e ON e.child = up.id)"
    " SELECT top, path FROM up WHERE id = 1"
)


def list_sets(mount: DaemonUnderTest | Area, *, hidden: bool = False) -> dict[str, int]:
    """Return the directories of all sets of this mount by their paths in the history; of an area only its own."""
    found = {}
    above = ".ckptfs.history/" + (f"{mount.path.name}/" if isinstance(mount, Area) else "")
    for inode, path in mount.catalog(_SETS):
        name = path.rstrip("/").rpartition("/")[2]
        if path.startswith(above) and (hidden or not name.startswith(".")):
            found[path.rstrip("/").removeprefix(above)] = inode
    return found


def wait_for_sets(mount: DaemonUnderTest | Area, *paths: str, timeout: float = 60.0) -> dict[str, int]:
    """Wait until the history holds exactly these sets; hidden ones count."""
    try:
        eventually(lambda: sorted(list_sets(mount, hidden=True)) == sorted(paths), timeout)
    except AssertionError:
        raise AssertionError(f"{sorted(list_sets(mount, hidden=True))} are in the history, and not {sorted(paths)}") from None
    return list_sets(mount)


def list_names(mount: DaemonUnderTest | Area, directory: int) -> dict[str, int]:
    """Return the inodes of what is directly in a set."""
    return dict(mount.catalog("SELECT CAST(name AS TEXT), child FROM entry WHERE parent = ?", directory))


def load_manifest(history: Path) -> dict[str, object]:
    """Return the manifest of a set on the PFS."""
    found: dict[str, object] = json.loads((history / "MANIFEST.json").read_bytes())
    return found


def write_archive(path: Path, data: bytes = bytes(3000)) -> None:
    """Write a file that shows its end, as torch.save does."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", data)
