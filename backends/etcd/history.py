"""Whether etcd is where it was: a wiped or restored cluster looks like one in which all sessions were closed.

**The rule.** A linearizable answer carries a revision at least as high as that of any answer that was there before its
request began: a read waits for its member to have applied what the leader had committed, and a transaction goes through
the leader. So a lower one, or another cluster's id, is no lagging member, no new leader and no replaced member: the
data is not what it was. Other headers (a watch's, a lease's, a login's) give their member's own revision, which may
lag, and say nothing here.

Not noticed: a cluster of the same id in which, before we looked again, more was written than it had lost.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("coatcheck.store")


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known when a request began."""

    cluster_id: int = 0
    """0: nothing."""
    revision: int = 0
    rewinds: int = 0


class History:
    def __init__(self) -> None:
        self.mark = Mark()
        self.rewound_at = 0.0
        """Of the latest (monotonic)."""

    @property
    def rewinds(self) -> int:
        """How often etcd turned out to have gone back, or to be another one."""
        return self.mark.rewinds

    def heard(self, began: Mark, header: Any) -> None:
        """The header of a linearizable answer to a request that began at this mark."""
        mark = self.mark
        cluster_id, revision = header.cluster_id, header.revision
        if began.rewinds != mark.rewinds:
            return  # on its way when we noticed; it may have been answered before
        if began.cluster_id and cluster_id != began.cluster_id:
            self._rewound(
                cluster_id, revision, "another cluster answers at its address (wiped, or restored as a new one)"
            )
        elif revision < began.revision:
            lost = f"from {began.revision} to {revision}"
            self._rewound(cluster_id, revision, f"its revision went back, {lost} (wiped, or restored from a backup)")
        elif revision > mark.revision or not mark.cluster_id:
            self.mark = Mark(cluster_id, revision, mark.rewinds)

    def _rewound(self, cluster_id: int, revision: int, what: str) -> None:
        self.rewound_at = time.monotonic()
        self.mark = Mark(cluster_id, revision, self.mark.rewinds + 1)
        _log.warning(
            "etcd is not where it was: %s; claims that are gone were not closed, and closed ones may stand again",
            what,
        )
