"""`ckptfs keys init|issue|revoke`: the keys by which the nodes of a cluster recognise one another.

If we die here: what was written is whole; the next run names what is there.
"""

from pathlib import Path
from typing import Annotated

import typer

from ckptfs_client.failures import CommandFailed

keys_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Makes a cluster's own CA, and a certificate for each of its nodes."
)

KeysDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Where the CA lies. Keep ca.key safe: whoever has it can make nodes.")]


@keys_app.command()
def init(
    directory: KeysDirectory, cluster: Annotated[str, typer.Option(help="The cluster's name, as in cluster=NAME.")] = "ckptfs"
) -> None:
    """Make the CA of a cluster: DIR/ca.pem and DIR/ca.key."""
    from ckptfs.clique import keys
    from ckptfs.errors import CkptfsError

    try:
        keys.init(directory, cluster)
    except (CkptfsError, OSError) as failure:
        raise _build_failure(failure) from failure
    print(f"{directory}/{keys.CA_CERTIFICATE} is the CA of cluster {cluster}; ckptfs keys issue {directory} NODE makes the keys of a node")


@keys_app.command()
def issue(
    directory: KeysDirectory,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as in node=NAME; without that, its host name.")],
    address: Annotated[list[str] | None, typer.Option(help="A host name or IP address to name in the certificate too.")] = None,
) -> None:
    """Make DIR/NODE with ca.pem, node.pem and node.key: copy it to the node and give keys=DIRECTORY there."""
    from ckptfs.clique import keys
    from ckptfs.errors import CkptfsError

    try:
        target = keys.issue(directory, node, address or [])
    except (CkptfsError, OSError) as failure:
        raise _build_failure(failure) from failure
    print(f"{target} holds the keys of node {node}; copy it there and mount with keys=DIRECTORY")


@keys_app.command()
def revoke(
    directory: KeysDirectory, node: Annotated[str, typer.Argument(metavar="NODE", help="The node whose keys are lost, or known to others.")]
) -> None:
    """Make all keys of a node worthless that were issued so far; issue new ones if it shall go on."""
    from ckptfs.clique import keys
    from ckptfs.errors import CkptfsError

    try:
        lists = keys.revoke(directory, node)
    except (CkptfsError, OSError) as failure:
        raise _build_failure(failure) from failure
    if not any(directory.glob(f".{node}.revoked-*")):
        print(f"no keys of a node {node} lie in {directory}: see that the name is right")
    print(f"the keys of node {node} are revoked; copy {lists[0]} into the directory keys= of every node: they read it while they run")


def _build_failure(failure: Exception) -> CommandFailed:
    return CommandFailed(str(failure), remedy=getattr(failure, "remedy", ""))
