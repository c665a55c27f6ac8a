"""Claims as files in a shared folder. `store` says what is promised."""

from backends.file.store import FileStore

__all__ = ["FileStore"]
