"""D5, D7, D8, D14, G3, H6: after 30 steps under each rule, and kills in between, each place has exactly what the rule says."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from set_history import list_sets, write_archive

from ckptfs import limits

pytestmark = pytest.mark.fuse

STEPS = 30
KILLS = {10: "mount", 17: "mover", 23: "mount"}
RULES = """
[[retention]]
path = "keep/step_*"
keep = 3

[[retention]]
path = "every/step_*.pt"
keep = 4
keep_every = 12

[[retention]]
path = "local/step_*.pt"
keep_local = 2

[[retention]]
path = "pfs/step_*.pt"
keep_local = 1
keep_pfs = 3

[[retention]]
path = "dragon/step_*.pt"
keep_local = 3
keep_pfs = 2
pfs_every = 10

[[retention]]
path = "interval/step_*"
keep = 5
pfs_interval = "1h"

[[retention]]
path = "rotated/step_*.pt"
keep = 6

[[retention]]
path = "reaped/step_*.pt"
incomplete_after = "1s"
"""
ALL = set(range(1, STEPS + 1))
# Sets that are left; of these, what the PFS has; of these, what RAM and NVMe have.
LEFT = {
    "keep": {28, 29, 30},
    "every": {12, 24, 27, 28, 29, 30},
    "local": ALL,
    "pfs": {28, 29, 30},
    "dragon": {20, 28, 29, 30},
    "interval": {1, 26, 27, 28, 29, 30},
    "rotated": set(range(25, 31)),
}
PFS = LEFT | {"dragon": {20, 30}, "interval": {1}}
LOCAL = LEFT | {"local": {29, 30}, "pfs": {30}, "dragon": {28, 29, 30}}
DIRECTORIES = {"keep", "interval"}
"""In these a step is a directory of two files, and elsewhere a file."""


@pytest.fixture
def ruled(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> DaemonUnderTest:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    return make_daemon(config=file)


def save(series: Path, step: int) -> None:
    if series.name in DIRECTORIES:
        (series / f"step_{step}").mkdir()
        for name in ("model.bin", "optimizer.bin"):
            write_archive(series / f"step_{step}" / name)
    else:
        write_archive(series / f"step_{step}.pt.tmp", os.urandom(2000))
        (series / f"step_{step}.pt.tmp").rename(series / f"step_{step}.pt")


def list_steps(names: list[str]) -> set[int]:
    return {int(name.removeprefix("step_").partition("@")[0].partition(".")[0]) for name in names if name.startswith("step_")}


def count_steps(mount: DaemonUnderTest, step: int) -> int:
    return sum(list_steps([path.rpartition("/")[2]]) == {step} for path in list_sets(mount))


def find_difference(mount: DaemonUnderTest) -> dict[str, object]:
    """What is not as the rules say yet."""
    sets = list_sets(mount, hidden=True)
    found: dict[str, object] = {}
    for name in LEFT:
        mine = {path.rpartition("/")[2]: inode for path, inode in sets.items() if path.startswith(f"{name}/")}
        seen = {
            "history": list_steps(list(mine)),
            "mount": list_steps(os.listdir(mount.path / name)),
            "pfs": list_steps(os.listdir(mount.pfs / name)),
            "local": list_steps([one for one, inode in mine.items() if has_local_copies(mount, inode)]),
        }
        expected = {"history": LEFT[name], "mount": LEFT[name], "pfs": PFS[name], "local": LOCAL[name]}
        if name == "rotated":
            expected |= {"mount": {29, 30}, "pfs": {29, 30}}
        found |= {f"{name} {place}": (seen[place] ^ expected[place]) for place in seen if seen[place] != expected[place]}
    return found


def has_local_copies(mount: DaemonUnderTest, set_directory: int) -> bool:
    tree = "WITH RECURSIVE tree(id) AS (VALUES (?) UNION SELECT child FROM entry JOIN tree ON entry.parent = tree.id)"
    found = mount.catalog(
        f"{tree} SELECT count(*) FROM tree JOIN inode i ON i.id = tree.id JOIN copy c ON c.content = i.content", set_directory
    )
    return bool(found[0][0])


def test_each_place_has_exactly_what_the_rules_say(ruled: DaemonUnderTest) -> None:
    for name in [*LEFT, "reaped"]:
        (ruled.path / name).mkdir()
        (ruled.path / name / "config.json").write_text("{}")
    for step in range(1, STEPS + 1):
        for name in LEFT:
            save(ruled.path / name, step)
        if step > 2:
            (ruled.path / "rotated" / f"step_{step - 2}.pt").unlink()
        if step in KILLS:
            ruled.kill(KILLS[step])
        eventually(lambda step=step: count_steps(ruled, step) == len(LEFT), 60, what=f"step {step} is complete everywhere")
    try:
        eventually(lambda: not find_difference(ruled), 120)
    except AssertionError:
        raise AssertionError(f"{find_difference(ruled)}\n{ruled.tail()}") from None
    ruled.settle()
    history = ruled.pfs / ".ckptfs.history"
    assert {name: list_steps(os.listdir(history / name / os.listdir(history / name)[0])) for name in LEFT} == PFS
    assert all((ruled.pfs / name / "config.json").exists() for name in [*LEFT, "reaped"]), "D14: what is in no set goes to the PFS"
    check_answers(ruled)
    assert ruled.complaints() == []


def check_answers(mount: DaemonUnderTest) -> None:
    """`wait`, `status` and `df` tell the truth about what the PFS is not to have."""
    left_out = mount.command("wait", mount.path / "dragon" / "step_29.pt", "--level", "pfs", check=False)
    assert left_out.returncode != 0 and "a retention rule sends only some sets there" in left_out.stderr
    assert "ckptfs pin" in left_out.stderr
    mount.command("wait", mount.path / "dragon" / "step_30.pt", "--level", "pfs")
    mount.command("wait", mount.path, "--level", "pfs")
    status = json.loads(mount.command("status", mount.path, "--json").stdout)
    figures = status["history"]
    assert status["write_back"]["dirty_files"] == status["write_back"]["changes"] == 0
    assert (figures["series"], figures["sets"]) == (len(LEFT), sum(map(len, LEFT.values())))
    assert 4 * 2000 < figures["bytes"] < figures["bytes_max"], "what the application has deleted of the rotated ones"
    assert figures["held_files"] > 0 and len(figures["rules"]) == 8
    shown = mount.command("status", mount.path).stdout
    assert "retention   keep/step_*: keeps 3 sets\n" in shown and "every 10th set goes to the PFS" in shown
    os.setxattr(mount.path / ".ckptfs" / "history" / "dragon" / "step_*.pt" / "step_29.pt@29", "user.ckptfs.pin", b"1")
    eventually((mount.pfs / "dragon" / "step_29.pt").exists, 60, what="the pinned set is on the PFS")
    assert "stay off the PFS by a rule" in shown and "only .ckptfs/history holds" in mount.command("df", mount.path).stdout


def cut(path: Path) -> None:
    """Write an archive that its writer did not finish."""
    write_archive(path)
    os.truncate(path, path.stat().st_size - 10)


def test_incomplete_checkpoints_are_reaped(ruled: DaemonUnderTest) -> None:
    """H6: not the newest one, none that a process has open, and nothing else."""
    series = ruled.path / "reaped"
    series.mkdir()
    for name in ("step_1.pt", "step_2.pt", "step_2.pt.tmp", "step_9.pt"):
        cut(series / name)
    for name in ("step_3.pt", "step_5.pt"):
        write_archive(series / name)
    (series / "notes.tmp").write_text("of something else")
    with open(series / "step_2.pt", "rb"):
        eventually(lambda: not {"step_1.pt", "step_2.pt.tmp"} & set(os.listdir(series)), 60)
        assert {"step_2.pt", "step_3.pt", "step_5.pt", "step_9.pt", "notes.tmp"} == set(os.listdir(series))
    eventually(lambda: set(os.listdir(series)) == {"step_3.pt", "step_5.pt", "step_9.pt", "notes.tmp"}, 60)
    ruled.settle()
    assert set(os.listdir(ruled.pfs / "reaped")) == set(os.listdir(series))


def test_a_large_set_expires_though_the_mount_is_killed(ruled: DaemonUnderTest) -> None:
    """P8: its names go in several changes, and the next process goes on with them."""
    series = ruled.path / "keep"
    for step in range(1, 5):
        (series / f"step_{step}").mkdir(parents=True)
        for number in range(3 * limits.EXPIRED_NAMES_MAX if step == 1 else 1):
            (series / f"step_{step}" / f"{number}.bin").write_bytes(b"weights")
        os.setxattr(series / f"step_{step}", "user.ckptfs.commit", b"1")
        eventually(lambda step=step: count_steps(ruled, step), 120, what=f"step {step} is complete")
    expiring = "SELECT 1 FROM xattr WHERE name = CAST('ckptfs.expiring' AS BLOB)"
    eventually(lambda: ruled.catalog(expiring), 120, what="the first set begins to expire")
    ruled.kill("mount")
    eventually(lambda: set(os.listdir(series)) == {"step_2", "step_3", "step_4"}, 120)
    eventually(lambda: len(list_sets(ruled, hidden=True)) == 3, 120)
    ruled.settle()
    assert set(os.listdir(ruled.pfs / "keep")) == {"step_2", "step_3", "step_4"}


def test_the_bound_of_the_history(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """Beyond it the oldest sets go that nothing but a rule keeps; pinned ones and the newest stay."""
    file = tmp_path / "rules.toml"
    file.write_text('[[retention]]\npath = "step_*.pt"\nkeep = 100\n')
    mount = make_daemon(config=file, history_size=50_000)
    for step in range(1, 9):
        write_archive(mount.path / f"step_{step}.pt", os.urandom(20_000))
        eventually(lambda step=step: f"step_*.pt/step_{step}.pt@{step}" in list_sets(mount), 60)
    mount.settle()
    for step in range(1, 9):
        (mount.path / f"step_{step}.pt").unlink()
    eventually(lambda: sorted(list_sets(mount, hidden=True)) == ["step_*.pt/step_7.pt@7", "step_*.pt/step_8.pt@8"], 60)
