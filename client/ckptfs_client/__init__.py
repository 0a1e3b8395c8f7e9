"""The command `ckptfs`, the helpers of mount(8) and umount(8), and the library `ckptfs_client.client`.

`__main__` and `mount_helper` are what the shell and mount(8) start. `cli` holds the commands about one mount and its files; the folders
hold the others, each with a module `..._commands` for their options: `sets`, `analysis` and `node`; `dashboard`, `lab` and `chaos` stay
open, or run a cluster. All share `mounts` (which mount is meant), `client` (questions to its daemon), `render` and `json_answers` (the
forms of output), `errors` (exit codes).
"""

import os

# gRPC writes no lines of its own between those of a command, unless the user asked for them. It looks when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
