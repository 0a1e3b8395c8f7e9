"""A claim keeps a file out of checkpoint sets while a node writes it, and no longer."""

import pytest
from local_node import Node

from ckptfs.catalog import handles, identity, set_members
from ckptfs.flow.seal import Seal
from ckptfs.model import Tier


@pytest.fixture
def claiming(node: Node) -> Node:
    number = identity.get_node_number(node.db)
    node.db.change("INSERT INTO peer (number, name, domain, alive, is_self) VALUES (?, 'one', 'one', 1, 1)", number)
    return node


def claim(node: Node, inode: int) -> None:
    with node.db.transaction():
        set_members.insert_claim(node.db, inode)


def close_and_seal(node: Node, content: int) -> None:
    node.close_content(content, 3)
    Seal(node.db, node.tiers, node.config, node.told).step()


def test_a_claim_ends_with_the_writing(claiming: Node) -> None:
    """T6: the next generation is for sets again."""
    content = claiming.make_sealed(b"step_1.pt", b"old")
    inode = claiming.inode(content)
    claim(claiming, inode)
    assert set_members.find_set_file(claiming.db, inode) is None
    content = claiming.reopen(content, Tier.RAM)
    close_and_seal(claiming, content)
    assert set_members.find_set_file(claiming.db, inode) is not None


@pytest.mark.parametrize("is_writer", [False, True])
def test_a_claim_without_a_writer_ends_when_the_mount_starts(claiming: Node, is_writer: bool) -> None:
    """D1, T6: the mount process died before the open, so nothing was written. If it died after it, the writer goes on."""
    content = claiming.make_sealed(b"step_1.pt", b"old")
    inode = claiming.inode(content)
    claim(claiming, inode)
    with claiming.db.transaction():
        claiming.db.run("DELETE FROM set_candidate")
        handles.insert(claiming.db, inode, content, is_writer=is_writer, backing_id=0)
        set_members.delete_own_claims(claiming.db)
    assert (set_members.find_set_file(claiming.db, inode) is None) == is_writer
    assert claiming.db.rows("SELECT inode FROM set_candidate") == ([] if is_writer else [(inode,)])


def test_a_second_writer_does_not_keep_it_out_for_ever(claiming: Node) -> None:
    """D1: a program opens the file that it just made once more, before it closes it."""
    content = claiming.make(b"step_1.pt", b"new", closed=False)
    inode = claiming.inode(content)
    claim(claiming, inode)
    close_and_seal(claiming, content)
    assert set_members.find_set_file(claiming.db, inode) is not None
