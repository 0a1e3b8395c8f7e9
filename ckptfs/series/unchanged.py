"""The comparison of two successive sets: equal bytes mean no progress of the training (X11). Pure.

A counter or the state of a random generator differs in any case. So only large files count, by their digests and not by their names, which
may have the number of the step. Files whose names are in their bytes, as in a zip archive of `torch.save`, differ as well.
"""

from collections.abc import Iterable

LARGE_SHARE = 0.01
"""A file is large if it has at least this share of the bytes of its set."""


def is_unchanged(newer: Iterable[tuple[int, bytes | None]], older: Iterable[tuple[int, bytes | None]]) -> bool:
    """Return whether each large file of the newer set has the bytes of one of the older set.

    Files are (size, digest, None: not known).
    """
    files = list(newer)
    total = sum(size for size, _ in files)
    large = {digest for size, digest in files if size and size >= total * LARGE_SHARE}
    return bool(large) and None not in large and large <= {digest for _, digest in older}
