"""`python -m ckptfs_client`: the command `ckptfs`."""

from ckptfs_client.entry import main

if __name__ == "__main__":
    main()
