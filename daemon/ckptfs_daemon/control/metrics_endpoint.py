"""The HTTP endpoint for Prometheus: GET /metrics on a TCP address or a unix socket (`metrics=`).

It never disturbs the mover: its server has few threads, of which one at a time makes the text, and the text is used again while it is
fresh. Without figures it answers 503.
"""

import logging
from collections.abc import Callable
from http import HTTPStatus

import trio

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.http_server import HttpReply, HttpRequest, HttpServer, refuse
from ckptfs.protocol import control_pb2 as pb
from ckptfs_daemon.control.metrics import CONTENT_TYPE, encode_metrics
from ckptfs_daemon.control.status import CachedFigure

log = logging.getLogger(__name__)


class MetricsEndpoint:
    """Serves one address."""

    def __init__(self, address: str, build_status: Callable[[], pb.Status]) -> None:
        """`address`: HOST:PORT or unix:/PATH. `build_status` is called in threads of the server."""
        self._address = address
        self._text = CachedFigure(lambda: encode_metrics(build_status()), limits.METRICS_FRESH_S)
        self._threads = trio.CapacityLimiter(1)

    async def serve(self) -> None:
        """Serve until cancelled. An address that cannot be had is tried again."""
        reported = ""
        while True:
            try:
                server = await trio.to_thread.run_sync(HttpServer, self._address, self._answer, limiter=self._threads)
            except (OSError, ValueError) as failure:
                if str(failure) != reported:
                    reported = str(failure)
                    log.warning("metrics at %s: cannot be served: %s; Prometheus gets no answer; trying again", self._address, reported)
                await trio.sleep(limits.RETRY_LAST_S)
                continue
            log.info("metrics at %s: served", self._address)
            try:
                await trio.to_thread.run_sync(server.serve, abandon_on_cancel=True, limiter=self._threads)
            finally:
                server.close()

    def _answer(self, request: HttpRequest) -> HttpReply:
        if request.path != "/metrics":
            return refuse(HTTPStatus.NOT_FOUND)
        try:
            return HttpReply(self._text.get(), CONTENT_TYPE)
        except (CkptfsError, OSError) as failure:
            log.debug("metrics: no figures: %s", failure)
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE)
