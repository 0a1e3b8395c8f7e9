"""The places on this node that hold bytes: ram, nvme and pfs."""
