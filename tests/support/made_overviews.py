"""Answers of daemons, made by hand, for the views that stay open."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptfs_client.dashboard.overview import MountAnswers
from ckptfs_client.mounts import Mount

from ckptfs.protocol import control_pb2 as pb

GIB = 1 << 30
USUAL = {"path": "run1/step_*", "name": "step_300", "level": "pfs", "age_s": 60, "files": 8, "size": 40 * GIB, "number": 30}
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def make_status(**fields: Any) -> pb.Status:
    """A mount with a PFS that is well."""
    status = pb.Status(name="run1", mountpoint="/ckpt", version="1.0", health="ok", fsync="local", pfs="/pfs")
    status.MergeFrom(pb.Status(**fields))
    status.tiers.add(name="ram", budget_bytes=64 * GIB, used_bytes=41 * GIB, free_bytes=23 * GIB, health="normal")
    status.tiers.add(name="nvme", budget_bytes=1800 * GIB, used_bytes=310 * GIB, free_bytes=1490 * GIB, health="normal")
    status.tiers.add(name="pfs", budget_bytes=9000 * GIB, free_bytes=3100 * GIB, health="normal")
    return status


def make_series(*newest: dict[str, Any]) -> pb.ListSeriesReply:
    """Series by their newest set: path, and fields of SetInfo; `age_s` stands for the time of completion."""
    reply, now_ns = pb.ListSeriesReply(), time.time_ns()
    for number, fields in enumerate(newest, 1):
        fields = {**USUAL, **fields}
        path, name, rollback = fields.pop("path").encode(), fields.pop("name").encode(), fields.pop("rollback", 0)
        pattern = path.rpartition(b"/")[2]
        one = reply.series.add(directory=number, path=path, pattern=pattern, sets=fields["number"], rollback=rollback)
        one.newest.CopyFrom(pb.SetInfo(completed_ns=now_ns - int(1e9 * fields.pop("age_s")), in_place=True, name=name, **fields))
    return reply


def make_cluster(dead: Sequence[int] = (), behind: Sequence[int] = (), nodes: int = 5) -> pb.Cluster:
    """A cluster of several nodes as node1 sees it. Each sends its copies to the next one."""
    cluster = pb.Cluster(name="training", node="node1", number=1, replication_factor=2, etcd="etcd1:2379")
    alive = [number for number in range(1, nodes + 1) if number not in dead]
    for number in range(1, nodes + 1):
        member = cluster.members.add(name=f"node{number}", number=number, domain=f"rack{1 + number % 2}", alive=number in alive)
        if member.alive:
            member.peers.append(f"node{alive[(alive.index(number) + 1) % len(alive)]}")
            member.has_figures, member.held_files, member.held_bytes = True, 8 * number, 11 * number * GIB
        if number in behind:
            member.under_replicated_files, member.under_replicated_bytes, member.lag_s = 3, 12 * GIB, 14.2
    return cluster


def make_five_nodes(left: float = 0.0) -> MountAnswers:
    """A node of five, in the middle of a checkpoint. `left` is the part that is not yet on other nodes and on the PFS."""
    status = make_status(data_path="passthrough")
    status.write_back.dirty_bytes, status.write_back.dirty_files = int(40 * GIB * (0.2 + 0.8 * left)), 6
    status.write_back.lag_s, status.write_back.changes = 31.0, 2
    status.clique.under_replicated_bytes = int(40 * GIB * max(0.0, left - 0.5))
    status.clique.under_replicated_files = 1 if left > 0.5 else 0
    status.counts.files, status.counts.writers = 412, 8
    status.health = "degraded"
    status.troubles.add(where="write back", path="run3/model.pt", what="EACCES: the PFS refuses it", remedy="chmod u+w run3", age_s=90)
    found = make_series(
        {"path": "run1/step_*", "name": "step_300", "level": "clique", "age_s": 31, "step": "300"},
        {"path": "run2/checkpoint-*", "name": "checkpoint-9000", "level": "pfs", "age_s": 800, "step": "9000", "rollback": 12},
        {"path": f"{HOSTILE}/epoch_*", "name": "epoch_3", "level": "local", "age_s": 4000, "step": "3", "number": 3},
    )
    private = found.series.add(directory=99, sets=4)
    private.newest.CopyFrom(pb.SetInfo(number=4, level="pfs", completed_ns=time.time_ns() - 7200 * 10**9, size=GIB, files=1))
    return MountAnswers("run1", "/ckpt", status, found, make_cluster(dead=[4], behind=[2]))


def make_mount(name: str = "run1", mountpoint: str = "/ckpt") -> Mount:
    """A mount that no daemon serves."""
    return Mount(name, Path(mountpoint), 0, 0)
