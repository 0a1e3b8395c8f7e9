"""Extended attributes of a file that many nodes share: any bytes, and no more than the store takes."""

import errno
from pathlib import Path

import pytest
from writers_together import WriterCluster, in_cluster

from ckptfs import limits
from ckptfs.catalog import inodes


@pytest.fixture
def cluster(tmp_path: Path) -> WriterCluster:
    return WriterCluster(tmp_path, 2, 0)


@in_cluster
async def test_values_of_any_bytes_up_to_the_bound(cluster: WriterCluster) -> None:
    one, two = cluster.nodes
    value = bytes(range(256)) * (limits.XATTR_VALUE_BYTES_MAX // 256)
    inode = (await one.make("file")).id
    held = {b"user.%d" % number: value for number in range(limits.XATTR_SHARED_BYTES_MAX // len(value) - 1)}
    for name, content in held.items():
        with one.db.transaction():
            inodes.set_xattr(one.db, inode, name, content)
    for name in (b"user.x", b"user.y"):
        with pytest.raises(OSError) as failure, one.db.transaction():
            inodes.set_xattr(one.db, inode, b"user.x", value)
            inodes.set_xattr(one.db, inode, name + b"2", value)
        assert failure.value.errno == errno.ENOSPC
    await one.sharing.wait_published()
    await two.stat("file")
    assert {name: inodes.get_xattr(two.db, inode, name) for name in held} == held
