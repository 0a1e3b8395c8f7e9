"""What `ckptfs doctor` says of a mount in a cluster: etcd, the other nodes, their clocks, failure domains, and this node's certificate.

Pure: judges what the daemon told. Asks nobody.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptfs_client.findings import BAD, GOOD, NOTE, Finding
from ckptfs_client.show import format_count, format_duration

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

CLOCK_OFFSET_S_MAX = 1.0
EXPIRES_SOON_DAYS = 30
NAMED_MAX = 5
DAY_S = 86400


def check_cluster(name: str, cluster: "pb.Cluster") -> Iterator[Finding]:
    """The findings under `name`."""
    yield _check_etcd(name, cluster)
    living = [member for member in cluster.members if member.alive]
    yield _check_nodes(name, cluster, living)
    yield from _check_node_clocks(name, living)
    yield from _check_failure_domains(name, cluster, living)
    yield from _check_ranks(name, living)
    yield from _check_certificate(name, cluster)


def _check_etcd(name: str, cluster: "pb.Cluster") -> Finding:
    if cluster.etcd_trouble:
        remedy = "see that etcd runs there and that no firewall is between; nothing is lost meanwhile"
        return Finding(name, BAD, f"etcd at {cluster.etcd}: {cluster.etcd_trouble}", remedy)
    if cluster.island:
        return Finding(name, NOTE, "etcd answers, and has not been told everything that was done while it was away", "wait a moment")
    return Finding(name, GOOD, f"etcd at {cluster.etcd} answers")


def _check_nodes(name: str, cluster: "pb.Cluster", living: list["pb.Member"]) -> Finding:
    silent = [member for member in living if member.silent]
    if silent:
        words = "; ".join(f"{member.name} at {member.address}: {member.silent}" for member in silent[:NAMED_MAX])
        remedy = "see that address= there names the host as this one reaches it, and that its port and the one after it are open"
        if any("keys" in member.silent for member in silent):
            remedy = "give each node keys of its own; where they were revoked issue new ones, and start it again"
        return Finding(name, BAD, f"{format_count(len(silent), 'node')} of {len(living)} cannot be reached: {words}", remedy)
    if len(living) < cluster.replication_factor:
        remedy = "start more nodes, or give a smaller replication_factor"
        return Finding(name, NOTE, f"{format_count(len(living), 'node')} live, and {cluster.replication_factor} copies are wanted", remedy)
    asked = [member.rtt_s for member in living if member.probed]
    slowest = f", the slowest within {1000 * max(asked):.1f} ms" if asked else ""
    return Finding(name, GOOD, f"{format_count(len(asked), 'other node')} answer{'s' if len(asked) == 1 else ''}{slowest}")


def _check_node_clocks(name: str, living: list["pb.Member"]) -> Iterator[Finding]:
    off = [member for member in living if member.probed and not member.silent and abs(member.clock_s) > CLOCK_OFFSET_S_MAX]
    if off:
        words = ", ".join(
            f"{one.name} by {format_duration(abs(one.clock_s))} {'ahead' if one.clock_s > 0 else 'behind'}" for one in off[:NAMED_MAX]
        )
        remedy = "let NTP set them (timedatectl set-ntp true): of two files closed under one name the later one wins"
        yield Finding(name, NOTE, f"clocks differ from this node's: {words}", remedy)


def _check_failure_domains(name: str, cluster: "pb.Cluster", living: list["pb.Member"]) -> Iterator[Finding]:
    domains = {member.domain for member in living}
    if len(living) > 1 and len(domains) == 1:
        words = f"all {len(living)} nodes are in the failure domain {living[0].domain}: no file gets the level clique"
        yield Finding(name, NOTE, words, "give failure_domain=NAME by what fails together (rack, switch), or leave it out")
    elif len(living) >= cluster.replication_factor > len(domains):
        words = f"{cluster.replication_factor} copies are wanted, and there are {len(domains)} failure domains"
        yield Finding(name, NOTE, words, "some copies share a domain: give more domains, or a smaller replication_factor")


def _check_ranks(name: str, living: list["pb.Member"]) -> Iterator[Finding]:
    twice = sorted(rank for rank, count in Counter(member.rank for member in living).items() if count > 1)
    if twice:
        ranks = ", ".join(map(str, twice[:NAMED_MAX]))
        words = f"nodes share the rank{'s' if len(twice) > 1 else ''} {ranks}: who holds copies for whom then depends on who came first"
        yield Finding(name, NOTE, words, "give each node a rank of its own, such as rank=$SLURM_NODEID")


def _check_certificate(name: str, cluster: "pb.Cluster") -> Iterator[Finding]:
    if not cluster.keys:
        return
    days = cluster.keys_expire_s / DAY_S
    if days < EXPIRES_SOON_DAYS:
        words = f"the certificate in {cluster.keys} {f'expires in {days:.0f} days' if days > 0 else 'has expired'}"
        remedy = f"ckptfs keys issue DIR {cluster.node} in a fresh directory, copy it there, and start ckptfs again"
        yield Finding(name, NOTE if days > 0 else BAD, words, remedy)
    else:
        yield Finding(name, GOOD, f"the certificate in {cluster.keys} is good for {days:.0f} days")
