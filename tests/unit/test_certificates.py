"""The keys of a cluster: made once, whole, private, and judged when they are loaded (F6)."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
from ckptfs_client.cli import app
from typer.testing import CliRunner

from ckptfs import limits
from ckptfs.clique import certificates
from ckptfs.errors import ConfigError, InvalidArgument


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    certificates.init(directory, "moon")
    return directory


def test_a_node_gets_what_it_needs_and_nothing_of_the_authority(authority: Path) -> None:
    directory = certificates.issue(authority, "node1", ["127.0.0.1", "node1.example"])
    assert sorted(os.listdir(directory)) == ["ca.pem", "node.key", "node.pem"]
    identity = certificates.load(directory)
    assert (identity.node, identity.cluster) == ("node1", "moon")
    assert certificates.get_subject(identity.certificate) == ("node1", "moon")
    for path in (authority / "ca.key", directory / "node.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_revoked_keys_are_refused_and_new_ones_are_good(authority: Path) -> None:
    """F6: also a second time, and on the node itself."""
    old = certificates.issue(authority, "node1")
    other = certificates.load(certificates.issue(authority, "node2"))
    lost = certificates.load(old)
    for count in (1, 2):
        lists = certificates.revoke(authority, "node1")
        assert lists == [authority / "revoked", authority / "node2" / "revoked"]
        assert certificates.read_revocations(authority / "node2") == {"node1": count}
        assert not certificates.is_current(lost.certificate, certificates.read_revocations(authority))
        assert certificates.is_current(other.certificate, certificates.read_revocations(authority))
        new = certificates.load(certificates.issue(authority, "node1"))
        assert certificates.is_current(new.certificate, certificates.read_revocations(authority))
        assert certificates.is_current(new.certificate, {}), "nodes that have not heard of it go on"
        lost = new
    put_aside = authority / ".node1.revoked-1"
    certificates.write_revocations(put_aside, {"node1": 2})
    with pytest.raises(ConfigError, match="were revoked"):
        certificates.load(put_aside)


def test_what_cannot_be_revoked_is_refused(authority: Path, tmp_path: Path) -> None:
    """P11."""
    for directory, node in ((tmp_path / "nowhere", "node1"), (authority, "../node1")):
        with pytest.raises(InvalidArgument):
            certificates.revoke(directory, node)
    result = CliRunner().invoke(app, ["keys", "revoke", str(authority), "node1"])
    assert result.exit_code == 0 and "of every node" in result.output


@pytest.mark.parametrize("text", ["node1", "node1 x", "node1 -1", "node1 0", "node1 9999999", "node1 \u0663"])
def test_a_broken_list_is_named_and_what_was_known_holds(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11."""
    monkeypatch.setattr(limits, "REVOKED_POLL_S", 0.0)
    certificates.write_revocations(tmp_path, {"node7": 3})
    known = certificates.RevocationList(tmp_path)
    assert known.get_counts() == {"node7": 3}
    (tmp_path / "revoked").write_text(text)
    with pytest.raises(ConfigError, match="line 1 is not NODE COUNT"):
        certificates.read_revocations(tmp_path)
    assert known.get_counts() == {"node7": 3}
    certificates.write_revocations(tmp_path, {"node1": 1})
    assert known.get_counts() == {"node1": 1}


def test_openssl_agrees(authority: Path) -> None:
    directory = certificates.issue(authority, "node1")
    for purpose in ("sslserver", "sslclient"):
        command = ["openssl", "verify", "-CAfile", str(authority / "ca.pem"), "-purpose", purpose, str(directory / "node.pem")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_nothing_is_overwritten(authority: Path) -> None:
    directory = certificates.issue(authority, "node1")
    before = {path: path.read_bytes() for path in (*authority.glob("ca.*"), *directory.iterdir())}
    for again in (lambda: certificates.init(authority, "moon"), lambda: certificates.issue(authority, "node1")):
        with pytest.raises(InvalidArgument, match="never overwritten"):
            again()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["", "../node", "a/b", "-a", "a" * 64, "näh"])
def test_odd_names_are_refused(authority: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="accepted"):
        certificates.issue(authority, name)
    with pytest.raises(InvalidArgument, match="accepted"):
        certificates.init(authority / "x", name)


def test_an_odd_address_is_refused_before_anything_is_written(authority: Path) -> None:
    with pytest.raises(InvalidArgument, match="neither a host name"):
        certificates.issue(authority, "node1", ["a b"])
    assert not (authority / "node1").exists()


def test_names_in_certificates_differ_by_node_and_cluster() -> None:
    names = {certificates.target_name(cluster, node) for cluster in ("a", "b", "ab") for node in ("a", "A", "b", "ba")}
    assert len(names) == 12


@pytest.mark.parametrize(
    ("foreign", "words"),
    [("", "open to others"), ("ca.pem", "not a certificate of the CA"), ("node.key", "not the key")],
    ids=["open to others", "of another authority", "another key"],
)
def test_keys_that_prove_nothing_are_refused(authority: Path, tmp_path: Path, foreign: str, words: str) -> None:
    certificates.init(tmp_path / "other", "moon")
    directory, other = certificates.issue(authority, "node1"), certificates.issue(tmp_path / "other", "node1")
    if foreign:
        (directory / foreign).write_bytes((other / foreign).read_bytes())
    else:
        (directory / "node.key").chmod(0o640)
    with pytest.raises(ConfigError, match=words):
        certificates.load(directory)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        certificates.load(tmp_path)
    with pytest.raises(InvalidArgument, match="no keys of a cluster"):
        certificates.issue(tmp_path, "node1")


def test_the_command_makes_them(tmp_path: Path) -> None:
    run = CliRunner()
    directory = tmp_path / "keys"
    assert run.invoke(app, ["keys", "init", str(directory), "--cluster", "moon"]).exit_code == 0
    assert run.invoke(app, ["keys", "issue", str(directory), "node1", "--address", "10.0.0.1"]).exit_code == 0
    assert certificates.load(directory / "node1").node == "node1"
    refused = run.invoke(app, ["keys", "issue", str(directory), "node1"])
    assert refused.exit_code != 0 and "never overwritten" in str(refused.exception)


def test_the_keys_of_another_node_are_refused(authority: Path) -> None:
    directory = certificates.issue(authority, "node1")
    assert certificates.load_for(directory, "node1", "moon") == certificates.load(directory)
    for node, cluster in (("node2", "moon"), ("node1", "mars")):
        with pytest.raises(ConfigError, match="has the keys of node node1 of cluster moon"):
            certificates.load_for(directory, node, cluster)
