"""What a lab consists of: `Plan`, kept in DIR/lab.json; names, addresses and paths follow from it.

The plan holds intentions only. What runs, what is mounted and which link is down is found by looking.
Crash safety: the file is replaced by rename(2), so it is the previous or the new one.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ckptfs_client.errors import CommandFailed, UsageError

DIRECTORY = Path("/var/lib/ckptfs/lab")
NODES_MAX = 64
ETCD = "etcd"
ETCD_ADDRESS = "10.111.0.1"
ETCD_PORT = 2379
ETCD_PORT_STEP = 10
ETCD_MEMBERS_MAX = 5
PEER_PORT = 7420
RAM = "1G"
PREFIX_LENGTH = 16
PLAN_NAME = "lab.json"
STOP_REMEDY = "`ckptfs lab stop` deletes what is left of that lab"


@dataclass(frozen=True, slots=True)
class Plan:
    """One lab. `token` distinguishes it from others on this machine; every daemon gets `options`."""

    directory: Path
    token: str
    factor: int
    pfs: Path | None
    options: dict[str, str]
    nodes: tuple[str, ...]
    etcd_members: int = 1

    @property
    def etcd_ports(self) -> list[int]:
        """Return the client port of each member of etcd. The port after it is for the other members."""
        return [ETCD_PORT + ETCD_PORT_STEP * member for member in range(self.etcd_members)]

    @property
    def etcd_names(self) -> list[str]:
        """Return the name of each member of etcd, which is that of its directory, too."""
        return [f"{ETCD}{member + 1}" if member else ETCD for member in range(self.etcd_members)]

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return f"lab-{self.token}"

    @property
    def networks(self) -> Path:
        """The directory of the network namespaces."""
        return self.directory / "net"

    @property
    def switch(self) -> Path:
        """The namespace of the switch and of etcd."""
        return self.networks / "switch"

    def node(self, name: str) -> "LabNode":
        """Return a node by name. Raises UsageError."""
        if name not in self.nodes:
            raise UsageError(f"there is no node {name!r} in this lab", remedy=f"its nodes are {', '.join(self.nodes)}")
        return LabNode(self, name)

    def all_nodes(self) -> list["LabNode"]:
        """Return every node, in order."""
        return [LabNode(self, name) for name in self.nodes]

    def add_node(self, name: str) -> "Plan":
        """Return the plan with one more node. Raises UsageError unless `name` is the next name."""
        expected = build_node_name(len(self.nodes) + 1)
        if name != expected or len(self.nodes) >= NODES_MAX:
            remedy = f"its nodes are {', '.join(self.nodes)}; {expected} would be a new one"
            raise UsageError(f"there is no node {name!r} in this lab", remedy=remedy)
        return replace(self, nodes=(*self.nodes, name))


class LabNode:
    """One node of a lab: its names, address and paths."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name, self.number = plan, name, int(name.removeprefix("node"))
        self.address = f"10.111.1.{self.number}"
        self.mount_name = f"{plan.cluster}-{name}"  # The name of its mount, unique on this machine.
        self.namespace = plan.networks / name  # Its network namespace.
        self.root, self.keys = plan.directory / name, plan.directory / "keys" / name
        """The directory of all that it has, and that of its certificate and key."""
        self.mountpoint, self.nvme, self.log = self.root / "mnt", self.root / "nvme", self.root / "log"
        self.state = self.root / "state"  # The directory of its catalog and RAM tier.

    def options(self) -> dict[str, str]:
        """Return the mount options of its daemon."""
        pfs = {} if self.plan.pfs is None else {"pfs": str(self.plan.pfs)}
        return {
            **pfs, "state": str(self.state), "nvme": str(self.nvme), "cluster": self.plan.cluster,
            "etcd": "+".join(f"{ETCD_ADDRESS}:{port}" for port in self.plan.etcd_ports), "etcd_insecure": "true",
            "node": self.name, "rank": str(self.number - 1), "keys": str(self.keys),
            "ram": RAM, "listen": f"{self.address}:{PEER_PORT}", "replication_factor": str(self.plan.factor), **self.plan.options,
        }  # fmt: skip


def build_node_name(number: int) -> str:
    """Return the name of the nth node, from 1."""
    return f"node{number}"


def build_plan(directory: Path, nodes: int, factor: int, pfs: Path | None, options: dict[str, str], etcd_members: int = 1) -> Plan:
    """Plan a new lab. Raises UsageError."""
    if not 1 <= nodes <= NODES_MAX:
        raise UsageError(f"a lab cannot have {nodes} nodes; accepted: 1 to {NODES_MAX}")
    if not 1 <= factor <= nodes:
        raise UsageError(f"{nodes} nodes cannot hold {factor} copies", remedy="--factor is between 1 and the number of nodes")
    if not 1 <= etcd_members <= ETCD_MEMBERS_MAX:
        raise UsageError(f"etcd cannot have {etcd_members} members in a lab; accepted: 1 to {ETCD_MEMBERS_MAX}")
    names = tuple(build_node_name(number) for number in range(1, nodes + 1))
    return Plan(directory, os.urandom(3).hex(), factor, pfs, options, names, etcd_members)


def save(plan: Plan) -> None:
    """Write the plan to its directory."""
    temporary = plan.directory / f".{PLAN_NAME}.new"
    paths = {"directory": str(plan.directory), "pfs": None if plan.pfs is None else str(plan.pfs)}
    temporary.write_text(json.dumps(asdict(plan) | paths, indent=2))
    os.rename(temporary, plan.directory / PLAN_NAME)


def load(directory: Path) -> Plan:
    """Return the plan of the lab in a directory. Raises CommandFailed if it is missing or damaged."""
    path = directory / PLAN_NAME
    try:
        found = json.loads(path.read_bytes())
        pfs = None if found["pfs"] is None else Path(found["pfs"])
        plan = Plan(**(found | {"directory": directory, "pfs": pfs, "nodes": tuple(found["nodes"])}))
    except FileNotFoundError:
        remedy = "`ckptfs lab start` creates one; name another directory with --dir DIR"
        raise CommandFailed(f"there is no lab in {directory}", remedy=remedy) from None
    except (ValueError, TypeError, KeyError) as failure:
        raise CommandFailed(f"{path} cannot be read: {failure}", remedy=STOP_REMEDY) from failure
    if not all(re.fullmatch(r"node[1-9]\d{0,2}", name) for name in plan.nodes):
        raise CommandFailed(f"{path} has invalid names of nodes", remedy=STOP_REMEDY)
    return plan
