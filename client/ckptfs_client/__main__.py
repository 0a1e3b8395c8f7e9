"""`python -m ckptfs_client`: the command `ckptfs`."""

from ckptfs_client.cli import main

if __name__ == "__main__":
    main()
