"""Samples of the figures of several mounts, with their recent history, for the views that stay open."""

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ckptfs.model import Level
from ckptfs.protocol import control_pb2 as pb
from ckptfs.series.set_order import build_set_order
from ckptfs_client.client import Client, ask_all
from ckptfs_client.dashboard import overview
from ckptfs_client.dashboard.overview import BacklogHistory, MountAnswers, Row
from ckptfs_client.errors import ClientError
from ckptfs_client.mounts import Mount
from ckptfs_client.render import escape_unprintable
from ckptfs_client.sets.set_history import ListedSeries, SetHistory, get_pattern, split_number

Found = TypeVar("Found")
ANSWER_S = 3.0
"""After this silence of a daemon a view goes on without it."""
REST_RATIO = 20
"""Figures of series are asked again after this many times the time that they took: some catalogs are large."""
WALK_WAIT_S = 1.0
REFRESHED_MAX = 8
"""Of how many series a sample asks the store of the cluster: each takes it some time."""


class OverviewSampler:
    """Asks the daemons, and keeps what they answered. One thread samples; any may ask for sets."""

    def __init__(self, list_chosen: Callable[[], Sequence[Mount]], *, for_caller: bool = False) -> None:
        """`list_chosen` returns the mounts to show, and is called for each sample.

        `for_caller`: also show names that the caller may read, and not every user. Others must not see the samples.
        """
        self._list_chosen = list_chosen
        self._for_caller = for_caller
        self._named: dict[str, dict[int, ListedSeries]] = {}
        self._mounts: dict[str, Mount] = {}
        self._answers: dict[str, MountAnswers] = {}
        self._histories: dict[str, BacklogHistory] = {}
        self._series: dict[str, tuple[pb.ListSeriesReply, float]] = {}
        self._walks: dict[str, threading.Thread] = {}

    def sample(self) -> Row:
        """Ask all daemons at once; return the host, the time in seconds since the epoch, and the mounts."""
        chosen = list(self._list_chosen())
        answers = [
            MountAnswers(mount.name, str(mount.mountpoint), failure=str(answer)) if isinstance(answer, ClientError) else answer
            for mount, answer in ask_all(chosen, self._ask, ANSWER_S)
        ]
        at_s = time.monotonic()
        self._mounts = {str(mount.mountpoint): mount for mount in chosen}
        self._answers = {one.mountpoint: one for one in answers}
        self._histories = {one.mountpoint: self._histories.get(one.mountpoint) or BacklogHistory() for one in answers}
        self._series = {where: found for where, found in self._series.items() if where in self._mounts}
        for one in answers:
            self._histories[one.mountpoint].append(at_s, one.status)
        shown = [overview.build_mount(one, self._histories[one.mountpoint], time.time_ns()) for one in answers]
        return {"host": escape_unprintable(socket.gethostname()), "at": time.time(), "mounts": shown}

    def list_sets(self, mountpoint: str, directory: int) -> list[Row]:
        """Return the newest sets of a series of the last sample.

        Raises KeyError if it was not in that sample, or ClientError.
        """
        mount, answers = self._mounts[mountpoint], self._answers[mountpoint]
        if answers.status is None or answers.series is None:
            raise KeyError(mountpoint)
        rollback = next((one.rollback for one in answers.series.series if one.directory == directory), None)
        if rollback is None:
            raise KeyError(directory)
        with Client(mount, answer_s=ANSWER_S) as client:
            return overview.build_sets(client.list_sets(directory, overview.SETS_SHOWN_MAX), rollback, answers.status, time.time_ns())

    def _ask(self, client: Client) -> MountAnswers:
        """Ask one daemon. Without an answer about series or nodes the rest is shown. Raises ClientError."""
        mount = client.mount
        status = client.get_status()
        cluster = _ask_or_none(client.get_cluster) if status.HasField("clique") else None
        series = self._ask_series(client, has_pfs=bool(status.pfs))
        return MountAnswers(mount.name, str(mount.mountpoint), status, series, cluster)

    def _ask_series(self, client: Client, *, has_pfs: bool) -> pb.ListSeriesReply | None:
        where, begun_s = str(client.mount.mountpoint), time.monotonic()
        known, due_s = self._series.get(where, (None, 0.0))
        if known is not None and begun_s < due_s:
            return known
        found = _ask_or_none(lambda: client.list_series(figures=True))
        if found is not None:
            has_unnamed = self._for_caller and not all(one.path for one in found.series)
            if found.shared or has_unnamed:
                self._walk_history(client.mount, {one.rollback for one in found.series})
            if found.shared:
                found = _ask_or_none(lambda: client.list_series(figures=True)) or found
                _refresh_newest(client, found, Level.PFS if has_pfs else Level.CLIQUE)
            _add_names(found, self._named.get(where, {}))
            end_s = time.monotonic()
            self._series[where] = found, end_s + REST_RATIO * (end_s - begun_s)
        return found

    def _walk_history(self, mount: Mount, rollbacks: Collection[int]) -> None:
        """List the history through the mount: so a node of a cluster learns what other nodes made.

        A mount that hangs keeps one thread, and the view goes on.
        """
        where = str(mount.mountpoint)

        def walk() -> None:
            _list_newest(mount.history, rollbacks)
            if self._for_caller:
                self._named[where] = _list_named(mount)

        if where not in self._walks or not self._walks[where].is_alive():
            self._walks[where] = threading.Thread(target=walk, daemon=True)
            self._walks[where].start()
        self._walks[where].join(WALK_WAIT_S)


def _list_newest(history: Path, rollbacks: Collection[int]) -> None:
    """List the directories of a history, and of each series the newest set and those in `rollbacks`."""
    for directory, names, _ in os.walk(history):
        get_order = build_set_order(os.fsencode(get_pattern(directory)))
        sets = {name: (member, number) for name in names for member, number in [split_number(name)] if number is not None}
        newest = max(sets, key=lambda name: get_order(os.fsencode(sets[name][0]), sets[name][1]), default=None)
        names[:] = [name for name in names if name not in sets or name == newest or sets[name][1] in rollbacks]


def _list_named(mount: Mount) -> dict[int, ListedSeries]:
    """Return the series whose names the caller may read through the mount, by directory."""
    with contextlib.suppress(ClientError, OSError), SetHistory(mount, Client(mount, answer_s=ANSWER_S), figures=True) as history:
        return {one.directory: one for one in history.series}
    return {}


def _add_names(found: pb.ListSeriesReply, named: Mapping[int, ListedSeries]) -> None:
    """Add names that the daemon does not tell every user."""
    for one in found.series:
        known = named.get(one.directory)
        if known is not None and not one.path:
            one.path, one.pattern = os.fsencode(known.path), os.fsencode(known.pattern)
            if known.newest is not None and known.newest.number == one.newest.number:
                one.newest.name = known.newest.name


def _refresh_newest(client: Client, found: pb.ListSeriesReply, highest: Level) -> None:
    """Have the daemon ask the store of the cluster how far the newest sets are.

    Only a question about sets does that. What the daemon knows of sets of other nodes is old.
    """
    moving = [one for one in found.series if one.HasField("newest") and one.newest.level != highest]
    moving.sort(key=lambda one: one.newest.completed_ns, reverse=True)
    for one in moving[:REFRESHED_MAX]:
        sets = _ask_or_none(functools.partial(client.list_sets, one.directory, 1))
        if sets:
            one.newest.CopyFrom(sets[0])


def _ask_or_none(question: Callable[[], Found]) -> Found | None:
    try:
        return question()
    except ClientError:
        return None
