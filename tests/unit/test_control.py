"""How the control plane is put together; what it answers is for the tests that ask it."""

from __future__ import annotations

from starlette.routing import Route

from app.config import Settings
from app.main import Router, create_app


def router(replica: str) -> Router:
    return create_app(Settings.flat(worker=("http://127.0.0.1:9",), claims="memory://", replica=replica))


def test_no_route_is_left_to_be_made_in_the_loop() -> None:
    """FastAPI makes the routes of an included router when a request first goes past it: tens of milliseconds in which
    no stream goes on. Two routers of one process have those of the admin API in common, and nothing else of it."""
    one, other = router("one"), router("other")
    assert [route for route in one.admin_side.routes if not isinstance(route, Route)] == []
    assert [app.admin_side.state.administration.replica for app in (one, other)] == ["one", "other"]
    theirs = {id(route) for route in other.admin_side.routes}
    shared = [route.path for route in one.admin_side.routes if id(route) in theirs and isinstance(route, Route)]
    assert "/admin/workers" in shared
    assert all(path.startswith("/admin") for path in shared)
