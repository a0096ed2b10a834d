"""Tickets: what comes back is what went out, or nothing."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc import config
from extproc.errors import ConfigError
from extproc.ticket import MAX_CHARS, VERSION, Ticket, TicketError, TicketSigner, signer

# A slow machine is no failure.
_STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NOW = 1_800_000_000.0


def _ticket(**changes: Any) -> Ticket:
    values: dict[str, Any] = {
        "version": VERSION,
        "connector": "nixl",
        "prefiller": "10.0.0.7:8000",
        "request_id": "chatcmpl-3f2a-bb647e8b",
        "issued_at": NOW - 1,
        "lease_s": 30.0,
        "data": {"tp_size": 2, "endpoints": [["10.0.0.7", [30000, 30001]]]},
    }
    return Ticket(**(values | changes))


def _reason(text: str, by: TicketSigner, now: float = NOW) -> str:
    with pytest.raises(TicketError) as refusal:
        by.open(text, now=now)
    assert str(refusal.value) == refusal.value.reason
    return refusal.value.reason


_plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20)
_data = st.dictionaries(
    st.text(max_size=10),
    _plain | st.lists(_plain, max_size=3) | st.dictionaries(st.text(max_size=5), _plain),
    max_size=4,
)


@settings(_STEADY, max_examples=60)
@given(
    st.binary(max_size=40), st.text(max_size=40), st.text(max_size=60), st.floats(0, 4e9), st.floats(1e-3, 1e9), _data
)
def test_a_sealed_ticket_opens_to_what_it_was(
    key: bytes, prefiller: str, request_id: str, issued_at: float, lease_s: float, data: dict[str, Any]
) -> None:
    ticket = _ticket(prefiller=prefiller, request_id=request_id, issued_at=issued_at, lease_s=lease_s, data=data)

    text = TicketSigner(key).seal(ticket)

    assert TicketSigner(key).open(text, now=issued_at) == ticket
    assert text.isascii()
    assert all(character.isalnum() or character in "-_" for character in text)


def test_a_ticket_is_small() -> None:
    ticket = _ticket(request_id="chatcmpl-" + "f" * 36 + "-0a1b2c3d", data={"params": b"x" * 420, "tp_size": 8})

    assert len(TicketSigner(b"k").seal(ticket)) < 800


def test_a_ticket_names_its_handoff() -> None:
    assert _ticket().handoff_id == ("10.0.0.7:8000", "chatcmpl-3f2a-bb647e8b")


# ── forgery ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_of_any_byte_is_noticed() -> None:
    sign = TicketSigner(b"key")
    text = sign.seal(_ticket())
    sealed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))

    for position in range(len(sealed)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(sealed)
            changed[position] ^= flip
            forged = base64.urlsafe_b64encode(changed).decode().rstrip("=")
            assert _reason(forged, sign) == "forged"


def test_no_change_of_a_character_gives_another_ticket() -> None:
    sign = TicketSigner(b"key")
    ticket = _ticket()
    text = sign.seal(ticket)

    for position in range(len(text)):
        for other in "A_~é":
            changed = text[:position] + other + text[position + 1 :]
            with contextlib.suppress(TicketError):
                assert sign.open(changed, now=NOW) == ticket  # the last character has spare bits


def test_every_truncation_is_refused() -> None:
    sign = TicketSigner(b"key")
    text = sign.seal(_ticket())

    assert {_reason(text[:length], sign) for length in range(len(text))} == {"forged", "malformed"}
    assert _reason(text + "AAAA", sign) == "forged"


@settings(_STEADY, max_examples=100)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_junk_is_refused(text: str) -> None:
    assert _reason(text, TicketSigner(b"key")) in ("forged", "malformed")


@pytest.mark.parametrize("text", ["", "=", "A", "AAAA", "A" * 21, "ticket", "\ud800", "a b c d", "AAAA\nAAAA" * 8])
def test_what_is_no_ticket_at_all_is_malformed(text: str) -> None:
    assert _reason(text, TicketSigner(b"key")) == "malformed"


def test_an_oversized_ticket_is_refused_unread() -> None:
    sign = TicketSigner(b"key")
    largest = "A" * MAX_CHARS

    assert _reason(largest, sign) == "forged"
    assert _reason(largest + "A", sign) == "oversize"
    assert _reason(sign.seal(_ticket(data={"pad": b"x" * MAX_CHARS})), sign) == "oversize"


def test_another_key_opens_nothing() -> None:
    text = TicketSigner(b"one").seal(_ticket())

    assert _reason(text, TicketSigner(b"two")) == "forged"
    assert _reason(text, TicketSigner(b"")) == "forged"


# ── age and version ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_ticket_ends_with_its_lease() -> None:
    sign = TicketSigner(b"key")
    text = sign.seal(_ticket(issued_at=NOW, lease_s=30.0))

    assert sign.open(text, now=NOW + 29.999).request_id == "chatcmpl-3f2a-bb647e8b"
    assert sign.open(text, now=NOW - 5).request_id == "chatcmpl-3f2a-bb647e8b"  # from a replica whose clock is ahead
    assert _reason(text, sign, NOW + 30.0) == "expired"


def test_the_clock_is_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    sign = TicketSigner(b"key")
    text = sign.seal(_ticket(issued_at=NOW, lease_s=30.0))

    monkeypatch.setattr("time.time", lambda: NOW + 29)
    assert sign.open(text) == _ticket(issued_at=NOW)
    monkeypatch.setattr("time.time", lambda: NOW + 31)
    with pytest.raises(TicketError, match="expired"):
        sign.open(text)


@pytest.mark.parametrize("version", [0, VERSION + 1])
def test_another_version_is_refused(version: int) -> None:
    sign = TicketSigner(b"key")

    assert _reason(sign.seal(_ticket(version=version)), sign) == "version"


@pytest.mark.parametrize("payload", [["1"], [1, 2, 3], {"version": 1}, "ticket", 7, b""])
def test_what_another_version_might_have_signed_is_refused(payload: Any) -> None:
    sign = TicketSigner(b"key")
    raw = msgspec.msgpack.encode(payload)
    text = base64.urlsafe_b64encode(raw + sign._mac(raw)).decode().rstrip("=")

    assert _reason(text, sign) == "version"


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _configured(**values: Any) -> TicketSigner:
    fleet = {"prefill": [{"url": "http://10.0.0.7:8000"}], "decode": [{"url": "http://10.0.0.8:8000"}]}
    return signer(config.build({"fleet": fleet | values.pop("fleet", {}), **values}))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"fleet": {"api_key": "sk-1"}},
        {"release": {"ticket_key": "a secret"}},
        {"fleet": {"prefill": [{"url": "http://p:1", "api_key": "sk-p"}]}},
    ],
)
def test_replicas_with_equal_configuration_open_each_others_tickets(values: dict[str, Any]) -> None:
    ticket = _ticket()

    assert _configured(**values).open(_configured(**values).seal(ticket), now=NOW) == ticket


def test_what_has_nothing_to_do_with_the_engines_may_differ() -> None:
    other = _configured(prefill={"timeout_s": 5}, log={"level": "debug"}, fleet={"scrape_s": 0, "lease_s": 31})

    assert other.open(_configured().seal(_ticket()), now=NOW) == _ticket()


@pytest.mark.parametrize(
    "values",
    [
        {"fleet": {"api_key": "sk-2"}},
        {"fleet": {"decode": [{"url": "http://10.0.0.9:8000"}]}},
        {"fleet": {"prefill": [{"url": "http://10.0.0.8:8000"}], "decode": [{"url": "http://10.0.0.7:8000"}]}},
        {"fleet": {"prefill": [{"url": "http://10.0.0.7:8000", "api_key": "sk-p"}]}},
        {"fleet": {"dns": [{"role": "prefill", "name": "p.local"}]}},
        {"release": {"ticket_key": "k"}},
    ],
)
def test_another_fleet_or_key_opens_nothing(values: dict[str, Any]) -> None:
    assert _reason(_configured().seal(_ticket()), _configured(**values)) == "forged"


def test_keys_of_engines_are_part_of_the_key() -> None:
    one = _configured(fleet={"dns": [{"role": "prefill", "name": "p.local", "api_key": "sk-1"}]})
    two = _configured(fleet={"dns": [{"role": "prefill", "name": "p.local", "api_key": "sk-2"}]})

    assert _reason(one.seal(_ticket()), two) == "forged"


def test_a_configured_key_counts_alone() -> None:
    one = _configured(release={"ticket_key": "shared"}, fleet={"api_key": "sk-1"})
    two = _configured(release={"ticket_key": "shared"}, fleet={"decode": [{"url": "http://other:1"}]})

    assert two.open(one.seal(_ticket()), now=NOW) == _ticket()


def test_an_empty_key_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset variable must not lead to a key that everybody knows."""
    with pytest.raises(ConfigError, match=r"release\.ticket_key: must not be empty"):
        _configured(release={"ticket_key": ""})
    monkeypatch.setenv("EXTPROC_RELEASE__TICKET_KEY", "")
    assert _reason(TicketSigner(b"").seal(_ticket()), _configured(fleet={"api_key": "sk-1"})) == "forged"
