"""Real engines, started once for all tests of this folder. Without ``make vllm`` these tests are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.demo.vllm.install import find
from extproc.demo.vllm.launch import VllmEngine, running
from extproc.errors import ConfigError
from extproc.processes import plain_http_client
from tests.vllm.gateway import VllmGateway
from tests.vllm.two_step import freed, introduce

HERE = Path(__file__).parent
# Engines meet only once, and are killed only once.
_ORDER = {"test_first_contact.py": -1, "test_killed_prefiller.py": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # A first test's setup starts engines: half a minute on two idle cores, minutes on busy ones.
            item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: _ORDER.get(item.path.name, 0))


@dataclass(frozen=True)
class Pair:
    prefill: VllmEngine
    decode: VllmEngine


@contextmanager
def _started(*engines: VllmEngine) -> Iterator[None]:
    with asyncio.Runner() as runner:
        everything = running(*engines)
        runner.run(everything.__aenter__())
        try:
            yield
        finally:
            runner.run(everything.__aexit__(None, None, None))


async def _unharmed(*engines: VllmEngine) -> None:
    """Alive, answering, with no block in use: no test may hide what it left behind."""
    async with plain_http_client(timeout_s=60.0) as client:
        for engine in engines:
            assert engine.running, f"{engine.name} died:\n{engine.tail()}"
            assert (await client.get(f"{engine.url}/health")).status_code == 200
            await freed(engine, timeout_s=5)


@pytest.fixture(scope="session")
def vllm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines' logs go. Skips the test when there is no vLLM."""
    try:
        find()
    except ConfigError as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def new_pair(vllm_directory: Path) -> Iterator[Pair]:
    """A pair that has not shaken hands, unless a test did that before."""
    prefill = VllmEngine("prefill", directory=vllm_directory)
    decode = VllmEngine("decode", directory=vllm_directory, load_failure_policy="recompute")
    with _started(prefill, decode):
        yield Pair(prefill, decode)


@pytest.fixture(scope="session")
def acquainted(new_pair: Pair) -> Pair:
    """The pair has shaken hands."""
    asyncio.run(introduce(new_pair.prefill, new_pair.decode))
    return new_pair


@pytest.fixture(scope="session")
def _abortable(vllm_directory: Path) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        "prefill",
        name="abortable",
        directory=vllm_directory,
        plugin=True,
        env={"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
    )
    with _started(engine):
        yield engine


@pytest.fixture
async def pair(acquainted: Pair) -> AsyncIterator[Pair]:
    """A stock prefiller and a stock decoder, which prefills itself what it cannot get. Checked after each test."""
    yield acquainted
    await _unharmed(acquainted.prefill, acquainted.decode)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _gateway(acquainted: Pair) -> AsyncIterator[VllmGateway]:
    async with VllmGateway.started(acquainted.prefill, acquainted.decode) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(_gateway: VllmGateway) -> AsyncIterator[VllmGateway]:
    """Envoy and service before that pair. Afterwards nothing may be left in the service, nothing pinned in an engine.

    Its tests run in the session's loop: ``pytest.mark.asyncio(loop_scope="session")``.
    """
    _gateway.mark()
    yield _gateway
    await _gateway.close_requests()
    await _gateway.settled()
    await _unharmed(_gateway.prefill, _gateway.decode)


@pytest.fixture
async def abortable(_abortable: VllmEngine) -> AsyncIterator[VllmEngine]:
    """A prefiller with extproc.vllm_plugin, whose internal request ids are predictable. Checked after each test."""
    yield _abortable
    await _unharmed(_abortable)
