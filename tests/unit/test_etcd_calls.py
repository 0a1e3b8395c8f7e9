"""P7: a node that stood still, with a question under way, does not take etcd for gone and itself for an island with old data.

N1: nodes that are refused by an etcd with too many requests do not all ask again at once.
"""

import functools
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ckptfs.errors import StoreUnreachable
from ckptfs.protocol import etcd_pb2 as pb
from ckptfs.store.etcd import EndpointCall, EtcdCodec, time
from ckptfs.store.kv import Get, Outcome, Put

WAIT_S = 3.0


class Pending:
    """A call that has ended."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def result(self) -> str:
        return "answer"

    def add_done_callback(self, act: Callable[[Any], None]) -> None:
        act(self)


class Member:
    """Each call takes as long as `takes_s` says next; what is not answered in its time is over. `asked`: how much time each one got."""

    address = "etcd:2379"
    count = 1

    def __init__(self, takes_s: list[tuple[float, bool]]) -> None:
        self.now_s, self._takes_s = 100.0, takes_s
        self.asked: list[float] = []
        self.paused_s: list[float] = []

    def start_call(self, call: str, request: object, timeout_s: float, wait_for_ready: bool) -> Pending:
        self.asked.append(timeout_s)
        took_s, answered = self._takes_s.pop(0)
        self.now_s += took_s
        return Pending(grpc.StatusCode.OK if answered else grpc.StatusCode.DEADLINE_EXCEEDED)

    # --- all members, which are this one ------------------------------------------------------------------------------

    class closed:
        @staticmethod
        def is_set() -> bool:
            return False

    def __len__(self) -> int:
        return self.count

    def get_current(self) -> "Member":
        return self

    def mark_failed(self, _: object) -> None: ...

    def call_later(self, act: Callable[[], None], pause_s: float) -> None:
        self.paused_s.append(pause_s)
        self.now_s += pause_s
        act()


@pytest.mark.parametrize(
    ("takes_s", "answered", "asked"),
    [
        ([(0.001, True)], True, 1),
        ([(WAIT_S, False)], False, 1),
        ([(WAIT_S + 15.0, False), (0.001, True)], True, 2),
        ([(WAIT_S + 15.0, False), (WAIT_S, False)], False, 2),
        ([(WAIT_S + 15.0, False), (WAIT_S + 15.0, False)], False, 2),
    ],
    ids=["answered", "away", "stood still", "stood still, and away", "stood still twice"],
)
def test_who_stood_still_asks_once_more(
    monkeypatch: pytest.MonkeyPatch, takes_s: list[tuple[float, bool]], answered: bool, asked: int
) -> None:
    member = Member(takes_s)
    monkeypatch.setattr(time, "monotonic", lambda: member.now_s)
    call: EndpointCall[str] = EndpointCall(member, "transaction", object(), str, WAIT_S)  # type: ignore[arg-type]
    call.start_next_try()
    assert member.asked == [WAIT_S] * asked
    if answered:
        assert call.future.result(timeout=0) == "answer"
    else:
        with pytest.raises(StoreUnreachable):
            call.future.result(timeout=0)


@pytest.mark.parametrize("responses", [0, 1, 3])
@pytest.mark.parametrize("succeeded", [False, True])
def test_an_answer_without_what_was_asked_for_is_none(succeeded: bool, responses: int) -> None:
    """P1: who waits for it goes on."""
    codec = EtcdCodec("c")
    request = codec.encode_transaction((), [Put(b"a", b""), Get(b"a"), Get(b"b")], [Get(b"a"), Get(b"b")])
    answer = pb.TxnResponse(succeeded=succeeded, responses=responses * [pb.ResponseOp(response_range=pb.RangeResponse())])
    member = Member([(0.001, True)])
    decode = functools.partial(codec.decode_outcome, request)
    call: EndpointCall[Outcome] = EndpointCall(member, "transaction", request, lambda _: decode(answer), WAIT_S)  # type: ignore[arg-type]
    call.start_next_try()
    with pytest.raises(StoreUnreachable, match=f"{responses} of 2 questions"):
        call.future.result(timeout=0)


class Overloaded(Member):
    """Three members that refuse everything."""

    count = 3

    def start_call(self, call: str, request: object, timeout_s: float, wait_for_ready: bool) -> Pending:
        super().start_call(call, request, timeout_s, wait_for_ready)
        return Pending(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: too many requests")


def test_an_overloaded_etcd_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [Overloaded([(0.001, False)] * 100) for _ in range(2)]
    for member in members:
        monkeypatch.setattr(time, "monotonic", lambda member=member: member.now_s)
        call: EndpointCall[str] = EndpointCall(member, "transaction", object(), str, WAIT_S)  # type: ignore[arg-type]
        call.start_next_try()
        with pytest.raises(StoreUnreachable):
            call.future.result(timeout=0)
        assert len(member.asked) < 16 and max(member.paused_s) > 4 * member.paused_s[0]
    assert members[0].paused_s != members[1].paused_s, "nodes do not ask in step"
