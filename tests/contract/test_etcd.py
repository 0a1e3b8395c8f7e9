"""What only a real etcd can show: members that die, hang or lose the others, TLS, and an etcd that is full (P1)."""

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from ckptfs_daemon.control import cluster_status
from daemon_under_test import eventually
from etcd_server import Etcd, Member, revision_at, serving
from etcd_server import three as three

from ckptfs import limits
from ckptfs.config import Config
from ckptfs.errors import Compacted, StoreFull, StoreRefused, StoreUnreachable, TooManyOperations
from ckptfs.protocol import etcd_pb2 as pb
from ckptfs.store.etcd import EtcdStore
from ckptfs.store.kv import ENDLESS, Compare, CompareTarget, Delete, Get, Item, Outcome, Put

PATIENCE_S = 120.0


@pytest.fixture
def store(three: Etcd) -> Iterator[EtcdStore]:
    with closing(EtcdStore(three.addresses, "one")) as made:
        yield made


@pytest.fixture
def single(etcd: Etcd) -> Iterator[EtcdStore]:
    """A store on an etcd of one member."""
    with closing(EtcdStore(etcd.addresses, "one")) as made:
        yield made


def value(store: EtcdStore, key: bytes) -> bytes:
    items: tuple[Item, ...] = store.read([Get(key)], timeout_s=PATIENCE_S).results[0]
    return items[0].value


def put(store: EtcdStore, key: bytes, new: bytes) -> int:
    return store.commit((), [Put(key, new)], timeout_s=PATIENCE_S).revision


def used(store: EtcdStore, etcd: Etcd) -> Member:
    address = store.get_member_status(timeout_s=PATIENCE_S).address
    return next(member for member in etcd.members if member.address == address)


def test_etcd_reports_its_status(three: Etcd, store: EtcdStore) -> None:
    about = store.get_member_status(timeout_s=PATIENCE_S)
    assert about.address in three.addresses and about.size_bytes > 0


@pytest.mark.parametrize("trouble", ["stopped", "paused"])
def test_calls_and_watches_go_on_when_the_member_that_answers_them_goes(three: Etcd, store: EtcdStore, trouble: str) -> None:
    """Each member in turn, so the leader too."""
    revision = put(store, b"a", b"0")
    told: list[bytes] = []
    watch = store.watch(b"a", None, revision)

    def listen() -> None:
        for events in watch:
            told.extend(event.item.value for event in events.events if event.item)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    expected = [b"0"]
    for number in range(1, 4):
        member = used(store, three)
        member.stop() if trouble == "stopped" else member.pause()
        expected.append(b"%d" % number)
        # The member that hangs may do it, too, when it goes on; so nobody does what is done already.
        store.commit([Compare(b"a", CompareTarget.VALUE, "<", expected[-1])], [Put(b"a", expected[-1])], timeout_s=PATIENCE_S)
        assert value(store, b"a") == expected[-1] and used(store, three) is not member
        eventually(lambda: told == expected, what="the watch tells of it, once")
        three.start_member(member) if trouble == "stopped" else member.resume()
        eventually(lambda: all(revision_at(one) for one in three.members), what="all members are back")
    watch.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_each_address_can_be_asked_alone(three: Etcd, store: EtcdStore) -> None:
    """One that leads to another etcd answers for itself only, and is left at the next turn."""
    put(store, b"a", b"1")
    members = store.members()
    assert [value(member, b"a") for member in members] == [b"1"] * 3
    three.members[0].stop()
    with pytest.raises(StoreUnreachable):
        members[0].read([Get(b"a")], timeout_s=0.5)
    for member in members:
        member.close()
    before = used(store, three)
    store.rotate_member()
    assert used(store, three) is not before


def test_a_watch_at_a_member_that_lags_asks_what_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction without an operation is answered by the member alone: what only lags would look like an etcd that lost its data."""
    store = EtcdStore(["127.0.0.1:1"], "one")
    asked: list[pb.TxnRequest] = []

    def call(_call: str, request: pb.TxnRequest, _finish: object, _timeout_s: float) -> Future[Outcome]:
        asked.append(request)
        answer: Future[Outcome] = Future()
        answer.set_result(Outcome(True, 20, ()))
        return answer

    monkeypatch.setattr(store._endpoints, "call", call)
    watch = store.watch(b"a", None, 10)
    watch._handle_created(5)
    (request,) = asked
    assert request.success and request.success[0].HasField("request_range")
    store.close()


def test_a_member_without_the_others_is_left(three: Etcd, store: EtcdStore) -> None:
    """Two of three are gone: nobody may answer; one comes back: the two that are a majority do."""
    put(store, b"a", b"1")
    gone = three.members[:2]
    for member in gone:
        member.stop()
    with pytest.raises(StoreUnreachable):
        store.commit((), [Put(b"a", b"2")], timeout_s=2.0)
    with pytest.raises(StoreUnreachable):
        store.read([Get(b"a")], timeout_s=2.0)
    three.start_member(gone[0])
    assert value(store, b"a") in (b"1", b"2")
    assert put(store, b"a", b"3") and value(store, b"a") == b"3"


def test_an_etcd_that_hangs_is_unreachable_and_answers_again_when_it_goes_on(etcd: Etcd, single: EtcdStore) -> None:
    put(single, b"a", b"1")
    etcd.pause()
    for _ in range(2):
        with pytest.raises(StoreUnreachable):
            single.read([Get(b"a")], timeout_s=0.3)
    waiting = single.read_soon([Get(b"a")], timeout_s=PATIENCE_S)
    etcd.resume()
    assert waiting.result(PATIENCE_S).results[0][0].value == b"1"


def test_calls_that_wait_end_when_the_store_is_closed(etcd: Etcd) -> None:
    store = EtcdStore(etcd.addresses, "one")
    etcd.pause()
    waiting = [store.read_soon([Get(b"a")], timeout_s=10 * PATIENCE_S) for _ in range(50)]
    store.close()
    assert all(isinstance(one.exception(PATIENCE_S), StoreUnreachable) for one in waiting)
    etcd.resume()


def test_an_etcd_that_permits_too_few_operations(tmp_path: Path) -> None:
    """What is read comes in parts; of what is changed, the refusal names the option."""
    with serving(tmp_path, more=["--max-txn-ops=16"]) as etcd, closing(EtcdStore(etcd.addresses, "one")) as store:
        put(store, b"30", b"x")
        assert [items[0].value for items in store.read([Get(b"%d" % number) for number in range(40)]).results if items] == [b"x"]
        with pytest.raises(TooManyOperations, match="too few operations") as refusal:
            store.commit((), [Put(b"%d" % number, b"x") for number in range(17)], timeout_s=PATIENCE_S)
        assert f"--max-txn-ops={limits.ETCD_TRANSACTION_MAX}," in refusal.value.remedy


def test_a_full_etcd_is_as_good_as_none(tmp_path: Path) -> None:
    """P1: what it holds can be read; changes are tried again later, and there is no EINVAL for them."""
    with serving(tmp_path, more=["--quota-backend-bytes=4000000"]) as etcd, closing(EtcdStore(etcd.addresses, "one")) as store:
        with pytest.raises(StoreFull, match="is full") as refusal:
            for number in range(100):
                put(store, b"%d" % number, bytes(1_000_000))
        assert "etcdctl alarm disarm" in refusal.value.remedy
        with pytest.raises(StoreFull):
            store.grant(10)
        assert value(store, b"0") == bytes(1_000_000)
        assert store.commit((), [Delete(b"0")], timeout_s=PATIENCE_S).succeeded
        found = cluster_status.examine_etcd(config_for(tmp_path, etcd))
        assert found.alarms == ["NOSPACE"] and found.size_bytes > 1_000_000
        assert found.open and not found.remote and not found.tls and not found.compacted
        etcd.compact(found.revision)
        assert cluster_status.examine_etcd(config_for(tmp_path, etcd)).compacted


def config_for(directory: Path, etcd: Etcd, **keys: Path) -> Config:
    return Config("test", directory, directory, cluster="one", etcd=tuple(etcd.addresses), **keys)  # type: ignore[arg-type]


def test_what_no_message_can_hold(single: EtcdStore) -> None:
    """A value is refused, and so is a range; many keys are read in parts."""
    with pytest.raises(StoreRefused, match="too large"):
        put(single, b"a", bytes(2_000_000))
    keys = [b"%d" % number for number in range(20)]
    for key in keys:
        put(single, key, key * 700_000)
    with pytest.raises(StoreRefused, match="larger than max"):
        single.read([Get(b"", ENDLESS)], timeout_s=PATIENCE_S)
    found = single.read([Get(key) for key in keys], timeout_s=PATIENCE_S).results
    assert [items[0].value for items in found] == [key * 700_000 for key in keys]


def test_a_watch_notices_that_etcd_lost_its_data(etcd: Etcd, single: EtcdStore) -> None:
    """And does not wait for a revision that will be something else."""
    revision = [put(single, b"a", b"%d" % number) for number in range(10)][-1]
    watch = single.watch(b"a", None, revision)
    assert [event.revision for event in next(watch).events] == [revision]
    etcd.stop()
    etcd.wipe()
    etcd.start()
    with pytest.raises(Compacted, match="lost its data"):
        next(watch)
    again = single.watch(b"a", None, single.read([Get(b"a")], timeout_s=PATIENCE_S).revision + 1)
    put(single, b"a", b"new")
    assert [event.item.value for event in next(again).events if event.item] == [b"new"]


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """An authority, and a key with a certificate of it for each of server and client."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    _openssl(tmp_path, "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    (tmp_path / "more").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        _openssl(tmp_path, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "more"]
        _openssl(tmp_path, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return tmp_path


def read_in_vain(store: EtcdStore) -> str:
    """Why the store does not answer."""
    with pytest.raises(StoreUnreachable) as refusal:
        store.read([Get(b"a")], timeout_s=1.0)
    return str(refusal.value)


def test_tls_with_a_certificate_for_each_side(keys: Path) -> None:
    ca, cert, key = keys / "ca.pem", keys / "client.pem", keys / "client.key"
    tls = [f"--cert-file={keys}/server.pem", f"--key-file={keys}/server.key", f"--trusted-ca-file={ca}", "--client-cert-auth"]
    with serving(keys, tls=tls) as etcd, ExitStack() as opened:
        given = ({"ca": ca, "cert": cert, "key": key}, {"ca": ca}, {})
        known, *strangers = (opened.enter_context(closing(EtcdStore(etcd.addresses, "one", **one))) for one in given)
        put(known, b"a", b"1")
        assert value(known, b"a") == b"1"
        for stranger in strangers:
            eventually(lambda one=stranger: "in time" not in read_in_vain(one), what="why it failed, not how long it took")  # type: ignore[misc]
        found = cluster_status.examine_etcd(config_for(keys, etcd, etcd_ca=ca, etcd_cert=cert, etcd_key=key))
        assert found.tls and not found.open


def test_an_etcd_that_asks_nobody_who_they_are_is_open(keys: Path) -> None:
    tls = [f"--cert-file={keys}/server.pem", f"--key-file={keys}/server.key"]
    with serving(keys, tls=tls) as etcd:
        given = {"etcd_ca": keys / "ca.pem", "etcd_cert": keys / "client.pem", "etcd_key": keys / "client.key"}
        found = cluster_status.examine_etcd(config_for(keys, etcd, **given))
        assert found.tls and found.open
