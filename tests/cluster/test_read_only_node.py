"""P9, N3: a node with a read-only mount reads what others wrote, holds no copies for them, and is missed by none."""

import errno
from collections.abc import Callable
from dataclasses import replace

import pytest
from ckptfs_client.lab import nodes
from ckptfs_client.lab.layout import LabNode
from cluster_lab import ClusterUnderTest, eventually, level, limited, wait_for

DATA = bytes(range(256)) * 30_000


def test_it_reads_from_peers_and_counts_for_nothing(make_lab: Callable[..., ClusterUnderTest]) -> None:
    lab = make_lab(with_pfs=False)
    lab.expect_warning("node2|node3|clique|copies|nodes|peer")
    file = lab[0].path / "a"
    plan = lab.laboratory.load_plan()
    node = LabNode(replace(plan, options={**plan.options, "ro": ""}), "node3")
    shown = node.mountpoint / "a"
    with limited(lab):
        eventually(lambda: lab[0].count_alive() == lab[1].count_alive() == 3, what="all are members")
        lab[2].end()
        eventually(lambda: lab[0].count_alive() == lab[1].count_alive() == 2, what="the others know that it has ended")
        nodes.wait_until_ready(node, nodes.launch(node))
        for data in (DATA, DATA[::-1]):
            file.write_bytes(data)
            wait_for(file, "clique")
            eventually(lambda data=data: shown.read_bytes() == data, what="it reads the newest generation")
        with pytest.raises(OSError) as failure:
            shown.write_bytes(b"x")
        assert failure.value.errno == errno.EROFS
        assert lab[0].count_alive() == lab[1].count_alive() == 2
        lab[1].wipe(nvme=True)
        eventually(lambda: level(file) == "local", what="what a read-only node has is no copy")
        assert shown.read_bytes() == DATA[::-1]
        nodes.unmount(node)
        lab.mend()
        wait_for(file, "clique")
        assert (lab[2].path / "a").read_bytes() == DATA[::-1]
