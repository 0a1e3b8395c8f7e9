"""The commands about the state of a mount on this node. Heavy modules are imported at their first use."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client import mounts, render
from ckptfs_client.errors import CommandFailed, NoMount, UsageError
from ckptfs_client.options import AnyDirectory, Directory, Json, Paths, Timeout, connect, parse_seconds, time_option

app = typer.Typer()
CONFIG_WIDTH_MAX = 60


@app.command()
def health(
    directory: AnyDirectory = None,
    timeout: Annotated[str, time_option("After this time without an answer the daemon counts as down.")] = "5s",
    json: Json = False,
) -> None:
    """Say in one line whether the tiers and peers of this node are sound.

    It is meant for health checks, such as that of Slurm. The exit code is 0 if all is well, 3 if there is no mount or no answer, and 1
    otherwise: a tier, a peer or a file is not sound, or this node is about to be taken away. Neither the PFS nor a file is touched.
    With --json: one object for one mount, a list for several.

    Example: ckptfs health /ckpt --timeout 2s
    """
    from ckptfs_client.client import Client, ask_all

    seconds = parse_seconds(timeout)
    if not seconds:
        raise UsageError("--timeout 0 leaves no time for an answer; accepted: a time such as 2s")
    chosen = mounts.choose_all(directory)
    found = [render.build_health(*one) for one in ask_all(chosen, Client.get_status, seconds)]
    render.print_answer(found[0] if len(chosen) == 1 else found, lambda: "\n".join(map(render.format_health, found)), json=json)
    codes = {render.OK: 0, render.DOWN: NoMount.exit_code}
    if code := max(codes.get(one["health"], CommandFailed.exit_code) for one in found):
        raise typer.Exit(code)


@app.command("config")
def show_config(
    directory: Directory = None,
    given: Annotated[bool, Option("--given", help="Only what was given, not the defaults.")] = False,
    json: Json = False,
) -> None:
    """Show the effective options of a mount, and where each was given.

    An option was given on the command line (mount -o, fstab, a unit) or in the file of config=; any other has its default. The options are
    those with which the daemon was started. A later change of the file takes effect at the next mount. Of keys, it shows only
    the paths.

    Example: ckptfs config /ckpt --given
    """
    from ckptfs.config.schema import DEFAULT

    with connect(directory) as client:
        found = [one for one in client.get_config().settings if not given or one.origin != DEFAULT]
    if json:
        render.print_json([render.message_to_dict(one) for one in found])
        return
    width = max((len(f"{one.name}={one.value}") for one in found), default=0)
    for one in found:
        print(render.escape_unprintable(f"{f'{one.name}={one.value}':{min(width, CONFIG_WIDTH_MAX)}}  {one.origin}"))


@app.command()
def who(
    path: Annotated[Path, Argument(metavar="PATH", help="A file or directory in a mount. A directory stands for all that is below it.")],
    json: Json = False,
) -> None:
    """Show which processes have a file or directory open.

    Processes that map a file or work in a directory count too, and those in containers. Root sees all processes, other users their own. For
    a file, the command also says if the daemon counts an open handle of a process that it cannot see. The exit code is 0 even if no process
    was found.

    Example: ckptfs who /ckpt/run1
    """
    from ckptfs_client.node import files

    found = files.find_users(path)
    if json:
        render.print_json(found)
        return
    for one in found["processes"]:
        print(render.escape_unprintable(files.format_user(one)))
    for note in files.list_notes(found):
        print(f"ckptfs: {render.escape_unprintable(note)}", file=sys.stderr)


@app.command()
def warm(
    paths: Paths,
    timeout: Timeout = None,
    json: Annotated[bool, Option("--json", help="Print a line of JSON for each file.")] = False,
) -> None:
    """Fetch files to RAM or NVMe of this node before they are needed.

    For a directory, all files below it are fetched. Files that are on this node already are skipped. If the rest does not fit, nothing is
    fetched, and the exit code is 1.

    Example: ckptfs warm /ckpt/run1/step_100 --timeout 10m
    """
    from ckptfs_client.node import warming

    begun_s = time.monotonic()
    done = warming.warm(paths, parse_seconds(timeout), json=json)
    if not json:
        fetched, here = done.counts[warming.FETCHED], done.counts[warming.HERE]
        amount = f"{format_count(fetched, 'file')} ({format_size(done.fetched_bytes)}) fetched, {here} here already"
        print(f"{amount} (after {format_duration(time.monotonic() - begun_s)})")


@app.command()
def web(
    listen: Annotated[str, Option(metavar="HOST:PORT", help="The address to serve.")] = "127.0.0.1:9465",
    beyond_loopback: Annotated[bool, Option("--beyond-loopback", help="Allow an address that other machines can reach.")] = False,
) -> None:
    """Serve a page that shows whether the newest checkpoints are safe.

    The page is read-only. For all mounts of this machine it shows checkpoints, nodes, tiers and troubles, and write-back and replication
    over time. Names of series that not every user may list are left out. There is neither TLS nor a password. Ctrl-C ends it.

    Example: ckptfs web --listen 127.0.0.1:8080
    """
    from ckptfs_client.dashboard import web_server

    address = web_server.check_listen(listen, is_exposed=beyond_loopback)
    web_server.serve(address, lambda url: print(f"{url} shows the mounts of this machine; Ctrl-C ends it", flush=True))


@app.command()
def upgrade(
    mount: Annotated[
        str | None, Argument(metavar="MOUNT", help="A path in the mount, or its name. Optional if only one ckptfs is mounted.")
    ] = None,
    json: Json = False,
) -> None:
    """Replace the running daemon of a mount by this version of ckptfs.

    Applications go on: their system calls wait for about half a second. The daemon first tries whether this version starts with its
    configuration and its catalog. If not, the command says why and ends with 1, and the daemon goes on as it is.

    Example: ckptfs upgrade /ckpt
    """
    from ckptfs_client.client import Client

    with Client(mounts.choose_named(mount)) as client:
        done = client.upgrade()
    text = f"{done['name']}: version {done['version']}, {done['former']} before (after {format_duration(done['seconds'])})"
    render.print_answer(done, lambda: text, json=json)
