"""`ckptfs config`: the effective options of a mount and where each was given. F5, P11."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client import mounts
from ckptfs_client.mounts import Mount
from control_served import Served, serving
from local_node import Node

from ckptfs import config
from ckptfs.config import Config
from ckptfs.config.schema import SETTINGS, SETTINGS_BY_NAME, format_value, list_effective

Run = Callable[..., tuple[int, str, str]]
SECRET = "-----BEGIN PRIVATE KEY-----"


@pytest.fixture
def configured(tmp_path: Path) -> Config:
    """A node of a cluster: options over a file over defaults."""
    for name in ("mnt", "pfs", "state", "keys"):
        (tmp_path / name).mkdir()
    for name in ("ca.pem", "node.pem", "node.key"):
        (tmp_path / "keys" / name).write_text(SECRET)
    file = tmp_path / "job.toml"
    file.write_text(
        f'ram = "1G"\nram_high = 0.7\npfs = "{tmp_path}/pfs"\netcd = ["a:1", "b:2"]\netcd_insecure = true\n'
        '[[retention]]\npath = "run*/step_*"\nkeep = 3\n[[series]]\npattern = "x*"\ncomplete = "30s"\n'
    )
    options = {
        "config": str(file), "state": str(tmp_path / "state"), "ram": "2G", "cluster": "c", "keys": str(tmp_path / "keys"),
        "address": "n1:7420", "node": "n1",
    }  # fmt: skip
    return config.load("job", tmp_path / "mnt", options)


def test_each_option_says_where_it_was_given(configured: Config, tmp_path: Path) -> None:
    """F5: an option of the command line wins over the file, also in what is shown."""
    found = {name: (value, origin) for name, value, origin in list_effective(configured)}
    file = str(tmp_path / "job.toml")
    assert found["ram"] == ("2G", "command line") and found["mountpoint"] == (f"{tmp_path}/mnt", "command line")
    assert (found["ram_high"], found["pfs"], found["etcd"]) == (("70%", file), (f"{tmp_path}/pfs", file), ("a:1+b:2", file))
    assert (found["ram_low"], found["nvme"], found["drain_deadline"]) == (("60%", "default"), ("", "default"), ("auto", "default"))
    assert found["failure_domain"] == ("n1", "default"), "what is derived is shown as it is in effect"
    assert (found["retention"], found["series"]) == (("path=run*/step_* keep=3", file), ("pattern=x* complete=30s", file))
    assert found["keys"] == (f"{tmp_path}/keys", "command line") and SECRET not in str(found)


def test_without_a_cluster_its_settings_have_no_effect() -> None:
    names = {name for name, _, _ in list_effective(Config("job", Path("/mnt"), Path("/state")))}
    assert "cluster" in names and not names & {"etcd", "replication_factor"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ram", "1536M"), ("ram", "auto"), ("nvme_size", "2T"), ("prepared", "25%"), ("prepared", "0"), ("history_size", "1000000"),
        ("ram_high", "12.5%"), ("synced_interval", "1.5s"), ("drain_deadline", "auto"), ("pfs_verify", "false"), ("fsync", "pfs"),
        ("etcd", "a:1+[fd00::1]:2"), ("rank", "7"), ("pfs", "/lustre/a"), ("preemption", "gce"),
    ],
)  # fmt: skip
def test_what_is_shown_can_be_given(name: str, text: str) -> None:
    """P11: the value reads as it was written, and is accepted again."""
    key = SETTINGS_BY_NAME[name]
    assert format_value(key, key.parse(text)) == text


@pytest.mark.parametrize("key", [key for key in SETTINGS if key.default is not None], ids=lambda key: key.name)
def test_the_defaults_can_be_given(key: Any) -> None:
    value = key.parse(key.default if isinstance(key.default, bool) else str(key.default))
    assert key.parse(format_value(key, value)) == value


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    node = Node(tmp_path)
    node.configure(origins=(("nvme", "command line"), ("ram_bytes", "/etc/ckptfs/a.toml")))
    with serving(node) as served:
        monkeypatch.setattr(mounts, "list_mounts", lambda: [Mount("test", tmp_path / "mnt", os.geteuid(), 0)])
        yield served


def test_the_command_shows_them(served: Served, run: Run, tmp_path: Path) -> None:
    code, out, err = run("config")
    lines = [line.rsplit("  ", 1) for line in out.splitlines()]
    assert (code, err) == (0, "") and ["ram_low=60%", "default"] in [[words.strip(), origin] for words, origin in lines]
    code, out, _ = run("config", tmp_path / "mnt", "--given", "--json")
    assert code == 0 and json.loads(out) == [
        {"name": "ram", "value": "64M", "origin": "/etc/ckptfs/a.toml"},
        {"name": "nvme", "value": str(tmp_path / "nvme"), "origin": "command line"},
    ]
    assert run("config", "/")[0] == 3
