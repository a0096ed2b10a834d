"""Envoy follows the fleet: an endpoint discovery service (EDS, state of the world) on the service's own gRPC port.

Envoy asks for a cluster by name; whatever the name, it gets the decoders. Every change of the fleet is pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from google.protobuf import any_pb2

from extproc.fleet.engines import Engine
from extproc.fleet.fleet import Fleet
from extproc.pb.envoy.config.core.v3 import address_pb2, health_check_pb2
from extproc.pb.envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from extproc.pb.envoy.service.discovery.v3 import discovery_pb2
from extproc.pb.envoy.service.endpoint.v3 import eds_pb2_grpc
from extproc.telemetry.logs import log

_PATIENCE_S: Final = 10.0
"""For sources and names that fail from the start of the process. An Envoy that knows no hosts has none meanwhile."""

TYPE_URL: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def assignment(cluster: str, decoders: Sequence[Engine]) -> endpoint_pb2.ClusterLoadAssignment:
    """The decoders as hosts of a cluster, in a stable order.

    Those that take no new work stay listed while they belong to the fleet, as DRAINING or UNHEALTHY, so that their
    running requests end in peace.
    """
    states: dict[tuple[str, int], health_check_pb2.HealthStatus] = {}
    for engine in sorted(decoders, key=lambda engine: engine.url):
        if engine.address is None:
            continue
        key = engine.address, engine.port
        # Two URLs may lead to one host; it is as well as the better of the two.
        states[key] = min(states.get(key, _state(engine)), _state(engine))
    hosts = []
    for (address, port), state in states.items():
        socket = address_pb2.SocketAddress(address=address, port_value=port)
        endpoint = endpoint_components_pb2.Endpoint(address=address_pb2.Address(socket_address=socket))
        hosts.append(endpoint_components_pb2.LbEndpoint(endpoint=endpoint, health_status=state))
    group = endpoint_components_pb2.LocalityLbEndpoints(lb_endpoints=hosts)
    return endpoint_pb2.ClusterLoadAssignment(cluster_name=cluster, endpoints=[group])


def _state(engine: Engine) -> health_check_pb2.HealthStatus:
    """HEALTHY is the smallest of the three numbers."""
    if engine.draining:
        return health_check_pb2.DRAINING
    return health_check_pb2.UNHEALTHY if engine.health.probed_ok is False else health_check_pb2.HEALTHY


class EndpointDiscovery(eds_pb2_grpc.EndpointDiscoveryServiceServicer):
    """``envoy.service.endpoint.v3.EndpointDiscoveryService``."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._versions = itertools.count(1)
        self._closing = False
        self._streams: set[asyncio.Event] = set()  # what wakes each
        self._complete = False
        self._patient_until = time.monotonic() + _PATIENCE_S

    async def StreamEndpoints(  # noqa: N802 (gRPC's name)
        self,
        request_iterator: AsyncIterator[discovery_pb2.DiscoveryRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One Envoy's subscription: answered at once, then on every change, until it leaves or we drain."""
        changed = asyncio.Event()
        self._streams.add(changed)
        self._fleet.on_change(changed.set)
        subscription = _Subscription()
        reader = asyncio.create_task(self._read(request_iterator, subscription, changed), name="eds requests")
        sent: bytes | None = None
        try:
            while not reader.done() and not self._closing:
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait({waiting, reader}, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                changed.clear()
                if not subscription.names or not self._knows_the_fleet():
                    continue
                response = self._response(subscription)
                content = b"".join(resource.value for resource in response.resources)
                if content != sent or subscription.asked_anew:
                    subscription.asked_anew = False
                    sent = content
                    subscription.nonce = response.nonce = response.version_info = str(next(self._versions))
                    await context.write(response)
        finally:
            self._streams.discard(changed)
            self._fleet.remove_listener(changed.set)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
                await reader

    async def _read(
        self,
        requests: AsyncIterator[discovery_pb2.DiscoveryRequest],
        subscription: _Subscription,
        changed: asyncio.Event,
    ) -> None:
        async for request in requests:
            if request.HasField("error_detail"):
                log.error("Envoy refused the endpoints", reason=request.error_detail.message[:500])
            if request.response_nonce and request.response_nonce != subscription.nonce:
                continue  # an answer to an older push
            names = tuple(request.resource_names)
            if names != subscription.names or not request.response_nonce:
                subscription.names = names
                subscription.asked_anew = True
                changed.set()

    def _knows_the_fleet(self) -> bool:
        """Whether all decoders have ever been known at once: every source has told its own, and every name its address.

        A service that has just started must not take decoders from an Envoy that knows them already from another one.
        What fails from the start is not waited for without an end, but there must be one decoder at least.
        """
        if not self._complete:
            addresses = [engine.address for engine in self._fleet.engines("decode")]
            out_of_patience = time.monotonic() >= self._patient_until
            self._complete = any(addresses) and (out_of_patience or (all(addresses) and not self._fleet.awaited))
        return self._complete

    def _patience(self) -> float | None:
        """Seconds for which the whole fleet is still waited for; None where it is not."""
        left = self._patient_until - time.monotonic()
        return None if self._complete or left <= 0 else left

    def _response(self, subscription: _Subscription) -> discovery_pb2.DiscoveryResponse:
        decoders = self._fleet.engines("decode")
        resources = []
        for name in subscription.names:
            value = assignment(name, decoders).SerializeToString(deterministic=True)
            resources.append(any_pb2.Any(type_url=TYPE_URL, value=value))
        return discovery_pb2.DiscoveryResponse(resources=resources, type_url=TYPE_URL)

    def close(self) -> None:
        """End all subscriptions; Envoy keeps what it knows and subscribes elsewhere.

        Not by cancelling them: one that is just writing would be aborted, and not end.
        """
        self._closing = True
        for changed in self._streams:
            changed.set()


class _Subscription:
    """What one stream has asked for, and the nonce of the last push."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.asked_anew = False
        self.nonce = ""
