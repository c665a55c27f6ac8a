"""What keeps a create that was given up from happening after all.

A frozen etcd may execute a request long after its caller was told that nobody knows. So each create also compares that
a key of this store's own, the *fence*, does not exist. Once the fence is made, no create that names it can succeed any
more; those that did before are visible to whoever reads after that. The store then goes on with the name of another
fence that is not made, which costs no round trip.

Not guaranteed: beyond `FENCE_TTL_S`, when the lease of a made fence ends, or when somebody removes it by hand.
"""

from __future__ import annotations

import secrets
from typing import Any

from aetcd import rpc

FENCE_TTL_S = 3600.0
"""An etcd that was frozen for longer may execute what it was sent before."""


class Fence:
    """The fence of the creates that are sent from now on."""

    def __init__(self, prefix: bytes) -> None:
        # Beyond the hex keys, where no watch of ours looks.
        self._prefix = prefix + b"~fence/"
        self._name_next(0)

    def passed(self, name: bytes, strays: int) -> None:
        """The fence of this name is made: go on with another. `strays`: how many writes had been given up before."""
        if name == self.name:
            self._name_next(strays)

    def _name_next(self, strays: int) -> None:
        self.name = self._prefix + secrets.token_hex(8).encode()
        self.compare = not_there(self.name)
        self.strays = strays
        """Of the cluster: the writes given up so far. None of them can be a create that still may happen."""


def not_there(name: bytes) -> Any:
    return rpc.Compare(key=name, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)
