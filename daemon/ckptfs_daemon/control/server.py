"""The control servers in the mover: NAME.sock for all users, NAME.admin.sock for the owner; metrics.

gRPC runs calls in its own threads, with database connections of their own. They touch the PFS only in admin calls that say so, so queries
are answered while it hangs. The permissions of the sockets decide who may call: connecting needs the right to write.

Crash safety: waiting clients see the connection end and call again; the next mover binds the sockets again.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import trio

from ckptfs import limits, runtime_dir, server_limits
from ckptfs.server_limits import CallWatchdog
from ckptfs_daemon.control.admin import AdminService
from ckptfs_daemon.control.control_context import ControlContext
from ckptfs_daemon.control.methods import ControlMethods
from ckptfs_daemon.control.queries import QueryService

log = logging.getLogger(__name__)

QUERIES_MODE = 0o666
ADMIN_MODE = 0o600
ADMIN_CALLS_MAX = 8
SOCKET_CHECK_S = 2.0
STOP_GRACE_S = 1.0


async def serve(context: ControlContext) -> None:
    """Serve until cancelled. A server that cannot start, or whose socket was deleted, is started again."""
    config, queries, admin = context.config, QueryService(context), AdminService(context)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_serve_sockets, config.name, queries, admin, name="control sockets")
        if config.metrics is not None:
            # A mount without metrics does not pay for the library.
            from ckptfs_daemon.control.metrics import MetricsEndpoint

            nursery.start_soon(MetricsEndpoint(config.metrics, queries.build_status).serve, name="metrics")


async def _serve_sockets(name: str, queries: QueryService, admin: AdminService) -> None:
    while True:
        try:
            await _serve_until_unlinked(name, queries, admin)
        except (OSError, RuntimeError) as failure:
            log.error("control sockets of %s: cannot be opened: %s; `ckptfs` gets no answer", name, failure)
            await trio.sleep(limits.RETRY_LAST_S)


async def _serve_until_unlinked(name: str, queries: QueryService, admin: AdminService) -> None:
    """Serve until one of the sockets was deleted or replaced."""
    runtime_dir.create()
    servers: list[tuple[grpc.Server, Path]] = []
    watchdog = CallWatchdog()
    try:
        server = _server(limits.CONTROL_CALLS_MAX + limits.CONTROL_WAITS_MAX, ControlMethods("Queries", queries, watchdog))
        servers.append((server, _bind(server, runtime_dir.socket_path(name), QUERIES_MODE)))
        server = _server(ADMIN_CALLS_MAX, ControlMethods("Admin", admin, watchdog))
        servers.append((server, _bind(server, runtime_dir.admin_socket_path(name), ADMIN_MODE)))
        for server, _ in servers:
            server.start()
        while all(path.exists() for _, path in servers):
            await trio.sleep(SOCKET_CHECK_S)
            watchdog.cancel_late_calls()
    finally:
        stopping = [server.stop(STOP_GRACE_S) for server, _ in servers]
        with trio.CancelScope(shield=True):
            for stopped in stopping:
                await trio.to_thread.run_sync(stopped.wait, 2 * STOP_GRACE_S)


def _server(calls_max: int, methods: ControlMethods) -> grpc.Server:
    """Create a server with bounded threads, calls, messages and connections that disconnects idle clients."""
    options = [
        ("grpc.max_receive_message_length", limits.CONTROL_MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", limits.CONTROL_MESSAGE_BYTES_MAX),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", server_limits.get_connections_max(limits.CONTROL_CONNECTIONS_MAX)),
        ("grpc.max_connection_idle_ms", int(limits.CONTROL_IDLE_S * 1000)),
        ("grpc.server_handshake_timeout_ms", int(limits.CONTROL_MESSAGE_S * 1000)),
    ]
    executor = ThreadPoolExecutor(calls_max, thread_name_prefix="control")
    server = grpc.server(executor, options=options, maximum_concurrent_rpcs=calls_max)
    server.add_generic_rpc_handlers((methods,))
    return server


def _bind(server: grpc.Server, path: Path, mode: int) -> Path:
    """Bind to a socket file that no other user can connect to before it has its mode."""
    before = os.umask(0o077)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(before)
    os.chmod(path, mode)
    return path
