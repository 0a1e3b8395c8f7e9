"""The transport between nodes: gRPC calls and streams of blocks, both sides."""
