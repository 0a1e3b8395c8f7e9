"""The shared key-value store: an interface, and etcd behind it."""
