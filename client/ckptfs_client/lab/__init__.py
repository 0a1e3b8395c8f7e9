"""`ckptfs lab`: a cluster on this one machine, for trying, teaching and testing.

Owns one directory: an etcd, a PFS, and for each node a network namespace, a daemon, a mount, tiers and keys. Traffic stays in the
namespaces; the machine's own interfaces are not touched. What is there is found by looking (mounts below the directory, processes
in the namespaces), so any later command can go on, also after an earlier one was killed.
"""
