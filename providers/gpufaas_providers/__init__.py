"""
Nodes that are ordered: which kinds are offered, who starts and stops them, and what was paid for them.

`Broker` carries out the engine's orders by a `Provider`, and keeps a `Ledger` of them. It decides about no order.
"""
