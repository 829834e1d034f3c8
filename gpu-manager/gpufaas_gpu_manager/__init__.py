"""The GPU manager of a node: devices, the memory ledger, workers and the fork server that makes them."""
