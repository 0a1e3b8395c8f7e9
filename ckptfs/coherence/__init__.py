"""How this node's catalog and the store of its cluster come to agree. In etcd is the truth that nodes share; the rows here are this
node's cache of it, and what it has not told yet.

`kinds` says which rows are which keys; `touching` marks what was changed here; `batch` makes one transaction of it; `outcome` takes what
came of that; `applying` takes over what was read; `reading` says what a question depends on. Nothing here waits or speaks to the network.
"""
