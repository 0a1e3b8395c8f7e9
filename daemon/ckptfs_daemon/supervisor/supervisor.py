"""The supervisor: keeps the FUSE connection and its requests, restarts mount and mover, ends in order.

One poll loop, without access to file contents. At the start, the mover recovers before the mount serves. When asked to end,
the mover drains while the mount is attached and serves; then the mount is unmounted, the mount process exits, and the mover drains what was
closed meanwhile. An unmount by an administrator begins with the second half.

A supervisor also ends without an unmount. It hands the mount over to another version, for `ckptfs upgrade`, or leaves it to systemd, which
keeps the connection during `systemctl restart`. It tries the successor first.

Crash safety: the children exit with the supervisor. systemd keeps the connection and restarts the supervisor; without systemd the next
start takes over what is left.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from ckptfs import __version__, limits, procfs
from ckptfs.catalog import database
from ckptfs.config import Config
from ckptfs.errors import CkptfsError
from ckptfs.event_log import EventKind
from ckptfs.model import DataPath
from ckptfs_daemon import ipc, logs
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.fuse import connection
from ckptfs_daemon.fuse.connection import Connection
from ckptfs_daemon.ipc import ChildSetup, ServeRole, Successor
from ckptfs_daemon.supervisor import children, handover, state_directory
from ckptfs_daemon.supervisor.children import Child, RestartHistory
from ckptfs_daemon.supervisor.handover import Trial
from ckptfs_daemon.supervisor.systemd import Systemd

log = logging.getLogger(__name__)

MOUNT, MOVER = "mount", "mover"
MOVER_RECOVERY_WAIT_S = 10.0
"""How long a fresh mount waits for the mover to recover after an earlier daemon."""
RECOVERY_WATCHDOG_FACTOR = 20
REAP_WAIT_S = 5.0
STUCK_REAP_WAIT_S = 0.1
LEAVE_REAP_WAIT_S = 1.0
"""The same before a handover, while applications wait. The successor ignores a process that hangs in a system call."""
TRIAL_POLL_S = 0.02
TURN_MAX_S = 1.0
"""How long the loop sleeps at most. A child that was killed and hangs in a system call sends no message and closes no link."""


class Phase(Enum):
    """RUNNING; DRAINING while the mount serves; UNMOUNTING until the connection has ended; FINISHING.

    FINISHING lasts until the mover has drained the rest. LEAVING: the mount stays, for a successor.
    """

    RUNNING = auto()
    DRAINING = auto()
    UNMOUNTING = auto()
    FINISHING = auto()
    OVER = auto()
    LEAVING = auto()


@dataclass
class Slot:
    """One role: its child, the deaths before, and when the next child is due (None: not at all)."""

    child: Child | None = None
    history: RestartHistory = field(default_factory=RestartHistory)
    due_at: float | None = None
    ever_ready: bool = False


class Supervisor:
    def __init__(
        self, config: Config, fuse_connection: Connection, *, is_resumed: bool, systemd: Systemd, ready_pipe: state_directory.ReadyPipe,
        arguments: list[str], serve_role: ServeRole,
    ) -> None:  # fmt: skip
        """`is_resumed`: a mount process has served this connection before.

        `arguments`: of this daemon, for its successor. `serve_role` is what a child runs.
        """
        self._config = config
        self._serve_role = serve_role
        self._connection = fuse_connection
        self._is_resumed = is_resumed
        self._systemd = systemd
        self._ready_pipe = ready_pipe
        self._arguments = arguments
        self._trial: Trial | None = None
        self.successor: Successor | None = None  # Who takes over, if `is_leaving`; None: systemd starts it.
        self._phase = Phase.RUNNING
        self.exit_code = 0
        self.ended_cleanly = False  # True once the mount and the mover have ended on request: nothing was cut off.
        self._began = time.monotonic()
        self._deadline = float("inf")
        self._watchdog_notified_at = 0.0
        self._is_ready_announced = False
        self._stop_signal_count = 0
        self.was_stopped = False  # True if a signal ended the mount, and no administrator unmounted it.
        self._is_hurried = False
        self._drain_report = ""
        self._slots = {MOVER: Slot(due_at=self._began), MOUNT: Slot(due_at=self._began)}
        self._hanging: dict[Child, float] = {}
        """Killed children that have not ended yet, and when to report that they hang; infinity: it is reported."""
        self._wake_sockets = dict(zip((MOUNT, MOVER), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), strict=True))
        self._is_unpublished = False
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def is_leaving(self) -> bool:
        return self._phase is Phase.LEAVING

    def run(self) -> int:
        """Run until unmounted, asked to end or replaced. Returns the daemon's exit code."""
        self._listen_to_signals()
        while self._phase not in (Phase.OVER, Phase.LEAVING):
            self._start_due()
            if self._is_unpublished:
                self._publish_processes()
            self._wait()
            self._handle_signals()
            self._read_children()
            self._follow_trial()
            self._check_heartbeats()
            self._check_deadline()
        self._kill_children()
        return self.exit_code

    # --- signals and waiting -----------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count_stop_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        handover.receive_stop_signals()

    def _count_stop_signal(self, *_: object) -> None:
        """Count a signal. The handler does nothing more, because it may interrupt the main loop anywhere."""
        self._stop_signal_count += 1

    def _handle_signals(self) -> None:
        count, self._stop_signal_count = self._stop_signal_count, 0
        for _ in range(count):
            self._handle_stop_signal()

    def _handle_stop_signal(self) -> None:
        """Drain and unmount at the first signal; at the next, unmount without drain, fail open files, end.

        Before the first one counts, systemd says whether it only restarts the unit.
        """
        if self._is_serving() and self._systemd.unit and not (self._trial is not None and self._trial.is_for_restart):
            self._start_trial(handover.get_own_successor(), self._systemd.is_restarting)
            return
        self._stop()

    def _stop(self) -> None:
        self._trial = None
        self.was_stopped = True
        if self._phase is Phase.RUNNING and self._slots[MOUNT].ever_ready:
            self._start_drain()
        elif self._phase is Phase.RUNNING:
            self._start_unmount()
        else:
            self._is_hurried = self._is_hurried or self._phase is Phase.DRAINING
            self._deadline = time.monotonic()

    def _wait(self) -> None:
        """Wait until a child sends a message or dies, a signal comes, or something is due."""
        now = time.monotonic()
        due = [slot.due_at for slot in self._slots.values() if slot.due_at is not None]
        until = min([now + TURN_MAX_S, self._deadline, *due])
        if self._systemd.watchdog_interval_s is not None:
            until = min(until, self._watchdog_notified_at + self._systemd.watchdog_interval_s)
        if self._is_waiting_for_mover(now):
            until = min(until, self._began + MOVER_RECOVERY_WAIT_S)
        if self._trial is not None:
            until = min(until, now + TRIAL_POLL_S)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for slot in self._slots.values():
            if slot.child is not None:
                poll.register(slot.child.link, select.POLLIN)
        poll.poll(max(0.0, until - now) * 1000 + 1)
        stood_still_s = max(0.0, time.monotonic() - max(until, now))
        for slot in self._slots.values():
            if slot.child is not None:  # What stopped this process, such as a pause of the machine, stopped its children, too.
                slot.child.last_message_at += stood_still_s
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 64):
                pass

    # --- children ----------------------------------------------------------------------------------------------------

    def _start_due(self) -> None:
        now = time.monotonic()
        for role, slot in self._slots.items():
            is_due = slot.child is None and slot.due_at is not None and slot.due_at <= now
            if is_due and not (role == MOUNT and self._is_waiting_for_mover(now)):
                self._start(role, slot)

    def _start(self, role: str, slot: Slot) -> None:
        slot.due_at = None
        fuse_fd, table_fd = (self._connection.fd, self._connection.table_fd) if role == MOUNT else (-1, -1)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            setup = ChildSetup(role, self._config, self._is_resumed, theirs, self._wake_sockets[role], fuse_fd, table_fd)
            slot.child = Child(setup, ours, self._serve_role)
        except OSError as failure:
            log.error("%s process: cannot be started: %s; trying again in %g s", role, failure, limits.RESTART_LAST_S)
            slot.due_at = time.monotonic() + limits.RESTART_LAST_S
        else:
            self._instruct(slot.child)
        self._publish_processes()

    def _is_waiting_for_mover(self, now: float) -> bool:
        """Return True while a fresh mount waits for the mover's recovery."""
        return not self._is_resumed and not self._slots[MOVER].ever_ready and now < self._began + MOVER_RECOVERY_WAIT_S

    def _read_children(self) -> None:
        self._hanging = {killed: report_at for killed, report_at in self._hanging.items() if killed.reap(0) is None}
        for killed, report_at in self._hanging.items():
            if time.monotonic() >= report_at:
                self._hanging[killed] = math.inf
                log.warning("%s process %d: was killed but hangs in a system call; another one has its place", killed.role, killed.pid)
        for role, slot in self._slots.items():
            child = slot.child
            if child is None:
                continue
            messages, is_alive = child.read_messages()
            for message in messages:
                self._handle_message(child, message)
            if child.is_ready and not slot.ever_ready:
                slot.ever_ready = True
                self._publish_processes()
            if role == MOUNT and child.is_ready:
                self._is_resumed = True
            if not is_alive:
                self._handle_child_end(role, slot, child)
            elif child.is_stuck():
                # Once the connection has ended it may have ended in an orderly way, and no application waits for another one.
                is_over = self._phase is Phase.FINISHING or self._connection.has_ended()
                self._handle_child_end(role, slot, child, REAP_WAIT_S if is_over else STUCK_REAP_WAIT_S)
        self._announce_ready()

    def _handle_message(self, child: Child, message: bytes) -> None:
        """Do what a child asks for, and follow what the mover reports of a drain."""
        if message.startswith(ipc.LOG_LEVEL):
            self._set_log_level(message.removeprefix(ipc.LOG_LEVEL).decode())
        elif message.startswith(ipc.UPGRADE):
            self._consider_upgrade(child, ipc.parse_successor(message.removeprefix(ipc.UPGRADE)))
        elif message.startswith(ipc.DRAINING):
            self._follow_drain(*ipc.parse_drain_report(message))
        elif message == ipc.DRAINED and self._phase is Phase.DRAINING:
            self._start_unmount()

    def _set_log_level(self, level: str) -> None:
        """Set the log level of all processes, also of later ones. It lasts until the daemon ends."""
        log.info("the log level is %s from now on", level)
        logs.set_level(level)
        self._config = replace(self._config, log_level=level)
        # The mover last, because it replies to `ckptfs log-level`.
        for role in (MOUNT, MOVER):
            child = self._slots[role].child
            if child is not None:
                child.send(ipc.LOG_LEVEL + level.encode())

    def _announce_ready(self) -> None:
        """Announce the mount once it serves and the mover is ready or its time is over."""
        if self._is_ready_announced or not self._slots[MOUNT].ever_ready or self._phase is not Phase.RUNNING:
            return
        if self._slots[MOVER].ever_ready or time.monotonic() >= self._began + MOVER_RECOVERY_WAIT_S:
            self._is_ready_announced = True
            log.info("%s is mounted at %s, data path %s", self._config.name, self._config.mountpoint, self._connection.data_path)
            events.record(EventKind.MOUNTED, mountpoint=str(self._config.mountpoint), version=__version__)
            self._systemd.notify("READY=1", f"STATUS=serving {self._config.mountpoint}")
            self._ready_pipe.write_once("ok")

    def _check_heartbeats(self) -> None:
        """Kill children without a heartbeat for too long, and send systemd the supervisor's own."""
        now = time.monotonic()
        for role, slot in self._slots.items():
            child = slot.child
            # A mover that recovers a large catalog sends no heartbeats yet, and no application waits for it.
            patience_s = limits.WATCHDOG_S * (RECOVERY_WATCHDOG_FACTOR if role == MOVER and child is not None and not child.is_ready else 1)
            if child is not None and now - child.last_message_at > patience_s:
                log.error("%s process %d: no heartbeat for %g s; killing it", role, child.pid, patience_s)
                child.last_message_at = now
                child.kill()
        if self._systemd.watchdog_interval_s is not None and now >= self._watchdog_notified_at + self._systemd.watchdog_interval_s:
            self._watchdog_notified_at = now
            self._systemd.notify("WATCHDOG=1")
        self._systemd.flush()

    # --- deaths ------------------------------------------------------------------------------------------------------

    def _handle_child_end(self, role: str, slot: Slot, child: Child, patience_s: float = REAP_WAIT_S) -> None:
        """Handle a closed link or a killed process: the child has ended, or ends now."""
        code = child.reap(patience_s)
        slot.child = None
        if code is None:
            self._hanging[child] = time.monotonic() + REAP_WAIT_S
        if role == MOUNT and code == 0:
            self._announce_ready()  # It served, even if it was unmounted at once.
            self._finish()
        elif role == MOVER and code == 0 and self._phase is Phase.FINISHING:
            self._phase = Phase.OVER
            self.ended_cleanly = self.exit_code == 0
        else:
            self._handle_child_failure(role, slot, child, -signal.SIGKILL if code is None else code)
        self._publish_processes()

    def _handle_child_failure(self, role: str, slot: Slot, child: Child, code: int) -> None:
        now = time.monotonic()
        lived_s = now - child.started_at
        slot.history = children.record_death(slot.history, now=now, lived_s=lived_s, ready=child.is_ready, killed=code == -signal.SIGKILL)
        log.warning("%s process %d: ended with %d (%s)", role, child.pid, code, "killed" if code == -9 else "of itself")
        events.record(EventKind.RESTARTED, process=role, pid=child.pid, exit_code=code)
        reason = children.must_give_up(slot.history, ever_ready=slot.ever_ready)
        if role == MOUNT and self._phase is not Phase.FINISHING:
            if reason:
                self._give_up(f"the mount process does not stay alive: {reason}; {self._find_cause()}")
                return
        elif role == MOVER and reason:
            log.error("mover: does not stay alive: %s; new files stay in their tiers until it does", reason)
            if self._phase is Phase.FINISHING:
                self._phase = Phase.OVER
            elif self._phase is Phase.DRAINING:
                self._start_unmount()
        slot.due_at = now + children.get_restart_delay_s(slot.history)

    def _find_cause(self) -> str:
        """Return why the mount process dies. After a clean end, a start does not search for damage."""
        try:
            database.check_file(self._config.state / "catalog.db")
        except CkptfsError as failure:
            return f"{failure}; {failure.remedy}"
        return "the log says what it died of"

    def _give_up(self, sentence: str) -> None:
        log.critical("%s; giving up", sentence)
        self._ready_pipe.write_once(f"error: {sentence}")
        self._systemd.notify(f"STATUS={sentence}")
        self.exit_code = 1
        connection.abort(self._connection)
        self._finish()

    # --- a successor -------------------------------------------------------------------------------------------------

    def _is_serving(self) -> bool:
        """Return True if a mount process has served, so that another can resume, and nothing ends it."""
        return self._phase is Phase.RUNNING and self._slots[MOUNT].ever_ready

    def _consider_upgrade(self, child: Child, successor: Successor) -> None:
        """Try the successor that `ckptfs upgrade` names."""
        if self._trial is None and self._is_serving():
            self._start_trial(successor)
        else:
            child.send(ipc.UPGRADE + b"the daemon starts, is about to end, or hands over already")

    def _start_trial(self, successor: Successor, ask_for_restart: Callable[[], bool] | None = None) -> None:
        self._trial = Trial(successor, self._arguments, self._connection.table_fd, ask_for_restart)

    def _follow_trial(self) -> None:
        """Leave the mount to the successor if its trial went well."""
        trial = self._trial
        if trial is None or trial.is_running:
            return
        self._trial = None
        if self._phase is not Phase.RUNNING:
            return
        if trial.is_wanted and not trial.refusal:
            handover.hold_stop_signals()
            if self._stop_signal_count:
                handover.receive_stop_signals()
                return
            log.info("%s: handing over to %s", self._config.mountpoint, "systemd" if trial.is_for_restart else trial.successor.places[0])
            self.successor = None if trial.is_for_restart else trial.successor
            self._phase = Phase.LEAVING
            return
        if trial.refusal:
            outcome = "draining and unmounting instead" if trial.is_for_restart else "this version goes on"
            log.error("%s: is not handed over: %s; %s", self._config.mountpoint, trial.refusal, outcome)
        if trial.is_for_restart:
            self._stop()
        elif (mover := self._slots[MOVER].child) is not None:
            mover.send(ipc.UPGRADE + trial.refusal.encode())

    # --- the end -----------------------------------------------------------------------------------------------------

    def _start_drain(self) -> None:
        """Have the mover drain while the mount is attached: an application that saves now still saves into it."""
        log.info("%s: asked to end; draining before the unmount", self._config.mountpoint)
        self._phase = Phase.DRAINING
        self._set_drain_deadline(self._config.drain_deadline_s)
        self._systemd.notify("STOPPING=1", "STATUS=writing back before the unmount")
        mover = self._slots[MOVER].child
        if mover is not None:
            self._instruct(mover)

    def _instruct(self, child: Child) -> None:
        """Send the mover what the phase asks of it. One that was started during a drain begins it again."""
        if child.role == MOVER and self._phase is Phase.DRAINING:
            child.send(ipc.DRAIN)
        elif child.role == MOVER and self._phase is Phase.FINISHING:
            child.send(ipc.STOP)

    def _follow_drain(self, seconds: float, text: str) -> None:
        """Follow how long the drain of the mover may still take, and what is left."""
        if self._phase not in (Phase.DRAINING, Phase.FINISHING):
            return
        if self._config.drain_deadline_s is None and not self._is_hurried and self._deadline > time.monotonic():
            self._set_drain_deadline(seconds)
        if text != self._drain_report:
            self._drain_report = text
            self._systemd.notify(f"STATUS=writing back: {text}")

    def _set_drain_deadline(self, seconds: float | None) -> None:
        """Set the end of the drain, later than the mover's own, so that it applies only if the mover hangs."""
        self._deadline = time.monotonic() + (limits.DRAIN_STALL_S if seconds is None else seconds) + limits.STOP_WAIT_S

    def _start_unmount(self) -> None:
        """Unmount in a thread, because the kernel may wait for replies of the mount process meanwhile."""
        log.info("%s: unmounting", self._config.mountpoint)
        self._phase = Phase.UNMOUNTING
        self._deadline = time.monotonic() + limits.STOP_WAIT_S
        self._systemd.notify("STOPPING=1", f"STATUS=unmounting {self._config.mountpoint}")

        def unmount() -> None:
            try:
                connection.unmount(self._connection)
            except (OSError, CkptfsError) as failure:
                log.error("%s: cannot be unmounted: %s", self._config.mountpoint, failure)

        threading.Thread(target=unmount, name="unmount", daemon=True).start()

    def _check_deadline(self) -> None:
        now = time.monotonic()
        if self._phase in (Phase.DRAINING, Phase.UNMOUNTING, Phase.FINISHING):
            self._systemd.notify(f"EXTEND_TIMEOUT_USEC={int(limits.STOP_EXTENSION_S * 1e6)}")
        if now < self._deadline:
            return
        if self._phase is Phase.DRAINING:
            log.info("%s: the drain was cut short", self._config.mountpoint)
            self._start_unmount()
        elif self._phase is Phase.UNMOUNTING:
            log.warning("%s: files are still open; they fail from now on", self._config.mountpoint)
            self._deadline = now + REAP_WAIT_S
            connection.abort(self._connection)
        elif self._phase is Phase.FINISHING:
            log.warning("drain: cut short; files that are not written back stay in their tiers for the next start")
            self._phase = Phase.OVER

    def _finish(self) -> None:
        """Leave the rest to the mover, after no application can reach the mount any more."""
        if self._phase is Phase.FINISHING:
            return
        log.info("%s: unmounted; writing back the rest", self._config.mountpoint)
        self._phase = Phase.FINISHING
        self._set_drain_deadline(self._config.drain_deadline_s)
        if self._is_hurried:
            self._deadline = time.monotonic() + limits.DRAIN_LAST_S
        self._systemd.notify("STOPPING=1", "STATUS=writing back the rest")
        self._systemd.remove_descriptors()
        with contextlib.suppress(OSError, CkptfsError):
            connection.unmount(self._connection)
        self._connection.close()
        self._kill_child(self._slots[MOUNT])
        mover = self._slots[MOVER]
        if mover.child is not None:
            mover.child.send(ipc.STOP)
        else:
            mover.due_at = mover.due_at or time.monotonic()

    def _kill_children(self) -> None:
        """Kill all children, first all and then one after the other to its end."""
        for slot in self._slots.values():
            if slot.child is not None:
                slot.child.kill()
        for slot in self._slots.values():
            self._kill_child(slot, LEAVE_REAP_WAIT_S if self.is_leaving else REAP_WAIT_S)

    def _kill_child(self, slot: Slot, patience_s: float = REAP_WAIT_S) -> None:
        slot.due_at = None
        if slot.child is not None:
            slot.child.kill()
            slot.child.reap(patience_s)
            slot.child = None

    # --- processes.json ----------------------------------------------------------------------------------------------

    def _publish_processes(self) -> None:
        """Publish which processes run. A full disk must not stop the supervisor."""
        mounted = self._connection
        processes: dict[str, Any] = {
            "name": self._config.name,
            "mountpoint": str(self._config.mountpoint),
            "connection": mounted.connection_id,
            "data_path": DataPath(mounted.data_path).value,
            "data_path_reason": mounted.data_path_reason,
            "is_kept_by_systemd": self._systemd.keeps_descriptors,
            "request_timeout_s": mounted.request_timeout_s,
            "supervisor": {"pid": os.getpid(), "started_ticks": procfs.get_start_ticks(os.getpid()), "restarts": 0},
        }
        for role, slot in self._slots.items():
            pid, ticks = (slot.child.pid, slot.child.started_ticks) if slot.child is not None else (0, 0)
            processes[role] = {"pid": pid, "started_ticks": ticks, "restarts": slot.history.restarts}
        try:
            state_directory.publish_processes(self._config, processes)
            self._is_unpublished = False
        except OSError as failure:
            if not self._is_unpublished:
                log.warning("processes.json: cannot be written: %s; trying again", failure)
            self._is_unpublished = True
