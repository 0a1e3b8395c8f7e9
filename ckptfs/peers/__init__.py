"""The transport between nodes: gRPC calls and encrypted bulk connections, both sides."""
