"""Which decoders a request is for: picked, reserved, and named as Envoy wants them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from extproc.errors import RequestError
from extproc.fleet.engines import Engine, Reservation
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

if TYPE_CHECKING:
    from extproc.fleet.fleet import Fleet
    from extproc.picking import Need

_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"


@dataclass(frozen=True, slots=True)
class Destination:
    """A reserved decoder and the alternatives that Envoy may turn to when it refuses the connection."""

    reservation: Reservation
    endpoints: str
    """``ip:port[,ip:port…]``, best first."""
    pairing: tuple[str, str]
    rank: int | None
    """X-data-parallel-rank, where every one of the endpoints has it."""


def subset_hint(message: ext_proc.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that the gateway limits the choice to, or None (the endpoint-picker protocol's subset hint)."""
    namespaces = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE not in namespaces or _SUBSET_KEY not in namespaces[_SUBSET_NAMESPACE].fields:
        return None
    value = namespaces[_SUBSET_NAMESPACE].fields[_SUBSET_KEY]
    listed = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
    return frozenset(endpoint.strip() for endpoint in listed if endpoint.strip())


def known_model(fleet: Fleet, need: Need) -> bool:
    """Whether some decoder serves the model. What none is known to serve is an engine's to judge."""
    return any(engine.serves(need.model) for engine in fleet.engines("decode"))


def choose(fleet: Fleet, need: Need, count: int, *, paired: bool) -> Destination:
    """Reserve the best decoder, with up to ``count - 1`` alternatives of the same pairing.

    ``paired``: one that a usable prefiller can hand over to, where there is any such pair. Raises RequestError: 503
    when no decoder is ready, 429 when all are at their cap.
    """
    if need.model is not None and not known_model(fleet, need):
        need = replace(need, model=None)
    pairings = {engine.pairing for engine in fleet.usable("prefill", replace(need, subset=None))} if paired else set()
    choices = fleet.preferences("decode", need, where=lambda engine: engine.pairing in pairings) if pairings else []
    if not choices:
        choices = fleet.preferences("decode", need)
    if not choices:
        if fleet.usable("decode", need):
            raise RequestError(
                429,
                "decoders_busy",
                "All decode engines are at their limit.",
                type="rate_limit_error",
                headers={"retry-after": "1"},
            )
        raise RequestError(503, "no_decoder", "No decode engine is ready.", headers={"retry-after": "1"})
    best = choices[0]
    listed = [engine for engine in choices if engine.pairing == best.pairing][:count]
    ranks = min(engine.spec.data_parallel_size for engine in listed)
    return Destination(
        reservation=fleet.reserve_engine(best, need),
        endpoints=",".join(_endpoint(engine) for engine in listed),
        pairing=best.pairing,
        rank=best.picked % ranks if ranks > 1 else None,
    )


def _endpoint(engine: Engine) -> str:
    assert engine.endpoint is not None  # usable engines have an address
    return engine.endpoint
