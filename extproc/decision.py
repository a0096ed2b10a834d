"""Which way a request goes once its body is here, by what it asks for and what the fleet has: decided in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc import openai
from extproc.picking import Need
from extproc.prefixes import Prefix

if TYPE_CHECKING:
    from extproc.fleet.engines import Engine
    from extproc.jsonobject import JsonObject
    from extproc.service import Service

_BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """``bypass`` is why there is no prefill leg, a metric label; empty where there is one."""

    need: Need
    bypass: str
    prefix: Prefix | None = None
    """What the decoder will have cached afterwards, where that is kept track of."""
    decoder: Engine | None = None
    """The decoder that is expected to have most of the prompt cached already."""


def decide(
    service: Service, path: str, body: JsonObject | None, size: int, *, subset: frozenset[str] | None, bypass: str
) -> Decision:
    """``body`` is None where it is no JSON object; ``size`` its bytes. ``bypass``: what the headers have decided."""
    if body is None:
        return Decision(Need(subset=subset), bypass or "not_json")
    routing = service.config.routing
    need = Need(
        model=openai.model(body),
        tokens=size // _BYTES_PER_TOKEN,
        affinity=openai.prompt_hash(body, routing.affinity_bytes) if service.wants_affinity else None,
        subset=subset,
    )
    bypass = bypass or openai.bypass_reason(path, body) or ""
    if not bypass and size < routing.min_prompt_bytes:
        bypass = "small_prompt"
    bypass = bypass or service.why_not_disaggregate(need.model)
    if routing.bypass_cached_ratio is None:
        return Decision(need, bypass)
    prefix = Prefix.of(body)
    if (
        prefix is not None
        and not bypass
        and (decoder := _cached_on(service, need, prefix, routing.bypass_cached_ratio))
    ):
        return Decision(need, "cached_prefix", prefix, decoder)
    return Decision(need, bypass, prefix)


def _cached_on(service: Service, need: Need, prefix: Prefix, enough: float) -> Engine | None:
    """The decoder that is expected to have so much of the prompt that a prefill leg does not pay."""
    usable = service.fleet.usable("decode", need)
    best, ratio = service.prefixes.best(prefix, [engine for engine in usable if not engine.full])
    return best if ratio >= enough else None
