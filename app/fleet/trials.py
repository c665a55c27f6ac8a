"""The turns that a worker which is suspected for its turns is given to see how it is: when the next one is due.

Each that fails is a client's, so that they cost little: the first comes after a while; the others a while after the
last one of any replica, as long as each costs a small part of what is placed meanwhile (`Fleet._due`), and else less
and less often. So a worker that is well again is found out soon wherever there are turns, and one that stays sick
costs a fleet of many replicas no more turns than a fleet of two.

Replicas tell each other of theirs. While trials fail, one puts off the next of each other, and that of who tried for
longer: then they take turns, and who is put off often comes before who is put off for the first time, for all of
some replica's trials may fail on the way from there. After one that went well everybody's is due at once.
"""

from __future__ import annotations

_WAITS = (1, 2, 4, 6)
"""So many times as long as until the first one, by how many have failed at any replica, where little is placed."""
_OWN = 1.5
"""So many times as long from one that failed to this replica's next; from another replica's as long as until the first
one."""
_SOONER, _PUT_OFF_AT_MOST = 0.05, 5
"""The part of that by which who was put off comes sooner, for each time since its own; so many times count."""
_RELAPSE = 60.0
"""Seconds: who is suspected again within them must serve twice as many trial turns well."""
_MOST = 16


class Trials:
    """One worker's, at this replica. Times as its owner's clock has them."""

    def __init__(self, first_wait: float, now: float) -> None:
        """`first_wait`: seconds until the first one."""
        self._first_wait = first_wait
        self._soon = self._at = now
        """When the next one is due where it costs a small part of what is placed, and in any case."""
        self.good = 0
        """In a row."""
        self._rose_at = now - _RELAPSE
        self._failed = self._relapses = 0
        self.out = False
        """One has been given, and is not answered."""
        self._put_off = 0
        """How often another replica's has put ours off since our last one."""
        self._hopeful = False
        """One went well, here or elsewhere, since the last one here that failed."""

    def due(self, now: float, *, cheap: bool) -> bool:
        """`cheap`: it would be a small part of what is placed. One that is not answered yet may fail, too."""
        return now >= (self._soon if cheap and not self.out else self._at)

    @property
    def passed(self) -> bool:
        """It has served as many well as it had to."""
        return self.good >= min(1 << self._relapses, _MOST)

    def begin(self, now: float, *, afresh: bool) -> None:
        """It is suspected; `afresh`: for the first time since it was up."""
        if afresh:
            self._relapses = self._relapses + 1 if now - self._rose_at < _RELAPSE else 0
        self.good = self._failed = self._put_off = 0
        self.out = self._hopeful = False
        self._soon = self._at = now + self._first_wait

    def begun(self, now: float) -> None:
        """As long as nothing is heard of it the next one comes as late as if it had failed: who is silent fails late,
        and would be given one after the other until then."""
        if self.out:
            self._failed += 1
        self.out, self._put_off = True, 0
        self._soon = now + self._first_wait * _OWN
        self._at = now + self._wait_after(self._failed + 1)

    def served(self, now: float) -> None:
        """A turn, of a trial or not."""
        self.out, self._hopeful = False, True
        self.good += 1
        self._soon = self._at = now

    def failed(self, now: float) -> None:
        """As above."""
        self.good = 0
        self._hopeful = False
        if self.out:  # it tells how the worker was when it was sent: the next one is due by that
            self.out = False
            self._failed += 1
        else:
            self._soon = max(self._soon, now + self._first_wait)
        self._at = max(self._at, now + self._wait_after(self._failed))

    def rose(self, now: float) -> None:
        """It is up."""
        self._rose_at = now

    def others_begun(self, now: float) -> None:
        """Another replica has given it one."""
        if self._hopeful:
            return
        self._failed += 1  # else it tells at once
        self._put_off = min(self._put_off + 1, _PUT_OFF_AT_MOST)
        part = 1 - _SOONER * self._put_off
        self._soon = max(self._soon, now + part * self._first_wait)
        self._at = max(self._at, now + part * self._wait_after(self._failed))

    def others_served(self, now: float) -> None:
        """And that has gone well."""
        self._hopeful = True
        self._soon, self._at = min(self._soon, now), min(self._at, now)

    def _wait_after(self, failed: int) -> float:
        return self._first_wait * _WAITS[min(failed, len(_WAITS) - 1)]
