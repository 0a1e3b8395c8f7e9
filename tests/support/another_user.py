"""Runs a function as another user, in a child process: what a stranger may and may not do."""

import errno
import functools
import importlib
import os
import pkgutil
import traceback
from collections.abc import Callable

import ckptfs_client

STRANGER = 65534
OTHER_STRANGER = 65533


@functools.cache
def import_client() -> None:
    """Import what a client imports at its first call: other users may not reach this tree, as below /root."""
    importlib.import_module("grpc._channel")
    for module in pkgutil.walk_packages(ckptfs_client.__path__, "ckptfs_client."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def as_user(act: Callable[[], object], uid: int = STRANGER, gid: int | None = None, groups: tuple[int, ...] = ()) -> str:
    """'ok', or the name of the errno with which `act` was refused to that user. Other exceptions fail the test."""
    import_client()
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
