"""The form of the output: rich tables and progress bars for people, plain values for JSON."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client.errors import ClientError, NotInTime
from ckptfs_client.json_answers import FormatJson, HealthJson

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ckptfs.protocol import control_pb2 as pb
    from ckptfs_client.mounts import Mount

OK, DOWN = "ok", "down"
"""The health of a mount without a trouble, and of one whose daemon does not answer."""
REASONS = {
    "failed_precondition": "not possible here", "deadline_exceeded": "not done in time", "not_found": "of what is not there",
    "invalid_argument": "with wrong arguments", "permission_denied": "not permitted", "resource_exhausted": "too many at once",
    "unimplemented": "unknown", "unavailable": "while a tier was away", "unknown": "failed",
}  # fmt: skip
"""Why the control server refused calls, in words. Peers have reasons of their own."""
STYLES = {
    "ok": "green", "normal": "green", "good": "green", "alive": "green", "degraded": "yellow", "suspect": "yellow", "down": "red",
    "full": "yellow", "bad": "red", "dead": "red",
}  # fmt: skip


def message_to_dict(message: Any) -> Any:
    """Convert a message of control.proto to dicts and lists, with every field; absent messages are None."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            values[field.name] = list(value) if field.is_repeated else value
        elif field.message_type.GetOptions().map_entry:
            values[field.name] = dict(value)
        else:
            absent = not field.is_repeated and not message.HasField(field.name)
            values[field.name] = (
                [message_to_dict(one) for one in value] if field.is_repeated else None if absent else message_to_dict(value)
            )
    return values


def print_json(value: Any, *, lines: bool = False) -> None:
    """Print JSON: indented on a terminal, else, and with `lines`, on one line."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() and not lines else None), flush=True)


def print_answer(answer: Any, show: Callable[[], "str | RenderableType"], *, json: bool) -> None:
    """Print an answer as JSON, or what `show` makes of it: a text, or a table."""
    if json:
        print_json(answer)
        return
    shown = show()
    if isinstance(shown, str):
        print(shown)
    else:
        print_renderable(shown)


def build_console() -> "Console":
    """Build the console for tables, so wide that nothing is wrapped if stdout is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 4096, highlight=False, emoji=False)


def print_renderable(what: "RenderableType") -> None:
    """Print a table without trailing blanks."""
    screen = build_console()
    with screen.capture() as captured:
        screen.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def format_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as text, quickly for thousands of rows.

    A column whose name ends with ">" is right-aligned. A column without any value is left out.
    """
    aligned = []
    for name, cells in zip(head, zip(*rows, strict=True), strict=True):
        if any(cells):
            column = (name.rstrip(">"), *cells)
            width = max(map(len, column))
            aligned.append([one.rjust(width) if name.endswith(">") else one.ljust(width) for one in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def escape_unprintable(name: str) -> str:
    """Return a name as one printable line; bytes that are no text and control characters become escapes."""
    if name.isascii() and name.isprintable():
        return name
    text = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def escape(name: str) -> str:
    """Return a name as one printable line of a table, in which brackets would be markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(escape_unprintable(name))


def _style_word(word: str) -> str:
    return f"[{STYLES[word]}]{word}[/]" if word in STYLES else word


def build_status(answer: "pb.Status") -> "RenderableType":
    """Build the output of `ckptfs status` for one mount."""
    from rich.console import Group
    from rich.padding import Padding

    if answer.health == DOWN:
        head = f"[bold]{escape(answer.name)}[/] on {escape(answer.mountpoint)}: {_style_word(DOWN)}"
        return Group(head, *map(_describe_trouble, answer.troubles))
    counts = answer.counts
    levels = ", ".join(f"{count} {level}" for level, count in sorted(counts.by_level.items()))
    remote_note = "   (files of other nodes as last reported; `ckptfs ls` asks them)" if answer.HasField("clique") else ""
    directories, handles = format_count(counts.directories, "directory", "directories"), format_count(counts.open_handles, "handle")
    lines = [
        f"[bold]{escape(answer.name)}[/] on {escape(answer.mountpoint)}: {_style_word(answer.health)}   (ckptfs {answer.version})",
        *map(_describe_trouble, answer.troubles),
        *_describe_notice(answer),
        f"  data path   {answer.data_path or 'unknown'}: {escape(answer.data_path_reason)}",
        f"  kill -9     {describe_survival(answer)}",
        f"  fsync       returns at the level {answer.fsync}",
        f"  files       {counts.files} in {directories}; by level: {levels or 'none'}; lost: {counts.lost}{remote_note}",
        f"  open        {handles}, {counts.writers} for writing; not sealed yet: {answer.write_back.unsealed_files}",
    ]
    lines += _describe_handles(answer)
    lines.append(f"  memory      {escape(describe_service_memory(answer.memory))}")
    lines += _describe_write_back(answer)
    lines += describe_history(answer.history)
    lines.append(f"  scrub       {describe_scrub(answer.scrub)}")
    lines += _describe_clique(answer.clique) if answer.HasField("clique") else []
    lines += _describe_refused(answer)
    tables = [_build_tier_table(answer), _build_process_table(answer)]
    if answer.clique.links:
        tables.insert(1, _build_link_table(answer.clique))
    padded = [Padding(table, (0 if number else 1, 2, 1, 2), expand=False) for number, table in enumerate(tables)]
    return Group("\n".join(lines), *padded)


def build_health(mount: "Mount", answer: "pb.Status | ClientError") -> HealthJson:
    """Return the health of the tiers and peers of a mount (X11)."""
    if isinstance(answer, ClientError):
        health, reasons = DOWN, [str(answer)]
    else:
        health, reasons = answer.health, _list_reasons(answer)
    return {"name": mount.name, "mountpoint": str(mount.mountpoint), "health": health, "reasons": reasons}


def _list_reasons(status: "pb.Status") -> list[str]:
    """Return why a mount is not sound. A tier whose trouble is named is not named again."""
    reasons = [f"{format_trouble_place(one)}: {one.what}" for one in status.troubles]
    named = {one.where for one in status.troubles}
    reasons += [f"{tier.name}: {tier.health}" for tier in status.tiers if tier.health != "normal" and tier.name not in named]
    if status.HasField("notice"):
        reasons.append(f"this node is about to be taken away: {status.notice.source}: {status.notice.what}")
    return reasons


def format_health(one: HealthJson) -> str:
    """Return the line about a mount: its health, and the first reason."""
    first, *others = one["reasons"] or [""]
    more = f" (and {format_count(len(others), 'more reason')})" if others else ""
    line = f"{one['health']}: {one['name']} on {one['mountpoint']}" + (f": {first}{more}" if first else "")
    return escape_unprintable(line)


def build_overview(answers: Sequence["pb.Status"]) -> Any:
    """Build the output of `ckptfs status` for several mounts: one line for each."""
    table = build_grid("mount", "health", "files>", "not on the PFS>", "mountpoint", "trouble")
    for one in answers:
        behind = format_size(one.write_back.dirty_bytes) if any(tier.name == "pfs" for tier in one.tiers) else "-"
        files = "-" if one.health == DOWN else str(one.counts.files)
        first = next((f"{format_trouble_place(trouble)}: {trouble.what}" for trouble in one.troubles), "")
        words = [first, *([f"(and {len(one.troubles) - 1} more)"] if len(one.troubles) > 1 else [])]
        table.add_row(escape(one.name), _style_word(one.health), files, behind, escape(one.mountpoint), escape(" ".join(words)))
    return table


def _describe_notice(answer: "pb.Status") -> list[str]:
    """Describe the notice that this node is about to be taken away."""
    if not answer.HasField("notice"):
        return []
    one = answer.notice
    drain = {"done": "all that was closed is drained", "missed": "the drain did not end in time; the log says what is safe"}
    words = drain.get(one.drain, f"draining for up to {format_duration(one.deadline_s)}")
    text = f"notice from {one.source} {format_duration(one.age_s)} ago: {escape_unprintable(one.what)}; {words}"
    return [f"  preemption  {escape(text)}"]


def _describe_handles(answer: "pb.Status") -> list[str]:
    """Describe by which way the bytes of open handles move, one line for each way and reason."""
    lines = []
    for number, one in enumerate(answer.handles):
        reason = f": {one.reason}" if one.reason else ""
        lines.append(f"  {'handles' if number == 0 else '':<11} {one.count} {one.way}, {one.tier}{reason}")
    return lines


def describe_history(history: "pb.History") -> list[str]:
    """Describe what ckptfs keeps of checkpoint sets, and what the retention rules say, a line each."""
    series, sets = format_count(history.series, "series", "series"), format_count(history.sets, "set")
    only = f"{format_size(history.bytes)} that only .ckptfs/history holds, of at most {format_size(history.bytes_max)}"
    lines = [f"  history     {sets} of {series}; {only}"]
    if history.held_files:
        lines.append(
            f"  held back   {format_count(history.held_files, 'file')} ({format_size(history.held_bytes)}) stay off the PFS by a rule"
        )
    return lines + [f"  {'' if number else 'retention':<11} {escape(rule)}" for number, rule in enumerate(history.rules)]


def describe_scrub(scrub: "pb.Scrub") -> str:
    """Describe how far the copies in local tiers are verified."""
    copies = format_count(scrub.copies, "copy", "copies")
    verified = f"; those of sealed files were verified in the last {format_duration(scrub.oldest_age_s)}" if scrub.oldest_age_s else ""
    repaired = f", of which {scrub.quarantined} are not repaired" if scrub.bad_found else ""
    return f"{copies}{verified}; bad so far: {scrub.bad_found}{repaired}"


def describe_survival(answer: "pb.Status") -> str:
    """Return whether applications survive a kill of the daemon's processes, and why."""
    if not answer.survives_kill:
        return "survives a kill: unknown"
    supervisor = "systemd keeps the mount" if answer.survives_supervisor_kill else "without systemd a kill of the supervisor ends the mount"
    words = f"survives a kill: yes (the supervisor keeps the requests in flight; {supervisor})"
    if answer.request_timeout_s:
        silence = format_duration(answer.request_timeout_s)
        words += f"; the kernel ends the mount if a request has no answer for {silence} (fs.fuse.max_request_timeout)"
    return words


def describe_service_memory(memory: "pb.ServiceMemory") -> str:
    """Return what the daemon needs and may use, as a sentence."""
    needed = f"the daemon needs {format_size(memory.needed_bytes)} (the RAM tier and its processes)"
    if not memory.limit_known:
        return f"{needed}; its memory limit cannot be found out"
    if not memory.limit_bytes:
        return f"{needed}; it has no limit"
    limit = f"its limit is {format_size(memory.limit_bytes)} ({memory.group})"
    if memory.limit_bytes >= memory.needed_bytes:
        return f"{needed}; {limit}"
    return f"{needed}; {limit}: the kernel kills it when the RAM tier fills; {get_memory_remedy(memory)}"


def get_memory_remedy(memory: "pb.ServiceMemory") -> str:
    """Return how to mend a limit that is too low."""
    return f"raise the limit to {format_size(memory.needed_bytes)} (MemoryMax= of the unit, the limit of the pod), or give a smaller ram="


def _describe_write_back(answer: "pb.Status") -> list[str]:
    if not answer.pfs:
        return ["  write-back  none: this mount has no PFS"]
    figures = answer.write_back
    behind = "nothing waits"
    if figures.dirty_files or figures.changes:
        files = f"{format_count(figures.dirty_files, 'file')} ({format_size(figures.dirty_bytes)})"
        behind = f"{files} and {format_count(figures.changes, 'other change')} are not on the PFS yet"
    lag = f", the oldest for {format_duration(figures.lag_s)}" if figures.lag_s else ""
    lines = [f"  write-back  {behind}{lag}; the PFS is {escape(answer.pfs)}"]
    if figures.current_path:
        copied = f"{format_size(figures.current_copied_bytes)} of {format_size(figures.current_size_bytes)}"
        lines.append(f"              now {escape(figures.current_path)}: {copied}")
    return lines


def format_trouble_place(trouble: "pb.Trouble") -> str:
    """Return the work that has a trouble, with the file that it is about."""
    return f"{trouble.where}: {trouble.path}" if trouble.path else trouble.where


def _describe_trouble(trouble: "pb.Trouble") -> str:
    """Describe a trouble in one line, with its remedy."""
    since = f" (for {format_duration(trouble.age_s)})" if trouble.age_s else ""
    remedy = f"; {escape(trouble.remedy)}" if trouble.remedy else ""
    return f"  [yellow]trouble[/] {escape(format_trouble_place(trouble))}: {escape(trouble.what)}{remedy}{since}"


def _describe_clique(clique: "pb.Clique") -> list[str]:
    """Describe the progress of replication, refill and repair."""
    behind = format_amount(clique.under_replicated_files, clique.under_replicated_bytes)
    repair = format_amount(clique.repair_files, clique.repair_bytes)
    copies = f", {clique.copies_present} of {clique.copies_wanted} copies" if clique.copies_wanted else ""
    lag = f", the oldest for {format_duration(clique.lag_s)}" if clique.under_replicated_files else ""
    lines = [f"  copies      {behind or 'nothing'} behind{copies if behind else ''}{lag}"]
    if clique.short:
        short = [
            f"{format_count(one.files, 'file')} {'is' if one.files == 1 else 'are'} {format_count(one.copies, 'copy', 'copies')} short"
            for one in clique.short
        ]
        lines.append(f"  clique      {', '.join(short)}")
    if clique.rebuild_files:
        lines.append(f"  refill      {format_amount(clique.rebuild_files, clique.rebuild_bytes)} to fetch back from other nodes")
    if repair:
        lines.append(f"  repair      {repair} of dead nodes, to be copied from this one{'' if behind else copies}")
    if clique.incoming_transfers or clique.outgoing_reads:
        sent, read = format_count(clique.incoming_transfers, "file"), format_count(clique.outgoing_reads, "file")
        lines.append(f"  peers       sending {sent} to this node, reading {read} from it")
    return lines


def format_amount(files: int, size_bytes: int) -> str:
    """Format files with their bytes; empty if there are none."""
    return f"{format_count(files, 'file')} ({format_size(size_bytes)})" if files else ""


def _describe_refused(answer: "pb.Status") -> list[str]:
    """Describe what was refused, by reason, with the callers."""
    found: dict[tuple[str, str], list[pb.Refused]] = {}
    for one in answer.refused:
        found.setdefault((one.where, one.reason), []).append(one)
    words = []
    for (where, reason), ones in found.items():
        who = ", ".join(escape(one.who) for one in ones if one.who)
        why = "" if where == "peers" else REASONS.get(reason, "")
        words.append(f"{where}: {sum(one.count for one in ones)} {why or reason.replace('_', ' ')}{f' ({who})' if who else ''}")
    return [f"  refused     {'; '.join(words)}"] if words else []


def _build_link_table(clique: "pb.Clique") -> Any:
    table = build_grid("peer", "waiting>", "sending>", "per stream>", "round trip>", "")
    for link in clique.links:
        waiting, sending = format_amount(link.waiting_files, link.waiting_bytes), format_amount(link.sending_files, link.sending_bytes)
        speed = f"{format_size(link.bytes_per_s)}/s" if link.bytes_per_s >= 0 else "-"
        rtt = f"{link.rtt_s * 1000:.1f} ms" if link.rtt_s >= 0 else "-"
        table.add_row(
            escape(link.node), waiting or "-", sending or "-", speed, rtt, "[yellow]failed lately[/]" if link.failed_recently else ""
        )
    return table


def build_cluster(answer: "pb.Cluster") -> "RenderableType":
    """Build the output of `ckptfs status --cluster`."""
    from rich.console import Group

    living = sum(get_member_state(answer, member) == "alive" for member in answer.members)
    head = (
        f"[bold]{escape(answer.name)}[/]: {living} of {format_count(len(answer.members), 'node')}, {answer.replication_factor} copies,"
        f" etcd {escape(answer.etcd)}   (as {escape(answer.node)} sees it)"
    )
    columns = ("node", "number>", "state", "rank>", "domain", "address", "copies go to", "behind", "oldest>", "refill, repair")
    table = build_grid(*columns, "holds for others")
    for member in answer.members:
        copies = f", {member.copies_present} of {member.copies_wanted} copies" if member.copies_wanted else ""
        behind = format_amount(member.under_replicated_files, member.under_replicated_bytes)
        behind = f"{behind}{copies}" if behind else "nothing"
        back, again = format_amount(member.rebuild_files, member.rebuild_bytes), format_amount(member.repair_files, member.repair_bytes)
        held = f"{format_count(member.held_files, 'file')} ({format_size(member.held_bytes)})"
        lag = format_duration(member.lag_s) if member.under_replicated_files else "-"
        figures = (behind, lag, ", ".join(filter(None, (back, again and f"{again} for others"))) or "-", held)
        shown_figures = figures if member.has_figures else ("unknown", "-", "-", "unknown")
        table.add_row(
            escape(member.name), str(member.number), _style_word(get_member_state(answer, member)), str(member.rank), escape(member.domain),
            escape(member.address), escape(", ".join(member.peers) or "nobody"), *shown_figures,
        )  # fmt: skip
    island = "[yellow]island[/]: etcd does not answer this node, or some changes are not published yet; no written data is lost"
    return Group(head, *([island] if answer.island else []), "", table)


def get_member_state(cluster: "pb.Cluster", member: "pb.Member") -> str:
    """Return alive, dead or unknown.

    An island knows only that itself is alive; the rest is as last reported.
    """
    if not member.alive:
        return "dead"
    return "unknown" if cluster.island and not member.has_figures and member.name != cluster.node else "alive"


def build_grid(*columns: str) -> Any:
    """Build an empty table. A column whose name ends with ">" is right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", no_wrap=True)
    return table


def _build_tier_table(answer: "pb.Status") -> Any:
    table = build_grid("tier", "health", "used>", "shared>", "free>", "budget>", "contents>", "where")
    for tier in answer.tiers:
        # Other users fill the PFS too, so its usage says nothing about this mount.
        used = format_size(tier.used_bytes) if tier.budget_bytes and tier.name != "pfs" else "-"
        free, budget = (format_size(size) if tier.budget_bytes else "-" for size in (tier.free_bytes, tier.budget_bytes))
        shared = format_size(tier.shared_bytes) if tier.shared_bytes else "-"
        table.add_row(tier.name, _style_word(tier.health), used, shared, free, budget, str(tier.contents), escape(tier.path))
    return table


def _build_process_table(answer: "pb.Status") -> Any:
    table = build_grid("process", "pid>", "memory>", "restarts>", "up>")
    for process in answer.processes:
        table.add_row(
            process.role, str(process.pid), format_size(process.rss_bytes), str(process.restarts), format_duration(process.uptime_s)
        )
    return table


def describe_flaw(one: FormatJson) -> str:
    """Return what is wrong with a file or set, after its format if that is known."""
    return ": ".join(filter(None, (one["format"], one["flaw"])))


def build_findings(found: list[dict[str, Any]]) -> Any:
    """Build the table of bad copies of `ckptfs verify`."""
    table = build_grid("verdict", "tier", "file", "what")
    for one in found:
        table.add_row(_style_word(one["verdict"]), one["tier"], escape(one["path"]), escape(one["what"]))
    return table


# --- progress of long operations --------------------------------------------------------------------------------------


def follow_progress(messages: Iterator["pb.Progress"], what: str, done: str, *, json: bool = False) -> None:
    """Follow a wait or a drain to its end, and print `done`. Raises NotInTime with what is left and why."""
    last: pb.Progress | None = None
    began_s = time.monotonic()
    try:
        with ProgressBar(what) as bar:
            for last in messages:
                if json:
                    print_json(message_to_dict(last), lines=True)
                bar.update(last.bytes_left, describe_progress(last))
    except NotInTime as failure:
        if not json:
            _print_safety(last)
        left = f"; left: {describe_progress(last)}" if last is not None else ""
        raise NotInTime(f"{what}: {failure.args[0]}{left}", remedy=failure.remedy or (last.remedy if last is not None else "")) from None
    except ClientError as failure:
        raise type(failure)(f"{what}: {failure.args[0]}", remedy=failure.remedy) from None
    if not json:
        _print_safety(last)
        print(f"{escape_unprintable(done)} (after {format_duration(time.monotonic() - began_s)})")


def _print_safety(last: "pb.Progress | None") -> None:
    """Print which checkpoints are safe, if the daemon has said it."""
    if last is None or not last.HasField("safety"):
        return
    from ckptfs.series.urgency import list_safety_lines

    for line in list_safety_lines(last.safety):
        print(escape_unprintable(line))


def describe_progress(progress: "pb.Progress") -> str:
    """Return what is left, and what blocks it."""
    words = [f"{format_count(progress.files_left, 'file')} ({format_size(progress.bytes_left)})"]
    if progress.changes_left:
        words.append(format_count(progress.changes_left, "other change"))
    text = ", ".join(words)
    return f"{text}; blocked: {progress.blocked_by}" if progress.blocked_by else text


class ProgressBar:
    """A progress bar. Its total is the largest amount that was ever left."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._most = 0
        self._progress: Any = None

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[words]}", markup=False))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=None, words="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, left: int, words: str) -> None:
        """Set the amount that is left, and the text."""
        self._most = max(self._most, left)
        if self._progress is not None:
            self._progress.update(self._task, total=self._most or None, completed=self._most - left, words=words)
