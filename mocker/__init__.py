"""Simulated LLM workers: an OpenAI-compatible server with a KV cache that is only pretended.

A mock answers like a worker (streams, usage, errors), remembers each session's prompts so that `cached_tokens` tells
the truth about affinity, and records every turn that it served, so that tests can read what really happened. It speaks
HTTP only and knows nothing of the router.

`create_mock` makes one worker as an ASGI app, `python -m mocker` runs some.
"""
