"""The manifests of deploy/kubernetes: the schemas of Kubernetes, and what they say of the mount, its memory and its end."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from ckptfs_client.cli import build_command
from ckptfs_client.node.doctor import STATE_ROOT

from ckptfs import config, limits

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/guides/kubernetes.md"
MANIFESTS = REPOSITORY / "deploy/kubernetes"
KUSTOMIZATIONS = sorted(MANIFESTS.rglob("kustomization.yaml"))
KINDS = ["base", "overlays/cluster"]
VERSIONS = ["1.30", "1.37"]
UNITS = {"Mi": 2**20, "Gi": 2**30}


def load(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def get_daemon(kind: str) -> tuple[Any, Any]:
    """Return the pod of the DaemonSet and its container, those of the base under those of an overlay."""
    pods = [load(MANIFESTS / name / "daemonset.yaml")[0]["spec"]["template"]["spec"] for name in ("base", kind)]
    containers = [pod["containers"][0] for pod in pods]
    volumes = [*pods[0]["volumes"], *([] if kind == "base" else pods[1]["volumes"])]
    mounts = [*containers[0]["volumeMounts"], *([] if kind == "base" else containers[1]["volumeMounts"])]
    return {**pods[0], **pods[1], "volumes": volumes}, {**containers[0], **containers[1], "volumeMounts": mounts}


def get_config(kind: str) -> config.Config:
    """Return the configuration that the daemon of a pod reads."""
    arguments = [word.replace("$(NODE_NAME)", "node7").replace("$(NODE_IP)", "10.0.0.7") for word in get_daemon(kind)[1]["args"]]
    name, flag, options = arguments
    assert flag == "-o"
    given = config.parse_options(options)
    given["config"] = str(MANIFESTS / kind / PurePosixPath(given["config"]).relative_to("/etc/ckptfs/config"))
    return config.load(name, None, given)


@pytest.fixture(autouse=True)
def another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the configurations be read as on a node with 256 GiB of memory, and without a look at its directories."""
    sizes = {"SC_PHYS_PAGES": 1 << 26, "SC_PAGE_SIZE": 4096}
    original = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sizes.get(str(name)) or original(name))
    monkeypatch.setattr(config, "resolve_config", lambda found: found)


def parse_bytes(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: str(path.parent.relative_to(MANIFESTS)))
def test_a_kustomization_names_what_exists(path: Path) -> None:
    (one,) = load(path)
    generated = [name for generator in one.get("configMapGenerator", []) for name in generator["files"]]
    named = [*one["resources"], *generated, *(patch["path"] for patch in one.get("patches", []))]
    assert named and [name for name in named if not (path.parent / name).exists()] == []
    used = {path.parent / name for name in named} | {path}
    assert {file for file in path.parent.iterdir() if file.is_file()} <= used, "no file is forgotten"


def list_documents() -> Iterator[Any]:
    """Return what is applied: the files of the base, and the overlays as kustomize renders them."""
    yield from (one for path in (MANIFESTS / "base").glob("*.yaml") if path.name != "kustomization.yaml" for one in load(path))
    yield from load(MANIFESTS / "job.yaml")
    if (kubectl := shutil.which("kubectl")) is not None:
        for path in KUSTOMIZATIONS:
            made = subprocess.run([kubectl, "kustomize", path.parent], capture_output=True, text=True, timeout=60, check=True)
            yield from yaml.safe_load_all(made.stdout)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_everything(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="NOT TESTED HERE, not installed: kubernetes-validate")
    documents = list(list_documents())
    assert {"Namespace", "PriorityClass", "DaemonSet", "Job"} <= {one["kind"] for one in documents}
    for one in documents:
        validator.validate(one, version, strict=True)
    broken = next(one for one in documents if one["kind"] == "DaemonSet")
    broken["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, version, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_container_pays_for_the_ram_tier(kind: str) -> None:
    """M2: its limit holds ram= and the processes, and is reserved (a guaranteed pod)."""
    resources = get_daemon(kind)[1]["resources"]
    assert resources["requests"] == resources["limits"] and set(resources["limits"]) == {"cpu", "memory"}
    ram = get_config(kind).ram_bytes
    assert isinstance(ram, int) and parse_bytes(resources["limits"]["memory"]) >= ram + limits.SERVICE_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_has_time_for_the_drain(kind: str) -> None:
    pod, container = get_daemon(kind)
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = config.parse_seconds(command[command.index("--deadline") + 1])
    sigterm_s = get_config(kind).drain_deadline_s
    assert sigterm_s is not None
    assert pod["terminationGracePeriodSeconds"] >= drain_s + sigterm_s + limits.STOP_WAIT_S


@pytest.mark.parametrize("kind", KINDS)
def test_commands_of_the_pod_exist(kind: str) -> None:
    _, container = get_daemon(kind)
    probes = [container[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness", "readiness")]
    lines = [container["lifecycle"]["preStop"]["exec"]["command"], *probes]
    mountpoint = str(get_config(kind).mountpoint)
    for line in lines:
        words = shlex.split(line[2].partition(";")[0]) if line[0] == "sh" else line
        command = build_command().commands[words[1]]
        names = {name for one in command.params for name in one.opts}
        assert words[0] == "ckptfs" and words[2] == mountpoint and {word for word in words if word.startswith("--")} <= names
    # The daemon that answers is left alone, whatever else it says: 3 means that it does not.
    for line in probes[:2]:
        assert line[2].endswith("; test $? -ne 3")


@pytest.mark.parametrize("kind", KINDS)
def test_mounts_reach_the_node(kind: str) -> None:
    """The mountpoint and the RAM tier lie below directories whose mounts propagate; every volume is there."""
    pod, container = get_daemon(kind)
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert {one["name"] for one in mounts.values()} <= volumes.keys()
    found = get_config(kind)
    for path in (found.mountpoint, STATE_ROOT / found.name):
        (above,) = (mounts[str(one)] for one in path.parents if str(one) in mounts)
        assert above["mountPropagation"] == "Bidirectional"
        assert volumes[above["name"]]["hostPath"]["path"] == above["mountPath"], "the paths in messages hold on the node, too"
    for path in filter(None, (found.pfs, found.nvme, found.keys, found.etcd_ca)):
        assert {str(path), *map(str, path.parents)} & mounts.keys(), path


def test_the_ports_of_a_pod_are_those_that_its_daemon_listens_on() -> None:
    """No other program of the node loses a port to a pod that does not use it."""
    found = get_config("overlays/cluster")
    ports = [(one["containerPort"], one["hostPort"]) for one in get_daemon("overlays/cluster")[1]["ports"]]
    port = int(found.listen.rpartition(":")[2])
    assert ports == [(port, port)] and found.address.endswith(f":{port}")


def test_the_job_waits_for_the_mount_and_sees_it() -> None:
    (job,) = load(MANIFESTS / "job.yaml")
    pod = job["spec"]["template"]["spec"]
    host = Path(pod["volumes"][0]["hostPath"]["path"])
    mountpoint = get_config("base").mountpoint
    waiting, training = pod["initContainers"][0], pod["containers"][0]
    for container in (waiting, training):
        (mount,) = container["volumeMounts"]
        assert mount["mountPropagation"] == "HostToContainer"
    seen = Path(mount["mountPath"]) / mountpoint.relative_to(host)
    pattern = re.search(r"grep -q '(.*)' /proc", waiting["command"][2])
    assert pattern is not None
    assert re.search(pattern[1], f"40 36 0:60 / {seen} rw,nosuid,nodev,relatime master:1 - fuse.ckptfs ckpt rw")
    assert any(word.startswith(f"{seen}/") for word in training["command"])
    assert pod["nodeSelector"] == get_daemon("base")[0]["nodeSelector"]


def test_keys_of_the_node_are_chosen(tmp_path: Path) -> None:
    """The init container of the cluster, run here: links that follow the secret, and an error that names what is missing."""
    (patch,) = load(MANIFESTS / "overlays/cluster/daemonset.yaml")
    container = patch["spec"]["template"]["spec"]["initContainers"][0]
    script = container["args"][0].replace("/etc/ckptfs/", f"{tmp_path}/")
    (tmp_path / "keys").mkdir()
    (tmp_path / "secret").mkdir()
    for name in ("ca.pem", "node7.pem", "node7.key"):
        (tmp_path / "secret" / name).write_text(name)

    def run(node: str) -> "subprocess.CompletedProcess[str]":
        command = [*container["command"], script]
        return subprocess.run(command, env={**os.environ, "NODE_NAME": node}, capture_output=True, text=True, timeout=60, check=False)

    assert run("node7").returncode == 0
    keys = tmp_path / "keys"
    assert [(keys / name).read_text() for name in ("ca.pem", "node.pem", "node.key")] == ["ca.pem", "node7.pem", "node7.key"]
    (tmp_path / "secret/revoked").write_text("node8\n")
    assert (keys / "revoked").read_text() == "node8\n"
    refused = run("node8")
    assert refused.returncode == 1 and "the secret ckptfs-keys has no node8.key" in refused.stderr


def test_the_secrets_are_made_as_the_guide_says(tmp_path: Path) -> None:
    """The commands of docs/guides/kubernetes.md, with a kubectl that only prints what it would create."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("NOT TESTED HERE, not installed: kubectl")
    (block,) = re.findall(
        r"^```sh\n(ckptfs keys init.*?)^kubectl apply", (REPOSITORY / "docs/guides/kubernetes.md").read_text(), re.M | re.S
    )
    programs = {"kubectl": f'{kubectl} "$@" --dry-run=client -o yaml; echo ---', "ckptfs": f'{sys.executable} -m ckptfs_client "$@" >&2'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / name).touch()
    roots = os.pathsep.join(str(REPOSITORY / part) for part in (".", "client"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": roots}
    run = subprocess.run(["sh", "-e", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in yaml.safe_load_all(run.stdout) if one}
    assert secrets == {
        "ckptfs-keys": {"ca.pem", "node7.pem", "node7.key", "node8.pem", "node8.key"}, "ckptfs-etcd": {"ca.crt", "tls.crt", "tls.key"},
    }  # fmt: skip
    (patch,) = load(MANIFESTS / "overlays/cluster/daemonset.yaml")
    volumes = patch["spec"]["template"]["spec"]["volumes"]
    assert {one["secret"]["secretName"] for one in volumes if "secret" in one} == secrets.keys()
