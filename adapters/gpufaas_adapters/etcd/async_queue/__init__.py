"""
The asynchronous calls of a cluster, in etcd (port: `gpufaas_async_calls.ports.AsyncQueue`).

Each call belongs to the gateway that accepted it; to claim one of its own, a gateway only notes it in memory, and
writes nothing. When a gateway's lease ends, the others take its calls over. Each change of a call is made on condition
that it was not changed since it was read, so that of two gateways that believe to own a call one succeeds. Executed
twice are only the calls that a gateway had claimed when it died or lost its lease.
"""

from gpufaas_adapters.etcd.async_queue.queue import EtcdAsyncQueue

__all__ = ["EtcdAsyncQueue"]
