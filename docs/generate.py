"""The generated reference: docs/reference.md, docs/man and docs/completion, made from what the code itself uses.

`python docs/generate.py` writes the files; with --check it writes nothing, names the files that differ and exits with 1.
The output depends on the tree alone: no dates, no facts of this machine. A description that the code does not have is in a table of this
module, and the generator refuses to run when such a table does not fit the code any more.

1. The tables below say what the code cannot: what `--json` prints for which command, environment variables, files, examples.
2. "Reading the code" turns the code's own tables into `Entry` and `Program`.
3. "Markdown" and "Man pages" print those.
"""

import argparse
import ast
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

# Everything of the project that the reference is made from. A rename in the tree is an edit here.
# isort: off
import typer

import ckptfs
import ckptfs_client
import ckptfs_daemon
from ckptfs.catalog.summary import VIRTUAL_XATTR_PREFIX, VIRTUAL_XATTRS
from ckptfs.catalog.user_settings import USER_SETTINGS
from ckptfs.config import (
    IGNORED_OPTIONS, MOUNT_FLAGS, REFUSED_OPTIONS, SERIES_SETTINGS, build_sample, is_known_option, parse_options,
)  # fmt: skip
from ckptfs.config.schema import RULE_SETTINGS, SETTINGS, Setting
from ckptfs.errors import ConfigError
from ckptfs.protocol import control_pb2 as pb
from ckptfs.runtime_dir import admin_socket_path, registry_path, socket_path
from ckptfs_client import json_answers
from ckptfs_client.cli import app
from ckptfs_client.node.doctor import STATE_ROOT, Finding
from ckptfs_client.errors import EXIT_CODES, SIGNAL_EXIT_CODES, ClientError
from ckptfs_client.lab.layout import DIRECTORY as LAB_DIRECTORY
from ckptfs_client.mount_helper import LOG, MOUNT_EXIT_CODES, UMOUNT_EXIT_CODES, build_mount_parser, build_umount_parser
from ckptfs_daemon.__main__ import DAEMON_EXIT_CODES, build_daemon_parser
from completion import list_lines, make_bash, make_fish, make_zsh
# isort: on

DOCS = Path(__file__).resolve().parent
COMMAND = ".venv/bin/python docs/generate.py"
MAN_WIDTH = 78
Message = Any
"""A message class of protobuf; the generated modules have no types."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table, or one tagged paragraph: a term and what it means."""

    term: str
    text: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program or subcommand: its name as typed, its usage behind the name, its paragraphs, and what it accepts."""

    name: str
    usage: str
    about: tuple[str, ...]
    entries: tuple[Entry, ...]
    json: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One key of a JSON object."""

    key: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Printed:
    """What one command prints with --json: the keys of `message` but for `without`, and those of the typed dict `more`."""

    how: str
    message: Message = None
    more: Any = None
    without: tuple[str, ...] = ()


# --- what the code does not say --------------------------------------------------------------------------------------

# The command, its options included where they change the answer. Each command with --json must be in this table.
PRINTED: dict[str, Printed] = {
    "status": Printed("One object for one mount, a list for several. With `--watch`, one line for each mount and second.", pb.Status),
    "status --cluster": Printed("One object.", pb.Cluster),
    "df": Printed("One object for one mount, a list for several.", pb.Capacity, json_answers.DfJson),
    "health": Printed("One object for one mount, a list for several.", more=json_answers.HealthJson),
    "config": Printed("A list with one object for each setting or rule.", pb.ConfigSetting),
    "who": Printed("One object.", more=json_answers.WhoJson),
    "warm": Printed("One line for each file, each one object.", more=json_answers.WarmJson),
    "ls": Printed("A list with one object for each name.", pb.Record, json_answers.LsJson, ("known",)),
    "list": Printed(
        "Without SERIES, or for a directory with several: a list with one object for each series.", more=json_answers.SeriesJson
    ),
    "list --level LEVEL": Printed("A list with one object for each set. Likewise for a single series.", more=json_answers.SetJson),
    "show": Printed("One object.", more=json_answers.ShowJson),
    "restore": Printed("One object.", more=json_answers.RestoreJson),
    **dict.fromkeys(("rollback", "pin", "unpin", "annotate", "commit", "rm"), Printed("One object.", more=json_answers.SetChangeJson)),
    "latest": Printed("One object.", more=json_answers.LatestJson),
    "advise": Printed("One object.", more=json_answers.AdviceJson),
    "simulate": Printed("One object.", more=json_answers.SimulateJson),
    "events": Printed("One line for each event, each one object.", more=json_answers.EventJson),
    "goodput": Printed("One object.", more=json_answers.GoodputJson),
    "chaos": Printed("One object.", more=json_answers.ChaosJson),
    "wait": Printed("One line for each change, each one object. The last one has `done`: true.", pb.Progress),
    "drain": Printed("One line for each change, each one object. The last one has `done`: true.", pb.Progress),
    "cluster adopt": Printed("One line for each change, each one object. The last one has `done`: true.", pb.Progress),
    "verify": Printed("One object.", more=json_answers.VerifyJson),
    "log-level": Printed("One object.", more=json_answers.LogLevelJson),
    "upgrade": Printed("One object.", more=json_answers.UpgradeJson),
    "doctor": Printed("A list with one object for each result.", more=Finding),
    "mounts": Printed("A list with one object for each name.", more=json_answers.MountJson),
    "version": Printed("One object.", more=json_answers.VersionJson),
    "lab start": Printed("One object. `lab start etcd` prints nothing.", more=json_answers.LabJson),
    "lab status": Printed("One object.", more=json_answers.LabJson),
}

FOR_TESTS = "For tests only."
BY_SYSTEMD = "Set by systemd."
# Each variable that the product reads from its environment, or sets in that of a program that it starts.
ENVIRONMENT: dict[str, str] = {
    "CC": "The C compiler for the daemon's shim, if the shim has to be compiled. Default: a compiler that is found in PATH.",
    "CKPTFS_FAULT": f"{FOR_TESTS} The disk operations that fail.",
    "CKPTFS_KERNEL_WITHOUT": f"{FOR_TESTS} Features of the kernel that the daemon is not to see, separated by commas.",
    "CKPTFS_LAB": "The directory of the lab, as `--dir` of the `ckptfs lab` commands.",
    "CKPTFS_MOUNT": "Set for the program that `ckptfs lab exec` runs: the mountpoint of the node.",
    "CKPTFS_RUNTIME_DIR": f"{FOR_TESTS} The directory of the control sockets.",
    "GRPC_VERBOSITY": "What gRPC logs in the daemon's processes and in commands: ERROR, INFO or DEBUG. Default: NONE.",
    "JOURNAL_STREAM": f"{BY_SYSTEMD} If it names the stream on stderr, the daemon logs to the journal.",
    "LISTEN_FDNAMES": f"{BY_SYSTEMD} The names of the descriptors that it kept over a restart.",
    "LISTEN_FDS": f"{BY_SYSTEMD} How many descriptors it kept over a restart.",
    "LISTEN_PID": f"{BY_SYSTEMD} The process for which the descriptors are.",
    "NOTIFY_SOCKET": f"{BY_SYSTEMD} Where the daemon says that it is ready.",
    "PYTHONPATH": "Where the daemon's processes find Python modules. The daemon adds its own directories in front.",
    "WATCHDOG_PID": f"{BY_SYSTEMD} The process that is watched.",
    "WATCHDOG_USEC": f"{BY_SYSTEMD} How often the daemon must say that it is alive.",
    "XDG_RUNTIME_DIR": "For ordinary users: the control sockets are in `ckptfs` below it. Default: `/run/user/UID`.",
    "XDG_STATE_HOME": "For ordinary users: the state directory is `ckptfs/NAME` below it. Default: `~/.local/state`.",
}

OPTIONS_BESIDE: dict[str, str] = {
    "config=FILE": "Reads settings from this TOML file, see ckptfs.toml(5). Other options win over the file.",
    "x-NAME": "Options that begin with `x-` belong to mount(8) and systemd. They are accepted and have no effect.",
}

PRODUCT = "ckptfs keeps checkpoints in memory and on local disks, copies them to other nodes and writes them back to a parallel filesystem."
XATTRS = "Any program can read these attributes of a regular file in a mount. listxattr(2) does not name them. They cannot be set."
TOML = "This file holds the settings of one mount. The sample /etc/ckptfs/ckptfs.toml.sample has all keys; it begins with:"
RETENTION = (
    "Each table [[retention]] of the TOML file says what is kept of the series that it names. Without a rule nothing expires. What is"
    " pinned, what a rollback made the latest, and the newest set of each level never expire; an older set goes only after those that"
    " replace it are as safe."
)
SERIES = (
    "Each table [[series]] of the TOML file names checkpoints that ckptfs does not know by their names, or says when they are complete."
    " It counts in every directory of the mount. What is not sealed, and a file that shows that it ends early, is never complete."
)
ON_THE_PFS = "pfs=/lustre/project/ckpt"
LOCAL = f"{ON_THE_PFS},nvme=/nvme/ckptfs,ram=64G"
CLUSTER = f"{ON_THE_PFS},cluster=run1,etcd=e1:2379+e2:2379+e3:2379,keys=/etc/ckptfs/keys"
EXAMPLES: dict[str, dict[str, str]] = {
    "ckptfs": {
        "Show all mounts of this machine": "ckptfs status",
        "Wait until a checkpoint is on the PFS, for at most five minutes": "ckptfs wait /ckpt/step_100.pt --level pfs --timeout 5m",
        "Find the newest complete checkpoint": "ckptfs latest '/ckpt/step_*'",
        "List the checkpoints that survive the end of the job": "ckptfs list '/ckpt/step_*' --level pfs",
        "Bring back one that was deleted": "ckptfs restore /ckpt/step_100",
        "Ask before a run whether three checkpoints of 40 GiB fit": "ckptfs df /ckpt --checkpoint 40G --keep 2",
        "Make the keys of a cluster and of one node": "ckptfs keys init keys --cluster run1\nckptfs keys issue keys node7",
        "Try a cluster on one machine": "ckptfs lab start --nodes 3\nckptfs lab status\nckptfs lab stop",
    },
    "mount.ckptfs": {
        "Mount on one node": f"mount -t ckptfs run1 /ckpt -o {LOCAL}",
        "The same in /etc/fstab": f"run1 /ckpt ckptfs {LOCAL},nofail 0 0",
        "Mount in a cluster": f"mount -t ckptfs run1 /ckpt -o {CLUSTER}",
        "Unmount, and wait for the write-back": "umount /ckpt",
    },
    "umount.ckptfs": {"Unmount, and wait for the write-back": "umount /ckpt"},
    "ckptfsd": {
        "Serve a mount in the foreground": f"ckptfsd run1 /ckpt -o {ON_THE_PFS}",
        "Serve a mount as a service, with the settings of /etc/ckptfs/run1.toml": "systemctl enable --now ckptfs@run1",
    },
    "ckptfs.toml": {
        "A node of a cluster": 'mountpoint = "/ckpt"\npfs = "/lustre/project/ckpt"\nnvme = "/nvme/ckptfs"\nram = "64G"\n'
        'cluster = "run1"\netcd = ["e1:2379", "e2:2379", "e3:2379"]\nkeys = "/etc/ckptfs/keys"',
    },
}


class NotDescribed(Exception):
    """The code and a table of this module do not fit; says what to edit."""


def list_files() -> list[Entry]:
    """What lies where, for root."""
    return [
        Entry("/etc/ckptfs/NAME.toml", "The settings of the mount NAME, for the unit ckptfs@NAME.service."),
        Entry("/etc/ckptfs/ckptfs.toml.sample", "All settings, with their meaning."),
        Entry(f"{STATE_ROOT}/NAME", "The state directory, unless `state=` names another one. It holds the catalog."),
        Entry(f"{STATE_ROOT}/NAME/{LOG}", "The log of a daemon that mount(8) started without a journal."),
        Entry(str(socket_path("NAME", 0)), "Answers questions of anyone on this machine."),
        Entry(str(admin_socket_path("NAME", 0)), "Takes orders from the owner of the mount."),
        Entry(str(registry_path("NAME", 0)), "Says what is mounted where, and by which process."),
        Entry(str(LAB_DIRECTORY), "The lab of `ckptfs lab`."),
    ]


# --- reading the code: programs --------------------------------------------------------------------------------------


def list_commands() -> list[Program]:
    """`ckptfs` and each of its subcommands, in the order of --help."""
    return list(_walk_commands("ckptfs", typer.main.get_command(app)))


def _walk_commands(name: str, command: Any) -> Iterator[Program]:
    subcommands: Mapping[str, Any] = getattr(command, "commands", {})
    parameters = [one for one in command.params if not getattr(one, "hidden", False) and "--help" not in one.opts]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option"]
    usage = ["[OPTIONS]"] if options else []
    usage += ["COMMAND ..."] if subcommands else [_format_argument(one) for one in arguments]
    about = tuple(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    entries = (
        *(_describe_parameter(_format_argument(one), one) for one in arguments),
        *(_describe_parameter(_format_option(one), one) for one in options),
    )
    yield Program(name, " ".join(usage), about, entries, any("--json" in one.opts for one in options))
    for word, sub in subcommands.items():
        if not sub.hidden:
            yield from _walk_commands(f"{name} {word}", sub)


def _format_argument(one: Any) -> str:
    word = _get_placeholder(one)
    if word.startswith(("[", "-")):
        return word
    return f"{word}..." if one.nargs == -1 else word if one.required else f"[{word}]"


def _format_option(one: Any) -> str:
    names = ", ".join(sorted([*one.opts, *one.secondary_opts], key=len))
    return names if one.is_flag else f"{names} {_get_placeholder(one)}"


def _get_placeholder(one: Any) -> str:
    """The word for a value: the one that the code gives, or that of its type."""
    if one.metavar:
        return str(one.metavar)
    if hasattr(one, "type_descriptor"):  # typer with a click of its own
        annotation = one.type_descriptor.annotation
        kind = next(iter(get_args(annotation)), annotation)
        return {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "PATH"}[kind]
    return str(one.type.name).split()[0].upper()


def _describe_parameter(term: str, one: Any) -> Entry:
    parts = [" ".join((one.help or "-").split())]
    lowest, highest = (getattr(one, name, getattr(getattr(one, "type", None), name, None)) for name in ("min", "max"))
    parts += ["Required."] if one.required and one.param_type_name == "option" else []
    parts += [f"At least {lowest}."] if lowest is not None else []
    parts += [f"At most {highest}."] if highest is not None else []
    flag = getattr(one, "is_flag", False)
    parts += [f"Default: `{one.default}`."] if one.default not in (None, ()) and not flag and not callable(one.default) else []
    parts += ["May be given several times."] if getattr(one, "multiple", False) else []
    parts += [f"Environment variable: `{one.envvar}`."] if one.envvar else []
    return Entry(term, " ".join(parts))


def describe_program(parser: argparse.ArgumentParser) -> Program:
    """A program that uses argparse."""
    shown = [one for one in parser._actions if one.help != argparse.SUPPRESS and not isinstance(one, argparse._HelpAction)]
    arguments = [one for one in shown if not one.option_strings]
    options = [one for one in shown if one.option_strings]
    entries = [Entry(_format_positional(one), one.help or "-") for one in arguments]
    for one in options:
        value = "" if one.nargs == 0 else f" {one.metavar or one.dest.upper()}"
        text = one.help or "-"
        # argparse has words of its own, in the language of the machine.
        text = "Print the version." if isinstance(one, argparse._VersionAction) else text
        entries.append(Entry(", ".join(one.option_strings) + value, text))
    return Program(parser.prog, " ".join(["[OPTIONS]", *map(_format_positional, arguments)]), (parser.description or "",), tuple(entries))


def _format_positional(one: argparse.Action) -> str:
    word = str(one.metavar or one.dest.upper())
    return f"[{word}]" if one.nargs == "?" else word


# --- reading the code: settings, attributes, environment -------------------------------------------------------------


def read_sample_head() -> list[str]:
    """What holds for all settings: the head of the sample configuration."""
    head = build_sample().split("\n\n", 1)[0]
    return [line.removeprefix("#").strip() for line in head.splitlines()]


def describe_accepted(parse: Any) -> str:
    """What a setting accepts, in the words with which its parser refuses what is empty, no text and too small."""
    found: list[str] = []
    for wrong in ("", "\0", "0"):
        try:
            parse(wrong)
        except ConfigError as failure:
            sentence = str(failure.args[0])
            for pattern, words in ((r"accepted: (.*)", r"\1"), (r"is neither (\S+) nor (\S+)", r"\1 or \2"), (r"is not (.*)", r"\1")):
                if match := re.search(pattern, sentence):
                    found.append(match.expand(words))
                    break
    if not found:
        raise NotDescribed(f"the parser {parse!r} refuses nothing by saying what it accepts")
    return "; ".join(dict.fromkeys(found))


def format_default(value: str | bool | float | None) -> str:
    """A default as it is written after `-o KEY=`; a dash for an option that is not given."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def list_other_options() -> list[Entry]:
    """The options beside the settings: what the kernel gets, what is accepted for nothing, what is refused."""
    for option in OPTIONS_BESIDE:
        if not is_known_option(option.split("=")[0]):
            raise NotDescribed(f"the option {option} is not accepted any more: edit OPTIONS_BESIDE")
    return [
        *(Entry(option, text) for option, text in OPTIONS_BESIDE.items()),
        Entry(", ".join(MOUNT_FLAGS), "Flags for the kernel, as mount(8) describes them."),
        Entry(", ".join(sorted(IGNORED_OPTIONS)), "Accepted, because mount(8), fstab(5) and systemd pass them. They have no effect."),
        *(Entry(option, f"Refused: {why}.") for option, why in REFUSED_OPTIONS.items()),
    ]


def list_attributes() -> list[Entry]:
    """The extended attributes that ckptfs makes up."""
    shown = [Entry((VIRTUAL_XATTR_PREFIX + name).decode(), text) for name, (_, text) in VIRTUAL_XATTRS.items()]
    set_by_users = [(name, f"{one.meaning} Accepted: {one.accepted}.") for name, one in USER_SETTINGS.items()]
    return shown + [Entry((VIRTUAL_XATTR_PREFIX + name).decode(), text) for name, text in set_by_users]


def list_environment() -> list[Entry]:
    """The environment variables. Raises NotDescribed when the code reads others than ENVIRONMENT has."""
    found: set[str] = set()
    for package in (ckptfs, ckptfs_client, ckptfs_daemon):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            if re.search("environ|getenv|envvar", text := path.read_text()):
                found |= set(_find_variables(ast.parse(text)))
    if wrong := found ^ ENVIRONMENT.keys():
        raise NotDescribed(f"the code and ENVIRONMENT differ in {', '.join(sorted(wrong))}: edit the table in docs/generate.py")
    return [Entry(name, ENVIRONMENT[name]) for name in sorted(found)]


def _find_variables(tree: ast.AST) -> Iterator[str]:
    """The environment variables that a module reads, or sets beside its own: `{**os.environ, NAME: VALUE}`."""
    for node in ast.walk(tree):
        names: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("os.environ.get", "os.environ.pop", "os.environ.setdefault", "os.getenv"):
                names.append(node.args[0])
            names += [keyword.value for keyword in node.keywords if keyword.arg == "envvar"]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            names.append(node.slice)
        elif isinstance(node, ast.Dict) and "os.environ" in [ast.unparse(value) for value in node.values]:
            names += node.keys
        yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))


# --- reading the code: JSON ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comments:
    """What control.proto says of a message and of its fields."""

    about: str
    fields: dict[str, str]


def parse_proto_comments() -> dict[str, Comments]:
    """The comments of control.proto by message: those in front of a message or field, and those behind a field."""
    found: dict[str, Comments] = {}
    above: list[str] = []
    current: Comments | None = None
    for line in Path(str(pb.__file__)).with_name("control.proto").read_text().splitlines():
        words = line.strip()
        if words.startswith("//"):
            above.append(words.removeprefix("//").strip())
            continue
        if message := re.match(r"message (\w+) \{", words):
            current = found.setdefault(message[1], Comments(" ".join(above), {}))
        elif current is not None and (field := re.match(r"[\w.<>, ]+?\s(\w+) = \d+;\s*(?://\s*(.*))?$", words)):
            current.fields[field[1]] = " ".join([*above, field[2] or ""]).strip()
        above = []
    return found


def list_message_rows(message: Message, comments: Mapping[str, Comments]) -> list[Row]:
    """The keys of a message as the client prints it: all fields, and null for an object that is absent."""
    said = comments[message.DESCRIPTOR.name].fields
    if [field.name for field in message.DESCRIPTOR.fields] != list(said):
        raise NotDescribed(f"control.proto and control_pb2 differ in {message.DESCRIPTOR.name}: run ckptfs/protocol/generate.py")
    return [Row(field.name, describe_field_kind(field), said[field.name]) for field in message.DESCRIPTOR.fields]


def describe_field_kind(field: Any) -> str:
    """The JSON type of a field."""
    one = field.message_type
    if one is not None and one.GetOptions().map_entry:
        return f"object of {describe_scalar(one.fields_by_name['value'])}"
    if one is None:
        return f"list of {describe_scalar(field)}" if field.is_repeated else describe_scalar(field)
    return f"list of {format_link(one.name)}" if field.is_repeated else f"{format_link(one.name)} or null"


def describe_scalar(field: Any) -> str:
    """The JSON type of a field that is no message."""
    kinds = {field.CPPTYPE_BOOL: "boolean", field.CPPTYPE_STRING: "string", field.CPPTYPE_DOUBLE: "number", field.CPPTYPE_FLOAT: "number"}
    return kinds.get(field.cpp_type, "integer")


def list_dict_rows(answer: Any) -> list[Row]:
    """The keys of a typed dict of the client."""
    rows = []
    for key, hint in get_type_hints(answer, include_extras=True).items():
        inner = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        if get_origin(inner) is not Annotated:
            raise NotDescribed(f"{answer.__name__}.{key} has no meaning: write Annotated[type, 'meaning']")
        kind, *words = get_args(inner)
        rows.append(Row(key, f"list of {format_link(words[0])}" if len(words) > 1 else describe_hint_kind(kind), words[-1]))
    return rows


def describe_hint_kind(hint: Any) -> str:
    """The JSON type of a type hint."""
    if get_origin(hint) is list:
        return f"list of {describe_hint_kind(get_args(hint)[0])}"
    if type(None) in get_args(hint):
        return f"{describe_hint_kind(get_args(hint)[0])} or null"
    if is_typeddict(hint):
        return format_link(hint.__name__.removesuffix("Json"))
    return {str: "string", int: "integer", bool: "boolean", float: "number"}[hint]


def format_link(name: str) -> str:
    """A reference to the table of an object."""
    return f"[{name}](#object-{name.lower()})"


def list_rows(printed: Printed, comments: Mapping[str, Comments]) -> list[Row]:
    """All keys of what a command prints."""
    rows = [] if printed.message is None else list_message_rows(printed.message, comments)
    if missing := set(printed.without) - {row.key for row in rows}:
        raise NotDescribed(f"{', '.join(missing)} is in no answer any more: edit PRINTED")
    return [row for row in rows if row.key not in printed.without] + ([] if printed.more is None else list_dict_rows(printed.more))


def collect_objects(comments: Mapping[str, Comments]) -> dict[str, tuple[str, list[Row]]]:
    """The objects inside of the answers: name to (what it is, its keys), in the order in which they are met."""
    found: dict[str, tuple[str, list[Row]]] = {}
    todo = [row.kind for printed in PRINTED.values() for row in list_rows(printed, comments)]
    while todo:
        for name in re.findall(r"\[(\w+)\]", todo.pop(0)):
            if name not in found:
                answer = getattr(json_answers, f"{name}Json", None)
                rows = list_message_rows(getattr(pb, name), comments) if answer is None else list_dict_rows(answer)
                found[name] = (comments[name].about if answer is None else " ".join((answer.__doc__ or "").split()), rows)
                todo += [row.kind for row in rows]
    return found


def check_printed(programs: Iterable[Program]) -> None:
    """Raises NotDescribed when PRINTED has not exactly the commands that have --json."""
    have = {one.name.removeprefix("ckptfs ") for one in programs if one.json}
    described = {re.sub(r" --.*", "", name) for name in PRINTED}
    if wrong := have ^ described:
        raise NotDescribed(f"--json of {', '.join(sorted(wrong))}: edit PRINTED in docs/generate.py")


def check_exit_codes() -> None:
    """Raises NotDescribed when the errors of the client have not exactly the exit codes that EXIT_CODES explains."""
    errors: list[type[ClientError]] = [ClientError, *ClientError.__subclasses__()]
    used = {0} | {error.exit_code for error in errors}
    if wrong := used ^ EXIT_CODES.keys():
        raise NotDescribed(f"the errors of the client and EXIT_CODES differ in {sorted(wrong)}: edit that table")


def check_examples(programs: Iterable[Program]) -> None:
    """Raises NotDescribed for an example whose command, options or settings do not exist."""
    known = {one.name: {word.rstrip(",") for entry in one.entries for word in entry.term.split()} for one in programs}
    for line in (line for group in EXAMPLES.values() for text in group.values() for line in text.splitlines()):
        words = shlex.split(line)
        if words[0] == "ckptfs":
            name = " ".join(words[:3]) if " ".join(words[:3]) in known else " ".join(words[:2])
            ours = words[: words.index("--")] if "--" in words else words
            wrong = [word for word in ours if word.startswith("-") and word not in known.get(name, ())]
            if name not in known or wrong:
                raise NotDescribed(f"the example {line!r} names what does not exist: {wrong or name}")
        settings = words[words.index("-o") + 1] if "-o" in words else words[3] if words[-1:] == ["0"] else ""
        if unknown := [option for option in parse_options(settings) if not is_known_option(option)]:
            raise NotDescribed(f"the example {line!r} names settings that do not exist: {', '.join(unknown)}")


# --- Markdown --------------------------------------------------------------------------------------------------------


def escape_md(text: str) -> str:
    """Text for a paragraph or a cell: what Markdown would take for its own is escaped, except in code spans and links."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part.replace("|", "\\|") if part.startswith("`") else re.sub(r"([|*<])", r"\\\1", part) for part in parts)


def format_code(text: str) -> str:
    """A code span in a cell."""
    return f"`{text}`".replace("|", "\\|")


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of cells that are Markdown already."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def format_entries(first: str, entries: Iterable[Entry]) -> list[str]:
    return format_table((first, "meaning"), ((format_code(one.term), escape_md(one.text)) for one in entries))


def format_program(one: Program, level: str) -> list[str]:
    lines = [f"{level} {one.name}", "", "```", f"{one.name} {one.usage}".rstrip(), "```", ""]
    for paragraph in one.about:
        lines += [escape_md(paragraph), ""]
    return lines + (format_entries("argument or option", one.entries) if one.entries else [])


def format_settings() -> list[str]:
    lines = [
        "## Settings", "",
        "Each setting is an option of `mount -t ckptfs NAME DIR -o KEY=VALUE,...` and of `ckptfsd -o`, and a key of the TOML file.",
        "The sample of that file, `/etc/ckptfs/ckptfs.toml.sample`, begins with:", "",
        *(f"> {escape_md(line)}" for line in read_sample_head()), "",
    ]  # fmt: skip
    rows = [
        (
            format_code(key.name),
            format_code(format_default(key.default)),
            escape_md(describe_accepted(key.parse)),
            escape_md(" ".join(key.description.split())),
        )
        for key in (*SETTINGS, *RULE_SETTINGS)
    ]
    lines += format_table(("key", "default", "accepted", "meaning"), rows[: len(SETTINGS)])
    lines += ["### Retention rules", "", escape_md(RETENTION), ""]
    lines += format_table(("key", "accepted", "meaning"), (row[:1] + row[2:] for row in rows[len(SETTINGS) :]))
    return [*lines, "### Other mount options", "", *format_entries("option", list_other_options())]


def format_exit_codes() -> list[str]:
    lines = ["## Exit codes", ""]
    for name, codes in list_exit_codes().items():
        lines += [
            f"### Exit codes of {name}",
            "",
            *format_table(("code", "meaning"), ((str(number), escape_md(text)) for number, text in codes.items())),
        ]
    return lines


def list_exit_codes() -> dict[str, dict[int, str]]:
    """Program to its exit codes."""
    return {
        "ckptfs": EXIT_CODES | SIGNAL_EXIT_CODES, "ckptfsd": DAEMON_EXIT_CODES, "mount.ckptfs": MOUNT_EXIT_CODES,
        "umount.ckptfs": UMOUNT_EXIT_CODES,
    }  # fmt: skip


def format_json() -> list[str]:
    comments = parse_proto_comments()
    lines = [
        "## JSON", "",
        "Every key is always there, unless its meaning says otherwise. Sizes are in bytes, times in seconds unless the name says ns.", "",
    ]  # fmt: skip
    for name, printed in PRINTED.items():
        with_json = f"{name} --json"
        lines += [f"### ckptfs {with_json}", "", escape_md(printed.how), "", *format_rows(list_rows(printed, comments))]
    for name, (about, rows) in collect_objects(comments).items():
        lines += [f"### Object {name}", "", *([escape_md(about), ""] if about else []), *format_rows(rows)]
    return lines


def format_rows(rows: Iterable[Row]) -> list[str]:
    return format_table(("key", "type", "meaning"), ((format_code(row.key), row.kind, escape_md(row.text)) for row in rows))


def make_reference() -> str:
    """docs/reference.md."""
    programs = list_commands()
    helpers = [describe_program(parser()) for parser in (build_daemon_parser, build_mount_parser, build_umount_parser)]
    lines = [
        "# Reference", "",
        f"This file is generated from the code. Do not edit it. After a change of the code, run `{COMMAND}`.", "",
        *(f"- [{title}](#{title.lower().replace(' ', '-')})" for title in ("Commands", "Other programs", "Settings", "Exit codes", "JSON",
          "Extended attributes", "Environment variables", "Files")), "",
        "## Commands", "",
        "Each command also accepts `--help`. Its exit codes are [below](#exit-codes-of-ckptfs).", "",
    ]  # fmt: skip
    for one in programs:
        lines += format_program(one, "###")
    lines += ["## Other programs", ""]
    for one in helpers:
        lines += format_program(one, "###")
    lines += [*format_settings(), *format_exit_codes(), *format_json()]
    lines += ["## Extended attributes", "", XATTRS, "", *format_entries("attribute", list_attributes())]
    lines += ["## Environment variables", "", *format_entries("variable", list_environment())]
    lines += ["## Files", "", *format_entries("path", list_files())]
    return "\n".join(lines).rstrip() + "\n"


# --- man pages -------------------------------------------------------------------------------------------------------


def escape_roff(text: str) -> str:
    """Text for a man page; code spans become bold."""
    text = text.replace("\\", "\\e").replace("'", "\\(aq").replace("~", "\\(ti").replace("^", "\\(ha")
    text = re.sub(r"(?<!\w)-|(?<=-)-", r"\\-", text)
    return re.sub(r"`([^`]*)`", lambda span: f"\\fB{escape_dashes(span[1])}\\fR", text)


def escape_dashes(text: str) -> str:
    """Every hyphen as the character that a shell wants."""
    return re.sub(r"(?<!\\)-", r"\\-", text)


def format_bold(text: str) -> str:
    """A term: words in capitals are placeholders and stay as they are."""
    return f"\\fB{escape_dashes(escape_roff(text))}\\fR"


def fill(text: str) -> list[str]:
    """A paragraph in short lines, none of which roff takes for a request."""
    lines = textwrap.wrap(escape_roff(text), MAN_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f"\\&{line}" if line.startswith(".") else line for line in lines]


def format_tagged(entries: Iterable[Entry]) -> list[str]:
    return [line for one in entries for line in (".TP", format_bold(one.term), *fill(one.text))]


def format_paragraphs(texts: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += [".PP", *fill(text)] if lines else fill(text)
    return lines


def format_man_page(name: str, section: int, about: str, parts: Mapping[str, Sequence[str]]) -> str:
    """A page: its parts by their headings; those that are empty are left out."""
    head = [
        '.\\" Generated by docs/generate.py from the code. Do not edit.',
        f'.TH {escape_dashes(name.upper())} {section} "" "ckptfs {ckptfs.__version__}" "ckptfs manual"',
        ".nh", ".ad l", ".SH NAME", f"{escape_dashes(name)} \\- {escape_roff(about)}",
    ]  # fmt: skip
    body = [line for heading, lines in parts.items() if lines for line in (f".SH {heading}", *lines)]
    return "\n".join([*head, *body]) + "\n"


def format_man_codes(name: str) -> list[str]:
    return format_tagged(Entry(str(number), f"{text[0].upper()}{text[1:]}.") for number, text in list_exit_codes()[name].items())


def format_man_examples(name: str) -> list[str]:
    lines: list[str] = []
    for what, text in EXAMPLES[name].items():
        lines += [
            ".PP",
            f"{escape_roff(what)}:",
            ".PP",
            ".RS 4",
            ".nf",
            *(escape_dashes(escape_roff(line)) for line in text.splitlines()),
            ".fi",
            ".RE",
        ]
    return lines[1:]


def format_references(*pages: str) -> list[str]:
    """References to other pages; each takes a line, with the comma behind it."""
    lines = [f".BR {escape_dashes(page).replace('(', ' (')}" for page in pages]
    return [*(f"{line}," for line in lines[:-1]), lines[-1]]


def format_synopsis(one: Program) -> list[str]:
    return [f"{format_bold(one.name)} {escape_dashes(escape_roff(one.usage))}".rstrip()]


def list_setting_entries(settings: Iterable[Setting], *, toml: bool) -> list[Entry]:
    """Settings as `KEY=VALUE`, or as lines of a TOML file. A rule says itself what holds without one of its keys."""
    found = []
    for key in settings:
        written = key.example if key.default is None else json.dumps(key.default)
        is_said = key in RULE_SETTINGS or key.default is None or "Default: " in key.description
        default = "" if is_said else f" Default: {format_default(key.default)}."
        text = f"{' '.join(key.description.split())}{default} Accepted: {describe_accepted(key.parse)}."
        found.append(Entry(f"{key.name} = {written}" if toml else f"{key.name}=VALUE", text))
    return found


def make_man_ckptfs() -> str:
    whole, *subcommands = list_commands()
    described: list[str] = []
    for one in subcommands:
        described += [
            f".SS {escape_dashes(one.name)}",
            *format_synopsis(one),
            ".PP",
            *format_paragraphs(one.about),
            *format_tagged(one.entries),
        ]
    parts = {
        "SYNOPSIS": format_synopsis(whole),
        "DESCRIPTION": format_paragraphs([*whole.about, PRODUCT]),
        "OPTIONS": format_tagged(whole.entries),
        "COMMANDS": described,
        "JSON": fill("The keys that commands print with `--json` are in docs/reference.md."),
        "EXTENDED ATTRIBUTES": [*fill(XATTRS), *format_tagged(list_attributes())],
        "EXIT STATUS": format_man_codes("ckptfs"),
        "ENVIRONMENT": format_tagged(list_environment()),
        "FILES": format_tagged(list_files()),
        "EXAMPLES": format_man_examples("ckptfs"),
        "SEE ALSO": format_references("mount.ckptfs(8)", "ckptfsd(8)", "ckptfs.toml(5)"),
    }
    return format_man_page("ckptfs", 1, "ask and control the daemons of ckptfs mounts", parts)


def make_man_mount() -> str:
    one = describe_program(build_mount_parser())
    usual = "\\fBmount \\-t ckptfs\\fR [\\fB\\-o\\fR OPTIONS] NAME DIRECTORY"
    parts = {
        "SYNOPSIS": [usual, ".br", *format_synopsis(one)],
        "DESCRIPTION": format_paragraphs(
            [*one.about, PRODUCT, "The settings after `-o` are described below; ckptfs.toml(5) has them as a file."]
        ),
        "OPTIONS": format_tagged(one.entries),
        "MOUNT OPTIONS": [*format_tagged(list_setting_entries(SETTINGS, toml=False)), *format_tagged(list_other_options())],
        "EXIT STATUS": format_man_codes("mount.ckptfs"),
        "FILES": format_tagged(list_files()),
        "EXAMPLES": format_man_examples("mount.ckptfs"),
        "SEE ALSO": format_references("ckptfs(1)", "ckptfs.toml(5)", "fstab(5)", "ckptfsd(8)", "mount(8)", "umount.ckptfs(8)"),
    }
    return format_man_page("mount.ckptfs", 8, "mount a ckptfs filesystem", parts)


def make_man_umount() -> str:
    one = describe_program(build_umount_parser())
    parts = {
        "SYNOPSIS": ["\\fBumount\\fR DIRECTORY", ".br", *format_synopsis(one)],
        "DESCRIPTION": format_paragraphs(one.about),
        "OPTIONS": format_tagged(one.entries),
        "EXIT STATUS": format_man_codes("umount.ckptfs"),
        "EXAMPLES": format_man_examples("umount.ckptfs"),
        "SEE ALSO": format_references("ckptfs(1)", "mount.ckptfs(8)", "umount(8)"),
    }
    return format_man_page("umount.ckptfs", 8, "unmount a ckptfs filesystem and wait for its write-back", parts)


def make_man_daemon() -> str:
    one = describe_program(build_daemon_parser())
    started = "mount.ckptfs(8) and the systemd unit ckptfs@NAME.service start it. The settings are those of ckptfs.toml(5)."
    parts = {
        "SYNOPSIS": format_synopsis(one),
        "DESCRIPTION": format_paragraphs([*one.about, started]),
        "OPTIONS": format_tagged(one.entries),
        "EXIT STATUS": format_man_codes("ckptfsd"),
        "ENVIRONMENT": format_tagged(list_environment()),
        "FILES": format_tagged(list_files()),
        "EXAMPLES": format_man_examples("ckptfsd"),
        "SEE ALSO": format_references("ckptfs(1)", "ckptfs.toml(5)", "mount.ckptfs(8)"),
    }
    return format_man_page("ckptfsd", 8, "serve a ckptfs mount", parts)


def make_man_toml() -> str:
    parts = {
        "SYNOPSIS": [format_bold("/etc/ckptfs/NAME.toml")],
        "DESCRIPTION": format_paragraphs([TOML, " ".join(read_sample_head())]),
        "KEYS": format_tagged(list_setting_entries(SETTINGS, toml=True)),
        "RETENTION RULES": [*fill(RETENTION), *format_tagged(list_setting_entries(RULE_SETTINGS, toml=True))],
        "SERIES RULES": [*fill(SERIES), *format_tagged(list_setting_entries(SERIES_SETTINGS, toml=True))],
        "FILES": format_tagged(list_files()[:2]),
        "EXAMPLES": format_man_examples("ckptfs.toml"),
        "SEE ALSO": format_references("ckptfs(1)", "ckptfsd(8)", "mount.ckptfs(8)"),
    }
    return format_man_page("ckptfs.toml", 5, "the settings of a ckptfs mount", parts)


# --- the program -----------------------------------------------------------------------------------------------------


def make_pages() -> dict[Path, str]:
    """Every generated file and what it must hold. Raises NotDescribed."""
    programs = list_commands()
    check_printed(programs)
    check_exit_codes()
    check_examples(programs)
    lines = list(list_lines("ckptfs", typer.main.get_command(app)))
    return {
        DOCS / "completion/bash/ckptfs": make_bash(lines),
        DOCS / "completion/fish/ckptfs.fish": make_fish(lines),
        DOCS / "completion/zsh/_ckptfs": make_zsh(lines),
        DOCS / "reference.md": make_reference(),
        DOCS / "man/ckptfs.1": make_man_ckptfs(),
        DOCS / "man/ckptfs.toml.5": make_man_toml(),
        DOCS / "man/ckptfsd.8": make_man_daemon(),
        DOCS / "man/mount.ckptfs.8": make_man_mount(),
        DOCS / "man/umount.ckptfs.8": make_man_umount(),
    }


def main() -> int:
    """Write the files, or compare them; the exit code."""
    parser = argparse.ArgumentParser(description="Write docs/reference.md, docs/man and docs/completion.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    asked = parser.parse_args()
    try:
        made = make_pages()
    except NotDescribed as failure:
        print(f"docs/generate.py: {failure}", file=sys.stderr)
        return 2
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if asked.check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} differs from the code; run {COMMAND}", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made[path])
        print(f"written: {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    os.environ.pop("CKPTFS_RUNTIME_DIR", None)  # It changes where the sockets are said to be.
    sys.exit(main())
