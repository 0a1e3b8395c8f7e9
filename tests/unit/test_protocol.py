"""The generated stubs are those of control.proto, and every message fits the bounds it is sent with."""

import shutil
from pathlib import Path

import pytest

from ckptfs import limits
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import generate

PACKAGE = Path(generate.__file__).parent


def test_the_committed_stubs_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m ckptfs.protocol.generate` would change nothing."""
    pytest.importorskip("grpc_tools")
    shutil.copy(PACKAGE / "control.proto", tmp_path)
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    generate.main()
    made = [path.name for path in tmp_path.iterdir() if path.name != "control.proto"]
    assert sorted(made) == ["control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"]
    for name in made:
        # The first lines name the versions of the generators, which may be newer here.
        mine, theirs = ((directory / name).read_text() for directory in (tmp_path, PACKAGE))
        if name == "control_pb2.py":
            mine, theirs = (text[text.index("DESCRIPTOR =") :] for text in (mine, theirs))
        if name == "control_pb2_grpc.py":
            mine, theirs = (text[text.index("class QuestionsStub") :] for text in (mine, theirs))
        assert mine == theirs, f"{name} is stale: python -m ckptfs.protocol.generate"


def test_a_full_list_fits_one_message() -> None:
    place = pb.Place(tier="nvme", state="quarantined", verified_age_s=1.5)
    record = pb.Record(
        inode=2**62, known=True, kind="directory", size=2**62, level="local", state="published", generation=2**40, copies=[place] * 4,
        progress=0.5, waiting=True,
    )  # fmt: skip
    assert pb.ListReply(records=[record] * limits.CONTROL_LIST_MAX).ByteSize() < limits.CONTROL_MESSAGE_BYTES_MAX
