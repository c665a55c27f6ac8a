"""The router: control plane (FastAPI), data plane (on sockets), and the affinity between sessions and targets."""
