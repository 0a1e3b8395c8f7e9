"""Files of one directory that are one checkpoint under a name that none of them has (H4, H2).

`FAMILIES` is the table. A program gives its restart that name: TensorFlow the prefix `ckpt-2` of `ckpt-2.index`, LAMMPS the `melt.%.100`
of `melt.base.100` and `melt.0.100`, DMTCP the script that restarts all images. Pure.
"""

import re
from collections.abc import Callable, Collection

DMTCP_SCRIPT = b"dmtcp_restart_script.sh"
DMTCP_IMAGE = re.compile(rb"ckpt_.+_[0-9a-f]+-[0-9]+-[0-9a-f]+\.dmtcp", re.DOTALL)
_DMTCP_FILE = re.compile(rb"ckpt_.+_[0-9a-f]+-[0-9]+-[0-9a-f]+(?:\.dmtcp|_files)|dmtcp_restart_script(?:_.+)?\.sh", re.DOTALL)
_TENSORFLOW_DATA = re.compile(rb"(.+)\.data-[0-9]+-of-[0-9]+", re.DOTALL)
_TENSORFLOW_FILE = re.compile(rb"(.+)\.(?:index|meta|data-[0-9]+-of-[0-9]+)", re.DOTALL)
_NUMBER = re.compile(rb"[0-9]+")
_LAMMPS_BASE, _LAMMPS_PARTS, _LAMMPS_FIRST = b"base", b"%", b"0"
_LAMMPS_BASE_WORD = re.compile(_LAMMPS_BASE)
_NO_PARTS = re.compile(rb"(step|iter|iteration|epoch|batch)[-_.=]?$", re.IGNORECASE)
"""Before a number that counts checkpoints: `step_base.pt` beside `step_0.pt` is another model."""
_NO_LAMMPS = re.compile(rb"\.(pth?|ckpt|safetensors|h5|hdf5|np[yz]|pkl|json|keras|zip|tar)$", re.IGNORECASE)


def find_groups(names: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the name of the group of each file that belongs to one."""
    found: dict[bytes, bytes] = {}
    for sign, find in FAMILIES:
        if any(sign in name for name in names):
            found |= find(names)
    return found


def _find_tensorflow(names: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the prefixes.

    One series of names holds them if any member has data: of another, the index may be alone.
    """
    with_data = {_mask(parts[1]) for name in names if (parts := _TENSORFLOW_DATA.fullmatch(name))}
    parts_of = {name: parts for name in names if (parts := _TENSORFLOW_FILE.fullmatch(name))}
    return {name: parts[1] for name, parts in parts_of.items() if _mask(parts[1]) in with_data}


def _mask(name: bytes) -> bytes:
    return _NUMBER.sub(b"0", name)


def _find_lammps(names: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the names with % in the place of "base" and of the numbers of the parts.

    One series of names holds them if any member has "base" and the first part: of another, a killed job may have left others.
    """
    known = names if isinstance(names, (set, frozenset, dict)) else set(names)
    found, sorts = {}, {_mask_lammps(name, at) for name in known for at in _list_lammps_bases(known, name)}
    for name in known if sorts else ():
        for number in (*_NUMBER.finditer(name), *_LAMMPS_BASE_WORD.finditer(name)):
            if _mask_lammps(name, number) in sorts:
                found[name] = name[: number.start()] + _LAMMPS_PARTS + name[number.end() :]
    return found


def _list_lammps_bases(known: Collection[bytes], name: bytes) -> list["re.Match[bytes]"]:
    """Return where a name has "base", if a file of the first process is beside it."""
    if _NO_LAMMPS.search(name):
        return []
    found = [(one, name[: one.start()], name[one.end() :]) for one in _LAMMPS_BASE_WORD.finditer(name)]
    return [one for one, before, after in found if before + _LAMMPS_FIRST + after in known and not _NO_PARTS.search(before)]


def _mask_lammps(name: bytes, at: "re.Match[bytes]") -> tuple[bytes, bytes]:
    """Return what the files of one series have in common: they may differ in other numbers."""
    return _mask(name[: at.start()]), _mask(name[at.end() :])


def _find_dmtcp(names: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the script that restarts all images, for them and for the scripts of each computation."""
    return {name: DMTCP_SCRIPT for name in names if _DMTCP_FILE.fullmatch(name)}


FAMILIES: tuple[tuple[bytes, Callable[[Collection[bytes]], dict[bytes, bytes]]], ...] = (
    (b".data-", _find_tensorflow),
    (_LAMMPS_BASE, _find_lammps),
    (b".dmtcp", _find_dmtcp),
)
"""What a directory must have in one of its names, and the groups of its files."""


def replace_group(pattern: bytes, group: bytes, file: bytes) -> bytes:
    """Return the pattern of a file, from that of its group."""
    before, parts, after = group.partition(_LAMMPS_PARTS)
    return pattern.replace(_LAMMPS_PARTS, file[len(before) : len(file) - len(after)]) if parts else pattern + file.removeprefix(group)
