"""Checks of engines one by one and beside each other: reachable, of one version, with one model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from extproc.check.findings import Findings
from extproc.fleet.engines import ROLES, Engine


@dataclass
class Known:
    """What reachable engines have said of themselves."""

    versions: dict[Engine, str] = field(default_factory=dict)
    models: dict[Engine, list[str]] = field(default_factory=dict)

    @property
    def engines(self) -> list[Engine]:
        return list(self.models)

    def of_role(self, role: str) -> list[Engine]:
        return [engine for engine in self.models if engine.role == role]


async def check_engines(engines: Sequence[Engine], client: httpx.AsyncClient, findings: Findings) -> Known:
    """All engines at once; findings come in the engines' order."""
    looks = [_Look(engine, client) for engine in engines]
    await asyncio.gather(*(look.run() for look in looks))
    known = Known()
    for look in looks:
        findings.extend(look.findings)
        if look.reached:
            known.versions[look.engine], known.models[look.engine] = look.version, look.models
    _compare_versions(known, findings)
    _compare_models(known, findings)
    return known


class _Look:
    """One engine."""

    def __init__(self, engine: Engine, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.findings = Findings()
        self.reached = False
        self.version = "unknown"
        self.models: list[str] = []
        self._client = client

    async def run(self) -> None:
        engine = self.engine
        if engine.address is None:
            text = f"its name {engine.host!r} does not resolve"
            self.findings.error("unresolved", engine.name, text, "fix the URL or the DNS record")
            return
        if not await self._is_healthy() or (models := await self._read_models()) is None:
            return
        self.models = models
        version = (await self._get("/version"))[1] or {}
        self.version = str(version.get("version", "unknown"))
        self.reached = True
        self.findings.ok(engine.name, f"{engine.role}, version {self.version}, serves {', '.join(models) or 'nothing'}")
        if engine.spec.models is not None and (absent := sorted(engine.spec.models - set(models))):
            text = f"`models` says {', '.join(absent)}, which it does not serve"
            self.findings.error("models_wrong", engine.name, text, "take its --served-model-name, or drop `models`")

    async def _is_healthy(self) -> bool:
        engine = self.engine
        try:
            health = await self._client.get(f"{engine.url}/health")
        except httpx.HTTPError as error:
            text = f"{engine.url} does not answer: {type(error).__name__}"
            self.findings.error("unreachable", engine.name, text, "start the engine, or fix its `url`")
            return False
        if health.status_code >= 500:
            text = f"/health answers {health.status_code}"
            self.findings.error("unhealthy", engine.name, text, "look into the engine's log")
            return False
        return True

    async def _read_models(self) -> list[str] | None:
        engine = self.engine
        status, value = await self._get("/v1/models")
        if status in (401, 403):
            text = f"/v1/models answers {status}"
            self.findings.error("unauthorized", engine.name, text, "set its `api_key`, or `fleet.api_key`")
            return None
        try:
            return [str(entry["id"]) for entry in (value or {})["data"]]
        except (KeyError, TypeError):
            text = "/v1/models gives no answer that vLLM would give"
            self.findings.error("not_vllm", engine.name, text, "is this URL a vLLM OpenAI server?")
            return None

    async def _get(self, path: str) -> tuple[int, dict[str, Any] | None]:
        """(status, the JSON object of a 200); status 0 where there is no answer."""
        try:
            answer = await self._client.get(self.engine.url + path, headers=authorization(self.engine))
            value = answer.json() if answer.status_code == 200 else None
        except httpx.HTTPError:
            return 0, None
        except (ValueError, RecursionError):
            return 200, None
        return answer.status_code, value if isinstance(value, dict) else None


def authorization(engine: Engine) -> Mapping[str, str]:
    return {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}


def _compare_versions(known: Known, findings: Findings) -> None:
    for pairing in sorted({engine.pairing for engine in known.engines}):
        versions = {engine.name: known.versions[engine] for engine in known.engines if engine.pairing == pairing}
        if len(set(versions.values()) - {"unknown"}) > 1:
            listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
            findings.error(
                "versions_differ",
                "fleet",
                f"engines of one group run different versions: {listed}",
                "run the same vLLM on prefillers and decoders: NIXL's handshake refuses others",
            )


def _compare_models(known: Known, findings: Findings) -> None:
    served = {role: {model for engine in known.of_role(role) for model in known.models[engine]} for role in ROLES}
    if not served["prefill"] or not served["decode"]:
        return
    if not served["prefill"] & served["decode"]:
        findings.error(
            "no_common_model",
            "fleet",
            f"prefillers serve {sorted(served['prefill'])}, decoders {sorted(served['decode'])}",
            "serve the same model, under the same --served-model-name, on both",
        )
    elif lacking := served["decode"] - served["prefill"]:
        text = f"no prefiller serves {sorted(lacking)}: such requests run on decoders alone"
        findings.warning("model_without_prefiller", "fleet", text, "add a prefiller for it, or ignore this")
