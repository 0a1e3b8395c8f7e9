"""`ckptfs status --watch`: a live view in a terminal, appended text elsewhere.

It draws what the page of `ckptfs web` shows. On a terminal it uses the alternate screen, and restores screen, cursor and keyboard however
it ends.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ckptfs.bounded_waits import wait_ready
from ckptfs.quantities import format_duration
from ckptfs_client import render
from ckptfs_client.client import list_statuses
from ckptfs_client.dashboard import overview
from ckptfs_client.dashboard.overview import Row
from ckptfs_client.dashboard.sampling import OverviewSampler
from ckptfs_client.mounts import Mount

if TYPE_CHECKING:
    from types import FrameType

WATCH_EVERY_S = 1.0
RESIZE_CHECK_S = 0.2
PLAIN_COLUMNS = 160
PLOT_ROWS = 3
LABEL_COLUMNS = 22
BAR_COLUMNS = 24
NAME_COLUMNS_MIN, FIGURE_COLUMNS = 12, 50
SERIES_ROWS, NODE_ROWS, TROUBLE_ROWS = 8, 16, 4
BLOCKS = " ▁▂▃▄▅▆▇█"
SIGNS = {
    overview.SAFE: ("✓", "green"), overview.COPIED: ("✓", "cyan"), overview.EXPOSED: ("!", "yellow"), overview.UNVERIFIED: ("?", "yellow"),
    overview.LOST: ("✗", "red"), overview.ABSENT: ("-", "white"), overview.SILENT: ("✗", "red"),
}  # fmt: skip
QUIT = b"q"
KEYS_BYTES_MAX = 64


def watch_status(chosen: Sequence[Mount], *, json: bool) -> None:
    """Show the mounts every second, until interrupted or until q is pressed."""
    while json:
        for status in list_statuses(chosen):
            render.print_json(render.message_to_dict(status), lines=True)
        time.sleep(WATCH_EVERY_S)
    sampler, console = OverviewSampler(lambda: chosen, for_caller=True), Console(highlight=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal:
        _watch_on_screen(sampler, console)
        return
    while True:
        print(time.strftime("--- %Y-%m-%d %H:%M:%S"))
        render.print_renderable(build_screen(sampler.sample(), PLAIN_COLUMNS))
        time.sleep(WATCH_EVERY_S)


def _watch_on_screen(sampler: OverviewSampler, console: Console) -> None:
    with _ending_on_signals(), _reading_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        is_ended = False
        while not is_ended:
            found, due_s = sampler.sample(), time.monotonic() + WATCH_EVERY_S
            size = None
            while not is_ended and (size != console.size or time.monotonic() < due_s):
                if size != console.size:
                    size = console.size
                    footer = Text("\nq ends", style="dim") if keys is not None else Text("\nCtrl-C ends", style="dim")
                    live.update(Group(build_screen(found, size.width), footer), refresh=True)
                is_ended = _is_quit_pressed(keys)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Turn signals that end the process into an exception, so that the terminal is restored."""

    def end(number: int, _: "FrameType | None") -> None:
        raise SystemExit(128 + number)

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def _reading_keys() -> Iterator[int | None]:
    """Read keys without waiting for Enter, and without an echo.

    Yields the descriptor, or None without a keyboard.
    """
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_quit_pressed(keys: int | None) -> bool:
    """Wait a moment for a key. Returns True for q, and if the terminal is gone."""
    if keys is None:
        time.sleep(RESIZE_CHECK_S)
        return False
    if not wait_ready(keys, select.POLLIN, RESIZE_CHECK_S):
        return False
    pressed = os.read(keys, KEYS_BYTES_MAX)
    return not pressed or QUIT in pressed.lower()


# --- drawing ----------------------------------------------------------------------------------------------------------


def build_screen(found: Row, columns: int) -> RenderableType:
    """Build the view of all mounts, the most important lines first."""
    if not found["mounts"]:
        return Text(f"No ckptfs is mounted on {found['host']}. mount -t ckptfs NAME DIR mounts one.")
    shown: list[RenderableType] = []
    for one in found["mounts"]:
        shown += [*_build_mount(one, columns), Text()]
    return Group(*shown[:-1])


def _build_mount(mount: Row, columns: int) -> Iterator[RenderableType]:
    sign, colour = SIGNS[mount["state"]]
    yield Text.assemble((f"{mount['name']} on {mount['mountpoint']}", "bold"), ": ", _color(mount["health"]))
    yield Text.assemble((f" {sign} {mount['title']} ", f"bold reverse {colour}"))
    yield Text(f"   {mount['detail']}")
    for note in mount["notes"]:
        yield Text(f"   {note}", style="dim")
    for trouble in mount["troubles"][:TROUBLE_ROWS]:
        remedy, age = f"; {trouble['remedy']}" if trouble["remedy"] else "", f" (for {trouble['age']})" if trouble["age"] else ""
        yield Text.assemble(("   trouble ", "yellow"), f"{trouble['where']}: {trouble['what']}{remedy}{age}")
    yield from _build_rest("troubles", len(mount["troubles"]) - TROUBLE_ROWS)
    yield from _build_plot(mount, columns)
    if mount["tiers"]:
        yield _build_tiers(mount)
    yield from _build_tables(mount, columns)


def _color(word: str) -> Text:
    return Text(word, style=render.STYLES.get(word, "yellow"))


def _build_rest(what: str, count: int) -> list[Text]:
    return [Text(f"   and {count} more {what}", style="dim")] if count > 0 else []


def _build_plot(mount: Row, columns: int) -> Iterator[Text]:
    """Draw the backlogs as bars, a column for each sample."""
    for one in mount["backlogs"]:
        facts = [one["behind"], one["lag"] and f"the oldest for {one['lag']}", one["trend"]]
        yield Text.assemble((f" waits for {one['name']}: ", "" if one["is_behind"] else "dim"), "; ".join(filter(None, facts)))
        yield from (Text(line, style="blue") for line in draw_bars(mount["plot"], one["name"], columns))


def draw_bars(plot: Row, name: str, columns: int) -> list[str]:
    """Return the lines of a plot, the scale in front. No lines if nothing was ever behind."""
    shown = max(1, columns - LABEL_COLUMNS - 2)
    values, times = plot["values"].get(name, [])[-shown:], plot["at_s"][-shown:]
    if not any(values):
        return []
    top, label = plot["ticks"][-1]
    eighths = [None if one is None else -(-one * 8 * PLOT_ROWS // top) for one in values]
    lines = []
    for row in reversed(range(PLOT_ROWS)):
        cells = ("·" if one is None else BLOCKS[min(8, max(0, one - 8 * row))] for one in eighths)
        scale = label if row == PLOT_ROWS - 1 else f"{format_duration(-times[0])} to now" if row == 0 else ""
        lines.append(f" {scale:>{LABEL_COLUMNS - 1}}▕{''.join(cells)}".rstrip())
    return lines


def _build_tiers(mount: Row) -> Table:
    table: Table = render.build_grid(" tier", "health", "used", "")
    for one in mount["tiers"]:
        share = one["share"]
        filled = round(BAR_COLUMNS * share) if share is not None else 0
        bar = Text("█" * filled, style="blue").append("░" * (BAR_COLUMNS - filled), style="dim") if share is not None else Text("-")
        words = "" if share is None else f"{one['used']} used of {one['size']}" if one["used"] else f"{one['free']} free of {one['size']}"
        table.add_row(f" {one['name']}", _color(one["health"]), bar, Text(words))
    return table


def _build_tables(mount: Row, columns: int) -> Iterator[RenderableType]:
    name_columns = max(NAME_COLUMNS_MIN, (columns - FIGURE_COLUMNS) // 2)
    if mount["series"]:
        table = render.build_grid(" level", "newest set", "age>", "size>", "sets>", "series")
        for series in mount["series"][:SERIES_ROWS]:
            sign, colour = SIGNS[series["state"]]
            newest = f"{series['newest']} ({series['rollback']})" if series["rollback"] else series["newest"]
            names = [one if len(one) <= name_columns else f"{one[: name_columns - 1]}…" for one in (newest, series["name"])]
            cells = (names[0], series["age"], series["size"], str(series["sets"]), names[1])
            table.add_row(Text(f" {sign} {series['level']}", style=colour), *map(Text, cells))
        yield table
        yield from _build_rest("series", len(mount["series"]) + mount["more_series"] - SERIES_ROWS)
    if mount["nodes"]:
        yield Text(f" {mount['cluster']}")
        table = render.build_grid(" node", "state", "domain", "copies go to", "behind", "oldest>", "holds for others")
        for node in mount["nodes"][:NODE_ROWS]:
            cells = (node["domain"], node["copies_to"], node["behind"], node["lag"], node["holds"])
            table.add_row(Text(f" {node['name']}"), _color(node["state"]), *map(Text, cells))
        yield table
        yield from _build_rest("nodes", len(mount["nodes"]) + mount["more_nodes"] - NODE_ROWS)
