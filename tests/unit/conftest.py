"""An example may take its time: beside other tests on a busy machine that says nothing about the rule under test."""

from __future__ import annotations

from hypothesis import settings

from tests.support.examples import examples

settings.register_profile("no-deadline", deadline=None, max_examples=examples(40))
settings.load_profile("no-deadline")
