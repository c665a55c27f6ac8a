"""Claims in etcd."""
