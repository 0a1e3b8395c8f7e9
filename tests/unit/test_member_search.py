"""The search for the members of series of which a file is a part: D1."""

from pathlib import Path

import pytest
from ckptfs_daemon.mount.sets.set_tracker import MemberSearch
from local_node import Node

from ckptfs.catalog import namespace
from ckptfs.model import ROOT

FILES = 20


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("name", [b"step_7", b"user_7"])
def test_a_directory_is_read_once_however_many_files_of_it_have_changed(node: Node, name: bytes) -> None:
    """Read for each file, a directory of thousands costs a processor for minutes: its names count checkpoints, or its kind is asked."""
    with node.db.transaction() as db:
        directory = namespace.create(db, ROOT, name, 0o040755, uid=0, gid=0, allow_unimported=True).id
        files = [
            namespace.create(db, directory, b"part.%c" % (65 + n), 0o100644, uid=0, gid=0, allow_unimported=True).id for n in range(FILES)
        ]
    search = MemberSearch(node.db, frozenset())
    statements: list[str] = []
    node.db.connection.set_trace_callback(statements.append)
    found = search.find(files)
    node.db.connection.set_trace_callback(None)
    reads = [sql for sql in statements if "SELECT e.name, e.child, i.mode" in sql]
    assert len(reads) <= 3, "the directory, its parent, and its kind"
    assert len(statements) <= FILES + 8, "beside the place of each file, nothing is read for it"
    assert [len(found[file] or ()) for file in files] == [1 if name == b"step_7" else 0] * FILES
    assert search.pauses_s[directory] > 0


def test_a_search_leaves_a_paused_directory_alone(node: Node) -> None:
    with node.db.transaction() as db:
        directory = namespace.create(db, ROOT, b"step_7", 0o040755, uid=0, gid=0, allow_unimported=True).id
        file = namespace.create(db, directory, b"a", 0o100644, uid=0, gid=0, allow_unimported=True).id
    assert MemberSearch(node.db, frozenset({directory})).find([file]) == {file: None}


def test_a_tree_deeper_than_the_stack_of_python_is_searched(node: Node) -> None:
    with node.db.transaction() as db:
        directory = namespace.create(db, ROOT, b"step_7", 0o040755, uid=0, gid=0, allow_unimported=True).id
        for _ in range(1500):
            directory = namespace.create(db, directory, b"d", 0o040755, uid=0, gid=0, allow_unimported=True).id
        file = namespace.create(db, directory, b"a", 0o100644, uid=0, gid=0, allow_unimported=True).id
    found = MemberSearch(node.db, frozenset()).find([file])[file]
    assert found is not None
    assert [one.member.name for one in found] == [b"step_7"]
