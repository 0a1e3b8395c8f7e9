"""Measure the longest pause of a filesystem: write, rename and read one small file again and again until SIGTERM.

Usage: probe.py DIRECTORY. Prints how many rounds there were, and how long the longest one took. An error ends it with a traceback.
"""

import os
import signal
import sys
import time


def main() -> None:
    """Probe."""
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    path = os.path.join(sys.argv[1], ".probe")
    rounds, longest_s = 0, 0.0
    while not ended:
        began = time.monotonic()
        with open(path + ".new", "w") as file:
            file.write(str(rounds))
        os.rename(path + ".new", path)
        with open(path) as file:
            assert file.read() == str(rounds)
        longest_s = max(longest_s, time.monotonic() - began)
        rounds += 1
        time.sleep(0.002)
    os.unlink(path)
    print(f"{rounds} times a file was written, renamed and read meanwhile, without an error; the longest time took {longest_s:.2f} s")


if __name__ == "__main__":
    main()
