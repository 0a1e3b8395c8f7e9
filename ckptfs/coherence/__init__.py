"""Agreement of this node's catalog with the store of its cluster.

The store holds the truth that nodes share. The rows of this catalog cache it, and hold changes that are not published yet.

`keys` maps rows to keys and values; `key_state` marks changes; `commit` builds transactions and records their outcome; `conflict` resolves
rejected ones; `read` loads what a question depends on. Nothing in this package waits or uses the network directly.
"""
