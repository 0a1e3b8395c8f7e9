"""A content's life in the catalog, from its first byte to its close, and the handles that outlive the mount process."""

import pytest

from ckptfs.catalog import contents, handles, namespace
from ckptfs.catalog.database import Database
from ckptfs.flow import open_decision
from ckptfs.model import ROOT, ContentState, Tier


def _file(db: Database, name: bytes = b"file") -> int:
    with db.transaction():
        return namespace.create(db, ROOT, name, 0o100644, uid=1, gid=2).id


def _begun(db: Database, inode: int) -> int:
    with db.transaction():
        return contents.insert_content(db, inode, Tier.RAM)


def _held(db: Database, inode: int) -> contents.FileContent:
    held = contents.get_file_content(db, inode)
    assert held is not None
    return held


def test_a_former_state_that_is_written_again_has_a_number_that_nobody_saw(db: Database) -> None:
    """P7: the state that was lost may come back with its node, and must not seem to be the same."""
    inode = _file(db)
    content = _begun(db, inode)
    with db.transaction():
        contents.mark_closed(db, inode, content, 0, 1, 2)
        db.run("UPDATE inode SET generation = 6")
        contents.mark_open(db, inode, content, Tier.RAM)
    assert db.value("SELECT generation FROM content") == 7 == _held(db, inode).inode.generation


def test_what_no_writer_has_open_is_abandoned(db: Database) -> None:
    kept, left = _file(db, b"kept"), _file(db, b"left")
    written, abandoned = _begun(db, kept), _begun(db, left)
    with db.transaction():
        handles.insert(db, kept, written, is_writer=True, backing_id=3)
        handles.insert(db, left, abandoned, is_writer=False, backing_id=4)
        reserved = contents.insert_reserved_content(db, Tier.PFS)
    assert set(contents.list_abandoned(db)) == {(abandoned, left, Tier.RAM), (reserved, 0, Tier.PFS)}


def test_handles_outlive_the_process_until_a_new_connection_begins(db: Database) -> None:
    inode = _file(db)
    content = _begun(db, inode)
    with db.transaction():
        first = handles.insert(db, inode, content, is_writer=True, backing_id=3)
        second = handles.insert(db, inode, content, is_writer=False, backing_id=3)
        assert handles.delete(db, first)
        assert not handles.delete(db, first), "a release that is told twice"
    other = Database(db.path, journalled=True)
    (handle,) = handles.list_all(other)
    assert (handle.id, handle.inode, handle.content, handle.is_writer, handle.backing_id) == (second, inode, content, False, 3)
    with other.transaction():
        assert handles.delete_all(other) == 1
    other.close()
    assert handles.list_all(db) == []


@pytest.mark.parametrize(
    ("state", "tiers", "published", "truncate", "way"),
    [
        (None, (), False, False, open_decision.WriteTarget.NEW),
        (None, (), True, False, open_decision.WriteTarget.FETCH),
        (None, (), True, True, open_decision.WriteTarget.NEW),
        (ContentState.SEALED, (Tier.RAM,), True, False, open_decision.WriteTarget.IN_PLACE),
        (ContentState.SEALED, (Tier.RAM,), True, True, open_decision.WriteTarget.NEW),
        (ContentState.OPEN, (Tier.NVME,), False, False, open_decision.WriteTarget.IN_PLACE),
        (ContentState.SEALED, (), True, False, open_decision.WriteTarget.FETCH),
        (ContentState.LOST, (), False, False, open_decision.WriteTarget.LOST),
        (ContentState.LOST, (), False, True, open_decision.WriteTarget.NEW),
        (ContentState.CLOSED, (), False, False, open_decision.WriteTarget.LOST),
    ],
)
def test_the_way_of_a_writer(
    db: Database, state: ContentState | None, tiers: tuple[Tier, ...], published: bool, truncate: bool, way: open_decision.WriteTarget
) -> None:
    held = contents.FileContent(_held(db, _file(db)).inode, None if state is None else 1, state, tiers, published)
    assert open_decision.choose_write_target(held, truncate=truncate) is way


@pytest.mark.parametrize(
    ("state", "tiers", "published", "way"),
    [
        (None, (), False, open_decision.ReadSource.EMPTY),
        (None, (), True, open_decision.ReadSource.FETCH),
        (ContentState.OPEN, (Tier.RAM,), False, open_decision.ReadSource.HERE),
        (ContentState.SEALED, (Tier.NVME,), True, open_decision.ReadSource.HERE),
        (ContentState.SEALED, (), True, open_decision.ReadSource.FETCH),
        (ContentState.CLOSED, (), True, open_decision.ReadSource.LOST),
        (ContentState.LOST, (), False, open_decision.ReadSource.LOST),
    ],
)
def test_the_way_of_a_reader(
    db: Database, state: ContentState | None, tiers: tuple[Tier, ...], published: bool, way: open_decision.ReadSource
) -> None:
    held = contents.FileContent(_held(db, _file(db)).inode, None if state is None else 1, state, tiers, published)
    assert open_decision.choose_read_source(held) is way
