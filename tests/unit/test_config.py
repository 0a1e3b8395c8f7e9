"""The configuration: accepted values, refusals by name, the sample file, and what `ckptfs config` shows. F5, P11."""

import contextlib
import json
import os
import socket
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client import mounts
from ckptfs_client.mounts import Mount
from control_served import Served, serving
from hypothesis import given
from hypothesis import strategies as st
from local_node import Node

from ckptfs import config, limits
from ckptfs.config import Config, rule_tables
from ckptfs.config.schema import SETTINGS, SETTINGS_BY_NAME, RetentionRule, format_value, list_effective
from ckptfs.errors import ConfigError
from ckptfs.model import CliqueLost, DataPath, Level

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with everything that a mount may name."""
    for name in ("mnt", "pfs", "nvme", "state"):
        (tmp_path / name).mkdir()
    return tmp_path


def load(place: Path, **options: object) -> Config:
    return config.load("job", place / "mnt", {"state": str(place / "state"), **{key: str(value) for key, value in options.items()}})


def refusal(place: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as refused:
        load(place, **options)
    return str(refused.value)


def test_defaults(place: Path) -> None:
    found = load(place)
    assert found == Config("job", place / "mnt", place / "state", allow_other=os.geteuid() == 0)


def test_every_option(place: Path) -> None:
    found = load(
        place, ram="6G", nvme=place / "nvme", nvme_size="1T", pfs=place / "pfs", fsync="pfs", data_path="buffered", ram_high="90%",
        ram_low=0.5, synced_interval="90", refresh_interval="2h", drain_deadline="1500ms", log_level="debug", allow_other="no",
        metrics="unix:/run/m",
    )  # fmt: skip
    assert found == Config(
        "job", place / "mnt", place / "state", ram_bytes=6 * limits.GIB, nvme=place / "nvme", nvme_bytes=1024 * limits.GIB,
        pfs=place / "pfs", fsync=Level.PFS, data_path=DataPath.BUFFERED, ram_high=0.9, ram_low=0.5,
        synced_interval_s=90.0, refresh_interval_s=7200.0,
        drain_deadline_s=1.5, log_level="debug", allow_other=False, metrics="unix:/run/m",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512M", 512 << 20), ("6G", 6 << 30), ("6GiB", 6 << 30), ("6gb", 6 << 30), ("1.5T", 1536 << 30), ("2 K", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert config.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "6X", "1e9", "6 G B", "six"])
def test_bad_sizes_are_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; accepted"):
        config.parse_size(text)


def test_ram_is_a_size_a_share_or_auto(place: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert load(place, ram="auto").ram_bytes is None
    assert load(place, ram="50%").ram_bytes == memory // 2
    assert "too little" in refusal(place, ram="1M")
    assert "is not a share" in refusal(place, ram="150%")


def test_more_ram_than_there_is_memory_is_refused(place: Path) -> None:
    """M3, P11."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert load(place, ram="100%").ram_bytes == memory
    assert f"'500T' is more than the memory of this machine, {memory / limits.GIB:.1f}G; accepted: up to that, 1% to 100%" in refusal(
        place, ram="500T"
    )
    assert load(place, nvme=str(place / "nvme"), nvme_size="500T").nvme_bytes == 500 * 1024 * limits.GIB


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60.0), ("500ms", 0.5), ("2m", 120.0), ("1h", 3600.0), ("1d", 86400.0), ("7", 7.0)])
def test_durations(text: str, seconds: float) -> None:
    assert config.parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsync": "clique"}, "needs a clique"),
        ({"fsync": "always"}, "accepted: local, clique, pfs"),
        ({"fsync": "pfs"}, "fsync=pfs needs a PFS"),
        ({"data_path": "fast"}, "accepted: auto, passthrough, buffered"),
        ({"log_level": "loud"}, "accepted: debug, info, warning, error"),
        ({"pfs": "relative/dir"}, "is not an absolute path"),
        ({"pfs": "/no/such/dir"}, "pfs /no/such/dir: No such file or directory"),
        ({"nvme": "/dev/null"}, "nvme /dev/null is not a directory"),
        ({"state": "/dev/null"}, "state /dev/null is not a directory"),
        ({"nvme_size": "1G"}, "without nvme"),
        ({"ram_high": "50%", "ram_low": "60%"}, "must be below"),
        ({"drain_deadline": "soon"}, "is not a duration"),
        ({"allow_other": "maybe"}, "neither true nor false"),
        ({"remount": "", "rw": ""}, "ro and rw included, cannot be changed; unmount it and mount it again"),
    ],
)
def test_bad_values_are_refused_by_name(place: Path, options: dict[str, str], words: str) -> None:
    assert words in refusal(place, **options)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "-x", "a b", "x" * 65])
def test_bad_names_are_refused(place: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a mount"):
        config.load(name, place / "mnt", {})


def test_what_mount_passes_is_accepted(place: Path) -> None:
    passed = "rw,nosuid,nodev,noatime,_netdev,nofail,noauto,user=ann,x-systemd.automount,X-foo=1,defaults,default_permissions"
    options = config.parse_options(passed)
    found = config.load("job", place / "mnt", options | {"state": str(place / "state")})
    assert found.mount_flags == 2 | 4 | 1024
    assert load(place).mount_flags == 2 | 4, "nosuid, nodev"
    assert load(place, suid="").mount_flags == 4 and load(place, suid="", dev="").mount_flags == 0
    assert load(place, suid="", nosuid="").mount_flags == 2 | 4


def test_options_keep_escaped_commas() -> None:
    assert config.parse_options(r"pfs=/a\,b,noatime,,ram=1G") == {"pfs": "/a,b", "noatime": "", "ram": "1G"}


def test_directories_must_not_contain_one_another(place: Path) -> None:
    (place / "mnt" / "in").mkdir()
    (place / "pfs" / "mnt").mkdir()
    (place / "link").symlink_to(place / "mnt" / "in")
    assert "pfs" in (said := refusal(place, pfs=place / "mnt" / "in")) and "lies inside mountpoint" in said
    assert "lies inside mountpoint" in refusal(place, nvme=place / "link")
    assert "is the same directory as mountpoint" in refusal(place, pfs=place / "mnt")
    assert "lies inside state" in refusal(place, nvme=place / "state", state=place)
    assert "state" in refusal(place, state=place / "pfs" / "state", pfs=place / "pfs")
    with pytest.raises(ConfigError, match="lies inside pfs"):
        config.load("job", place / "pfs" / "mnt", {"pfs": str(place / "pfs"), "state": str(place / "state")})


def test_the_mountpoint_must_be_a_directory(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"the mountpoint .* No such file"):
        config.load("job", place / "none", {})
    with pytest.raises(ConfigError, match="no mountpoint was given"):
        config.load("job", None, {})


def test_the_file_is_read_and_options_win(place: Path) -> None:
    file = place / "job.toml"
    file.write_text(f'mountpoint = "{place}/mnt"\nstate = "{place}/state"\nram = "1G"\nram_high = 0.7\nallow_other = false\n')
    found = config.load("job", None, {"config": str(file), "ram": "2G"})
    assert (found.mountpoint, found.ram_bytes, found.ram_high, found.allow_other) == (place / "mnt", 2 * limits.GIB, 0.7, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rma = '1G'", "unknown key 'rma', did you mean ram?; accepted: mountpoint, state, ram,"),
        ("ram = true", "not a value"),
        ("noatime = ''", "unknown key 'noatime'"),
        ("[tier]\nram = '1G'", "unknown key 'tier'"),
        ("ram = [1]", "not a value"),
        ("ram 1G", "not valid TOML"),
        ("ram = 'x'", "is not a size"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(place: Path, text: str, words: str) -> None:
    file = place / "job.toml"
    file.write_text(text)
    message = refusal(place, config=file)
    assert words in message and str(file) in message


def test_a_missing_file_is_refused(place: Path) -> None:
    assert "cannot be read: No such file" in refusal(place, config=place / "none.toml")


def test_the_sample_says_the_truth(place: Path) -> None:
    """deploy/systemd/ckptfs.toml is what `sample` writes, names every key, and shows the defaults."""
    text = (REPOSITORY / "deploy/systemd/ckptfs.toml").read_text()
    assert text == config.build_sample()
    assert tomllib.loads(text) == {}
    shown = "\n".join(line[2:] for line in text.splitlines() if any(line.startswith(f"# {key.name} = ") for key in SETTINGS))
    values = tomllib.loads(shown)
    assert set(values) == {key.name for key in SETTINGS}
    file = place / "all.toml"
    with_default = {key.name for key in SETTINGS if key.default is not None} - {"nvme_size"}
    file.write_text("\n".join(line for line in shown.splitlines() if line.split(" = ")[0] in with_default))
    assert load(place, config=file, allow_other="true") == load(place, allow_other="true")


def test_every_field_has_a_key() -> None:
    assert {key.field for key in SETTINGS} == {field.name for field in fields(Config)} - {
        "name",
        "mount_flags",
        "origins",
        "retention",
        "series",
    }


@pytest.mark.parametrize("text", ["127.0.0.1:9464", "localhost:1", "[::1]:9464", "node7:9464", "0.0.0.0:9464", "unix:/run/m.sock"])
def test_metrics_are_served_where_the_option_says(place: Path, text: str) -> None:
    """F5: nowhere without it."""
    assert load(place).metrics is None and load(place, metrics=text).metrics == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "accepted: HOST:PORT, as in 127.0.0.1:9464, or unix:/PATH"),
        ("9464", "accepted: HOST:PORT"),
        (":9464", "accepted: HOST:PORT"),
        ("127.0.0.1:0", "accepted: HOST:PORT"),
        ("http://127.0.0.1:9464", "accepted: HOST:PORT"),
        ("unix:", "is not an absolute path"),
        ("unix:run/m.sock", "is not an absolute path"),
        (f"unix:/{'x' * 107}", "accepted: a path of up to 107 bytes"),
        ("unix:PLACE/mnt/m.sock", "lies inside mountpoint"),
        ("unix:PLACE/pfs/m.sock", "lies inside pfs"),
    ],
)
def test_metrics_are_not_served_elsewhere(place: Path, text: str, words: str) -> None:
    """A host has to be named (P11); a socket in the mount or on the PFS would make the daemon wait for itself, or for the PFS."""
    assert words in refusal(place, pfs=place / "pfs", metrics=text.replace("PLACE", str(place)))


@given(st.text())
def test_no_option_string_does_more_than_refuse(text: str) -> None:
    """P11: whatever is given, the answer is a configuration or a ConfigError."""
    with contextlib.suppress(ConfigError):
        config.load("job", Path("/"), config.parse_options(text) | {"state": "/nonexistent/state"})


@pytest.fixture
def keys(place: Path) -> Path:
    """A directory with the names of keys."""
    (place / "keys").mkdir()
    for name in ("ca.pem", "node.pem", "node.key"):
        (place / "keys" / name).touch(0o600)
    return place / "keys"


def test_a_cluster_with_everything(place: Path, keys: Path) -> None:
    """N1: the words of others, on nodes."""
    found = load(
        place, cluster="training", etcd="a:2379+b:2379+[fd00::1]:2379", node="n-1", rank=7, failure_domain="rack.3", listen="[::]:7000",
        address="n1.example.org:7000", keys=keys, replication_factor=3, replication_jump=2, peer_share="30%", fsync="clique",
        clique_wait="5s", clique_lost="local", etcd_ca=keys / "ca.pem", etcd_cert=keys / "node.pem", etcd_key=keys / "node.key",
    )  # fmt: skip
    assert found == Config(
        "job", place / "mnt", place / "state", allow_other=os.geteuid() == 0, cluster="training",
        etcd=("a:2379", "b:2379", "[fd00::1]:2379"), node="n-1", rank=7, failure_domain="rack.3", listen="[::]:7000",
        address="n1.example.org:7000", keys=keys, replication_factor=3, replication_jump=2, peer_share=0.3, fsync=Level.CLIQUE,
        clique_wait_s=5.0, clique_lost=CliqueLost.LOCAL,
        etcd_ca=keys / "ca.pem", etcd_cert=keys / "node.pem", etcd_key=keys / "node.key",
    )  # fmt: skip


def test_a_node_is_named_after_its_machine(place: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host-1")
    found = load(place, cluster="c", etcd="e:2379", keys=keys, etcd_insecure="")
    assert (found.node, found.failure_domain, found.address, found.rank) == ("host-1", "host-1", "host-1:7420", None)
    found = load(place, cluster="c", etcd="e:2379", keys=keys, etcd_insecure="", node="n", listen="10.0.0.1:7")
    assert (found.node, found.failure_domain, found.address) == ("n", "n", "10.0.0.1:7")
    monkeypatch.setattr(socket, "gethostname", lambda: "höst")
    assert "cannot name a node" in refusal(place, cluster="c", etcd="e:2379", keys=keys)


def test_servers_may_be_a_list_in_a_file(place: Path) -> None:
    file = place / "job.toml"
    file.write_text('cluster = "c"\netcd = ["a:1", "b:2"]\netcd_insecure = true\nlisten = "127.0.0.1:7420"\ninsecure = true\n')
    assert load(place, config=file, node="n").etcd == ("a:1", "b:2")
    file.write_text('etcd = ["a:1", 2]\n')
    assert "not a value" in refusal(place, config=file)


TRIED = {"cluster": "c", "etcd": "127.0.0.1:2379", "node": "n", "listen": "127.0.0.1:7420", "insecure": ""}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": None}, "etcd was given without cluster"),
        (dict.fromkeys(TRIED) | {"fsync": "local", "replication_factor": "2"}, "replication_factor was given without cluster"),
        ({"cluster": None, "etcd": None, "node": None, "listen": None, "insecure": None, "replication_factor": "3"}, "without cluster"),
        ({"etcd": None}, "without etcd"),
        ({"etcd": "localhost"}, "is not an address; accepted: HOST:PORT"),
        ({"etcd": "+"}, "names 0 servers"),
        ({"etcd": "+".join(f"h{number}:1" for number in range(17))}, "accepted: 1 to 16"),
        ({"insecure": None}, "without keys"),
        ({"listen": "10.0.0.1:7420"}, "loopback addresses only, but 10.0.0.1:7420 is not one"),
        ({"listen": None, "address": "127.0.0.1:7420"}, "loopback addresses only, but 0.0.0.0:7420 is not one"),
        ({"address": "node7:7420"}, "loopback addresses only, but node7:7420 is not one"),
        ({"address": "0.0.0.0:7420"}, "names no node"),
        ({"keys": "/etc"}, "exclude one another"),
        ({"keys": "/no/such", "insecure": None}, "ca.pem cannot be read: No such file"),
        ({"fsync": "clique", "replication_factor": "1"}, "replication_factor of at least 2"),
        ({"replication_factor": "0"}, "accepted: a whole number from 1 to 16"),
        ({"replication_factor": "two"}, "accepted: a whole number"),
        ({"replication_factor": "17"}, "accepted: a whole number"),
        ({"replication_jump": "0"}, "accepted: a whole number from 1"),
        ({"replication_jump": "-1"}, "accepted: a whole number from 1"),
        ({"rank": "-1"}, "accepted: a whole number from 0"),
        ({"node": "a b"}, "accepted: 1 to 64 letters"),
        ({"node": "a/b"}, "accepted: 1 to 64 letters"),
        ({"node": "x" * 65}, "accepted: 1 to 64 letters"),
        ({"cluster": "a/b"}, "accepted: 1 to 64 letters"),
        ({"failure_domain": ""}, "accepted: 1 to 64 letters"),
        ({"listen": "127.0.0.1:0"}, "is not an address"),
        ({"listen": "127.0.0.1:65536"}, "is not an address"),
        ({"listen": "::1:7420"}, "is not an address"),
        ({"peer_share": "0"}, "is not a share"),
        ({"clique_lost": "pray"}, "accepted: error, local"),
        ({"etcd_cert": "/x"}, "need one another"),
        ({"etcd_cert": "/x", "etcd_key": "/y"}, "without etcd_ca"),
        ({"etcd_ca": "/no/ca.pem"}, "etcd_ca: /no/ca.pem cannot be read"),
        ({"etcd": "127.0.0.1:2379+e2:2379"}, "etcd at e2:2379 would be used without TLS"),
        ({"etcd_ca": "/etc/hostname", "etcd_insecure": ""}, "etcd_ca and etcd_insecure exclude one another"),
        ({"etcd_ca": "/etc/hostname", "etcd_cert": "/etc/hostname", "etcd_key": "/etc/hostname"}, "is open to others"),
    ],
)
def test_clusters_that_cannot_be_are_refused(place: Path, changes: dict[str, str | None], words: str) -> None:
    """P11: one sentence, which names what to give instead."""
    assert load(place, **TRIED, fsync="clique").cluster == "c"
    options = {key: value for key, value in (TRIED | changes).items() if value is not None}
    assert words in refusal(place, **options)


def test_etcd_addresses_with_a_comma_are_led_to_the_plus(tmp_path: Path) -> None:
    """P11: mount(8) splits at commas, so the second one looks like an option."""
    with pytest.raises(ConfigError, match="unknown option 'e2:2379'") as failure:
        config.load("x", tmp_path, config.parse_options("cluster=c,etcd=e1:2379,e2:2379"))
    assert "joined by '+'" in failure.value.remedy


@pytest.mark.parametrize(("option", "near"), [("rma", "ram"), ("drain_dedline", "drain_deadline"), ("noatme", "noatime"), ("qqqqqq", "")])
def test_a_mistyped_option_is_answered_with_the_nearest_one(option: str, near: str) -> None:
    """P11."""
    with pytest.raises(ConfigError) as refused:
        config.load("n", Path("/"), {option: "1"})
    message = str(refused.value)
    assert (
        f"{option!r}{f', did you mean {near}?' if near else ''}; accepted: " in message and "nvme_size" in message and "noatime" in message
    )


RULES = """
[[retention]]
path = "run*/step_*"
keep = 5
keep_every = 100
keep_local = 2
incomplete_after = "1d"

[[retention]]
path = "**/ckpt-*"
keep_local = 2
keep_pfs = 3
pfs_every = 10

[[retention]]
path = "*"
keep = 1
pfs_interval = "30m"
"""


def load_rules(place: Path, text: str, **options: object) -> Config:
    file = place / "job.toml"
    file.write_text(text)
    return load(place, config=file, **options)


def test_retention_rules(place: Path) -> None:
    """D5, D7, D8, H6: one table for each rule; child processes get them, too."""
    found = load_rules(place, RULES, pfs=place / "pfs", history_size="1G")
    assert found.history_size == limits.GIB
    assert found.retention == (
        RetentionRule("run*/step_*", keep=5, keep_every=100, keep_local=2, incomplete_after_s=86400.0),
        RetentionRule("**/ckpt-*", keep_local=2, keep_pfs=3, pfs_every=10),
        RetentionRule("*", keep=1, pfs_interval_s=1800.0),
    )


@pytest.mark.parametrize(
    ("path", "number"),
    [(b"run1/step_*", 0), (b"run1/a/step_*", None), (b"ckpt-*", 1), (b"run1/a/ckpt-*", 1), (b"step_*", 2), (b"run\xff/step_*", 0)],
)
def test_the_first_rule_that_matches_a_series_counts(place: Path, path: bytes, number: int | None) -> None:
    rules = load_rules(place, RULES, pfs=place / "pfs").retention
    assert rule_tables.find_rule(rules, path) == (None if number is None else rules[number])


def test_the_rule_of_a_directory(place: Path) -> None:
    rules = load_rules(place, RULES, pfs=place / "pfs").retention
    assert [rule_tables.find_directory_rule(rules, path) for path in (b"run1", b"run1/a", b"")] == [rules[0], rules[1], rules[1]]
    assert rule_tables.find_directory_rule(rules[:1], b"other") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("retention = 3", "this is not a list of tables"),
        ("[retention]\nkeep = 3", "this is not a list of tables"),
        ("[[retention]]\nkeep = 3", "retention rule 1: no path was given"),
        ('[[retention]]\npath = "a/step_*"', "it says nothing"),
        ('[[retention]]\npath = "/a/step_*"\nkeep = 3', "path: '/a/step_*' is not a path of series"),
        ('[[retention]]\npath = "step_*"\nkeep = 0', "keep: '0' cannot be used; accepted: a whole number from 1"),
        ('[[retention]]\npath = "step_*"\nkeep = true', "keep: True is not a value"),
        ('[[retention]]\npath = "step_*"\nkeeps = 3', "unknown key 'keeps'; accepted: path, keep, "),
        ('[[retention]]\npath = "step_*"\nincomplete_after = 0', "incomplete_after: '0' is not above 0"),
        ('[[retention]]\npath = "step_*"\nkeep = 3\nkeep_local = 4', "keep_local (4) is more than keep (3)"),
        ('[[retention]]\npath = "step_*"\nkeep = 3\nkeep_pfs = 4', "keep and keep_pfs exclude one another"),
        ('[[retention]]\npath = "step_*"\npfs_every = 3', "would fill RAM and NVMe"),
        ('[[retention]]\npath = "step_*"\nkeep = 3\npfs_every = 3\npfs_interval = 3', "exclude one another"),
        ('[[retention]]\npath = "step_*"\nkeep_local = 7\nkeep_pfs = 2\npfs_every = 3', "reach further back"),
        ('fsync = "pfs"\n[[retention]]\npath = "step_*"\nkeep = 3\npfs_every = 3', "fsync=pfs waits for the PFS"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(place: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_rules(place, text, pfs=place / "pfs")
    assert words in str(refused.value)
    assert "job.toml" in str(refused.value) or "retention rule for step_*" in str(refused.value)


def test_a_rule_about_the_pfs_needs_one(place: Path) -> None:
    with pytest.raises(ConfigError, match="keep_local, keep_pfs needs a PFS"):
        load_rules(place, '[[retention]]\npath = "step_*"\nkeep_local = 2\nkeep_pfs = 3')


def test_ro_and_rw_are_flags_of_the_kernel(place: Path) -> None:
    """A mount for login nodes; fstab and systemd also pass rw."""
    assert load(place, ro="").is_read_only and load(place, ro="").mount_flags & 1
    assert not load(place).is_read_only and not load(place, rw="").is_read_only


# --- what is in effect, and where it was given -----------------------------------------------------------------------


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
