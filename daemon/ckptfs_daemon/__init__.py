"""The process: adapters and wiring of `ckptfsd`."""
