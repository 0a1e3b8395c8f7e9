"""Other limits for the processes of a daemon under test, as `CKPTFS_TEST_LIMITS="SCAN_WAIT_S=5"` says: see `shorten`.

Python imports this module first in every process whose PYTHONPATH names its directory.
"""

import importlib
import os

for place, _, value in (pair.partition("=") for pair in os.environ["CKPTFS_TEST_LIMITS"].split()):
    module, _, name = (place if "." in place else f"limits.{place}").rpartition(".")
    home = importlib.import_module(f"ckptfs.{module}")
    assert hasattr(home, name), f"there is no limit {place}"
    is_int = isinstance(getattr(home, name), int) and value.isdigit()
    setattr(home, name, int(value) if is_int else float(value))
