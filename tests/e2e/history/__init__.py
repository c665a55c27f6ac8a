"""Is what happened legal? Real replicas and workers under load and faults, and a checker of what they did.

`python -m tests.e2e.history --store file --seconds 60 --seed 1`, or `make soak`. `checker` has the rules.
"""
