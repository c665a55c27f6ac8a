"""An example may take its time: beside other tests on a busy machine that says nothing about the rule under test."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
