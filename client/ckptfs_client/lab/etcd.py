"""Owns the lab's etcd: one member, in the switch's namespace, its data in DIR/etcd.

`stop` is a kill -9: what etcd has answered is on its disk. If we die here: it runs or it does not; `start` may be called again.
"""

import contextlib
import http.client
import shutil
import threading
import time

from ckptfs_client.failures import Failed
from ckptfs_client.lab import network, processes
from ckptfs_client.lab.plan import ETCD, ETCD_ADDRESS, ETCD_PORT, Plan

READY_S = 30.0
ASK_S = 2.0
LOOK_S = 0.05
CLIENTS = f"http://{ETCD_ADDRESS}:{ETCD_PORT}"
MEMBERS = "http://127.0.0.1:2380"


def program() -> str:
    """Where etcd is installed. Raises Failed."""
    found = shutil.which("etcd")
    if found is None:
        raise Failed("the lab needs etcd, which is not installed", remedy="apt install etcd-server, or another etcd from 3.4 on in PATH")
    return found


def start(plan: Plan) -> None:
    """Have it running and answering. Raises Failed."""
    namespace = network.place(plan, network.BRIDGE)
    if not runs(plan):
        command = [
            program(), "--name", "lab", "--data-dir", str(plan.directory / ETCD), "--listen-client-urls", CLIENTS,
            "--advertise-client-urls", CLIENTS, "--listen-peer-urls", MEMBERS, "--initial-advertise-peer-urls", MEMBERS,
            "--initial-cluster", f"lab={MEMBERS}", "--auto-compaction-retention", "1",
        ]  # fmt: skip
        processes.spawn(namespace, command, plan.directory / "etcd.log")
    until = time.monotonic() + READY_S
    while not answers(plan):
        if time.monotonic() > until or not runs(plan):
            raise Failed("etcd does not answer", remedy=f"{plan.directory / 'etcd.log'} says why")
        threading.Event().wait(LOOK_S)


def stop(plan: Plan) -> None:
    """Kill it; its data stay."""
    processes.end(network.place(plan, network.BRIDGE))


def runs(plan: Plan) -> bool:
    """Whether its process is there."""
    return bool(processes.named(network.place(plan, network.BRIDGE), ETCD))


def answers(plan: Plan) -> bool:
    """Whether it says that it is well."""

    def ask() -> bool:
        connection = http.client.HTTPConnection(ETCD_ADDRESS, ETCD_PORT, timeout=ASK_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read(4096)
        return False

    from ckptfs_client.lab import namespaces

    return runs(plan) and namespaces.inside(network.place(plan, network.BRIDGE), ask)
