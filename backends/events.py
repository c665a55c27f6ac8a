"""What the claims' events and the registry's have in common."""

from __future__ import annotations

import msgspec


class Reset(msgspec.Struct, frozen=True):
    """Events may have been missed: whatever was read before this must be read again before it is relied on."""

    rewound: bool = False
    """The store is not the one that was read before, or has gone back in time (wiped, restored from a backup): that a
    claim is not there does not mean that it was closed."""
