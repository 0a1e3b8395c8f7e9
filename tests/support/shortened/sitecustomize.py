"""Other limits for the processes of a daemon under test, as `CKPTFS_TEST_LIMITS="SCAN_WAIT_S=5"` says: see `shorten`.

Python imports this module first in every process whose PYTHONPATH names its directory.
"""

import os

from ckptfs import limits

for name, _, value in (pair.partition("=") for pair in os.environ["CKPTFS_TEST_LIMITS"].split()):
    assert hasattr(limits, name), f"there is no limit {name}"
    setattr(limits, name, float(value))
