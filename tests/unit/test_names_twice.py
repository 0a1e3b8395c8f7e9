"""P5, P11: one name with several state directories, of which one may be mounted: all are shown, and each can be deleted."""

from pathlib import Path

import pytest
from ckptfs_client import cli
from ckptfs_client.errors import UsageError
from ckptfs_client.mounts import Mount
from ckptfs_client.node import unmounted
from ckptfs_client.node.unmounted import UnmountedName

from ckptfs import runtime_dir


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two unmounted state directories of the name `run1`, which is mounted with a third one."""
    found = [tmp_path / "a", tmp_path / "b"]
    for state in found:
        state.mkdir()
        (state / "lock").touch()
        (state / unmounted.CATALOG).touch()
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path))
    runtime_dir.registry_path("run1").write_text(f'{{"pid": 1, "state": "{tmp_path}/c"}}')
    mounted = [Mount("run1", tmp_path / "mnt", 0, 1)]
    monkeypatch.setattr(unmounted, "list_mounts", lambda: mounted)
    monkeypatch.setattr(unmounted, "list_unmounted", lambda: [UnmountedName("run1", state, None) for state in found if state.exists()])
    return found


def test_a_mounted_name_is_shown_beside_its_other_state_directories(states: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["mounted"] for one in unmounted.describe_all()] == [True, False, False]
    cli.list_names()
    shown = capsys.readouterr().out
    assert f"run1: mounted at {states[0].parent}/mnt\n" in shown and all(f"mounts --delete {state}\n" in shown for state in states)


def test_one_of_several_is_deleted_by_its_directory(states: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The registration of the mounted one stays."""
    unmounted.delete(str(states[0]), yes=True)
    assert not states[0].exists() and states[1].exists() and runtime_dir.registry_path("run1").exists()
    states[0].mkdir()
    monkeypatch.setattr(unmounted, "list_mounts", list)
    with pytest.raises(UsageError, match="several state directories") as refused:
        unmounted.delete("run1", yes=True)
    assert refused.value.remedy == "give one of them instead"
