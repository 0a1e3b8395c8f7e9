"""The manifest of a checkpoint set: two plain files that tell what belongs to it (D1, H10). Pure.

`MANIFEST.json` is for programs. `MANIFEST.xxh128` has a line `<digest>  <path>` for each file, as md5sum and its kin write them: a name
with a line break or a backslash is escaped, and its line begins with a backslash. Files of unknown digests are in the first one only.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMAT = 1
DIGEST_RULE = "xxh3-128 of the xxh3-128 digests of all 4 MiB blocks, in order, and of the size as 8 bytes, little endian"


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of a set.

    `producer`: the number of the process that wrote it, in the list of producers; None: it is not known.
    """

    size: int
    mtime_ns: int
    digest: bytes | None
    producer: int | None = None


def build_manifest(set_fields: Mapping[str, Any], producers: Sequence[Mapping[str, Any]], files: Mapping[bytes, ManifestFile]) -> bytes:
    """Return `MANIFEST.json`. `set_fields`: what is known of the set as a whole."""
    fields = {
        "format": FORMAT,
        **set_fields,
        "digest": DIGEST_RULE,
        "producers": list(producers),
        "files": [_build_entry(path, file) for path, file in sorted(files.items())],
    }
    return json.dumps(fields, indent=1).encode() + b"\n"


def _build_entry(path: bytes, file: ManifestFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": os.fsdecode(path), "size": file.size, "mtime_ns": file.mtime_ns}
    entry["digest"] = None if file.digest is None else file.digest.hex()
    return entry if file.producer is None else {**entry, "producer": file.producer}


def build_checksums(files: Mapping[bytes, ManifestFile]) -> bytes:
    """Return `MANIFEST.xxh128`."""
    return b"".join(_build_line(path, file.digest) for path, file in sorted(files.items()) if file.digest is not None)


def _build_line(path: bytes, digest: bytes) -> bytes:
    escaped = path.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    return b"%s%s  %s\n" % (b"\\" if escaped != path else b"", digest.hex().encode(), escaped)
