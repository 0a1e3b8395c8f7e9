"""`ckptfs lab`: a cluster on one machine, to try, teach and test ckptfs.

A lab is one directory: an etcd, a PFS, and for each node a network namespace, a daemon, a mount, tiers and keys. All traffic stays in the
namespaces; the machine's own interfaces are not touched. Each command finds the state by looking: mounts below the directory, processes in
the namespaces. So any command can follow one that was killed.
"""
