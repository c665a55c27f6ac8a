"""Bytes: HTTP/1.1 on both sides. Knows nothing of sessions, and nothing of what a turn is."""
