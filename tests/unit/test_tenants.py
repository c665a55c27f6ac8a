"""Whose key a request carries, among others that are none of ours."""

from __future__ import annotations

import hashlib

import pytest

from app.errors import TurnError
from app.http.headers import Noted
from app.sessions.tenants import Tenants, protocols_without_keys
from tests.support.rows import rows

ALICE, AGAIN, BOB = (b"ck-alice", b"ck-alice-2", b"ck-bob")
TENANTS = Tenants(
    {hashlib.sha256(key).hexdigest(): whose for key, whose in ((ALICE, b"alice"), (AGAIN, b"alice"), (BOB, b"bob"))}
)
AUTH, KEY, OFFER = b"authorization", b"x-api-key", b"sec-websocket-protocol"
FOREIGN = b"Bearer sk-other"


@rows(
    ("noted", "goes_on"),
    [
        ({AUTH: [b"Bearer " + ALICE]}, (AUTH, b"Bearer " + ALICE)),
        ({AUTH: [b"bearer  " + ALICE]}, (AUTH, b"bearer  " + ALICE)),
        ({KEY: [ALICE]}, (KEY, ALICE)),
        ({AUTH: [FOREIGN], KEY: [ALICE]}, (KEY, ALICE)),
        ({AUTH: [b"Basic eDp5"], KEY: [ALICE]}, (KEY, ALICE)),
        ({AUTH: [b"Bearer " + ALICE], KEY: [b"sk-ant"]}, (AUTH, b"Bearer " + ALICE)),
        ({AUTH: [FOREIGN, b"Bearer " + ALICE]}, (AUTH, b"Bearer " + ALICE)),
        ({KEY: [b"", b"sk-x", ALICE]}, (KEY, ALICE)),
        ({AUTH: [b"Bearer " + ALICE], KEY: [AGAIN]}, (AUTH, b"Bearer " + ALICE)),
        ({OFFER: [b"realtime, openai-insecure-api-key." + ALICE]}, (AUTH, b"Bearer " + ALICE)),
        ({OFFER: [b"realtime", b"openai-insecure-api-key." + ALICE], AUTH: [FOREIGN]}, (AUTH, b"Bearer " + ALICE)),
    ],
)
def test_one_valid_key_is_enough(noted: Noted, goes_on: tuple[bytes, bytes]) -> None:
    assert TENANTS.recognise(noted) == (b"alice", goes_on)


@pytest.mark.parametrize(
    ("noted", "why"),
    [
        ({}, "no API key was given"),
        ({AUTH: [FOREIGN], KEY: [b"sk"]}, "not valid here"),
        ({OFFER: [b"openai-insecure-api-key.", b"realtime"]}, "no API key"),
        ({AUTH: [b"Bearer " + ALICE], KEY: [BOB]}, "keys of 2 tenants"),
        ({AUTH: [b"Bearer " + ALICE, b"Bearer " + BOB]}, "keys of 2 tenants"),
        ({AUTH: [b"Bearer " + ALICE], OFFER: [b"openai-insecure-api-key." + BOB]}, "keys of 2 tenants"),
    ],
)
def test_none_and_those_of_two_tenants_are_refused(noted: Noted, why: str) -> None:
    with pytest.raises(TurnError, match=why) as refused:
        TENANTS.recognise(noted)
    assert refused.value.code == "invalid_api_key"


def test_offered_protocols_go_on_without_keys() -> None:
    offered = [b"realtime, openai-insecure-api-key.k", b"openai-beta.realtime-v1"]
    assert protocols_without_keys({OFFER: offered}) == b"realtime, openai-beta.realtime-v1"
    assert protocols_without_keys({OFFER: [b"openai-insecure-api-key.k"]}) == b""
