"""Where a session goes first."""

from __future__ import annotations

from collections import Counter

import pytest

from app.errors import TurnError
from app.fleet.policies import POLICIES, Policy, direct, least_loaded, rendezvous, round_robin
from app.fleet.workers import Fleet, Target, make_worker
from app.sessions.identity import KeyHasher


def targets(count: int) -> list[Target]:
    return [
        make_worker(f"http://h:{number + 1}", name=f"w{number}", connect_limit=1, idle_limit=1).targets[0]
        for number in range(count)
    ]


def name(target: Target) -> str:
    return target.worker.name


hasher = KeyHasher()
KEYS = [hasher.key(b"", b"%d" % number) for number in range(3000)]


def test_the_settings_names() -> None:
    assert {"least-loaded": least_loaded, "round-robin": round_robin, "direct": direct} == POLICIES


class Placing:
    """Picks by a policy and acts on it."""

    def __init__(self, policy: Policy, count: int = 3) -> None:
        self.policy, self.targets = policy, targets(count)
        self.fleet = Fleet(target.worker for target in self.targets)

    def __call__(self) -> Target:
        target = self.policy(self.targets)
        self.fleet.note_placed(target)
        return target


def test_direct_places_nothing() -> None:
    with pytest.raises(TurnError) as caught:
        direct(targets(3))
    assert caught.value.code == "hint_required"


@pytest.mark.parametrize("policy", [least_loaded, round_robin])
def test_a_policy_only_looks(policy: Policy) -> None:
    """Asked again it says the same, as long as nobody has acted on it."""
    place = Placing(policy)
    for _ in range(7):
        told = policy(place.targets)
        assert policy(place.targets) is told
        assert place() is told


def test_least_loaded_takes_the_least_loaded() -> None:
    place = Placing(least_loaded)
    for load in ((2, 1, 3), (0, 5, 5), (9, 9, 8)):
        for target, turns in zip(place.targets, load, strict=True):
            target.in_flight = turns
        for _ in range(4):  # whoever was given something last
            assert place().in_flight == min(load)


def test_least_loaded_counts_claims_being_made() -> None:
    place = Placing(least_loaded)
    for _ in range(30):
        place().reserved += 1
    assert [target.reserved for target in place.targets] == [10, 10, 10]


def test_least_loaded_spreads_what_comes_one_at_a_time() -> None:
    place = Placing(least_loaded)
    assert Counter(name(place()) for _ in range(30)) == {"w0": 10, "w1": 10, "w2": 10}


def test_round_robin() -> None:
    place = Placing(round_robin)
    assert [name(place()) for _ in range(6)] == ["w0", "w1", "w2"] * 2
    place.targets[0].in_flight = 100
    assert Counter(name(place()) for _ in range(6)) == {"w0": 2, "w1": 2, "w2": 2}


def test_round_robin_goes_on_when_one_of_them_cannot_be_chosen_for_a_while() -> None:
    place = Placing(round_robin)
    assert name(place()) == "w0"
    away = place.targets.pop(0)
    assert [name(place()) for _ in range(3)] == ["w1", "w2", "w1"]
    place.targets.append(away)
    assert [name(place()) for _ in range(3)] == ["w0", "w2", "w1"]


@pytest.mark.parametrize("policy", [least_loaded, round_robin])
def test_policies_take_any_number_of_candidates(policy: Policy) -> None:
    for count in (1, 5, 2, 1, 3):
        some = targets(count)
        assert policy(some) in some


def test_fleets_share_nothing() -> None:
    Placing(round_robin)()
    assert name(Placing(round_robin)()) == "w0"


def test_rendezvous_does_not_depend_on_the_order_or_the_load() -> None:
    five = targets(5)
    for key in KEYS[:100]:
        place = rendezvous(key, five)
        place.in_flight += 7
        assert rendezvous(key, five[::-1]) is place
        assert rendezvous(key, five[2:] + five[:2]) is place


def test_rendezvous_spreads_evenly() -> None:
    counted = Counter(name(rendezvous(key, targets_)) for targets_ in [targets(6)] for key in KEYS)
    assert len(counted) == 6
    assert all(400 < count < 600 for count in counted.values())  # 500 each; 5 standard deviations are 102


def test_only_the_lost_workers_sessions_move_and_they_spread() -> None:
    six = targets(6)
    before = {key: rendezvous(key, six) for key in KEYS}
    left = [target for target in six if name(target) != "w3"]
    moved: Counter[str] = Counter()
    for key, place in before.items():
        now = rendezvous(key, left)
        if name(place) == "w3":
            moved[name(now)] += 1
        else:
            assert now is place
    assert len(moved) == 5
    assert min(moved.values()) > 60  # not all to the same next one: 100 each


def test_rendezvous_tells_ranks_apart() -> None:
    worker = targets(1)[0].worker
    ranks = [Target(worker, rank) for rank in range(4)]
    counted = Counter(rendezvous(key, ranks).rank for key in KEYS)
    assert len(counted) == 4
    assert min(counted.values()) > 600


def test_rendezvous_is_the_same_in_every_version() -> None:
    """Replicas of two versions run side by side during an update."""
    assert [name(rendezvous(key, targets(4))) for key in KEYS[:8]] == ["w2", "w1", "w0", "w1", "w0", "w0", "w1", "w2"]
