"""Fixtures that offer a real mount: `mount` (shared, on both data paths), `share_daemon` (shared by the tests of a module that want the
same options), `fresh_mount` (a new one for each test), `make_daemon`; and `etcd`, a server of the test's own.

A test fails when the daemon's log holds a WARNING, ERROR or Traceback line that it did not announce with `expect_warning`.
With CKPTFS_IN_CLUSTER=1 every one of these daemons is a node of a cluster of its own: the tests of one node hold there, too.
"""

import contextlib
import itertools
import os
import re
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# gRPC reads this when it is imported. Its fork handlers can abort a forked child, and break the calls of its parent.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import pytest
from daemon_under_test import DAEMONS, REPOSITORY, Area, DaemonUnderTest, NotStarted, deadline
from etcd_server import etcd as etcd
from etcd_server import node_options, serving
from hypothesis import HealthCheck, settings

# No test measures time: an example takes long if another program has the processor.
settings.register_profile("tests", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("tests")

# The long form of tests/crash takes longer.
TEST_S = 300.0 + 15.0 * max(0, int(os.environ.get("CKPTFS_KILLS", "0")) - 10)
FILES_OPEN_MAX = 20_000
IN_CLUSTER = os.environ.get("CKPTFS_IN_CLUSTER") == "1"
DATA_PATHS = ("passthrough", "buffered")
AFTER_MOUNTS = pytest.StashKey[set[Path]]()
"""The modules that come after the last one with tests on data paths."""
_clusters = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of single steps open a catalog and its tiers each, and a shell's limit of open files is often as low as 1,024.

    A shell without job control starts what it runs in the background with SIGINT ignored, and all children inherit that. A tree that was
    cloned into what mktemp -d made is closed to the other users whose programs some tests run in it: it is open to them meanwhile.
    """
    mode = REPOSITORY.stat().st_mode
    if os.geteuid() == 0 and not mode & stat.S_IXOTH and not hasattr(config, "workerinput"):
        REPOSITORY.chmod(mode | 0o055)
        config.add_cleanup(lambda: REPOSITORY.chmod(mode))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, min(most, FILES_OPEN_MAX)), most))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out data paths, and tests that cannot hold here; and choose the order of the modules.

    A module of names and commands alone has `ONLY_DATA_PATH`. A tree made in a directory of mode 0700, and entered by chroot, shuts out
    everybody but root: not even libc can be loaded.
    """
    items[:] = [one for one in items if (path := _get_data_path(one)) is None or getattr(one.module, "ONLY_DATA_PATH", path) == path]
    _spread_clusters(items)
    last = max((number for number, one in enumerate(items) if _get_data_path(one)), default=0)
    config.stash[AFTER_MOUNTS] = {one.path for one in items[last:]} - {items[last].path} if items else set()
    cannot_hold = {}
    if os.geteuid() == 0 and not os.stat("/").st_mode & stat.S_IXOTH:
        cannot_hold["others"] = "OTHER USERS CANNOT ENTER / HERE (chmod 755 /): what they may do is not tested"
    if IN_CLUSTER:
        cannot_hold["alone"] = "IN A CLUSTER: it behaves otherwise here, as the documents say"
    for item in items:
        for marker, reason in cannot_hold.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _spread_clusters(items: list[pytest.Item]) -> None:
    """Put the modules of clusters, which mostly wait, evenly among the first half of the others, which compute meanwhile."""
    modules = list(dict.fromkeys(item.path for item in items))
    clusters = [path for path in modules if path.parent.name == "cluster"]
    others = [path for path in modules if path not in clusters]
    turns: dict[Path, float] = {path: number for number, path in enumerate(others)}
    turns |= {path: number * len(others) / 2 / len(clusters) for number, path in enumerate(clusters)}
    items.sort(key=lambda item: turns[item.path])


def _get_data_path(item: Any) -> str | None:
    path: str | None = item.callspec.params.get("data_path") if hasattr(item, "callspec") else None
    return path


def _usable() -> str:
    """Why no mount can be made here; empty where it can."""
    if os.geteuid() != 0:
        return "a mount of our own needs root"
    if not Path("/dev/fuse").exists():
        return "/dev/fuse is missing"
    return ""


def _started(daemon: DaemonUnderTest) -> DaemonUnderTest:
    """Start it; skips the test where this kernel has no passthrough and the test demands it."""
    try:
        return daemon.start()
    except NotStarted as refusal:
        daemon.close()
        if daemon.options["data_path"] == "passthrough" and re.search("passthrough", str(refusal)) and "Traceback" not in str(refusal):
            pytest.skip(f"NO PASSTHROUGH HERE, this data path is not tested: {refusal}")
        raise


@pytest.fixture(scope="session", params=DATA_PATHS)
def data_path(request: pytest.FixtureRequest) -> str:
    """Each way in which bytes travel; a test that uses it runs once for each."""
    if reason := _usable():
        pytest.skip(f"NO MOUNT TESTS HERE: {reason}")
    return str(request.param)


@pytest.fixture(scope="session")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], dict[str, str]]]:
    """Options that make a daemon the only node of a cluster; none without CKPTFS_IN_CLUSTER."""
    if not IN_CLUSTER:
        yield dict
        return
    with serving(tmp_path_factory.mktemp("etcd")) as server:
        yield lambda: node_options(server.joined, f"c{next(_clusters)}")


class SharedDaemons:
    """Gives the daemon with some options, started when it is wanted first. All end together."""

    def __init__(self, clustered: Callable[[], dict[str, str]]) -> None:
        self._clustered = clustered
        self._started: dict[Any, DaemonUnderTest] = {}

    def __call__(self, data_path: str, **options: Any) -> DaemonUnderTest:
        wanted = (data_path, *sorted(options.items()))
        if wanted not in self._started:
            self._started[wanted] = _started(DaemonUnderTest(data_path, **{**self._clustered(), **options}))
        return self._started[wanted]

    def close(self) -> None:
        """End them at once: an unmount would first write back what many tests left."""
        while self._started:
            daemon = self._started.popitem()[1]
            daemon.crash()
            daemon.close()


@pytest.fixture(scope="session")
def get_daemon_of_session(clustered: Callable[[], dict[str, str]]) -> Iterator[SharedDaemons]:
    with contextlib.closing(SharedDaemons(clustered)) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def get_daemon_of_module(clustered: Callable[[], dict[str, str]]) -> Iterator[SharedDaemons]:
    with contextlib.closing(SharedDaemons(clustered)) as daemons:
        yield daemons


@pytest.fixture(scope="module", autouse=True)
def _no_idle_daemons(request: pytest.FixtureRequest, get_daemon_of_session: SharedDaemons) -> None:
    """End the daemons of the session after the last module of mounts, all of which run early: idle ones keep a processor busy."""
    if request.path in request.config.stash[AFTER_MOUNTS]:
        get_daemon_of_session.close()


@pytest.fixture
def shared_daemon(data_path: str, get_daemon_of_session: SharedDaemons) -> DaemonUnderTest:
    """One daemon for all cheap tests of a data path; both live on, since tests of the two come by turns."""
    return get_daemon_of_session(data_path)


@contextlib.contextmanager
def _lend(daemon: DaemonUnderTest, request: pytest.FixtureRequest) -> Iterator[Area]:
    """A directory of the test's own in a mount of many tests."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", request.node.name)[:100]
    taken = sum(1 for found in os.listdir(daemon.path) if found.startswith(name))
    known = set(daemon.complaints())
    request.node.stash[DAEMONS] = [daemon]
    with deadline(daemon, TEST_S):
        yield Area(daemon, f"{name}-{taken}")
    assert [line for line in daemon.complaints() if line not in known] == []


@pytest.fixture
def mount(shared_daemon: DaemonUnderTest, request: pytest.FixtureRequest) -> Iterator[Area]:
    """A directory of the test's own in the shared mount. Do not kill or reconfigure this daemon: take `fresh_mount` for that."""
    with _lend(shared_daemon, request) as area:
        yield area


@pytest.fixture
def share_daemon(get_daemon_of_module: SharedDaemons, request: pytest.FixtureRequest) -> Iterator[Callable[..., Area]]:
    """Lends a directory on a daemon that tests of the module share which want the same options.

    The directory is deleted afterwards. Sizes of its files may be prepared for those of the next test: `prepared="0"` prevents that.
    """
    if reason := _usable():
        pytest.skip(f"NO MOUNT TESTS HERE: {reason}")
    with contextlib.ExitStack() as lent:

        def share(data_path: str, **options: Any) -> Area:
            area = lent.enter_context(_lend(get_daemon_of_module(data_path, **options), request))
            lent.callback(shutil.rmtree, area.path)
            return area

        yield share


@pytest.fixture
def make_daemon(request: pytest.FixtureRequest, clustered: Callable[[], dict[str, str]]) -> Iterator[Callable[..., DaemonUnderTest]]:
    """Makes and starts daemons: `make_daemon("passthrough", ram="64M", env={...}, pfs=None)`; all end with the test."""
    if reason := _usable():
        pytest.skip(f"NO MOUNT TESTS HERE: {reason}")
    made = request.node.stash[DAEMONS] = []
    deadlines = contextlib.ExitStack()

    def make(data_path: str = "auto", *, start: bool = True, **options: Any) -> DaemonUnderTest:
        daemon = DaemonUnderTest(data_path, **{**clustered(), **options})
        made.append(daemon)
        deadlines.enter_context(deadline(daemon, TEST_S))
        try:
            return _started(daemon) if start else daemon
        except pytest.skip.Exception:
            made.remove(daemon)
            raise

    try:
        yield make
        complaints = [line for daemon in made for line in daemon.complaints()]
        assert complaints == []
    finally:
        for daemon in made:
            daemon.close()
        deadlines.close()


@pytest.fixture
def here(mount: Area) -> Path:
    """The test's own directory in the shared mount."""
    return mount.path


@pytest.fixture
def fresh_mount(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> Iterator[DaemonUnderTest]:
    yield make_daemon(data_path)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for daemon in item.stash.get(DAEMONS, []):
            if daemon.log_file.exists():
                report.sections.append((f"log of {daemon.name}", daemon.tail()))
