"""Run a program as on the oldest kernel that ckptfs supports: `old_system_calls.py COMMAND ARGUMENT...`.

System calls that came after Linux 4.20 fail with ENOSYS, for the program and its children. From Linux 5.1 on, new system calls have the
same numbers, from 424, on all machines: pidfd_open, clone3, close_range, openat2 and all later ones. Needs root.
"""

import ctypes
import errno
import os
import struct
import sys

FIRST_NEW_CALL = 424
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x35, 0x06
REFUSE, ALLOW = 0x00050000 | errno.ENOSYS, 0x7FFF0000


def main() -> None:
    """Install the filter and become the program."""
    steps = [(LOAD, 0, 0, 0), (JUMP_IF_AT_LEAST, 0, 1, FIRST_NEW_CALL), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
