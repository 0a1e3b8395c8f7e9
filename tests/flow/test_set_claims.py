"""A claim keeps a file out of checkpoint sets while a node writes it, and no longer."""

import pytest
from local_node import Node

from ckptfs.catalog import identity, set_members
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


def test_a_second_writer_does_not_keep_it_out_for_ever(claiming: Node) -> None:
    """D1: a program opens the file that it just made once more, before it closes it."""
    content = claiming.make(b"step_1.pt", b"new", closed=False)
    inode = claiming.inode(content)
    claim(claiming, inode)
    close_and_seal(claiming, content)
    assert set_members.find_set_file(claiming.db, inode) is not None
