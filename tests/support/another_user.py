"""Runs a function as another user, in a child process: what a stranger may and may not do."""

import errno
import os
import traceback
from collections.abc import Callable

STRANGER = 65534
OTHER_STRANGER = 65533


def as_user(act: Callable[[], object], uid: int = STRANGER, gid: int | None = None, groups: tuple[int, ...] = ()) -> str:
    """'ok', or the name of the errno with which `act` was refused to that user. Other exceptions fail the test."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        answer = "died"
        try:
            os.setgroups(list(groups))
            os.setresgid(*[uid if gid is None else gid] * 3)
            os.setresuid(uid, uid, uid)
            act()
            answer = "ok"
        except OSError as refusal:
            answer = errno.errorcode.get(refusal.errno or 0, "?")
        except BaseException:
            answer = traceback.format_exc()
        finally:
            os.write(write_end, answer.encode()[:4096])
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    assert "Traceback" not in answer, answer
    return answer
