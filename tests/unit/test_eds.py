from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from extproc.fleet.eds import TYPE_URL, EndpointDiscovery, assignment
from extproc.fleet.engines import Engine
from extproc.fleet.fleet import Fleet
from extproc.pb.envoy.config.core.v3 import health_check_pb2
from extproc.pb.envoy.config.endpoint.v3 import endpoint_pb2
from extproc.pb.envoy.service.discovery.v3 import discovery_pb2
from extproc.pb.envoy.service.endpoint.v3 import eds_pb2_grpc
from tests.support.fleet import fleet_of, named, spec, specs


def hosts(assigned: endpoint_pb2.ClusterLoadAssignment) -> dict[str, str]:
    """``{"ip:port": health status}`` in the order of the assignment."""
    (locality,) = assigned.endpoints
    found = {}
    for host in locality.lb_endpoints:
        address = host.endpoint.address.socket_address
        name = health_check_pb2.HealthStatus.Name(host.health_status)
        found[f"{address.address} {address.port_value}"] = name
    return found


class Envoy:
    """One EDS stream, as Envoy holds it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def ask(self, *names: str, nonce: str = "", version: str = "", error: str | None = None) -> None:
        request = discovery_pb2.DiscoveryRequest(
            resource_names=names, type_url=TYPE_URL, response_nonce=nonce, version_info=version
        )
        if error is not None:
            request.error_detail.message = error
        await self.call.write(request)

    async def accept(self, response: discovery_pb2.DiscoveryResponse, *names: str) -> None:
        await self.ask(*names or ("decode",), nonce=response.nonce, version=response.version_info)

    async def next(self) -> discovery_pb2.DiscoveryResponse:
        response = await asyncio.wait_for(self.call.read(), 5)
        assert isinstance(response, discovery_pb2.DiscoveryResponse), response
        return response

    async def nothing_comes(self) -> None:
        """Nothing is on its way: what is asked anew afterwards is answered first."""
        await self.ask("sentinel")
        response = await self.next()
        assert list(assignments(response)) == ["sentinel"]


def assignments(response: discovery_pb2.DiscoveryResponse) -> dict[str, dict[str, str]]:
    assert response.type_url == TYPE_URL
    found = {}
    for resource in response.resources:
        assert resource.type_url == TYPE_URL
        assigned = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value)
        found[assigned.cluster_name] = hosts(assigned)
    return found


class Served:
    def __init__(self, fleet: Fleet, discovery: EndpointDiscovery, channel: grpc.aio.Channel) -> None:
        self.fleet = fleet
        self.discovery = discovery
        self._stub = eds_pb2_grpc.EndpointDiscoveryServiceStub(channel)  # type: ignore[no-untyped-call]
        self._calls: list[Any] = []

    def envoy(self) -> Envoy:
        self._calls.append(self._stub.StreamEndpoints())
        return Envoy(self._calls[-1])

    def leave(self) -> None:
        for call in self._calls:
            call.cancel()


@contextlib.asynccontextmanager
async def served(*listed: Any) -> AsyncIterator[Served]:
    fleet = fleet_of(*listed)
    discovery = EndpointDiscovery(fleet)
    server = grpc.aio.server()
    eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(discovery, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        one = Served(fleet, discovery, channel)
        yield one
        one.leave()
    await server.stop(1)
    assert discovery._streams == set()
    assert fleet._on_change == []


# ---- what a fleet looks like to Envoy ----


def test_decoders_with_an_address_in_a_stable_order() -> None:
    engines = [
        Engine(spec("decode", 3)),
        Engine(spec("decode", 1)),
        Engine(spec("decode", 9, url="http://not-resolved:8000")),
        Engine(spec("decode", 2, url="http://[2001:DB8:0::2]:9000")),
    ]
    expected = {"10.0.2.1 8000": "HEALTHY", "10.0.2.3 8000": "HEALTHY", "2001:db8::2 9000": "HEALTHY"}
    for order in (engines, engines[::-1]):
        found = hosts(assignment("decode", order))
        assert found == expected
        assert list(found) == list(expected)


def test_those_that_take_no_new_work_stay_listed() -> None:
    fleet = fleet_of(spec("decode", 1), spec("decode", 2, drain=True), spec("decode", 3), spec("decode", 4))
    fleet.drain("decode-3", True)
    named(fleet, "decode-3").health.probed("ConnectError", 1)
    named(fleet, "decode-4").health.probed("ConnectError", 1)
    named(fleet, "decode-1").health.probed("", 1)
    assert hosts(assignment("decode", fleet.engines("decode"))) == {
        "10.0.2.1 8000": "HEALTHY",
        "10.0.2.2 8000": "DRAINING",
        "10.0.2.3 8000": "DRAINING",
        "10.0.2.4 8000": "UNHEALTHY",
    }


def test_an_engine_that_serves_under_two_urls_is_one_host() -> None:
    fleet = fleet_of(
        spec("decode", 1, url="http://engine:8000", name="a"), spec("decode", 2, url="http://10.0.2.1:8000", name="b")
    )
    named(fleet, "a").address = "10.0.2.1"
    assigned = assignment("decode", fleet.engines("decode"))
    assert len(assigned.endpoints[0].lb_endpoints) == 1


# ---- the protocol ----


async def test_the_first_request_is_answered_with_the_decoders() -> None:
    async with served(*specs("prefill", 2), *specs("decode", 2)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        response = await envoy.next()
        assert assignments(response) == {"decode": {"10.0.2.1 8000": "HEALTHY", "10.0.2.2 8000": "HEALTHY"}}
        assert response.nonce
        assert response.version_info


async def test_every_change_is_pushed_and_nothing_else() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        first = await envoy.next()
        await envoy.accept(first)
        seen = [first]

        async def pushed() -> dict[str, str]:
            seen.append(await envoy.next())
            await envoy.accept(seen[-1])
            return assignments(seen[-1])["decode"]

        one.fleet.update("file", [spec("decode", 2)])
        assert await pushed() == {"10.0.2.1 8000": "HEALTHY", "10.0.2.2 8000": "HEALTHY"}
        one.fleet.drain("decode-1", True)
        assert await pushed() == {"10.0.2.1 8000": "DRAINING", "10.0.2.2 8000": "HEALTHY"}
        one.fleet.update("test", [])
        assert await pushed() == {"10.0.2.2 8000": "HEALTHY"}
        named(one.fleet, "decode-2").health.probed("ConnectError", 1)
        one.fleet.changed()
        assert await pushed() == {"10.0.2.2 8000": "UNHEALTHY"}
        one.fleet.update("file", [])
        assert await pushed() == {}

        one.fleet.update("file", [spec("prefill", 1)])  # none of Envoy's business
        one.fleet.changed()
        await envoy.nothing_comes()
        assert len({response.nonce for response in seen}) == len({response.version_info for response in seen}) == 6


async def test_a_burst_of_changes_ends_with_the_last_state() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        await envoy.next()
        for count in range(2, 50):
            one.fleet.update("test", specs("decode", count))
        found: dict[str, str] = {}
        while len(found) < 49:
            found = assignments(await envoy.next())["decode"]
        await envoy.nothing_comes()


async def test_several_names_each_get_the_decoders() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("a", "b")
        response = await envoy.next()
        assert assignments(response) == {name: {"10.0.2.1 8000": "HEALTHY"} for name in ("a", "b")}
        await envoy.ask("a", "b", "c", nonce=response.nonce, version=response.version_info)
        assert list(assignments(await envoy.next())) == ["a", "b", "c"]


async def test_an_acknowledgement_is_not_answered() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        await envoy.accept(await envoy.next())
        await envoy.nothing_comes()


async def test_a_refusal_is_logged_and_not_answered_with_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        first = await envoy.next()
        await envoy.ask("decode", nonce=first.nonce, error="malformed IP address")
        one.fleet.update("file", [spec("decode", 2)])
        second = await envoy.next()
        assert list(assignments(second)["decode"]) == ["10.0.2.1 8000", "10.0.2.2 8000"]
        await envoy.accept(second)
        await envoy.nothing_comes()
    output = capsys.readouterr().out
    assert output.count("Envoy refused the endpoints") == 1
    assert "malformed IP address" in output


async def test_an_answer_to_an_older_push_changes_nothing() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        first = await envoy.next()
        one.fleet.update("file", [spec("decode", 2)])
        second = await envoy.next()
        await envoy.ask("other", nonce=first.nonce, version=first.version_info)  # crossed the second push
        await envoy.accept(second)
        one.fleet.update("file", [])
        assert list(assignments(await envoy.next())) == ["decode"]


async def test_a_new_stream_is_answered_whatever_the_envoy_knows_already() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        first = await envoy.next()
        again = one.envoy()
        await again.ask("decode", version=first.version_info)
        assert assignments(await again.next()) == assignments(first)


async def test_every_subscriber_is_told() -> None:
    async with served(*specs("decode", 1)) as one:
        envoys = [one.envoy() for _ in range(3)]
        for envoy in envoys:
            await envoy.ask("decode")
            await envoy.next()
        one.fleet.update("file", [spec("decode", 2)])
        for envoy in envoys:
            assert len(assignments(await envoy.next())["decode"]) == 2


async def test_a_service_that_knows_no_decoder_yet_does_not_empty_an_envoy() -> None:
    async with served(spec("decode", 1, url="http://not-resolved:8000")) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        named(one.fleet, "decode-1").address = "10.0.2.1"
        one.fleet.changed()
        assert assignments(await envoy.next()) == {"decode": {"10.0.2.1 8000": "HEALTHY"}}
        one.fleet.update("test", [])  # now it does know
        assert assignments(await envoy.next()) == {"decode": {}}


async def test_nor_one_that_knows_some_of_its_decoders_yet() -> None:
    """A restarted worker must not take decoders from an Envoy: it waits for every source, and every name."""
    async with served(*specs("decode", 1)) as one:
        one.fleet.expect("file")
        one.fleet.expect("dns")
        envoy = one.envoy()
        await envoy.ask("decode")
        one.fleet.update("file", [spec("decode", 2)])
        one.fleet.report("dns", "look-up failed")  # it may know some, too
        one.fleet.update("dns", [spec("decode", 3, url="http://name:8000")])
        named(one.fleet, "decode-3").address = "10.0.2.3"
        one.fleet.changed()
        assert list(assignments(await envoy.next())["decode"]) == ["10.0.2.1 8000", "10.0.2.2 8000", "10.0.2.3 8000"]
        one.fleet.update("file", [spec("decode", 2), spec("decode", 4, url="http://slow-name:8000")])
        await envoy.nothing_comes()
        one.fleet.update("file", [])  # now all are known, and one that is not resolved holds up nothing
        assert list(assignments(await envoy.next())["sentinel"]) == ["10.0.2.1 8000", "10.0.2.3 8000"]


@pytest.mark.parametrize("fails", ["a source", "a name"])
async def test_what_fails_from_the_start_is_not_waited_for_without_an_end(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.fleet.eds._PATIENCE_S", 0.5)
    names = [spec("decode", 2, url="http://not-resolved:8000")] if fails == "a name" else []
    async with served(spec("decode", 1), *names) as one:
        if fails == "a source":
            one.fleet.expect("dns")
            one.fleet.report("dns", "look-up failed")
        started = time.monotonic()
        envoy = one.envoy()
        await envoy.ask("decode")
        assert assignments(await envoy.next()) == {"decode": {"10.0.2.1 8000": "HEALTHY"}}
        assert time.monotonic() - started > 0.2


async def test_a_source_without_any_engine_is_not_waited_for() -> None:
    async with served(spec("decode", 1)) as one:
        one.fleet.expect("file")
        envoy = one.envoy()
        await envoy.ask("decode")
        one.fleet.update("file", [])
        assert assignments(await envoy.next()) == {"decode": {"10.0.2.1 8000": "HEALTHY"}}


async def test_a_service_that_leaves_ends_the_stream_in_peace() -> None:
    async with served(*specs("decode", 1)) as one:
        envoy = one.envoy()
        await envoy.ask("decode")
        await envoy.next()
        one.discovery.close()
        assert await asyncio.wait_for(envoy.call.read(), 5) is grpc.aio.EOF
        assert await envoy.call.code() == grpc.StatusCode.OK


async def test_an_envoy_that_leaves_is_forgotten() -> None:
    async with served(*specs("decode", 1)) as one:
        for end in ("half-close", "cancel"):
            envoy = one.envoy()
            await envoy.ask("decode")
            await envoy.next()
            assert len(one.discovery._streams) == 1
            if end == "cancel":
                envoy.call.cancel()
            else:
                await envoy.call.done_writing()
                assert await asyncio.wait_for(envoy.call.read(), 5) is grpc.aio.EOF
            async with asyncio.timeout(5):
                while one.discovery._streams:
                    await asyncio.sleep(0.005)
            assert one.fleet._on_change == []
