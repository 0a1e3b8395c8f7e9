"""How answers look: as rich tables for people, and as plain values for JSON. No questions are asked here."""

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ckptfs.protocol import control_pb2 as pb

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
STYLES = {
    "ok": "green", "normal": "green", "good": "green", "alive": "green", "degraded": "yellow", "suspect": "yellow", "down": "red",
    "bad": "red", "dead": "red",
}  # fmt: skip


def size(count: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.1f} {UNITS[unit]}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 file", "3 files"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Seconds for people: "3.2 s", "5 min", "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def plain(message: Any) -> Any:
    """A message of control.proto as dicts and lists: every field is there, numbers stay numbers."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            values[field.name] = list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            values[field.name] = dict(value)
        else:
            values[field.name] = [plain(one) for one in value] if field.is_repeated else plain(value)
    return values


def emit(value: Any, *, lines: bool = False) -> None:
    """Print JSON: indented for a terminal, on one line otherwise, and when many such `lines` follow one another."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() and not lines else None), flush=True)


def console() -> "Console":
    """Where tables go. Not a terminal: wide enough that nothing is cut or wrapped."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 4096, highlight=False)


def put(what: "RenderableType") -> None:
    """Print a table, without the blanks with which it is filled up to its right edge."""
    screen = console()
    with screen.capture() as captured:
        screen.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def printable(name: str) -> str:
    """A name on one line: what is no text, and what would move the cursor, as escapes."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _shown(name: str) -> str:
    """A name as rich shall print it."""
    from rich.markup import escape

    return escape(printable(name))


def _styled(word: str) -> str:
    return f"[{STYLES[word]}]{word}[/]" if word in STYLES else word


def status(answer: "pb.Status") -> "RenderableType":
    """The figures of one mount."""
    from rich.console import Group
    from rich.markup import escape
    from rich.padding import Padding

    counts, behind = answer.counts, answer.write_back
    levels = ", ".join(f"{count} {level}" for level, count in sorted(counts.by_level.items()))
    directories, handles = counted(counts.directories, "directory", "directories"), counted(counts.open_handles, "handle")
    lines = [
        f"[bold]{escape(answer.name)}[/] on {escape(answer.mountpoint)}: {_styled(answer.health)}   (ckptfs {answer.version})",
        f"  data path   {answer.data_path or 'unknown'}: {escape(answer.data_path_reason)}",
        f"  fsync       returns at the level {answer.fsync}",
        f"  files       {counts.files} in {directories}; by level: {levels or 'none'}; lost: {counts.lost}",
        f"  open        {handles}, {counts.writers} for writing; awaiting their seal: {behind.unsealed_files}",
    ]
    if answer.pfs:
        changes = f"{counted(behind.dirty_files, 'file')} ({size(behind.dirty_bytes)}) and {counted(behind.changes, 'other change')} behind"
        changes = changes if behind.dirty_files or behind.changes else "nothing is behind"
        lag = f", the oldest for {duration(behind.lag_s)}" if behind.lag_s else ""
        lines.append(f"  write-back  {changes}{lag}, to {escape(answer.pfs)}")
        if behind.now_path:
            lines.append(f"              now {_shown(behind.now_path)}: {size(behind.now_copied_bytes)} of {size(behind.now_size_bytes)}")
    else:
        lines.append("  write-back  none: this mount has no PFS")
    troubles = []
    for trouble in answer.troubles:
        where = f"{trouble.where}: {trouble.path}" if trouble.path else trouble.where
        remedy = f"; {trouble.remedy}" if trouble.remedy else ""
        troubles.append(f"[yellow]trouble[/] {_shown(where)}: {escape(trouble.what)}{escape(remedy)} (for {duration(trouble.age_s)})")
    tables = (Padding(_tiers(answer), (1, 2), expand=False), Padding(_processes(answer), (0, 2, 1, 2), expand=False))
    return Group("\n".join(lines), *tables, *troubles)


def cluster(answer: "pb.Cluster") -> "RenderableType":
    """All nodes of a cluster."""
    from rich.console import Group
    from rich.markup import escape

    living = sum(member.alive for member in answer.members)
    head = (
        f"[bold]{escape(answer.name)}[/]: {living} of {counted(len(answer.members), 'node')}, {answer.replication_factor} copies,"
        f" etcd {escape(answer.etcd)}   (as {escape(answer.node)} sees it)"
    )
    table = grid("node", "number>", "state", "rank>", "domain", "address", "copies go to", "behind", "oldest>", "holds for others")
    for member in answer.members:
        behind = f"{counted(member.behind_files, 'file')} ({size(member.behind_bytes)})" if member.behind_files else "nothing"
        held = f"{counted(member.held_files, 'file')} ({size(member.held_bytes)})"
        figures = (behind, duration(member.lag_s) if member.behind_files else "-", held)
        table.add_row(
            escape(member.name), str(member.number), _styled("alive" if member.alive else "dead"), str(member.rank), escape(member.domain),
            escape(member.address), escape(", ".join(member.peers) or "nobody"), *(figures if member.told else ("unknown", "-", "unknown")),
        )  # fmt: skip
    island = "[yellow]island[/]: etcd does not answer this node, or has not been told everything yet; nothing that was written is lost"
    return Group(head, *([island] if answer.island else []), "", table)


def grid(*columns: str) -> Any:
    """An empty table; a column whose name ends with ">" is set to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", no_wrap=True)
    return table


def _tiers(answer: "pb.Status") -> Any:
    from rich.markup import escape

    table = grid("tier", "health", "used>", "free>", "budget>", "contents>", "where")
    for tier in answer.tiers:
        # What others use of the PFS is not ours to tell, and what we use shows under ordinary names.
        known = (tier.budget_bytes > 0 and tier.name != "pfs", tier.budget_bytes > 0, tier.budget_bytes > 0)
        values = (tier.used_bytes, tier.free_bytes, tier.budget_bytes)
        figures = [size(value) if told else "-" for value, told in zip(values, known, strict=True)]
        table.add_row(tier.name, _styled(tier.health), *figures, str(tier.contents), escape(tier.path))
    return table


def _processes(answer: "pb.Status") -> Any:
    table = grid("process", "pid>", "memory>", "restarts>", "up>")
    for process in answer.processes:
        table.add_row(process.role, str(process.pid), size(process.rss_bytes), str(process.restarts), duration(process.uptime_s))
    return table


def listing(rows: list[dict[str, Any]]) -> Any:
    """The records of `ckptfs ls`."""
    table = grid("level", "state", "gen>", "size>", "copies", "digest", "name")
    for row in rows:
        copies = " ".join(f"{copy['tier']}:{copy['state']}" for copy in row["copies"])
        waiting = " *" if row["waiting"] else ""
        figures = (str(row["generation"]), size(row["size"]))
        table.add_row(row["level"] + waiting, row["state"] or row["kind"], *figures, copies, row["digest"][:16], _shown(row["name"]))
    return table


def findings(found: list[dict[str, Any]]) -> Any:
    """What verify found bad."""
    from rich.markup import escape

    table = grid("verdict", "tier", "file", "what")
    for one in found:
        table.add_row(_styled(one["verdict"]), one["tier"], _shown(one["path"]), escape(one["what"]))
    return table
