"""What a claim means by a worker's name where replicas do not agree on names."""

from __future__ import annotations

from collections.abc import Mapping

from app.fleet.naming import Naming, Place
from app.fleet.workers import Fleet, Target, make_worker


def fleet(**workers: str) -> Fleet:
    """By name; a URL may have `,RANKS` behind it."""
    parts = [(name, *url.partition(",")[::2]) for name, url in workers.items()]
    return Fleet(
        make_worker(url, name=name, ranks=int(ranks or 0), connect_limit=1, idle_limit=1) for name, url, ranks in parts
    )


def learn(names: Naming, said: Mapping[str, tuple[str, Mapping[str, Place]]]) -> None:
    for _ in names.learn(said):
        pass


def spoken(target: Target | None) -> tuple[str, int | None] | None:
    return None if target is None else (target.worker.name, target.rank)


def test_names_that_agree_are_the_fleets_own() -> None:
    ours = fleet(a="http://h:1", b="http://h:2")
    names = Naming(ours, "net")
    learn(names, {"other": ("elsewhere", {"a": Place("http://h:1"), "b": Place("http://h:2")})})
    assert names.find("a", None, "other") is ours.find("a", None)
    assert names.find("c", None, "other") is None


def test_a_name_that_is_not_ours_means_the_worker_at_its_url() -> None:
    names = Naming(fleet(a="http://h:1"), "net")
    learn(names, {"other": ("elsewhere", {"x": Place("http://h:1"), "y": Place("http://h:9")})})
    assert spoken(names.find("x", None, "other")) == ("a", None)
    assert spoken(names.find("x", None, "one that is gone")) == ("a", None)
    assert names.find("y", None, "other") is None, "it is none of ours"


def test_swapped_names_mean_what_their_maker_means() -> None:
    names = Naming(fleet(a="http://h:1", b="http://h:2"), "net")
    learn(names, {"other": ("elsewhere", {"a": Place("http://h:2"), "b": Place("http://h:1")})})
    assert spoken(names.find("a", None, "other")) == ("b", None)
    assert spoken(names.find("a", None, "ourselves")) == ("a", None)


def test_a_loopback_is_that_of_one_network() -> None:
    names = Naming(fleet(a="http://127.0.0.1:1"), "net")
    learn(names, {"same": ("net", {"x": Place("http://localhost:1")}), "far": ("far", {"y": Place("http://[::1]:1")})})
    assert spoken(names.find("x", None, "same")) == ("a", None)
    assert names.find("y", None, "far") is None


def test_ranks_that_only_the_other_knows_are_served_there() -> None:
    names = Naming(fleet(a="http://h:1", b="http://h:2,2"), "net")
    learn(names, {"other": ("net", {"a": Place("http://h:1", 4), "b": Place("http://h:2")})})
    rank = names.find("a", 3, "other")
    assert spoken(rank) == ("a", 3)
    assert names.find("a", 3, "other") is rank, "always the same one"
    assert names.find("a", 4, "other") is None
    assert spoken(names.find("b", None, "other")) == ("b", None)
    assert spoken(names.find("b", 1, "ourselves")) == ("b", 1)


def test_what_is_mended_is_forgotten() -> None:
    names = Naming(fleet(a="http://h:1"), "net")
    learn(names, {"other": ("net", {"x": Place("http://h:1")})})
    learn(names, {"other": ("net", {"a": Place("http://h:1")})})
    assert names.find("x", None, "other") is None


def test_a_spot_is_found_by_its_place() -> None:
    here, there = Naming(fleet(a="http://127.0.0.1:1"), "net"), Naming(fleet(x="http://localhost:1"), "net")
    [worker] = fleet(x="http://localhost:1")
    assert spoken(here.at(there.spot(worker.targets[0]))) == ("a", None)
    far = Naming(fleet(x="http://localhost:1"), "far")
    assert here.at(far.spot(worker.targets[0])) is None
