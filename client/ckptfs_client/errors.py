"""What can go wrong for a client, each with its exit code; translated to a sentence on stderr once, in the command's main function.

Exit codes: 0 done, 1 failed or found bad, 2 wrong usage, 3 no ckptfs mount there or its daemon does not answer, 4 not in time,
5 not permitted.
"""

EXIT_CODES = {
    0: "done",
    1: "failed, or something was found bad",
    2: "wrong usage",
    3: "no ckptfs mount there, or its daemon does not answer",
    4: "not done in time",
    5: "not permitted",
}
INTERRUPTED, PIPE_CLOSED = 130, 141
# As a shell reports a program that a signal ended; not named in --help.
SIGNAL_EXIT_CODES = {INTERRUPTED: "interrupted (Ctrl-C)", PIPE_CLOSED: "the program that reads the output has ended"}


class ClientError(Exception):
    """The base: one sentence, a remedy that may be empty, and an exit code."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.remedy}" if self.remedy else str(self.args[0])


class CommandFailed(ClientError):
    """The daemon could not do it."""


class UsageError(ClientError):
    """The question itself is wrong."""

    exit_code = 2


class NoMount(ClientError):
    """There is no ckptfs where one was looked for, or nobody answers for it."""

    exit_code = 3


class NotInTime(ClientError):
    """A timeout or deadline passed."""

    exit_code = 4


class NotPermitted(ClientError):
    """Only the mount's owner may do this."""

    exit_code = 5
