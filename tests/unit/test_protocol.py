"""The generated stubs are those of the .proto files, and a full list fits the message it is sent in."""

import shutil
from pathlib import Path

import pytest

from ckptfs import limits
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import generate

PACKAGE = Path(generate.__file__).parent
# What is generated for each .proto, and where it begins to say the same with every generator.
ENDINGS = {"_pb2.py": "DESCRIPTOR =", "_pb2.pyi": "from", "_pb2_grpc.py": "class "}


def test_the_committed_stubs_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m ckptfs.protocol.generate` would change nothing."""
    pytest.importorskip("grpc_tools")
    protos = [Path(shutil.copy(proto, tmp_path)) for proto in PACKAGE.glob("*.proto")]
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    generate.main()
    made = {path.name for path in tmp_path.iterdir()} - {proto.name for proto in protos}
    assert made == {f"{proto.stem}{end}" for proto in protos for end in ENDINGS} and made
    for name in made:
        mine, theirs = (_without_versions(directory / name) for directory in (tmp_path, PACKAGE))
        assert mine == theirs, f"{name} is stale: python -m ckptfs.protocol.generate"


def _without_versions(path: Path) -> str:
    """The first lines name the versions of the generators, which may be newer here."""
    text = path.read_text()
    for end, begin in ENDINGS.items():
        if path.name.endswith(end):
            return text[text.index(begin) :]
    raise AssertionError(path)


def test_a_full_list_fits_one_message() -> None:
    place = pb.CopyInfo(tier="nvme", state="quarantined", verified_age_s=1.5)
    record = pb.Record(
        inode=2**62, known=True, kind="directory", size=2**62, level="local", state="published", generation=2**40, copies=[place] * 4,
        progress=0.5, pfs_pending=True,
    )  # fmt: skip
    assert pb.ListReply(records=[record] * limits.CONTROL_LIST_MAX).ByteSize() < limits.CONTROL_MESSAGE_BYTES_MAX
