"""Which decoders a request is for: picked, reserved, and named as Envoy wants them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Final

from extproc.errors import RequestError
from extproc.fleet.engines import Engine, Reservation
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.picking import Need
from extproc.replies import LB_NAMESPACE

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Value

    from extproc.fleet.fleet import Fleet, Pairing

_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
_SERVED_KEY: Final = "x-gateway-destination-endpoint-served"


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
    value = _metadata(message, _SUBSET_NAMESPACE, _SUBSET_KEY)
    if value is None:
        return None
    listed = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
    return frozenset(endpoint.strip() for endpoint in listed if endpoint.strip())


def served(message: ext_proc.ProcessingRequest) -> str | None:
    """The endpoint that the gateway says it used, in a message of the response; None where it does not say."""
    value = _metadata(message, LB_NAMESPACE, _SERVED_KEY)
    return value.string_value or None if value is not None else None


def _metadata(message: ext_proc.ProcessingRequest, namespace: str, key: str) -> Value | None:
    namespaces = message.metadata_context.filter_metadata
    # Reading a map of messages creates what is absent.
    return (
        namespaces[namespace].fields[key] if namespace in namespaces and key in namespaces[namespace].fields else None
    )


def moved(fleet: Fleet, held: Reservation, endpoint: str) -> Reservation:
    """The reservation, on the decoder that really serves the request; the one held is then given back."""
    engine = fleet.decoder_at(endpoint)
    if engine is None or engine is held.engine:
        return held
    held.release()
    return fleet.reserve_engine(engine, Need(tokens=held.tokens))


def known_model(fleet: Fleet, need: Need) -> bool:
    """Whether some decoder serves the model. What none is known to serve is an engine's to judge."""
    return any(engine.serves(need.model) for engine in fleet.engines("decode"))


def choose(fleet: Fleet, need: Need, count: int, *, paired: bool, first: Engine | None = None) -> Destination:
    """Reserve the best decoder, or ``first`` where that one can take it, with up to ``count - 1`` alternatives.

    ``paired``: one that a usable prefiller can hand over to, where there is any such pair, and alternatives of its
    pairing only; otherwise those of its pairing come first. Raises RequestError: 503 when no decoder is ready, 429 when
    all are at their cap.
    """
    if need.model is not None and not known_model(fleet, need):
        need = replace(need, model=None)
    pairings: set[Pairing] | None = None
    if paired and len(fleet.pairings) > 1:
        prefillers = fleet.usable("prefill", replace(need, subset=None))
        pairings = {engine.pairing for engine in prefillers}
        pairings.intersection_update(engine.pairing for engine in fleet.usable("decode", need))
    choices = fleet.preferences("decode", need, pairings=pairings or None)
    if not choices:
        raise _nothing_to_choose(fleet, need)
    best = first if first in choices else choices[0]
    choices = [best, *(engine for engine in choices if engine is not best)]
    akin = [engine for engine in choices if engine.pairing == best.pairing]
    others = [] if paired else [engine for engine in choices if engine.pairing != best.pairing]
    listed = [*akin, *others][:count]
    if any(engine.pairing != best.pairing or not engine.serves(need.model) for engine in fleet.engines("decode")):
        # Envoy retries that often, and after the last of the list on any decoder of its cluster: one that serves
        # another model, or that a stranger's params could kill.
        listed = list(islice(cycle(listed), count))
    reservation = fleet.reserve_engine(best, need)
    return Destination(
        reservation=reservation,
        endpoints=",".join(_endpoint(engine) for engine in listed),
        pairing=best.pairing,
        rank=reservation.rank(min(engine.spec.data_parallel_size for engine in listed)),
    )


def _nothing_to_choose(fleet: Fleet, need: Need) -> RequestError:
    if fleet.usable("decode", need):
        text = "All decode engines are at their limit."
        return RequestError(429, "decoders_busy", text, type="rate_limit_error", headers={"retry-after": "1"})
    return RequestError(503, "no_decoder", "No decode engine is ready.", headers={"retry-after": "1"})


def _endpoint(engine: Engine) -> str:
    assert engine.endpoint is not None  # usable engines have an address
    return engine.endpoint
