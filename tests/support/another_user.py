"""Runs code as another user, in a child process: what a stranger may and may not do."""

import errno
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon_under_test import environment

STRANGER = 65534
OTHER_STRANGER = 65533
COMMAND_S = 60.0
_COMMAND = """
import importlib, os, pkgutil, sys
uid = int(sys.argv.pop(1))
import ckptfs_client
from ckptfs_client.__main__ import main
importlib.import_module("grpc._channel")
for module in pkgutil.walk_packages(ckptfs_client.__path__, "ckptfs_client."):
    importlib.import_module(module.name)
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
main()
"""
"""It imports what a command imports, and then becomes the other user, who may not reach this tree (as below /root)."""


def as_user(act: Callable[[], object], uid: int = STRANGER, groups: tuple[int, ...] = ()) -> str:
    """'ok', or the name of the errno with which `act` was refused to that user. Other exceptions fail the test.

    It runs in a fork, where gRPC does not work: see `run_as_user`.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        answer = "died"
        try:
            os.setgroups(list(groups))
            os.setresgid(uid, uid, uid)
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


def run_as_user(*words: str | Path, uid: int = STRANGER) -> "subprocess.CompletedProcess[str]":
    """Run a command of `ckptfs` as that user; its stdout has stderr, too."""
    command = [sys.executable, "-c", _COMMAND, str(uid), *map(str, words)]
    ways: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment()}
    return subprocess.run(command, **ways, timeout=COMMAND_S, check=False)
