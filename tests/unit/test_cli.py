"""The command `ckptfs`: output, JSON and exit codes, against control servers without FUSE. F5, P11."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ckptfs_client import __main__ as entry
from ckptfs_client import cli, mounts, render
from ckptfs_client.client import Client, ask_answering
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.mounts import Mount
from ckptfs_client.node import doctor
from control_served import Served
from daemon_under_test import environment

from ckptfs import procfs
from ckptfs.catalog import summary
from ckptfs.errors import describe_connection_fault
from ckptfs.protocol import control_pb2 as pb

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def served(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A node that seems to be mounted at tmp_path/mnt: the files there have the inode numbers of the catalog's."""
    (tmp_path / "mnt").mkdir()
    mount = Mount("test", tmp_path / "mnt", os.geteuid(), os.stat(tmp_path).st_dev)
    monkeypatch.setattr(mounts, "list_mounts", lambda: [mount])
    return served


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (pb.Status(), "survives a kill: unknown"),
        (pb.Status(survives_kill=True), "survives a kill: yes .*; without systemd a kill of the supervisor ends the mount"),
        (pb.Status(survives_kill=True, survives_supervisor_kill=True), "survives a kill: yes .*systemd keeps the mount"),
        (pb.Status(survives_kill=True, request_timeout_s=120), "has no answer for 2 min .fs.fuse.max_request_timeout"),
    ],
)
def test_status_says_what_a_kill_costs(status: pb.Status, words: str) -> None:
    """X10, P8."""
    assert re.search(words, render.describe_survival(status))


@pytest.mark.parametrize(
    ("release", "verdict", "words"), [("6.1.0-50-amd64", "ok", "survives a kill: yes"), ("4.18.0-553.el8", "note", "too old")]
)
def test_doctor_says_what_a_kill_costs(monkeypatch: pytest.MonkeyPatch, release: str, verdict: str, words: str) -> None:
    """X10, P8."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    found = [finding for finding in doctor.examine() if finding.check == "kernel" and words in finding.what]
    assert [finding.verdict for finding in found] == [verdict]


@pytest.mark.parametrize(
    ("timeouts", "verdict", "words"),
    [((0, 0), "ok", "waits for slow answers"), ((30, 0), "ok", "asks for the longest"), ((0, 600), "note", "no answer for 10 min")],
)
def test_doctor_reads_the_timeouts_of_fuse(monkeypatch: pytest.MonkeyPatch, timeouts: tuple[int, int], verdict: str, words: str) -> None:
    """X10: they end servers that are slow to answer."""
    monkeypatch.setattr(procfs, "get_fuse_timeouts", lambda: procfs.FuseTimeouts(*timeouts))
    (found,) = (finding for finding in doctor.examine() if finding.check == "fuse timeout")
    assert found.verdict == verdict and words in found.what


def test_status(served: Served, run: Run, tmp_path: Path) -> None:
    served.node.make(b"file", b"x" * 2048)
    summary.set_trouble(served.node.db, "write_back", {"what": "EACCES: no", "path": "a [b]", "remedy": "chmod it"})
    code, out, err = run("status", tmp_path / "mnt")
    assert (code, err) == (0, "")
    assert f"test on {tmp_path}/mnt: degraded" in out and "1 file (2.0 KiB)" in out and "a [b]: EACCES: no; chmod it" in out
    code, out, _ = run("status", "--json")
    found = json.loads(out)
    assert found["name"] == "test" and found["write_back"]["dirty_bytes"] == 2048 and found["counts"]["by_level"] == {"local": 1}
    assert {tier["name"] for tier in found["tiers"]} == {"ram", "nvme", "pfs"} and found["troubles"][0]["path"] == "a [b]"


def test_drain_in_time_and_not(served: Served, run: Run, tmp_path: Path) -> None:
    code, out, err = run("drain")
    said = re.escape(f"{tmp_path}/mnt is drained: every closed file has its highest level (after ")
    assert (code, err) == (0, "") and re.fullmatch(said + r"\d+\.\d s\)\n", out)
    code, out, _ = run("drain", "--json")
    assert code == 0 and json.loads(out)["done"] is True
    served.node.make(b"file", b"x" * 2048)
    code, _, err = run("drain", tmp_path / "mnt", "--deadline", "300ms")
    assert code == 4
    assert err == f"ckptfs: draining {tmp_path}/mnt: not done in time; left: 1 file (2.0 KiB), 1 other change\n"


def test_drain_says_which_checkpoints_are_safe(served: Served, run: Run, tmp_path: Path) -> None:
    """G1."""
    served.node.make_sealed(b"step_1.pt", b"x" * 2048)
    code, out, err = run("drain", "--deadline", "300ms", "--level", "pfs")
    assert code == 4 and err.startswith(f"ckptfs: draining {tmp_path}/mnt: not done in time; left: 1 file")
    assert out == "step_*.pt: step_1.pt is NOT safe (local): 1 of 1 file missing (2.0 KiB of 2.0 KiB); no older one is safe\n"
    code, out, _ = run("drain", "--deadline", "300ms", "--json")
    assert code == 4 and json.loads(out.splitlines()[-1])["safety"]["series"][0]["missing_bytes"] == 2048


@pytest.mark.parametrize(
    ("options", "what"),
    [(["--level", "ram"], "'ram' is not a level to drain to; accepted: clique, pfs"), (["--deadline", "soon"], "is not a duration")],
)
def test_drain_refuses_what_it_does_not_know(served: Served, run: Run, options: list[str], what: str) -> None:
    """P11."""
    code, _, err = run("drain", *options)
    assert code == 2 and what in err


def test_outside_of_a_mount(served: Served, run: Run, tmp_path: Path) -> None:
    for command in (["ls", "/"], ["wait", "/", "--level", "local"], ["verify", "/"], ["drain", "/"], ["status", "/"], ["refresh", "/"]):
        code, out, err = run(*command)
        assert (code, out) == (3, "") and err == f"ckptfs: / does not lie in a ckptfs mount; ckptfs is mounted at: {tmp_path}/mnt\n"


def test_a_missing_path(served: Served, run: Run, tmp_path: Path) -> None:
    for command in ("ls", "wait", "verify"):
        assert run(command, tmp_path / "mnt" / "none") == (1, "", f"ckptfs: {tmp_path}/mnt/none: No such file or directory\n")


def test_a_path_that_cannot_be_looked_at(served: Served, run: Run, tmp_path: Path) -> None:
    """Whatever a command does with a path, the error is a sentence."""
    path = tmp_path / "mnt" / ("n" * 256)
    for command in ("ls", "latest", "list", "commit"):
        assert run(command, path) == (1, "", f"ckptfs: {path}: File name too long\n"), command


def test_bad_usage(served: Served, run: Run, tmp_path: Path) -> None:
    """P11: exit code 2, and the words say what is accepted."""
    assert run("wait", tmp_path / "mnt", "--timeout", "soon")[0] == 2
    code, _, err = run("wait", tmp_path / "mnt", "--level", "clique")
    # tmp_path/mnt has no inode of the catalog, but the level is looked at first.
    assert code == 2 and "keeps no copies on other nodes" in err
    refused = (2, "", "ckptfs: 'disk' is not a level that can be waited for; accepted: local, clique, pfs\n")
    assert run("wait", tmp_path / "mnt", "--level", "disk") == refused
    code, _, err = run("wait", "--bogus")
    assert code == 2 and "--bogus" in err
    assert run("frobnicate")[0] == 2
    refused = (2, "", "ckptfs: 'loud' is not a log level; accepted: debug, info, warning, error\n")
    assert run("log-level", "loud") == run("log-level", tmp_path / "mnt", "loud") == refused
    for words in (["--checkpoint", "much"], ["--checkpoint", "1G", "--keep", "-1"], ["--checkpoint", "1G", "--ranks-per-node", "0"]):
        assert run("df", tmp_path / "mnt", *words)[0] == 2


def test_only_the_owner_gives_orders(served: Served, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, _, err = run("drain")
    assert code == 5 and err.startswith("ckptfs: draining")
    assert "only the owner of the mount test may do this; run it as root, or as the user who mounted it\n" in err


def test_help_documents_the_exit_codes(run: Run) -> None:
    for arguments in (["--help"], ["wait", "--help"], ["keys", "--help"], ["keys", "init", "--help"], ["cluster", "--help"]):
        code, out, _ = run(*arguments)
        words = " ".join(out.split())
        assert code == 0 and "4 not done in time" in words and "Example: ckptfs" in words


def test_a_reader_that_ends_gives_the_documented_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: 141, as a shell reports it; the library for commands would end it with 1, which means that something is bad."""

    def write(_: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(render, "print_json", write)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert run("version", "--json")[0] == 141


def test_several_mounts_have_one_line_each() -> None:
    """P11: the trouble of one is not below a screen of the others."""
    well = pb.Status(name="a", mountpoint="/a", health="ok", tiers=[pb.TierStatus(name="pfs")], counts=pb.Counts(files=3))
    well.write_back.dirty_bytes = 5 << 20
    ill = pb.Status(
        name="b", mountpoint="/b", health="degraded", troubles=[pb.Trouble(where="x", path="[d]", what="no"), pb.Trouble(where="y")]
    )
    screen = render.build_console()
    with screen.capture() as captured:
        screen.print(render.build_overview([well, ill]))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[1:] == [
        ["a", "ok", "3", "5.0", "MiB", "/a"],
        ["b", "degraded", "0", "-", "/b", "x:", "[d]:", "no", "(and", "1", "more)"],
    ]


def test_of_several_mounts_an_error_names_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if the daemon answers with an error in which it does not name itself."""

    def ask(client: Client) -> str:
        if client.mount.name == "bad":
            raise CommandFailed("No such file or directory")
        return client.mount.name

    answers, has_silent = ask_answering([Mount(name, tmp_path / name, os.geteuid(), 0) for name in ("good", "bad")], ask)
    assert ([answer for _, answer in answers], has_silent) == (["good"], True)
    assert capsys.readouterr().err == f"ckptfs: {tmp_path}/bad: No such file or directory\n"


def test_a_mount_whose_daemon_has_ended(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs_client.client.ENDED_ANSWER_S", 0.2)
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(mounts, "list_mounts", lambda: [Mount("gone", tmp_path, os.geteuid(), 0)])
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "gone.json").write_text(json.dumps({"pid": ended.pid}))
    code, out, err = run("status")
    assert (code, out) == (3, "") and f"({tmp_path}) has ended; mount gone again" in err


@pytest.mark.parametrize(
    ("name", "words"), [(b"plain [x]", "plain [x]"), (b"bad\xff", "bad\\xff"), (b"two\nlines\x1b[m", "two\\nlines\\x1b[m")]
)
def test_a_name_keeps_to_its_line(name: bytes, words: str) -> None:
    assert render.escape_unprintable(os.fsdecode(name)) == words


@pytest.mark.parametrize("command", ["ls", "latest", "show", "wait"])
def test_an_error_keeps_to_its_line(served: Served, run: Run, tmp_path: Path, command: str) -> None:
    code, _, err = run(command, os.fsdecode(os.fsencode(tmp_path) + b"/mnt/two\nlines\xff"))
    assert code == 1 and err.count("\n") == 1 and "/mnt/two\\nlines\\xff: " in err


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    ("end", "code", "words"), [(">/dev/full", 1, "the output cannot be written: No space left on device"), (">&-", 0, "")]
)
def test_an_output_that_takes_nothing(end: str, code: int, words: str, is_buffered: bool) -> None:
    """P11: a job script whose log is on a full disk, or a service that closes its descriptors."""
    env = environment() | {"PYTHONUNBUFFERED": "" if is_buffered else "1"}
    for command in ("version", "mounts --json", "--help"):
        shell = f"{shlex.quote(sys.executable)} -m ckptfs_client {command} {end}"
        done = subprocess.run(["sh", "-c", shell], env=env, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (code, f"ckptfs: {words}\n" if words else ""), command


def test_version_is_quick() -> None:
    """The heavy packages are imported where they are used, and not for this."""
    program = (
        "import sys; sys.argv = ['ckptfs', 'version']\n"
        "from ckptfs_client import __main__\ntry: __main__.main()\nexcept SystemExit: pass\n"
        "assert not {'grpc', 'rich', 'google.protobuf', 'trio'} & set(sys.modules), sys.modules.keys()\n"
        "import ckptfs_client.sets.newest\nassert not {'grpc', 'ckptfs.config'} & set(sys.modules), 'for latest'"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith("ckptfs "), done.stderr


def test_grpc_writes_no_lines_of_its_own(tmp_path: Path) -> None:
    """A daemon closes a connection that is idle for long, while `umount` waits. gRPC told the terminal so."""
    program = (
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\nimport ckptfs_client.client\nimport grpc\n"
        "server = grpc.server(ThreadPoolExecutor(1), options=[('grpc.max_connection_idle_ms', 100)])\n"
        f"server.add_insecure_port('unix:{tmp_path}/socket')\nserver.start()\nwas_ready, closed = [], threading.Event()\n"
        "def note(state):\n"
        "    if state is grpc.ChannelConnectivity.READY: was_ready.append(True)\n"
        "    elif was_ready: closed.set()\n"
        f"with grpc.insecure_channel('unix:{tmp_path}/socket') as channel:\n"
        "    channel.subscribe(note, try_to_connect=True)\n    assert closed.wait(60)\n"
    )
    env = {name: value for name, value in environment().items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "is_short"),
    [
        ("latest /", True), ("latest / --json", True), ("latest --level pfs /", True), ("list", True),
        ("list / --level local --json", True),
        ("latest", False), ("latest --help", False), ("latest / --level best", False), ("latest / --level", False), ("list / /tmp", False),
        ("latest / --jsno", False), ("list --all", False), ("latest -- /", False), ("status", False), ("", False),
    ],
)  # fmt: skip
def test_what_scripts_call_most_needs_no_typer(words: str, is_short: bool) -> None:
    """D12: it takes longer than the rest. Both ways refuse with the same words."""
    program = (
        "import sys\nfrom ckptfs_client import __main__ as entry, mounts\nmounts.list_mounts = list\n"
        "try: entry.{0}\nexcept SystemExit as end: print('typer' in sys.modules, end)"
    )
    assert (entry.find_short_way(words.split()) is not None) == is_short
    if words != "latest /":
        return
    ends = {}
    for way in ("main()", "run(__import__('ckptfs_client.cli').cli.main)"):
        command = [sys.executable, "-c", program.format(way), *words.split()]
        ends[way] = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    short, long = ends.values()
    assert (short.stdout, long.stdout) == ("False 3\n", "True 3\n")
    assert short.stderr == long.stderr and "ckptfs" in long.stderr


def test_mountinfo_is_understood(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "40 22 0:44 / /ckpt\\040one rw shared:2 master:3 - fuse.ckptfs job rw,user_id=1000,group_id=1000,allow_other\n"
        "41 22 0:45 / /other rw - fuse.sshfs host: rw,user_id=0\n"
    )
    assert mounts.list_mounts(str(table)) == [Mount("job", Path("/ckpt one"), 1000, os.makedev(0, 44))]


def test_the_deepest_and_latest_mount_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner, over = (Mount(name, tmp_path / path, 0, 1) for name, path in (("o", "a"), ("i", "a/b"), ("v", "a/b")))
    monkeypatch.setattr(mounts, "list_mounts", lambda: [inner, over, outer])
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    assert mounts.find(tmp_path / "a" / "b" / "c") is over and mounts.find(tmp_path / "a" / "x") is outer
    assert mounts.find(tmp_path / "link" / "c") is over
    with pytest.raises(UsageError, match="several ckptfs are mounted"):
        mounts.choose(None)


@pytest.mark.parametrize(("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (150 << 20, "150 MiB")])
def test_sizes_for_people(count: int, words: str) -> None:
    assert render.format_size(count) == words


def test_doctor_looks_at_everything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "list_mounts", list)
    names = {finding.check for finding in doctor.examine()}
    assert {"kernel", "/dev/fuse", "libfuse", "permissions", "daemon", "leases", "memory", "space", "clock"} <= names
    monkeypatch.setattr(doctor, "CLOCK_MIN", 2**40)
    code, out, _ = run("doctor", "--json")
    clock = next(finding for finding in json.loads(out) if finding["check"] == "clock")
    assert code == 1 and clock["verdict"] == "bad" and clock["remedy"]


@pytest.mark.parametrize(("text", "told"), [("0\n", True), ("200000\n", False), (None, False)])
def test_doctor_advises_to_poll_before_halting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, told: bool) -> None:
    """Advice, not a fault, and only where there is such a driver."""
    setting = tmp_path / "guest_halt_poll_ns"
    if text is not None:
        setting.write_text(text)
    monkeypatch.setattr(doctor, "HALT_POLL", setting)
    found = [finding for finding in doctor.examine() if finding.check == "idle processors"]
    assert bool(found) == told
    assert all(one.verdict == doctor.GOOD and f"echo 200000 > {setting}" in one.remedy for one in found)


def test_doctor_finds_a_mount_without_a_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ckptfs_client.client.ANSWER_S", 0.2)
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(mounts, "list_mounts", lambda: [Mount("dead", tmp_path, 0, 0)])
    found = next(finding for finding in doctor.examine() if finding.check == "dead")
    assert found.verdict == doctor.BAD and "no daemon serves it" in found.what and f"umount -l {tmp_path}" in found.remedy


def test_help_version_and_slips_of_the_pen(run: Run) -> None:
    """P11: -h and --version work everywhere, help shows no types of Python, and a mistyped word is answered with the nearest one."""
    assert run("--version")[:2] == run("version")[:2]
    for words in (["-h"], ["wait", "-h"], ["help", "wait"], ["keys", "-h"], ["lab", "start", "-h"]):
        code, out, _ = run(*words)
        assert code == 0 and "Usage: ckptfs" in out and "list[" not in out and "<str>" not in out, out
    assert "Did you mean 'status'?" in run("statsu")[2]
    code, _, err = run("wait", "--levle", "pfs", "/")
    assert code == 2 and "--level" in err


def list_leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
    for name, one in (below or {}).items():
        yield from list_leaves(one, (*words, name))


@pytest.mark.parametrize(("words", "command"), [pytest.param(*leaf, id=" ".join(leaf[0])) for leaf in list_leaves(cli.build_command())])
def test_each_help_has_an_example_that_can_be_given(words: tuple[str, ...], command: Any) -> None:
    """P11: of the command itself, with arguments and options that it takes."""
    found = re.search(r"Example: (.*)$", command.help.strip())
    assert found is not None, f"ckptfs {' '.join(words)} --help has no example at its end"
    given = shlex.split(found[1])
    assert tuple(given[: len(words) + 1]) == ("ckptfs", *words)
    command.make_context(" ".join(words), given[len(words) + 1 :])


def test_troubles_come_first_with_true_times_and_plain_words(served: Served, run: Run, tmp_path: Path) -> None:
    """F5: a tier that was well for long and fails now has failed just now, not since the mount."""
    db = served.node.db
    summary.set_report(db, "tier:pfs", {"state": "normal", "error": "", "total": 1, "free": 1})
    with db.transaction():
        db.run("UPDATE report SET at_ns = at_ns - 3600000000000 WHERE key = 'tier:pfs'")
    summary.set_report(db, "tier:pfs", {"state": "suspect", "error": "EIO", "remedy": "look", "total": 1, "free": 1})
    run("wait", tmp_path / "mnt", "--level", "clique")
    code, out, _ = run("status")
    lines = out.splitlines()
    assert code == 0 and re.match(r"  trouble pfs: .*EIO; look \(for \d{1,2}\.\d s\)", lines[1]), out
    assert "failed precondition" not in out and "control: 1 not possible here" in out
    with db.transaction():
        db.run("UPDATE report SET at_ns = at_ns - 120000000000 WHERE key = 'tier:pfs'")
    summary.set_report(db, "tier:pfs", {"state": "down", "error": "EIO again", "remedy": "look", "total": 1, "free": 1})
    assert "(for 2 min)" in run("status")[1], "it goes on failing"


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("Stream removed (recvmsg:No route to host)", "no route to host"),
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1.2.3.4:1: Connection refused", "connection refused"),
        ("Deadline Exceeded", "no answer in time"),
        ("Stream removed", "the connection broke off"),
        ("node2 has no room", "node2 has no room"),
    ],
)  # fmt: skip
def test_no_words_of_grpc(details: str, words: str) -> None:
    assert describe_connection_fault(details) == words
