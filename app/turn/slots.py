"""A turn's slots, where the turns of targets or tenants are limited: one for each attempt, and the waits for them."""

from __future__ import annotations

from app.fleet.capacity import ANYTHING, Bounds, Capacity, Choice, Slot
from app.fleet.workers import Target
from app.turn.presence import Presence


class Slots:
    """What one turn has of the capacity. It holds a slot from when it is ready, or has waited, until its attempt takes
    it (`hand_over`); `give_back` when the turn ends."""

    __slots__ = ("_began", "_beside", "_bounds", "_capacity", "_presence", "_slot", "_stays", "_tenant", "_until")

    def __init__(
        self,
        capacity: Capacity,
        bounds: Bounds,
        tenant: bytes,
        presence: Presence,
        began: float,
        *,
        beside: bool = False,
    ) -> None:
        """`beside`: they come to others that the turn holds."""
        self._beside = beside
        self._capacity, self._bounds, self._tenant = capacity, bounds, tenant
        self._presence, self._began = presence, began
        self._slot: Slot | None = None
        self._until = 0.0
        """When it has waited as long as it may, in the loop's time; 0: it has not waited yet. One bound for all waits
        of a turn."""
        self._stays = False
        """It has been told once that its worker is lost, and has found no other."""

    @property
    def allowed(self) -> bool:
        """The turn's tenant may have it now."""
        return self._slot is not None or self._capacity.allows(self._tenant)

    def ready(self, target: Target) -> bool:
        """There is a slot at `target`, and it is held now. False: then `wait`."""
        slot = self._slot
        if slot is not None:
            if slot.target is target:
                return True
            slot.give_back()
        self._slot = slot = self._capacity.take(self._tenant, target, beside=self._beside)
        return slot is not None

    async def wait(self, target: Target | None, choice: Choice = ANYTHING, *, stays: bool = False) -> Target | None:
        """Wait in place for a slot at `target`, or (None) at any of the `choice`; one that is held elsewhere is given
        back. Returns where it is held then; None when the worker of `target` is lost and the choice has another one:
        unless it `stays`, told once in a turn. Raises Full or ClientDisconnected."""
        self.give_back()
        self._until = self._until or self._presence.loop.time() + self._bounds.wait
        capacity = self._capacity
        waiter = capacity.wait(
            self._tenant,
            target,
            choice=choice,
            began=self._began,
            until=self._until,
            stays=stays or self._stays,
            beside=self._beside,
        )
        try:
            await self._presence.unless_gone_before(waiter.wake, lambda: capacity.leave(waiter))
        except BaseException:  # also when the turn is cut: what was given meanwhile goes to the next one
            capacity.leave(waiter)
            raise
        if waiter.refusal is not None:
            raise waiter.refusal
        self._slot = waiter.slot
        if waiter.slot is None:
            self._stays = True
            return None
        return waiter.slot.target

    def hand_over(self) -> Slot | None:
        """Who gets it gives it back."""
        slot, self._slot = self._slot, None
        return slot

    def give_back(self) -> None:
        """Idempotent."""
        slot = self.hand_over()
        if slot is not None:
            slot.give_back()
