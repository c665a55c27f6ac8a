"""`coatcheck demo`: one workload, three ways to a fleet, and what became of caches when things die."""
