"""The arrays of Orbax in OCDBT: H4, D6. The bytes are those that TensorStore wrote for Orbax, and for a deeper tree."""

import pytest
from series_tree import SeriesTree, TreeFile

from ckptfs.series import ocdbt
from ckptfs.series.pickle_scan import TooLong

ROOT = "d/2c198072403bdddc5a43b5eebabc439c"
DATA = "ocdbt.process_0/d/2d25d243f759e96c4ccd0bd1dc2f4aa9"
MANIFEST = bytes.fromhex(
    "0cdb3a2a7300000000000000000128b52ffd2058c102006f36d0cff83b01585f3eaf62f886732f00800880c2d72f0401000000000122"
    "00642f326331393830373234303362646464633561343362356565626162633433396301010000008303108303ebca05e7e34048eeb7ec1800cedbd285"
)
NODE = bytes.fromhex(
    "0cdb20de8301000000000000000128b52ffd606e053d0b00b653493b508738072891815d49190206dbe72f9c182a9657ed0c5abf64ad9487842cbce52d45968d46"
    "550b454b1ef8dfde24bb5349051338ad1adf306d48a63a003e003500ff92234d9a94b9fb18141c92d7f068c84227442c525a583529452f90ce69cd8aa55a2812d8"
    "c4aa28a5a2d5442778615ce77d4eca173a6fa47a1d98e99d7ed05bc0e040c186e340028490c68300827e2d79011ef4ba0fbdee05bcee3faffb02af7b03af730"
    "0f0067035638a35a92828412b614dbee4e046065eb94da61eb9e459bee42abeb69be1ad6a19f5c84345b75553ad474e33e678749a7927fa5f8ceb73da9d1e61"
    "4008a98be83863cb04ddddddfdd05d018168307d222632ab1259154f153d4bed2f76490cf6c82d3cfa57fa177fcdd666b6e83563a5e6b236c33c720ba3f0181"
    "80001640f149c8806241a735f5fa1610410b88cea9699b72d04c310e055a83229afe6bd1695352013c9cf134221600e18068c00735fcca86619a0ecad7050ea"
    "dcd450"
)
SAVED = {
    "_CHECKPOINT_METADATA": b'{"item_handlers": {"default": "S"}, "commit_timestamp_nsecs": 17}', "commit_success.txt": b"y",
    "default/commit_success.txt": b"y", "default/_METADATA": b'{"tree": {}}', "default/_sharding": b'{"a": "b"}',
    "default/array_metadatas/process_0": b'{"array_metadatas": []}',
    "default/manifest.ocdbt": MANIFEST, f"default/{ROOT}": NODE, f"default/{DATA}": bytes(91780),
}  # fmt: skip
NEEDED = {f"default/{one}" for one in ("manifest.ocdbt", "_METADATA", ROOT, DATA)}
DEEP = b"d/10543e14a7e2c79084c0bf024c16a1ed"
DEEP_MANIFEST = bytes.fromhex(
    "0cdb3a2a850000000000000000000000000000000000000000000000000000013c0400020000220000642f313035343365313461376532633739303834633062"
    "663032346331366131656402010200030001ffffffffffffffffff019a06ffffffffffffffffff0154000600d60600181fa74b2211b8ec18eba59f2211b8ec18"
    "000696f072"
)
DEEP_DATA = bytes.fromhex(
    "6161616162626262636363636464646465656565666666660cdb20de3e00000000000000000000012200642f3130353433653134613765326337393038346330"
    "62663032346331366131656401000401000027ded5e40cdb20de3e00000000000000000000012200642f31303534336531346137653263373930383463306266"
    "3032346331366131656401000401000438494f230cdb20de3e00000000000000000000012200642f313035343365313461376532633739303834633062663032"
    "3463313661316564010004010008e8860c6e0cdb20de3e00000000000000000000012200642f3130353433653134613765326337393038346330626630323463"
    "31366131656401000401000cf71196a90cdb20de3e00000000000000000000012200642f31303534336531346137653263373930383463306266303234633136"
    "6131656401000401001048198bf40cdb20de3e00000000000000000000012200642f313035343365313461376532633739303834633062663032346331366131"
    "6564010004010014578e11330cdb20de5000000000000000000001012200642f3130353433653134613765326337393038346330626630323463313661316564"
    "020003030303616161626262000018563e3e01013e3e040459d2d8750cdb20de5200000000000000000001012200642f31303534336531346137653263373930"
    "3834633062663032346331366131656402000303030363636364646400009401d2013e3e01013e3e0404efcc4ddf0cdb20de5200000000000000000001012200"
    "642f313035343365313461376532633739303834633062663032346331366131656402000303030365656566666600009002ce023e3e01013e3e0404a59528ce"
    "0cdb20de5400000000000000000002012200642f3130353433653134613765326337393038346330626630323463313661316564020003030000616161636363"
    "00008c03dc0350520202cc01ce010808138ddfb60cdb20de4600000000000000000002012200642f313035343365313461376532633739303834633062663032"
    "346331366131656401030065656500ae045202ce01084517dbe80cdb20de5400000000000000000003012200642f313035343365313461376532633739303834"
    "633062663032346331366131656402000303000061616165656500008005d40554460402ee03940210086d3fd3ab"
)
"""Values of four bytes from the beginning, then a tree of four levels."""


def series(*numbers: int) -> SeriesTree:
    return SeriesTree.of({f"{number}/{name}": data for number in numbers for name, data in SAVED.items()})


def test_what_the_arrays_of_orbax_need() -> None:
    """D6: the root of the tree, and the files and bytes that it names."""
    needs = ocdbt.load_manifest(len(MANIFEST), lambda offset, length: MANIFEST[offset : offset + length])
    assert needs == ({ROOT.encode(): 387}, (ocdbt.TreeNode(b"", ROOT.encode(), 0, 387),))
    assert ocdbt.load_node(needs.nodes[0], lambda offset, length: NODE[offset : offset + length]) == ({DATA.encode(): 91499}, ())


def test_a_deep_tree() -> None:
    """D6: every node is followed, so the largest end of each file is known."""
    needs, seen = ocdbt.load_manifest(len(DEEP_MANIFEST), lambda offset, length: DEEP_MANIFEST[offset : offset + length]), []
    todo = [*needs.nodes]
    while todo:
        found = ocdbt.load_node(todo.pop(), lambda offset, length: DEEP_DATA[offset : offset + length])
        seen.append(found.files)
        todo += found.nodes
    assert needs.files == {DEEP: 878} and len(seen) == 12
    assert sorted(one[DEEP] for one in seen)[:6] == [4, 8, 12, 16, 20, 24], "the values"


@pytest.mark.parametrize("change", ["removed", "empty", "cut"])
@pytest.mark.parametrize("name", sorted(NEEDED))
def test_arrays_that_lack_bytes(name: str, change: str) -> None:
    """N7, D6: removed or cut after the commit, or copied in part, mark first; with a checkpoint before it and without."""
    for before in ((20,), ()):
        tree, path = series(*before, 30), f"30/{name}"
        assert tree.find("*") == "30" and tree.find_reasons("*") == {}
        cut = {"empty": b"", "cut": SAVED[name][: len(SAVED[name]) * 9 // 10]}
        tree = tree.without(path) if change == "removed" else tree.with_files({path: cut[change]})
        assert tree.find("*") == "".join(map(str, before)), tree.find_reasons("*")


def test_a_node_that_cannot_be_read() -> None:
    """D3: a node that cannot be read now."""
    tree = series(30)
    assert tree.with_files({f"30/default/{ROOT}": TreeFile(NODE, error=5)}).find("*") == ""


@pytest.mark.parametrize("length", range(0, len(NODE) - 8, 7))
def test_a_damaged_node(length: int) -> None:
    """P11: bytes that no writer left are refused."""
    tree = series(30).with_files({f"30/default/{ROOT}": NODE[:length] + b"\xff" * (len(NODE) - length)})
    assert "names a node of its tree that cannot be read" in tree.find_reasons("*")["30"]


def test_a_later_format() -> None:
    with pytest.raises(TooLong):
        ocdbt.load_manifest(20, lambda offset, length: MANIFEST[:4] + (20).to_bytes(8, "little") + b"\1\0" + bytes(6))
    tree = series(30).with_files({"30/default/manifest.ocdbt": MANIFEST[:4] + (20).to_bytes(8, "little") + b"\1\0" + bytes(6)})
    assert "more than can be checked" in tree.find_reasons("*")["30"]
