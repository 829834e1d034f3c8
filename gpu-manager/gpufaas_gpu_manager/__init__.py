"""The GPU manager of a node: devices, the memory ledger, worker processes and the zygote that they are forked from."""
