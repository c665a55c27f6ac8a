"""The client libraries that people use, before two replicas: `make test-clients`, never `make test`.

Each library lives in an environment of its own below `.bench/clients/` (`install.py`), where a script of `py/` or `js/`
does with it what its users do and prints what it saw. `promises.py` compares that with what the workers recorded.
"""
