"""F5: a real daemon is scraped at the address of its option, also after the mover has died."""

import http.client
from collections.abc import Callable

from daemon_under_test import DaemonUnderTest, eventually
from etcd_server import free_ports
from prometheus_client.parser import text_string_to_metric_families


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """{(name, values of the labels, in the order of their names): value}; empty if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode() if answer.status == http.HTTPStatus.OK else ""
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, *(value for _, value in sorted(one.labels.items()))): one.value for one in samples}


def test_a_scrape_of_a_daemon(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    port = free_ports(1)[0]
    daemon = make_daemon(metrics=f"127.0.0.1:{port}")
    for name in ("a", "b"):
        (daemon.path / name).write_bytes(b"x" * 5000)
    daemon.settle()
    eventually(lambda: scrape(port).get(("ckptfs_files", "pfs")) == 2, timeout=60, what="the figures of now")
    found = scrape(port)
    assert found["ckptfs_files", "pfs"] == 2 and found["ckptfs_file_bytes", "pfs"] == 10_000
    assert found["ckptfs_tier_capacity_bytes", "ram"] == 3 << 30
    assert found["ckptfs_process_restarts_total", "mover"] == 0
    assert [found["ckptfs_step_bytes_total", step] for step in ("seal", "write_back")] == [10_000, 10_000]
    assert found["ckptfs_step_duration_seconds_count", "write_back"] == 2
    assert found["ckptfs_healthy",] == 1 and found["ckptfs_tier_state", "normal", "ram"] == 1
    daemon.kill("mover")
    eventually(lambda: scrape(port).get(("ckptfs_process_restarts_total", "mover")) == 1, timeout=60, what="the next mover serves")
    assert scrape(port)["ckptfs_files", "pfs"] == 2
