"""
Adapters: what implements a port of another room with SQLite, files, etcd or S3.

A port is declared beside its consumer, an adapter imports it from there. Only `gpufaas_apps` imports adapters.
"""
