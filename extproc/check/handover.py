"""Checks of the hand-over: a prefill, its side channels, a decode that takes the blocks, a release. All of it real."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from extproc import sidechannel
from extproc.check.engines import Known, authorization
from extproc.check.findings import Findings
from extproc.connectors import UnusableHandoff
from extproc.connectors.base import Handoff, ReleaseResult
from extproc.connectors.mooncake_ascend import rank_endpoints
from extproc.fleet.engines import Engine
from extproc.fleet.monitor import samples
from extproc.release import ticket_for
from extproc.releaseways import ReleaseWays

_TEXT: Final = "extproc check: a short prompt that is prefilled once and released again. " * 8
_PING: Final = sidechannel.encode((b"ping_msg",))
_CONNECT_S: Final = 2.0
_EFFECT_S: Final = 3.0
_MAX_PAIRS: Final = 64


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prefill that handed over. ``told`` is the engine's ``kv_transfer_params`` before the service looked at them."""

    handoff: Handoff
    told: Mapping[str, Any]
    prompt: str


class HandOver:
    """Sends each prefiller a few short prefills."""

    def __init__(self, known: Known, ways: ReleaseWays, client: httpx.AsyncClient, findings: Findings) -> None:
        self._known = known
        self._ways = ways
        self._client = client
        self._findings = findings
        self._seen: set[tuple[str, str]] = set()

    async def run(self) -> None:
        prefillers = self._known.of_role("prefill")
        for prefiller, decoders in self._pairs(prefillers):
            if not decoders:
                self._findings.error(
                    "no_pair",
                    prefiller.name,
                    f"no reachable decoder has its group and connector {prefiller.pairing}",
                    "give a decoder the same `group` and `connector`",
                )
                continue
            met = False
            for decoder in decoders:
                common = [model for model in self._known.models[prefiller] if model in self._known.models[decoder]]
                prefilled = await self._prefill(prefiller, common[0]) if common else None
                if common and prefilled is None:
                    met = False
                    break  # it will not hand over to the next one either
                if prefilled is not None:
                    met |= await self._transfer(prefiller, decoder, prefilled, common[0])
            if met:
                await self._release(prefiller)

    def _pairs(self, prefillers: Sequence[Engine]) -> Iterator[tuple[Engine, Sequence[Engine]]]:
        """Each prefiller with its decoders: all of them, or in a large fleet one each, and each decoder once."""
        decoders = self._known.of_role("decode")
        if len(prefillers) * len(decoders) <= _MAX_PAIRS:
            for prefiller in prefillers:
                yield prefiller, [decoder for decoder in decoders if decoder.pairing == prefiller.pairing]
            return
        self._findings.note("sampled", "fleet", f"too many pairs to try each: {len(prefillers)} × {len(decoders)}")
        for pairing in sorted({prefiller.pairing for prefiller in prefillers}):
            first, second = ([e for e in part if e.pairing == pairing] for part in (prefillers, decoders))
            for number, prefiller in enumerate(first):
                yield prefiller, second[number :: len(first)] or second[: min(1, len(second))]

    def _once(self, code: str, engine: Engine) -> bool:
        """Whether this has not been said of this engine yet."""
        new = (code, engine.name) not in self._seen
        self._seen.add((code, engine.name))
        return new

    # ── prefill ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _prefill(self, prefiller: Engine, model: str) -> _Prefilled | None:
        prompt = _TEXT + uuid.uuid4().hex
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1}
        edits = prefiller.connector.prefill_edits()
        body |= {key: json.loads(value) for key, value in edits.items() if value is not None}
        try:
            answer = await self._client.post(
                f"{prefiller.url}/v1/completions", json=body, headers=authorization(prefiller)
            )
        except httpx.HTTPError as error:
            text = f"a prefill failed: {type(error).__name__}"
            self._findings.error("prefill_failed", prefiller.name, text, "look into the engine's log")
            return None
        if answer.status_code != 200:
            text = f"a prefill failed: status {answer.status_code}"
            self._findings.error("prefill_failed", prefiller.name, text, "look into the engine's log")
            return None
        try:
            handoff = prefiller.connector.handoff(prefiller, answer.content, time.monotonic())
        except UnusableHandoff as reason:
            self._explain_unusable(prefiller, str(reason))
            return None
        return _Prefilled(handoff, answer.json()["kv_transfer_params"], prompt)

    def _explain_unusable(self, prefiller: Engine, reason: str) -> None:
        if reason == "no_params":
            self._findings.error(
                "no_handoff",
                prefiller.name,
                "a prefill answers without kv_transfer_params: it does not hand over",
                "start it with --kv-transfer-config and a connector that matches `fleet.connector`",
            )
        else:
            text = f"a prefill hands over nothing usable: {reason}"
            self._findings.error("bad_handoff", prefiller.name, text, "check `connector` and the engine's version")

    def _look_at_connector(self, prefiller: Engine, told: Mapping[str, Any]) -> None:
        seen = "mooncake-ascend" if "remote_ptp_size" in told else "nixl"
        configured = prefiller.connector.name
        if configured != "timer" and seen != configured and self._once("wrong_connector", prefiller):
            self._findings.error(
                "wrong_connector",
                prefiller.name,
                f"configured as {configured}, but its params are {seen}'s",
                f"set `connector: {seen}`: releases go out in the wrong way, and can harm the engine",
            )
        if told.get("transfer_mode") == "push" and self._once("push_mode", prefiller):
            text = "it runs NIXL in push mode, which needs both legs at once"
            self._findings.error("push_mode", prefiller.name, text, "use NixlConnector (pull) on it")

    def _look_at_host(self, prefiller: Engine, told: Mapping[str, Any]) -> None:
        host = str(told.get("remote_host"))
        elsewhere = any(decoder.address != prefiller.address for decoder in self._known.of_role("decode"))
        if elsewhere and _unroutable(host) and self._once("unroutable_host", prefiller):
            self._findings.warning(
                "unroutable_host",
                prefiller.name,
                f"it names {host} as its side channel; decoders are told {prefiller.address} instead, "
                "but NIXL listens on the address it names only",
                "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that decoders reach",
            )

    # ── side channels ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _look_at_side_channels(self, prefiller: Engine, handoff: Handoff, decoder: Engine) -> None:
        """Whether the ports are open. Nothing is sent: a foreign frame would kill NIXL's listener."""
        values = handoff.values
        ascend = "remote_ptp_size" in values
        targets = rank_endpoints(values) if ascend else [(str(values["remote_host"]), int(values["remote_port"]))]
        for (host, port), is_open in zip(targets, await asyncio.gather(*(_is_open(*t) for t in targets)), strict=True):
            if not is_open and self._once(f"side channel {host}:{port}", prefiller):
                self._findings.error(
                    "side_channel_closed",
                    prefiller.name,
                    f"its side channel {host}:{port} cannot be reached from here",
                    f"open it to decoders ({decoder.name} …), or fix the host that the engine announces",
                )

    # ── decode ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _transfer(self, prefiller: Engine, decoder: Engine, prefilled: _Prefilled, model: str) -> bool:
        """Whether the decoder took the blocks over. What it did not take is released, as far as that works."""
        self._look_at_connector(prefiller, prefilled.told)
        self._look_at_host(prefiller, prefilled.told)
        await self._look_at_side_channels(prefiller, prefilled.handoff, decoder)
        if await self._decode(prefiller, decoder, prefilled, model):
            return True
        if prefiller.abort_port is None and (ticket := ticket_for(prefilled.handoff)) is not None:
            await prefiller.connector.release(ticket, self._ways)
        return False

    async def _decode(self, prefiller: Engine, decoder: Engine, prefilled: _Prefilled, model: str) -> bool:
        params = dict(prefilled.handoff.values)
        body = {"model": model, "prompt": prefilled.prompt, "max_tokens": 1, "kv_transfer_params": params}
        try:
            answer = await self._client.post(f"{decoder.url}/v1/completions", json=body, headers=authorization(decoder))
            failed = f"status {answer.status_code}" if answer.status_code != 200 else ""
        except httpx.HTTPError as error:
            failed = type(error).__name__
        if failed:
            self._findings.error(
                "transfer_failed",
                decoder.name,
                f"it could not take over KV blocks from {prefiller.name}: {failed}",
                "see both engines' logs: versions, network between them, kv_role, block size",
            )
        else:
            self._findings.ok(decoder.name, f"takes over KV blocks from {prefiller.name}")
        return not failed

    # ── release ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _release(self, prefiller: Engine) -> None:
        """After the decodes: a decoder that has met the prefiller tells it at once."""
        before = await self._usage(prefiller)
        models = self._known.models[prefiller]
        prefilled = await self._prefill(prefiller, models[0]) if models else None
        if prefilled is None:
            return
        plugin_answers = await self._look_at_plugin(prefiller, prefilled.handoff)
        ticket = ticket_for(prefilled.handoff)
        if ticket is None:
            text = "blocks of dead streams stay pinned until its own timer"
            self._findings.note("timer_only", prefiller.name, text, "use a connector that can release, if there is one")
            return
        if not plugin_answers:
            return  # said already; a frame to a port of another kind could do harm
        if await prefiller.connector.release(ticket, self._ways) is not ReleaseResult.RELEASED:
            self._findings.error(
                "release_failed",
                prefiller.name,
                "its pinned blocks could not be released; they stay for the whole lease",
                "nixl: decoders of vLLM 0.21 or later, same api_key; mooncake-ascend: open all ranks' ports",
            )
        elif before is not None and not await self._falls_to(prefiller, before):
            self._findings.warning(
                "release_without_effect",
                prefiller.name,
                "a release was accepted, but its KV usage has not fallen since",
                "nixl: update decoders to vLLM 0.21 or later; if requests are running on it, check again",
            )
        else:
            self._findings.ok(prefiller.name, "prefills, hands over, and releases when told to")

    async def _look_at_plugin(self, prefiller: Engine, handoff: Handoff) -> bool:
        """Whether the plugin's port is there, or none is configured."""
        port = prefiller.abort_port
        if port is None or prefiller.address is None:
            return True
        if port == handoff.values["remote_port"]:
            text = f"its abort_port {port} is NIXL's own, whose listener dies of an abort"
            self._findings.error("abort_port", prefiller.name, text, "give the plugin a port of its own")
            return False
        address = sidechannel.endpoint(prefiller.address, port)
        (reply,) = await self._ways.ask_side_channels([address], _PING)
        if _is_pong(reply):
            return True
        self._findings.error(
            "no_plugin",
            prefiller.name,
            f"nothing answers pings at its abort_port {port}",
            "load extproc's vLLM plugin in the engine, or remove `abort_port`",
        )
        return False

    async def _usage(self, engine: Engine) -> float | None:
        """KV usage of an engine that is idle but for us, from 0 to 1; None where that cannot be told."""
        try:
            answer = await self._client.get(f"{engine.url}/metrics", headers=authorization(engine))
        except httpx.HTTPError:
            return None
        values = samples(answer.text) if answer.status_code == 200 else {}
        if values.get("vllm:num_requests_running") or values.get("vllm:num_requests_waiting"):
            return None
        return values.get("vllm:kv_cache_usage_perc")

    async def _falls_to(self, engine: Engine, usage: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EFFECT_S):
                while (now := await self._usage(engine)) is not None and now > usage:
                    await asyncio.sleep(0.05)
                return True
        return False


async def _is_open(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _is_pong(reply: bytes | None) -> bool:
    try:
        value = msgspec.msgpack.decode(reply or b"")
    except (msgspec.MsgspecError, RecursionError):
        return False
    return isinstance(value, list) and value[:1] == [b"PONG"]


def _unroutable(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
