"""Adapters that keep the cluster's state in etcd; what they keep is said by the ports of those who use them."""
