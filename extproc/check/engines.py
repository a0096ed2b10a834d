"""Checks of engines: reachable, of one version, with one model, and truly handing over."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from extproc import sidechannel
from extproc.check.findings import Findings
from extproc.connectors import UnusableHandoff
from extproc.connectors.base import Handoff, ReleaseResult
from extproc.connectors.mooncake_ascend import rank_endpoints
from extproc.fleet.engines import ROLES, Engine
from extproc.fleet.fleet import Fleet
from extproc.release import ticket_for
from extproc.releaseways import ReleaseWays

_PROMPT: Final = "extproc check: a short prompt that is prefilled once and released again. " * 8
_PLUGIN_PING: Final = sidechannel.encode((b"ping_msg",))
_CONNECT_S: Final = 2.0


class EngineChecks:
    """All checks of a fleet's engines, into one list of findings."""

    def __init__(self, fleet: Fleet, ways: ReleaseWays, client: httpx.AsyncClient, findings: Findings) -> None:
        self._fleet = fleet
        self._ways = ways
        self._client = client
        self._findings = findings
        self._versions: dict[Engine, str] = {}
        self._models: dict[Engine, list[str]] = {}

    async def run(self) -> None:
        reachable = [engine for engine in self._fleet.engines() if await self._reach(engine)]
        self._compare_versions(reachable)
        self._compare_models(reachable)
        for prefiller in (engine for engine in reachable if engine.role == "prefill"):
            decoders = [e for e in reachable if e.role == "decode" and e.pairing == prefiller.pairing]
            if not decoders:
                self._findings.error(
                    "no_pair",
                    prefiller.name,
                    f"no reachable decoder has its group and connector {prefiller.pairing}",
                    "give a decoder the same `group` and `connector`",
                )
                continue
            await self._hand_over(prefiller, decoders)

    # ── one engine ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _reach(self, engine: Engine) -> bool:
        if engine.address is None:
            text = f"its name {engine.host!r} does not resolve"
            self._findings.error("unresolved", engine.name, text, "fix the URL or the DNS record")
            return False
        try:
            health = await self._client.get(f"{engine.url}/health")
        except httpx.HTTPError as error:
            text = f"{engine.url} does not answer: {type(error).__name__}"
            self._findings.error("unreachable", engine.name, text, "start the engine, or fix its `url`")
            return False
        if health.status_code >= 500:
            text = f"/health answers {health.status_code}"
            self._findings.error("unhealthy", engine.name, text, "look into the engine's log")
            return False
        models = await self._get(engine, "/v1/models")
        if models is None:
            return False
        self._models[engine] = [str(entry.get("id")) for entry in models.get("data", []) if isinstance(entry, dict)]
        version = await self._get(engine, "/version", required=False) or {}
        self._versions[engine] = str(version.get("version", "unknown"))
        models_text = ", ".join(self._models[engine])
        self._findings.ok(engine.name, f"{engine.role}, version {self._versions[engine]}, serves {models_text}")
        return True

    async def _get(self, engine: Engine, path: str, *, required: bool = True) -> dict[str, Any] | None:
        try:
            answer = await self._client.get(engine.url + path, headers=_authorization(engine))
            if answer.status_code == 401 and required:
                self._findings.error(
                    "unauthorized", engine.name, f"{path} answers 401", "set its `api_key`, or `fleet.api_key`"
                )
                return None
            value = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            value = None
        if not isinstance(value, dict) and required:
            text = f"{path} gives no answer that vLLM would give"
            self._findings.error("not_vllm", engine.name, text, "is this URL a vLLM OpenAI server?")
        return value if isinstance(value, dict) else None

    # ── engines beside each other ─────────────────────────────────────────────────────────────────────────────────

    def _compare_versions(self, engines: Sequence[Engine]) -> None:
        for pairing in {engine.pairing for engine in engines}:
            versions = {e.name: self._versions[e] for e in engines if e.pairing == pairing}
            if len(set(versions.values()) - {"unknown"}) > 1:
                listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
                self._findings.error(
                    "versions_differ",
                    "fleet",
                    f"engines of one group run different versions: {listed}",
                    "run the same vLLM on prefillers and decoders: NIXL's handshake refuses others",
                )

    def _compare_models(self, engines: Sequence[Engine]) -> None:
        served = {
            role: {model for engine in engines if engine.role == role for model in self._models[engine]}
            for role in ROLES
        }
        if not served["prefill"] or not served["decode"]:
            return
        if not served["prefill"] & served["decode"]:
            self._findings.error(
                "no_common_model",
                "fleet",
                f"prefillers serve {sorted(served['prefill'])}, decoders {sorted(served['decode'])}",
                "serve the same model, under the same --served-model-name, on both",
            )
        elif lacking := served["decode"] - served["prefill"]:
            text = f"no prefiller serves {sorted(lacking)}: such requests run on decoders alone"
            self._findings.warning("model_without_prefiller", "fleet", text, "add a prefiller for it, or ignore this")

    # ── a real hand-over ──────────────────────────────────────────────────────────────────────────────────────────

    async def _hand_over(self, prefiller: Engine, decoders: Sequence[Engine]) -> None:
        """Prefill once for each decoder and let it read the blocks, then once more and have them released."""
        for decoder in decoders:
            common = [model for model in self._models[prefiller] if model in self._models[decoder]]
            if common and (handoff := await self._prefill(prefiller, common[0])) is not None:
                await self._side_channels(prefiller, handoff, decoder)
                await self._decode(prefiller, decoder, handoff, common[0])
        models = self._models[prefiller]
        if models and (handoff := await self._prefill(prefiller, models[0], quiet=True)) is not None:
            await self._release(prefiller, handoff)

    async def _prefill(self, prefiller: Engine, model: str, *, quiet: bool = False) -> Handoff | None:
        edits = prefiller.connector.prefill_edits()
        body: dict[str, Any] = {"model": model, "prompt": _PROMPT + uuid.uuid4().hex, "max_tokens": 1}
        body |= {key: json.loads(value) for key, value in edits.items() if value is not None}
        try:
            answer = await self._client.post(
                f"{prefiller.url}/v1/completions", json=body, headers=_authorization(prefiller)
            )
        except httpx.HTTPError as error:
            if not quiet:
                text = f"a prefill failed: {type(error).__name__}"
                self._findings.error("prefill_failed", prefiller.name, text, "look into the engine's log")
            return None
        try:
            if answer.status_code != 200:
                raise UnusableHandoff(f"status {answer.status_code}")
            handoff = prefiller.connector.handoff(prefiller, answer.content, time.monotonic())
        except UnusableHandoff as reason:
            if not quiet:
                self._explain_unusable(prefiller, str(reason))
            return None
        if not quiet:
            self._compare_connector(prefiller, handoff.values)
            self._look_at_host(prefiller, answer.json()["kv_transfer_params"])
        return handoff

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

    def _compare_connector(self, prefiller: Engine, values: Mapping[str, Any]) -> None:
        seen = "mooncake-ascend" if "remote_ptp_size" in values else "nixl"
        if prefiller.connector.name in ("nixl", "mooncake-ascend") and seen != prefiller.connector.name:
            self._findings.error(
                "wrong_connector",
                prefiller.name,
                f"configured as {prefiller.connector.name}, but its params are {seen}'s",
                f"set `connector: {seen}`: releases go out in the wrong way, and can harm the engine",
            )
        if values.get("transfer_mode") == "push":
            text = "it runs NIXL in push mode, which needs both legs at once"
            self._findings.error("push_mode", prefiller.name, text, "use NixlConnector (pull) on it")

    def _look_at_host(self, prefiller: Engine, values: Mapping[str, Any]) -> None:
        host = str(values.get("remote_host"))
        decoders = self._fleet.engines("decode")
        elsewhere = any(decoder.address != prefiller.address for decoder in decoders)
        if elsewhere and (host == "localhost" or _unroutable(host)):
            self._findings.warning(
                "unroutable_host",
                prefiller.name,
                f"it names {host} as its side channel; decoders are told {prefiller.address} instead, "
                "but NIXL listens on the address it names only",
                "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that decoders reach",
            )

    async def _side_channels(self, prefiller: Engine, handoff: Handoff, decoder: Engine) -> None:
        """Whether the ports are open. Nothing is sent: a foreign frame would kill NIXL's listener."""
        values = handoff.values
        targets = [(str(values["remote_host"]), int(values["remote_port"]))]
        if prefiller.connector.name == "mooncake-ascend":
            targets = rank_endpoints(values)
        for host, port in targets:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
            except (OSError, TimeoutError):
                self._findings.error(
                    "side_channel_closed",
                    prefiller.name,
                    f"its side channel {host}:{port} cannot be reached from here",
                    f"open it to decoders ({decoder.name} …), or fix the host that the engine announces",
                )
            else:
                writer.close()

    async def _decode(self, prefiller: Engine, decoder: Engine, handoff: Handoff, model: str) -> None:
        body = {"model": model, "prompt": _PROMPT, "max_tokens": 1, "kv_transfer_params": dict(handoff.values)}
        try:
            answer = await self._client.post(
                f"{decoder.url}/v1/completions", json=body, headers=_authorization(decoder)
            )
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

    async def _release(self, prefiller: Engine, handoff: Handoff) -> None:
        port = prefiller.abort_port
        if port is not None and prefiller.address is not None:
            address = sidechannel.endpoint(prefiller.address, port)
            (reply,) = await self._ways.ask_side_channels([address], _PLUGIN_PING)
            if reply is None or b"PONG" not in reply:
                self._findings.error(
                    "no_plugin",
                    prefiller.name,
                    f"nothing answers pings at its abort_port {port}",
                    "load extproc's vLLM plugin in the engine, or remove `abort_port`",
                )
        ticket = ticket_for(handoff)
        if ticket is None:
            text = "blocks of dead streams stay pinned until its own timer"
            self._findings.note("timer_only", prefiller.name, text, "use a connector that can release, if there is one")
            return
        if await prefiller.connector.release(ticket, self._ways) is ReleaseResult.RELEASED:
            self._findings.ok(prefiller.name, "prefills, hands over, and releases when told to")
        else:
            self._findings.error(
                "release_failed",
                prefiller.name,
                "its pinned blocks could not be released; they stay for the whole lease",
                "nixl: decoders of vLLM 0.21 or later, same api_key; mooncake-ascend: open all ranks' ports",
            )


def _authorization(engine: Engine) -> dict[str, str]:
    return {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}


def _unroutable(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
