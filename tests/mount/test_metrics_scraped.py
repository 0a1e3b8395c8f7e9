"""F5: a scrape of a real daemon shows what `ckptfs status --json` shows, also after the mover has died."""

import http.client
import json
from collections.abc import Callable
from typing import Any

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


def expected(status: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """What a scrape should show of a mount at rest."""
    found: dict[tuple[str, ...], float] = {
        ("ckptfs_healthy",): status["health"] == "ok", ("ckptfs_directories",): status["counts"]["directories"],
        ("ckptfs_open_handles",): status["counts"]["open_handles"],
        ("ckptfs_write_back_pending_files",): status["write_back"]["dirty_files"],
        ("ckptfs_write_back_pending_bytes",): status["write_back"]["dirty_bytes"],
        ("ckptfs_write_back_lag_seconds",): status["write_back"]["lag_s"],
        ("ckptfs_history_series",): status["history"]["series"], ("ckptfs_history_sets",): status["history"]["sets"],
        ("ckptfs_info", status["data_path"], status["fsync"], status["name"], status["version"]): 1,
    }  # fmt: skip
    found |= {("ckptfs_files", level): number for level, number in status["counts"]["by_level"].items()}
    found |= {("ckptfs_file_bytes", level): size for level, size in status["counts"]["bytes_by_level"].items()}
    for tier in status["tiers"]:
        found["ckptfs_tier_contents", tier["name"]] = tier["contents"]
        found["ckptfs_tier_state", tier["health"], tier["name"]] = 1
    found["ckptfs_tier_capacity_bytes", "ram"] = status["tiers"][0]["budget_bytes"]
    found |= {("ckptfs_process_restarts_total", one["role"]): one["restarts"] for one in status["processes"]}
    return found


def test_a_scrape_shows_what_status_shows(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    port = free_ports(1)[0]
    daemon = make_daemon(metrics=f"127.0.0.1:{port}")
    for name in ("a", "b"):
        (daemon.path / name).write_bytes(b"x" * 5000)
    daemon.settle()

    def differ() -> dict[tuple[str, ...], tuple[float, float | None]]:
        """Figures are some time old, so what has just changed may differ for a while."""
        answer = daemon.command("status", daemon.path, "--json", check=False)
        if answer.returncode:
            return {("no answer",): (0, None)}
        wanted, found = expected(json.loads(answer.stdout)), scrape(port)
        return {key: (value, found.get(key)) for key, value in wanted.items() if found.get(key) != value}

    eventually(lambda: not differ(), timeout=60, what="the same figures")
    found = scrape(port)
    assert found["ckptfs_files", "pfs"] == 2 and found["ckptfs_file_bytes", "pfs"] == 10_000
    assert found["ckptfs_tier_capacity_bytes", "ram"] == 3 << 30
    assert found["ckptfs_process_restarts_total", "mover"] == 0
    assert [found["ckptfs_step_bytes_total", step] for step in ("seal", "write_back")] == [10_000, 10_000]
    assert found["ckptfs_step_duration_seconds_count", "write_back"] == 2
    daemon.kill("mover")
    eventually(lambda: scrape(port).get(("ckptfs_process_restarts_total", "mover")) == 1, timeout=60, what="the next mover serves")
    eventually(lambda: not differ(), timeout=60, what="the same figures")
