"""P4, P6: a large content is copied to the PFS before its seal. It appears only if the seal confirms the copy."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from local_node import run_until_idle
from write_back_world import Killed, Mount, intercepted, killed_at

from ckptfs import disk, limits
from ckptfs.errors import CkptfsError
from ckptfs.flow.write_back import plan
from ckptfs.model import ContentState, Tier

LARGE = 5 << 20
COPIED = "write_back:truncate"
"""The last thing that happens to a copy before its seal is waited for."""


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Some MiB are much here, and nothing is sealed by itself."""
    monkeypatch.setattr(plan, "BATCH_BYTES_MAX", LARGE)
    return Mount(tmp_path, seal_at_once=False)


def once(label: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Let `act` happen at the first operation with this label."""
    left = [act]

    def at(seen: str) -> None:
        if seen == label and left:
            left.pop()()

    return at


def test_it_appears_when_it_is_sealed_and_not_before(mount: Mount) -> None:
    content = mount.put(b"large", data := os.urandom(LARGE))
    after = mount.put(b"after", b"small")
    mount.seal(after)

    def seal() -> None:
        assert mount.on_pfs() == {} and len(mount.temporaries()) == 1
        mount.seal(content)

    read: list[str] = []
    flow = mount.write_back()
    with intercepted(once(COPIED, seal), lambda label: read.append(label) if label == "write_back:create" else None):
        assert flow.step()
        assert mount.on_pfs() == {b"large": ("file", data, 0o644)}, "what was closed after it comes after it"
    assert len(read) == 1, "the bytes were copied once"
    mount.settle_exactly(flow)
    assert mount.state(content) is ContentState.SEALED


def test_a_file_that_is_too_large_to_seal_keeps_no_other_off_the_pfs(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES_MAX", LARGE - 1)
    mount.put(b"vast", bytes(LARGE))
    mount.seal(mount.put(b"after", b"small"))
    run_until_idle(mount.write_back())
    assert mount.on_pfs() == {b"after": ("file", b"small", 0o644)} and mount.temporaries() == []


def in_vain(mount: Mount, meanwhile: Callable[[], None]) -> None:
    """Copy early what `meanwhile` makes worthless: nothing appears, nothing is left."""
    flow = mount.write_back()
    with intercepted(once(COPIED, meanwhile)):
        run_until_idle(flow)
    assert mount.on_pfs() == {} and mount.temporaries() == []
    assert mount.db.rows("SELECT * FROM pfs_batch") == []


def test_bytes_that_changed_before_the_seal_are_not_what_appears(mount: Mount) -> None:
    """A mapping that outlived its handle may write after the copy read, and before the seal did."""
    content = mount.put(b"large", os.urandom(LARGE))

    def change() -> None:
        mount.spoil(content, Tier.RAM)
        mount.seal(content)
        assert mount.on_pfs() == {}

    with intercepted(once(COPIED, change)):
        mount.settle()
    mount.exact()


def test_a_content_that_is_opened_again_is_thrown_away(mount: Mount) -> None:
    content = mount.put(b"large", os.urandom(LARGE))
    in_vain(mount, lambda: mount.reopen(content, Tier.RAM))
    with mount.db.transaction():
        mount.close(content, LARGE)
    mount.seal(content)
    mount.settle_exactly()


def test_a_content_that_is_deleted_is_thrown_away(mount: Mount) -> None:
    mount.put(b"large", os.urandom(LARGE))
    in_vain(mount, lambda: mount.unlink(b"large"))
    mount.settle_exactly()


def test_a_seal_that_does_not_come_is_waited_for_once(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has it mapped for writing: it is copied again only when it is sealed."""
    monkeypatch.setattr(limits, "EARLY_SEAL_WAIT_S", 0.0)
    content = mount.put(b"large", os.urandom(LARGE))
    flow, seen = mount.write_back(), []
    with intercepted(seen.append):
        for _ in range(4):
            flow.step()
        assert not flow.step()
    assert seen.count("write_back:create") == 1 and flow.next_due_s() is not None
    assert mount.on_pfs() == {} and mount.temporaries() == []
    mount.seal(content)
    mount.settle_exactly(flow)


def test_a_copy_that_is_gone_is_no_trouble_of_the_pfs(mount: Mount) -> None:
    content = mount.put(b"large", os.urandom(LARGE))
    mount.tiers[Tier.RAM].remove(content)
    in_vain(mount, lambda: None)


def operations(mount: Mount) -> list[str]:
    content = mount.put(b"large", os.urandom(LARGE))
    with intercepted(once(COPIED, lambda: mount.seal(content))), killed_at(10_000, after=False) as seen:
        mount.settle()
    return seen


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation(mount: Mount, tmp_path: Path, after: bool) -> None:
    """What a killed one had copied of a content that was not sealed never appears by itself."""
    seen = operations(mount)
    for number in sorted({seen.index(label) for label in seen} | {len(seen) // 2}):
        one = Mount(tmp_path / str(number), seal_at_once=False)
        content = one.put(b"large", os.urandom(LARGE))
        seal = once(COPIED, lambda one=one, content=content: one.seal(content))  # type: ignore[misc]
        with pytest.raises(Killed), intercepted(seal), killed_at(number, after=after):
            one.settle()
        if one.state(content) is ContentState.CLOSED:
            assert one.on_pfs() == {}
            one.seal(content)
        one.settle()
        one.exact()
        one.db.close()


@pytest.mark.parametrize("label", ["write_back:create", "write_back:write", COPIED, "write_back:fsync"])
def test_a_pfs_that_fails_fails_nothing_but_write_back(mount: Mount, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: the seal comes all the same."""
    content = mount.put(b"large", os.urandom(LARGE))
    flow = mount.write_back()
    monkeypatch.setattr(disk, "_fault", f"{label}=EIO@*")
    with pytest.raises(CkptfsError), intercepted(once("write_back:begun", lambda: mount.seal(content))):
        flow.step()
    monkeypatch.setattr(disk, "_fault", "")
    assert mount.state(content) is ContentState.SEALED and mount.on_pfs() == {} and mount.temporaries() == []
    mount.settle_exactly(flow)
