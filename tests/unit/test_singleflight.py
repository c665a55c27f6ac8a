"""Work that several callers want is done once, whoever of them leaves, fails or is late."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from backends.singleflight import Abandoned, SingleFlight


class Job:
    """Work that ends when told to, and counts how often it was begun and cancelled."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.ends: list[asyncio.Future[str]] = []

    async def __call__(self) -> str:
        self.begun += 1
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ends.append(end)
        try:
            return await end
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_callers_share_one_answer_and_the_next_one_asks_anew() -> None:
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=True)
    callers = [asyncio.create_task(flights.run("a", job)) for _ in range(3)]
    other = asyncio.create_task(flights.run("b", job))
    await turns()
    assert (job.begun, len(flights)) == (2, 2)
    job.ends[0].set_result("one")
    assert await asyncio.gather(*callers) == ["one"] * 3
    again = asyncio.create_task(flights.run("a", job))
    await turns()
    job.ends[1].set_result("two")
    job.ends[2].set_result("three")
    assert (await other, await again) == ("two", "three")
    assert len(flights) == 0


async def test_every_caller_hears_what_went_wrong() -> None:
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=True)
    callers = [asyncio.create_task(flights.run("a", job)) for _ in range(3)]
    await turns()
    job.ends[0].set_exception(OSError("no"))
    assert [type(each) for each in await asyncio.gather(*callers, return_exceptions=True)] == [OSError] * 3
    assert job.begun == 1


@pytest.mark.parametrize("outlives", [True, False])
async def test_a_cancelled_caller_concerns_no_other(outlives: bool) -> None:
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=outlives)
    first, second = [asyncio.create_task(flights.run("a", job)) for _ in range(2)]
    await turns()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    job.ends[0].set_result("one")
    assert await second == "one"
    assert job.cancelled == 0


@pytest.mark.parametrize("outlives", [True, False])
async def test_what_nobody_waits_for_goes_on_or_ends_as_asked(outlives: bool) -> None:
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=outlives)
    callers = [asyncio.create_task(flights.run("a", job)) for _ in range(2)]
    await turns()
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    await turns()
    assert job.cancelled == (not outlives)
    assert len(flights) == outlives
    if outlives:
        late = asyncio.create_task(flights.run("a", job))
        await turns()
        job.ends[0].set_result("one")
        assert await late == "one"
        assert job.begun == 1


async def test_who_joins_work_that_was_just_given_up_does_it_again_after_it() -> None:
    under_way = 0

    async def slow_to_end() -> str:
        nonlocal under_way
        under_way += 1
        assert under_way == 1, "never two at once"
        try:
            await asyncio.sleep(30 if not gone else 0)
        finally:
            await turns()
            under_way -= 1
        return "two"

    gone: list[bool] = []
    flights: SingleFlight[str, str] = SingleFlight(outlives=False)
    first = asyncio.create_task(flights.run("a", slow_to_end))
    await turns()
    first.cancel()
    await turns(2)
    gone.append(True)
    assert len(flights) == 1
    assert await flights.run("a", slow_to_end) == "two"


@pytest.mark.parametrize("later", range(4))
async def test_who_comes_while_work_that_was_given_up_ends_does_not_spin(later: int) -> None:
    """At any step of its end: also when it is over and nobody has been told yet."""
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=False)
    first = asyncio.create_task(flights.run("a", job))
    await turns()
    first.cancel()
    await turns(later)
    second = asyncio.create_task(flights.run("a", job))
    await turns(10)
    job.ends[1].set_result("two")
    assert await second == "two"


async def test_a_limit_ends_the_wait_and_not_the_work() -> None:
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=True)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await flights.run("a", job, timeout=0.01)
    with pytest.raises(TimeoutError):
        await flights.run("a", job, timeout=-1)
    patient = asyncio.create_task(flights.run("a", job, timeout=5))
    await turns()
    job.ends[0].set_result("one")
    assert await patient == "one"
    assert job.begun == 1


@pytest.mark.parametrize("outlives", [True, False])
async def test_an_exception_that_nobody_waits_for_is_nobodys_news(outlives: bool) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=outlives)
    flights.start("a", job)
    flights.start("a", job)
    left = asyncio.create_task(flights.run("a", job))
    await turns()
    assert job.begun == 1
    job.ends[0].set_exception(OSError("no"))
    left.cancel()
    await asyncio.wait({left})
    await turns()
    del left
    job.ends.clear()
    gc.collect()
    await turns()
    assert not reported
    assert len(flights) == 0


async def test_closed_it_ends_everything_and_begins_nothing() -> None:
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=True)
    callers = [asyncio.create_task(flights.run("a", job)) for _ in range(2)]
    flights.start("b", job)
    await turns()
    await flights.aclose()
    assert (job.cancelled, len(flights)) == (2, 0)
    # They were not cancelled themselves.
    assert [type(each) for each in await asyncio.gather(*callers, return_exceptions=True)] == [Abandoned] * 2
    with pytest.raises(Abandoned):
        await flights.run("a", job)
    flights.start("a", job)
    await flights.aclose()
    assert job.begun == 2


async def test_a_failure_may_be_handed_over_to_those_who_joined() -> None:
    """Each then tries by itself, one at a time; the one whose work it was hears of it."""
    job = Job()
    flights: SingleFlight[str, str] = SingleFlight(outlives=False)

    async def insist() -> str:
        while True:
            with flights.join("a", job) as seat:
                await seat.ended()
                if not seat.handed_over:
                    return seat.result()

    callers = [asyncio.create_task(insist()) for _ in range(3)]
    await turns()
    job.ends[0].set_exception(OSError("first"))
    with pytest.raises(OSError, match="first"):
        await callers[0]
    await turns()
    assert job.begun == 2
    job.ends[1].set_result("two")
    assert await asyncio.gather(*callers[1:]) == ["two"] * 2
