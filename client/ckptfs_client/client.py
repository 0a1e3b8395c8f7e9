"""A library over the control sockets: `Client(mount)` queries one daemon; answers as in control.proto.

If the mover restarts, calls wait for it and streams are resumed, so callers notice a pause and no error. Raises the errors of
`ckptfs_client.errors`.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import grpc

from ckptfs import limits
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import control_pb2_grpc as rpc
from ckptfs_client.errors import ClientError, CommandFailed, NoMount, NotInTime, NotPermitted, UsageError
from ckptfs_client.json_answers import UpgradeJson
from ckptfs_client.mounts import Mount, build_unanswered_error, find_inode
from ckptfs_client.render import DOWN, escape_unprintable

ANSWER_S = 15.0
"""After this silence a daemon counts as not answering."""
SEVERAL_ANSWER_S = 5.0
"""The same if several daemons are asked at once."""
ASKED_AT_ONCE_MAX = 64
Answer = TypeVar("Answer")
ENDED_ANSWER_S = 3.0
"""The same for a daemon that has ended: systemd may be restarting it."""
UPGRADED_ANSWER_S = 1.0
RETRY_S = 0.05
DRAIN_GRACE_S = 2.0
REMEDY_KEY = "ckptfs-remedy-bin"
OPTIONS = [
    ("grpc.max_receive_message_length", limits.CONTROL_MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
RETRYABLE_CODES = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
PROBE_TIMEOUT_S = 60.0
REFRESH_TIMEOUT_S = 3600.0


class Client:
    """A client of one mount's daemon. Use it as a context manager, or close it."""

    def __init__(self, mount: Mount, *, answer_s: float = ANSWER_S) -> None:
        self.mount = mount
        self._answer_s = min(answer_s, ENDED_ANSWER_S) if mount.has_ended else answer_s
        self._channels: dict[Path, grpc.Channel] = {}

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._channels:
            self._channels.popitem()[1].close()

    # --- queries ------------------------------------------------------------------------------------------------------

    def get_status(self) -> pb.Status:
        answer: pb.Status = self._call(self._build_query_stub().GetStatus, pb.StatusRequest())
        return answer

    def get_cluster(self, *, probe: bool = False) -> pb.Cluster:
        """Return all nodes of the cluster; with `probe` the daemon pings them. Raises UsageError without one."""
        answer: pb.Cluster = self._call(
            self._build_query_stub().GetCluster, pb.ClusterRequest(probe=probe), PROBE_TIMEOUT_S if probe else None
        )
        return answer

    def get_capacity(self) -> pb.Capacity:
        """Return the space on this node for the next checkpoint."""
        answer: pb.Capacity = self._call(self._build_query_stub().GetCapacity, pb.CapacityRequest())
        return answer

    def get_config(self) -> pb.ConfigReply:
        """Return the effective settings of the mount, and where each was given."""
        answer: pb.ConfigReply = self._call(self._build_query_stub().GetConfig, pb.ConfigRequest())
        return answer

    def list_records(self, inodes: Iterable[int], *, trees: bool = False) -> list[pb.Record]:
        """Return the record of each inode, in order; with `trees` that of a directory sums up the files below."""
        numbers = list(inodes)
        found: list[pb.Record] = []
        for start in range(0, len(numbers), limits.CONTROL_LIST_MAX):
            request = pb.ListRequest(inodes=numbers[start : start + limits.CONTROL_LIST_MAX], trees=trees)
            found.extend(self._call(self._build_query_stub().List, request).records)
        return found

    def wait(self, inode: int, level: str, timeout_s: float | None = None) -> Iterator[pb.Progress]:
        """Yield progress until the inode, or everything below it, has the level. Raises NotInTime."""
        return self._stream_until_done(lambda: self._build_query_stub().Wait, pb.WaitRequest(inode=inode, level=level), timeout_s)

    def list_series(self, *, figures: bool = False) -> pb.ListSeriesReply:
        """Return the series that have complete sets. Names are only told of those that all users may list."""
        answer: pb.ListSeriesReply = self._call(self._build_query_stub().ListSeries, pb.ListSeriesRequest(figures=figures))
        return answer

    def list_sets(self, directory: int, at_least: int | None = None) -> list[pb.SetInfo]:
        """Return the sets of a series, the newest first: all, or `at_least` so many.

        Raises UsageError if there is no such series.
        """
        found: dict[int, pb.SetInfo] = {}
        messages = self._stream_until_done(lambda: self._build_query_stub().ListSets, pb.ListSetsRequest(directory=directory), None)
        for message in messages:
            found |= {one.number: one for one in message.sets}
            if at_least is not None and len(found) >= at_least:
                break
        return list(found.values())

    def list_events(self, position: tuple[int, int], since_ns: int = 0) -> pb.EventList:
        """Return some events behind a position in the log."""
        request = pb.EventsRequest(file=position[0], offset=position[1], since_ns=max(0, since_ns))
        answer: pb.EventList = self._call(self._build_query_stub().ListEvents, request)
        return answer

    # --- admin --------------------------------------------------------------------------------------------------------

    def drain(self, deadline_s: float | None = None, level: str = "") -> Iterator[pb.Progress]:
        """Start a drain, and yield progress until it is done. Raises NotInTime, UsageError."""
        request = pb.DrainRequest(deadline_s=deadline_s or 0.0, level=level)
        # The daemon ends it at the deadline; this client waits a little longer for its words.
        return self._stream_until_done(lambda: self._build_admin_stub().Drain, request, deadline_s and deadline_s + DRAIN_GRACE_S)

    def verify(self, inode: int) -> Iterator[pb.VerifyProgress]:
        """Verify the digest of every copy of a file, or of all files below a directory."""
        return self._stream_until_done(lambda: self._build_admin_stub().Verify, pb.VerifyRequest(inode=inode), None)

    def refresh(self, inode: int, *, recursive: bool = False, timeout_s: float | None = None) -> None:
        """Compare a directory with the PFS again. Raises NotInTime."""
        self._call(self._build_admin_stub().Refresh, pb.RefreshRequest(inode=inode, recursive=recursive), timeout_s or REFRESH_TIMEOUT_S)

    def adopt(self, *, is_last: bool = False) -> Iterator[pb.Progress]:
        """Have the mount adopt a store that lost its data, and yield progress until it is done."""
        return self._stream_until_done(lambda: self._build_admin_stub().Adopt, pb.AdoptRequest(last=is_last), None)

    def get_or_set_log_level(self, level: str = "") -> str:
        """Set the log level of the daemon, if given; return it. Raises NotPermitted, UsageError, NotInTime."""
        answer: pb.LogLevelReply = self._call(self._build_admin_stub().LogLevel, pb.LogLevelRequest(level=level), self._answer_s)
        return answer.level

    def upgrade(self) -> UpgradeJson:
        """Have the daemon hand over to this version; return when that serves. Raises ClientError.

        The daemon tries this version first. If it refuses, nothing was changed. It goes on by itself if the caller is interrupted.
        """
        before = self.get_status()
        mover = next((process.pid for process in before.processes if process.role == "mover"), 0)
        begun_s = time.monotonic()
        request = pb.UpgradeRequest(python=sys.executable, places=_list_package_homes())
        try:
            self._build_admin_stub().Upgrade(request, timeout=limits.UPGRADE_WAIT_S + DRAIN_GRACE_S, wait_for_ready=True)
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                remedy = "drain, unmount, and mount again"
                raise CommandFailed(f"the daemon of {self.mount.name} is too old to be upgraded while it runs", remedy=remedy) from failure
            if failure.code() not in RETRYABLE_CODES:
                raise self._translate_error(failure, waited=True) from failure
        version = _wait_until_replaced(self.mount, mover)
        os.statvfs(self.mount.mountpoint)  # Waits for the mount process.
        return {"name": before.name, "former": before.version, "version": version, "seconds": round(time.monotonic() - begun_s, 1)}

    # --- the connection -----------------------------------------------------------------------------------------------

    def _build_query_stub(self) -> Any:
        return rpc.QueriesStub(self._channel(self.mount.socket))

    def _build_admin_stub(self) -> Any:
        path = self.mount.admin_socket
        if path.exists() and not os.access(path, os.W_OK):
            remedy = "run it as root, or as the user who mounted it"
            raise NotPermitted(f"only the owner of the mount {self.mount.name} may do this", remedy=remedy)
        return rpc.AdminStub(self._channel(path))

    def _channel(self, path: Path) -> grpc.Channel:
        if path not in self._channels:
            self._channels[path] = grpc.insecure_channel(f"unix:{path}", options=OPTIONS)
        return self._channels[path]

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        """Return the reply of one call. Wait while the daemon restarts.

        Without `timeout_s`, or if the daemon has ended, wait for at most `answer_s` in all.
        """
        until = time.monotonic() + self._answer_s
        while True:
            timeout_s = None if self.mount.has_ended else timeout_s
            try:
                return method(request, timeout=timeout_s or max(RETRY_S, until - time.monotonic()), wait_for_ready=True)
            except grpc.RpcError as failure:
                if failure.code() not in RETRYABLE_CODES or time.monotonic() > until:
                    raise self._translate_error(failure, waited=timeout_s is not None) from failure

    def _stream_until_done(self, method: Callable[[], Any], request: Any, timeout_s: float | None) -> Iterator[Any]:
        """Yield the messages of a stream up to the one with `done`; call again if a restart cut the stream."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        silent_until = time.monotonic() + self._answer_s
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise NotInTime("not done in time")
            try:
                for message in method()(request, timeout=left):
                    silent_until = time.monotonic() + self._answer_s
                    yield message
                    if message.done:
                        return
            except grpc.RpcError as failure:
                if failure.code() not in RETRYABLE_CODES or time.monotonic() > silent_until:
                    raise self._translate_error(failure, waited=timeout_s is not None) from failure
            threading.Event().wait(RETRY_S)

    def _translate_error(self, failure: Any, *, waited: bool) -> ClientError:
        """Return the error for a gRPC status; `waited`: the caller gave a timeout."""
        code, words = failure.code(), failure.details() or ""
        remedy = next((value.decode() for key, value in failure.trailing_metadata() or () if key == REMEDY_KEY), "")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            if waited:
                return NotInTime("not done in time" if "Deadline" in words or not words else words, remedy=remedy)
            return build_unanswered_error(self.mount)
        if code in RETRYABLE_CODES:
            return build_unanswered_error(self.mount)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            problem = f"the daemon of {self.mount.name} runs another version of ckptfs, which does not know this question"
            return CommandFailed(problem, remedy=f"umount {self.mount.mountpoint}, and mount it again")
        kinds = {grpc.StatusCode.FAILED_PRECONDITION: UsageError, grpc.StatusCode.PERMISSION_DENIED: NotPermitted}
        return kinds.get(code, CommandFailed)(words, remedy=remedy)


def _list_package_homes() -> list[str]:
    """Return the directories of the packages of this installation."""
    homes = []
    for package in ("ckptfs", "ckptfs_daemon"):
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise CommandFailed(f"this installation of ckptfs lacks the package {package}", remedy="install all of it")
        homes.append(str(Path(found.submodule_search_locations[0]).absolute().parent))
    return list(dict.fromkeys(homes))


def _wait_until_replaced(mount: Mount, mover: int) -> str:
    """Wait until another mover answers; return its version.

    One that the same supervisor restarted does not count.
    """
    until = time.monotonic() + limits.READY_WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(ClientError), Client(mount, answer_s=UPGRADED_ANSWER_S) as client:
            status = client.get_status()
            if any(process.role == "mover" and process.pid != mover and not process.restarts for process in status.processes):
                return status.version
        threading.Event().wait(RETRY_S)
    raise NotInTime(f"the daemon of {mount.name} did not answer in time after the upgrade", remedy="its log says why")


# --- several mounts ---------------------------------------------------------------------------------------------------


def ask_all(
    chosen: Sequence[Mount], question: Callable[[Client], Answer], answer_s: float | None = None
) -> list[tuple[Mount, "Answer | ClientError"]]:
    """Ask several daemons at once. Returns the answer of each mount, or its error.

    Without `answer_s`, a single daemon may restart meanwhile; of several, none waits long for a silent one.
    """
    silence_s = answer_s or (ANSWER_S if len(chosen) == 1 else SEVERAL_ANSWER_S)

    def ask(mount: Mount) -> "Answer | ClientError":
        with Client(mount, answer_s=silence_s) as client:
            try:
                return question(client)
            except ClientError as failure:
                return failure

    with ThreadPoolExecutor(max_workers=min(len(chosen), ASKED_AT_ONCE_MAX) or 1) as threads:
        return list(zip(chosen, threads.map(ask, chosen), strict=True))


def ask_answering(chosen: Sequence[Mount], question: Callable[[Client], Answer]) -> tuple[list[tuple[Mount, Answer]], bool]:
    """Ask several daemons at once, and name on stderr those that do not answer.

    Returns the others with their answers, and whether one was silent. Raises the error of an only one.
    """
    found = ask_all(chosen, question)
    failures = [(mount, answer) for mount, answer in found if isinstance(answer, ClientError)]
    if len(found) == 1 and failures:
        raise failures[0][1]
    _print_failures(failures)
    return [(mount, answer) for mount, answer in found if not isinstance(answer, ClientError)], bool(failures)


def list_statuses(chosen: Sequence[Mount]) -> list[pb.Status]:
    """Return the status of each mount, with the health DOWN without an answer; errors go to stderr.

    Raises NoMount if none answers.
    """
    found = ask_all(chosen, Client.get_status)
    failures = [(mount, answer) for mount, answer in found if isinstance(answer, ClientError)]
    if len(failures) == len(found):
        raise failures[0][1] if len(found) == 1 else NoMount("; ".join(str(failure) for _, failure in failures))
    _print_failures(failures)
    return [_build_silent_status(mount, answer) if isinstance(answer, ClientError) else answer for mount, answer in found]


def _print_failures(failures: Iterable[tuple[Mount, ClientError]]) -> None:
    """Print errors of several mounts on stderr, each with its mount."""
    for mount, failure in failures:
        where = "" if str(mount.mountpoint) in str(failure) else f"{mount.mountpoint}: "
        print(f"ckptfs: {escape_unprintable(f'{where}{failure}')}", file=sys.stderr)


def _build_silent_status(mount: Mount, failure: ClientError) -> pb.Status:
    trouble = pb.Trouble(where="daemon", what=str(failure.args[0]), remedy=failure.remedy)
    return pb.Status(name=mount.name, mountpoint=str(mount.mountpoint), health=DOWN, troubles=[trouble])


def open_client(path: str | os.PathLike[str]) -> tuple[Client, int]:
    """Return a client of the mount of `path`, and its inode number. Raises NoMount, CommandFailed."""
    mount, inode = find_inode(path)
    return Client(mount), inode
