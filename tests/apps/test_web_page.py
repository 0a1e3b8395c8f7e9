"""The page of `ckptfs web` in a real browser: F2, F5, F6. CKPTFS_PICTURES=DIR keeps a picture of each scene."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckptfs_client.dashboard import overview, sampling
from ckptfs_client.dashboard.sampling import OverviewSampler
from ckptfs_client.dashboard.web_server import OverviewSite
from ckptfs_client.errors import NoMount
from control_served import Served, serving
from etcd_server import free_ports
from headless_browser import Browser, browsing
from local_node import Node
from made_overviews import HOSTILE, make_five_nodes, make_mount, make_series, make_status

from ckptfs.catalog import history, inodes, namespace
from ckptfs.catalog.history import SetRecord
from ckptfs.http_server import HttpServer
from ckptfs.model import ROOT
from ckptfs.protocol import control_pb2 as pb

pytestmark = pytest.mark.apps
PHONE = 390
# The contrast of text with what is behind it, as WCAG 2 defines it.
CONTRAST = """(selector => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(one => one / 255).map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = element => parse(getComputedStyle(element).backgroundColor);
  const behind = element => { for (; element; element = element.parentElement) {
    const found = ground(element); if (found.length === 3 || found[3] > 0) return found; } return [255, 255, 255]; };
  return Math.min(...[...document.querySelectorAll(selector)].map(element => {
    const pair = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05); }));
})('.title, .detail, .note, .badge, .what, .more, .figure, .facts, th, td, .remedy, .scale span, .legend li, #clock, .sign')"""

Serve = Callable[..., str]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve the page of some mounts after so many samples; its URL."""
    ends: list[Callable[[], object]] = []

    def start(chosen: Sequence[Any], samples: int = 1) -> str:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        site = OverviewSite(OverviewSampler(lambda: chosen), address)
        for _ in range(samples):
            site.sample()
        server = HttpServer(address, site.answer)
        thread = threading.Thread(target=server.serve)
        thread.start()
        ends.extend([server.close, thread.join])
        return f"http://{address}/"

    yield start
    for end in ends:
        end()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Any]], None]:
    """Give these answers of one mount one after the other, a second each; the last one for ever."""

    def give(answers: Sequence[Any]) -> None:
        left, clock = list(answers), iter(range(1000, 10_000))
        monkeypatch.setattr(sampling, "ask_all", lambda chosen, *_: [(one, left.pop(0) if len(left) > 1 else left[0]) for one in chosen])
        stand_in = SimpleNamespace(monotonic=lambda: float(next(clock)), time=time.time, time_ns=time.time_ns)
        monkeypatch.setattr(sampling, "time", stand_in)

    return give


def keep_picture(browser: Browser, name: str) -> None:
    if directory := os.environ.get("CKPTFS_PICTURES"):
        browser.photograph(Path(directory) / f"{name}.png")


def check_page(browser: Browser) -> None:
    """What holds for every scene: readable, not wider than the window, nothing refused, nothing from elsewhere."""
    assert browser.complaints == []
    assert browser.evaluate(CONTRAST) >= 4.5
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"
    assert browser.evaluate("performance.getEntriesByType('resource').every(one => one.name.startsWith(location.origin))")
    assert browser.evaluate("[...document.querySelectorAll('th')].every(one => one.scope)"), "a header says of what"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_mounted(browser: Browser, serve: Serve, scheme: str) -> None:
    browser.show(serve([]), scheme=scheme)
    assert "Nothing is mounted" in browser.text() and "mount -t ckptfs NAME DIR" in browser.text()
    check_page(browser)
    keep_picture(browser, f"web-nothing-{scheme}")


def make_history(served: Served) -> None:
    """Three sets of a series, one of which is pinned, and a series that not all users may list."""
    node = served.node
    file = node.inode(node.make_sealed(b"model.pt", b"x" * 5000))
    for name, mode in ((b"secret-run", 0o700), (b"run1", 0o755)):
        with node.db.transaction():
            made = namespace.create(node.db, ROOT, name, 0o040000 | mode, uid=7, gid=7, allow_unimported=True).id
            series = history.insert_series(node.db, made, b"step_*").directory
            for number in (1, 2, 3):
                record = SetRecord(number, b"step_%d" % (100 * number), (100 * number,), 1, 5000, time.time_ns() - 10**9)
                one = history.begin_set(node.db, series, record)
                history.insert_link(node.db, file, one, b"model.pt")
                history.finish_set(node.db, one)
                inodes.set_internal_xattr(node.db, one, history.PIN_XATTR, b"1" if number == 2 else None)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_one_node(browser: Browser, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The answers are those of a real daemon. Its sets are shown where the user asks for them."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    with serving(Node(tmp_path)) as served:
        make_history(served)
        url = serve([served.mount], samples=3)
        browser.show(url, scheme=scheme)
        assert browser.text(".title") == "Not safe yet" and "step_300 is on one node only, and not on the PFS yet" in browser.text(
            ".detail"
        )
        assert browser.evaluate("document.title").startswith("! Not safe yet: ckptfs on ")
        assert "a private series" in browser.text() and "secret-run" not in browser.evaluate("document.documentElement.outerHTML")
        assert "waits for write-back" in browser.text(".legend") and browser.evaluate("document.querySelectorAll('.plot path').length") == 2
        browser.evaluate("[...document.querySelectorAll('button')].find(one => one.ariaLabel === 'sets of run1/step_*').click()")
        browser.wait_for("document.querySelectorAll('.inner tbody tr').length === 3")
        assert re.search(r"step_200\s+200\s+! local\s+1\s+4\.9 KiB\s+\S+ s\s+pinned", browser.text(".inner"))
        browser.wait_for("performance.getEntriesByName(location.href + 'figures.json').length > 2")
        assert "pinned" in browser.text(".inner"), "it stays open when new figures come"
        check_page(browser)
        keep_picture(browser, f"web-one-{scheme}")


@pytest.mark.parametrize("width", [1200, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_five_nodes(browser: Browser, serve: Serve, answer: Callable[[Sequence[Any]], None], scheme: str, width: int) -> None:
    """In the middle of a checkpoint, with a dead node, a trouble, a gap in the figures, and a series with a hostile name."""
    saves: list[Any] = [make_five_nodes(max(0.0, 1 - 1.5 * (at % 60) / 60)) for at in range(150)]
    answer([*saves[:40], *[NoMount("the daemon does not answer")] * 3, *saves[43:]])
    browser.show(serve([make_mount()], samples=150), scheme=scheme, width=width)
    text = browser.text()
    assert browser.text(".title") == "Safe if a node fails" and "8 files are being written now" in text
    assert "write back: run3/model.pt: EACCES: the PFS refuses it; chmod u+w run3" in text and "4 of 5 nodes alive" in text
    assert [browser.evaluate(f"document.querySelectorAll('.badge.{state}').length") for state in ("alive", "dead")] == [4, 1]
    assert browser.evaluate("document.querySelector('path.first:not(.area)').getAttribute('d').match(/M/g).length") == 2, "a gap"
    assert browser.evaluate("getComputedStyle(document.querySelector('thead')).position") == ("absolute" if width == PHONE else "static")
    check_page(browser)
    keep_picture(browser, f"web-five-{scheme}{'-phone' if width == PHONE else ''}")


def test_a_hostile_name_is_text(browser: Browser, serve: Serve, answer: Callable[[Sequence[Any]], None]) -> None:
    """F6. A series named <script> is shown, and runs nothing; of names in mounts, troubles and nodes the same holds."""
    found = make_five_nodes()
    assert found.status is not None and found.cluster is not None
    found.status.troubles.add(where=HOSTILE, path=HOSTILE, what=HOSTILE, remedy=HOSTILE)
    found.cluster.members.add(name=HOSTILE, domain=HOSTILE, alive=True, peers=[HOSTILE])
    answer([found._replace(series=make_series({"path": f"{HOSTILE}/{HOSTILE}", "name": HOSTILE}))])
    browser.show(serve([make_mount(HOSTILE, f"/{HOSTILE}")]))
    assert f"{HOSTILE}/{HOSTILE}" in browser.text() and browser.evaluate("document.title").startswith("✓ Safe: ckptfs on ")
    assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
    check_page(browser)


def test_the_policy_forbids_scripts_in_line(browser: Browser, serve: Serve) -> None:
    """Even if a name came in as HTML, it would run nothing."""
    browser.show(serve([]))
    added = "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'})); document.title"
    assert "nothing mounted" in browser.evaluate(added)
    assert any("Content Security Policy" in one for one in browser.complaints)
    browser.complaints.clear()


@pytest.mark.parametrize(("level", "state"), [("pfs", "safe"), ("clique", "copied"), ("local", "exposed"), ("none", "unverified")])
def test_the_verdict_has_a_colour_a_sign_and_words(
    browser: Browser, serve: Serve, answer: Callable[[Sequence[Any]], None], level: str, state: str
) -> None:
    status = make_status()
    status.clique.CopyFrom(pb.Clique())
    answer([overview.MountAnswers("run1", "/ckpt", status, make_series({"level": level}))])
    browser.show(serve([make_mount()]))
    assert browser.text(".title") == overview.TITLES[state] and browser.text(".sign").strip()
    assert browser.evaluate(f"document.querySelector('.verdict').classList.contains('{state}')")
    check_page(browser)
    keep_picture(browser, f"web-{state}")


def test_a_server_that_is_gone_is_told(browser: Browser, serve: Serve, answer: Callable[[Sequence[Any]], None]) -> None:
    """Old figures never look like new ones."""
    answer([make_five_nodes()])
    browser.show(serve([make_mount()]))
    browser.evaluate("(window.fetch = () => Promise.reject(new Error()), null)")
    browser.wait_for("document.body.classList.contains('old')")
    assert "ckptfs web does not answer; the figures are of " in browser.text("#clock")
    check_page(browser)
