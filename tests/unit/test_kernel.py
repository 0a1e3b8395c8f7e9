"""INIT: which of the kernel's offers we take, and in which bytes we say so (DESIGN 6.2; FEATURES F4)."""

import struct
from pathlib import Path

import pytest
from ckptfs_daemon.fuse import kernel
from ckptfs_daemon.fuse.kernel import Feature

from ckptfs.errors import InvalidArgument
from ckptfs.model import DataPath
from ckptfs.procfs import FuseTimeouts, get_fuse_timeouts

EVERYTHING = (1 << 48) - 1


def init_request(flags: int = EVERYTHING, *, minor: int = 45, major: int = 7, opcode: int = 26) -> bytes:
    """The 104 bytes that a kernel of today sends."""
    body = struct.pack("=IIIII44x", major, minor, 131072, flags & 0xFFFFFFFF, flags >> 32)
    return struct.pack("=IIQQIIIHH", 40 + len(body), opcode, 2, 0, 0, 0, 0, 0, 0) + body


def test_an_offer_is_read_with_its_second_word_of_flags() -> None:
    offer = kernel.parse_init(init_request())
    assert (offer.unique, offer.major, offer.minor, offer.flags) == (2, 7, 45, EVERYTHING)
    assert offer.flags & Feature.PASSTHROUGH


def test_the_second_word_means_nothing_without_its_announcement() -> None:
    offer = kernel.parse_init(init_request(EVERYTHING & ~Feature.INIT_EXT))
    assert offer.flags >> 32 == 0


@pytest.mark.parametrize("request_", [b"", init_request()[:50], init_request(opcode=1), init_request(major=8), init_request(minor=27)])
def test_anything_else_is_refused(request_: bytes) -> None:
    with pytest.raises(kernel.BadHandshake):
        kernel.parse_init(request_)


def test_passthrough_and_the_writeback_cache_exclude_each_other() -> None:
    offer = kernel.parse_init(init_request())
    through = kernel.choose_init_flags(offer, DataPath.PASSTHROUGH, is_single_node=True)
    buffered = kernel.choose_init_flags(offer, DataPath.BUFFERED, is_single_node=True)
    assert through & Feature.PASSTHROUGH and not through & Feature.WRITEBACK_CACHE
    assert buffered & Feature.WRITEBACK_CACHE and not buffered & Feature.PASSTHROUGH
    for flags in (through, buffered):
        assert flags & Feature.KILLPRIV_V2
        assert not flags & Feature.RESEND, "the table of requests does it all"
        assert not flags & (1 << 1 | 1 << 10), "locks are the kernel's"
        assert not flags & 1 << 14, "pyfuse3 has readdirplus only"


def test_no_passthrough_where_a_file_that_is_not_passed_through_could_not_be_mapped() -> None:
    """P2, X10: a kernel may have the one and lack the other, which came three versions before."""
    offer = kernel.parse_init(init_request(EVERYTHING & ~Feature.DIRECT_IO_ALLOW_MMAP))
    assert not kernel.choose_init_flags(offer, DataPath.PASSTHROUGH, is_single_node=True) & Feature.PASSTHROUGH


def test_where_other_nodes_write_the_kernel_does_not_keep_sizes_and_times() -> None:
    """P7: with the writeback cache it would show its own for ever."""
    assert (
        not kernel.choose_init_flags(kernel.parse_init(init_request()), DataPath.BUFFERED, is_single_node=False) & Feature.WRITEBACK_CACHE
    )


@pytest.mark.parametrize("data_path", [DataPath.PASSTHROUGH, DataPath.BUFFERED])
@pytest.mark.parametrize("bit", range(48))
def test_nothing_is_taken_that_was_not_offered(data_path: DataPath, bit: int) -> None:
    offer = kernel.parse_init(init_request(EVERYTHING & ~(1 << bit)))
    assert not kernel.choose_init_flags(offer, data_path, is_single_node=True) & 1 << bit


def test_the_answer_has_the_kernels_layout() -> None:
    offer = kernel.parse_init(init_request())
    flags = kernel.choose_init_flags(offer, DataPath.PASSTHROUGH, is_single_node=True)
    reply = kernel.build_init_reply(offer, flags)
    assert struct.unpack_from("=IiQ", reply) == (80, 0, 2) and len(reply) == 80
    major, minor, _ahead, low, *_background = struct.unpack_from("=IIII", reply, 16)
    max_write, grain_ns, pages, _align, high, depth = struct.unpack_from("=IIHHII", reply, 36)
    assert (major, minor, max_write, grain_ns, pages, depth) == (7, 40, 1 << 20, 1, 256, 1)
    assert low | high << 32 == flags


def test_an_older_kernel_is_answered_in_its_own_protocol() -> None:
    offer = kernel.parse_init(init_request(kernel.COMMON, minor=31))
    reply = kernel.build_init_reply(offer, kernel.choose_init_flags(offer, DataPath.PASSTHROUGH, is_single_node=True))
    assert struct.unpack_from("=II", reply, 16) == (7, 31)
    assert struct.unpack_from("=I", reply, 16 + 36)[0] == 0, "no stacking depth without passthrough"


def test_features_are_hidden_by_name() -> None:
    """X10: an old kernel is imitated by what it lacks. Without INIT_EXT it has no second word of flags."""
    assert kernel.parse_hidden_features("") == 0
    assert kernel.parse_hidden_features("resend, passthrough") == Feature.RESEND | Feature.PASSTHROUGH
    assert EVERYTHING & ~kernel.parse_hidden_features("init_ext,max_pages") == 0xFFFFFFFF & ~(Feature.INIT_EXT | Feature.MAX_PAGES)


def test_what_the_mount_cannot_do_without_is_not_hidden() -> None:
    """X10: with every feature hidden, readdirplus is still there: pyfuse3 lists directories by it alone."""
    hidden = kernel.parse_hidden_features(",".join(Feature.__members__))
    offer = kernel.parse_init(init_request(EVERYTHING & ~hidden))
    assert kernel.choose_init_flags(offer, DataPath.BUFFERED, is_single_node=True) == kernel.READDIRPLUS == 1 << 13


def test_an_unknown_feature_is_refused_with_those_that_exist() -> None:
    """P11."""
    with pytest.raises(InvalidArgument, match="no feature is called splice") as refused:
        kernel.parse_hidden_features("resend,splice")
    assert "passthrough" in refused.value.remedy


@pytest.mark.parametrize(
    ("default_s", "most_s", "offered", "effective_s"),
    [
        (0, 0, Feature.REQUEST_TIMEOUT, 0), (0, 60, Feature.REQUEST_TIMEOUT, 60), (30, 60, Feature.REQUEST_TIMEOUT, 60),
        (30, 0, Feature.REQUEST_TIMEOUT, 65535), (30, 0, 0, 30), (30, 20, 0, 20), (0, 100_000, Feature.REQUEST_TIMEOUT, 100_000),
    ],
)  # fmt: skip
def test_a_slow_answer_does_not_end_the_mount(default_s: int, most_s: int, offered: int, effective_s: int) -> None:
    """X10: a default timeout of the kernel is replaced by the longest; a site's maximum is respected, and told."""
    offer = kernel.parse_init(init_request(kernel.COMMON | offered))
    flags = kernel.choose_init_flags(offer, DataPath.BUFFERED, is_single_node=True, has_default_timeout=default_s > 0)
    assert kernel.get_request_timeout_s(flags, FuseTimeouts(default_s, most_s)) == effective_s
    (asked_s,) = struct.unpack_from("=H", kernel.build_init_reply(offer, flags), 56)
    assert asked_s == (65535 if default_s and offered else 0)


def test_the_settings_of_the_kernel_are_read(tmp_path: Path) -> None:
    """Kernels before 6.15 have none."""
    assert get_fuse_timeouts(tmp_path) == FuseTimeouts(0, 0)
    (tmp_path / "default_request_timeout").write_text("30\n")
    (tmp_path / "max_request_timeout").write_text("600\n")
    assert get_fuse_timeouts(tmp_path) == FuseTimeouts(30, 600)
