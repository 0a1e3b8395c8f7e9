"""The errors of the commands, with their exit codes. `__main__` prints them as a sentence on stderr."""

EXIT_CODES = {
    0: "done",
    1: "failed, or something is bad",
    2: "wrong usage",
    3: "the path is in no ckptfs mount, or the daemon does not answer",
    4: "not done in time",
    5: "not permitted",
}
INTERRUPTED, PIPE_CLOSED = 130, 141
SIGNAL_EXIT_CODES = {INTERRUPTED: "interrupted (Ctrl-C)", PIPE_CLOSED: "the program that reads the output has ended"}
"""As a shell reports a program that a signal ended; not shown by --help."""
EPILOG = "Exit codes: " + "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + "."


class PipeClosed(Exception):
    """The program that reads the output has ended."""


class ClientError(Exception):
    """The base: one sentence, a remedy (may be empty), and an exit code."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.remedy}" if self.remedy else str(self.args[0])


class CommandFailed(ClientError):
    """The command failed."""


class UsageError(ClientError):
    """The arguments are wrong."""

    exit_code = 2


class NoMount(ClientError):
    """The path is in no ckptfs mount, or the daemon does not answer."""

    exit_code = 3


class NotInTime(ClientError):
    """A timeout or deadline passed."""

    exit_code = 4


class NotPermitted(ClientError):
    """Only the owner of the mount, or root, may do this."""

    exit_code = 5
