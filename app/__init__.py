"""The router: control plane (FastAPI), data plane (raw ASGI), and the affinity between sessions and targets."""
