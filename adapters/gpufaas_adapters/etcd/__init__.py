"""What a cluster keeps in etcd (docs/etcd-keys.md). `client` is the only module that knows the protocol."""
