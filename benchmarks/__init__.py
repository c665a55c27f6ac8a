"""Measurements that back what the documentation says. Not part of the package, and no tests: they judge no change."""
