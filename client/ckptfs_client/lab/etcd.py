"""Owns the lab's etcd: one member, in the switch's namespace, its data in DIR/etcd.

`stop` is a kill -9: what etcd has answered is on its disk. If we die here: it runs or it does not; `start` may be called again.
"""

import contextlib
import http.client
import shutil
import threading
import time

from ckptfs_client.failures import CommandFailed
from ckptfs_client.lab import network, processes
from ckptfs_client.lab.plan import ETCD, ETCD_ADDRESS, ETCD_PORT, Plan

ETCD_READY_WAIT_S = 30.0
HEALTH_TIMEOUT_S = 2.0
ETCD_POLL_S = 0.05
CLIENT_URL = f"http://{ETCD_ADDRESS}:{ETCD_PORT}"
PEER_URL = "http://127.0.0.1:2380"


def find_etcd() -> str:
    """Where etcd is installed. Raises Failed."""
    found = shutil.which("etcd")
    if found is None:
        raise CommandFailed(
            "the lab needs etcd, which is not installed", remedy="apt install etcd-server, or another etcd from 3.4 on in PATH"
        )
    return found


def start_etcd(plan: Plan) -> None:
    """Have it running and answering. Raises Failed."""
    namespace = network.get_namespace_path(plan, network.BRIDGE)
    if not is_etcd_running(plan):
        command = [
            find_etcd(), "--name", "lab", "--data-dir", str(plan.directory / ETCD), "--listen-client-urls", CLIENT_URL,
            "--advertise-client-urls", CLIENT_URL, "--listen-peer-urls", PEER_URL, "--initial-advertise-peer-urls", PEER_URL,
            "--initial-cluster", f"lab={PEER_URL}", "--auto-compaction-retention", "1",
        ]  # fmt: skip
        processes.spawn(namespace, command, plan.directory / "etcd.log")
    until = time.monotonic() + ETCD_READY_WAIT_S
    while not is_etcd_healthy(plan):
        if time.monotonic() > until or not is_etcd_running(plan):
            raise CommandFailed("etcd does not answer", remedy=f"{plan.directory / 'etcd.log'} says why")
        threading.Event().wait(ETCD_POLL_S)


def stop_etcd(plan: Plan) -> None:
    """Kill it; its data stay."""
    processes.kill_processes(network.get_namespace_path(plan, network.BRIDGE))


def is_etcd_running(plan: Plan) -> bool:
    """Whether its process is there."""
    return bool(processes.list_processes_named(network.get_namespace_path(plan, network.BRIDGE), ETCD))


def is_etcd_healthy(plan: Plan) -> bool:
    """Whether it says that it is well."""

    def ask() -> bool:
        connection = http.client.HTTPConnection(ETCD_ADDRESS, ETCD_PORT, timeout=HEALTH_TIMEOUT_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read(4096)
        return False

    from ckptfs_client.lab import namespaces

    return is_etcd_running(plan) and namespaces.run_in_namespace(network.get_namespace_path(plan, network.BRIDGE), ask)
