"""TLS on the gRPC port: who gets in, certificates that change, files that cannot be used."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import trustme
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.config import build
from extproc.configsections import Tls
from extproc.errors import ConfigError
from extproc.server import Server
from extproc.tls import Certificates
from tests.grpc.stand import Stand, through
from tests.support.certificates import Files, issued


def _about_certificates(logged: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [line for line in logged if "certificates" in line["event"]]


def _settings(server: Files, client_ca: Path | None = None) -> Mapping[str, Any]:
    tls: dict[str, str] = {"certificate": str(server.certificate), "key": str(server.key)}
    if client_ca is not None:
        tls["client_ca"] = str(client_ca)
    return {"grpc": {"listen": "127.0.0.1:0", "tls": tls}}


async def _let_in(stand: Stand, credentials: grpc.ChannelCredentials | None) -> None:
    """Ask for the service's health over a connection of its own. Raises AioRpcError."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.aio.secure_channel(stand.grpc_address, credentials, options)
        if credentials
        else grpc.aio.insecure_channel(stand.grpc_address, options)
    )
    async with channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)


async def _turned_away(stand: Stand, credentials: grpc.ChannelCredentials | None) -> bool:
    try:
        await _let_in(stand, credentials)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_with_tls_clients_check_the_server(tmp_path: Path) -> None:
    server = issued(tmp_path / "server")
    async with Stand.standing(_settings(server)) as stand:
        credentials = server.client(certificate=False)
        async with stand.envoy("BUFFERED", credentials=credentials) as envoy:
            upstream = (await through(envoy)).upstream
        assert b'"kv_transfer_params":' in upstream.body
        assert await _turned_away(stand, None)  # plain text
        assert await _turned_away(stand, issued(tmp_path / "other").client(certificate=False))
        await _let_in(stand, credentials)


async def test_with_a_client_ca_servers_check_the_client(tmp_path: Path) -> None:
    server, envoy_files = issued(tmp_path / "server"), issued(tmp_path / "envoy", "envoy.internal")
    stranger = issued(tmp_path / "stranger", "envoy.internal")
    server_ca = server.ca.read_bytes()

    def showing(files: Files) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(server_ca, files.key.read_bytes(), files.certificate.read_bytes())

    async with Stand.standing(_settings(server, envoy_files.ca)) as stand:
        async with stand.envoy("BUFFERED", credentials=showing(envoy_files)) as envoy:
            upstream = (await through(envoy)).upstream
        assert b'"kv_transfer_params":' in upstream.body
        assert await _turned_away(stand, grpc.ssl_channel_credentials(server_ca))
        assert await _turned_away(stand, showing(stranger))
        assert await _turned_away(stand, None)


async def test_new_certificates_need_no_restart(tmp_path: Path) -> None:
    """The server's own and the clients' authority; a stream that is open goes on."""
    server, client = issued(tmp_path / "server"), issued(tmp_path / "client", "envoy")

    def showing(trusted: bytes, shown: Files) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(trusted, shown.key.read_bytes(), shown.certificate.read_bytes())

    before = showing(server.ca.read_bytes(), client)
    async with Stand.standing(_settings(server, client.ca)) as stand:
        await _let_in(stand, before)
        async with stand.envoy("BUFFERED", credentials=before) as envoy:
            exchange = await envoy.request("POST", "/v1/embeddings", body=b"{}")

            old_client_ca = client.ca.read_bytes()
            server.replace(issued(tmp_path / "next"))
            client.replace(issued(tmp_path / "next client", "envoy"))
            assert client.ca.read_bytes() != old_client_ca
            after = showing(server.ca.read_bytes(), client)
            with structlog.testing.capture_logs() as logged:
                await _let_in(stand, after)
                await _let_in(stand, after)
            assert [line["event"] for line in _about_certificates(logged)] == ["certificates read again"]
            assert await _turned_away(stand, before)

            await exchange.response()
            await exchange.finish()


@pytest.mark.parametrize("half", ["certificate", "key", "missing"])
async def test_half_of_a_rotation_changes_nothing_yet(tmp_path: Path, half: str) -> None:
    authority = trustme.CA()
    server = issued(tmp_path / "server", authority=authority)
    coming = issued(tmp_path / "next", authority=authority)
    credentials = server.client(certificate=False)
    async with Stand.standing(_settings(server)) as stand:
        if half == "missing":
            server.key.unlink()
            problem = f"grpc.tls.key: {server.key} cannot be read: No such file or directory"
        else:
            getattr(coming, half).replace(getattr(server, half))
            problem = f"grpc.tls.key: {server.key} does not belong to {server.certificate}"
        with structlog.testing.capture_logs() as logged:
            await _let_in(stand, credentials)
            await _let_in(stand, credentials)
        assert _about_certificates(logged) == [
            {
                "event": "certificates cannot be used; the last ones stay",
                "problem": problem,
                "log_level": "error",
            }
        ]
        for mine, theirs in zip(server, coming, strict=True):
            if theirs.exists():
                theirs.replace(mine)
        with structlog.testing.capture_logs() as logged:
            await _let_in(stand, credentials)
        assert [line["event"] for line in _about_certificates(logged)] == ["certificates read again"]


# ── files that cannot be used ─────────────────────────────────────────────────────────────────────────────────────────


def _encrypted(files: Files) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"password")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda f: f.certificate.unlink(),
            "grpc.tls.certificate: {0.certificate} cannot be read: No such file or directory",
        ),
        (lambda f: f.key.unlink(), "grpc.tls.key: {0.key} cannot be read: No such file or directory"),
        (lambda f: f.ca.unlink(), "grpc.tls.client_ca: {0.ca} cannot be read: No such file or directory"),
        (
            lambda f: f.certificate.write_text("junk"),
            "grpc.tls.certificate: {0.certificate} is no PEM certificate chain",
        ),
        (lambda f: f.certificate.write_text(""), "grpc.tls.certificate: {0.certificate} is no PEM certificate chain"),
        (lambda f: f.key.write_text("junk"), "grpc.tls.key: {0.key} is no PEM private key without a password"),
        (_encrypted, "grpc.tls.key: {0.key} is no PEM private key without a password"),
        (
            lambda f: f.key.write_bytes(trustme.CA().issue_cert("a").private_key_pem.bytes()),
            "grpc.tls.key: {0.key} does not belong to {0.certificate}",
        ),
        (lambda f: f.ca.write_text("junk"), "grpc.tls.client_ca: {0.ca} holds no PEM certificates"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, spoil: Callable[[Files], None], problem: str) -> None:
    files = issued(tmp_path)
    settings = Tls(certificate=files.certificate, key=files.key, client_ca=files.ca)
    Certificates(settings).credentials()
    spoil(files)
    with pytest.raises(ConfigError) as fault:
        Certificates(settings).credentials()
    assert str(fault.value) == problem.format(files)


async def test_the_service_does_not_start_with_such_files(tmp_path: Path) -> None:
    files = issued(tmp_path)
    files.key.write_text("junk")
    with socket.socket() as admin:
        admin.bind(("127.0.0.1", 0))
        port = admin.getsockname()[1]
    values = {"fleet": {"decode": [{"url": "http://127.0.0.1:9"}]}, "admin": {"listen": f"127.0.0.1:{port}"}}
    with pytest.raises(ConfigError, match=r"^grpc\.tls\.key: "):
        async with Server(build(values | _settings(files) | {"life": {"notice_s": 0, "drain_s": 1}})):
            pass
    with socket.socket() as admin:
        admin.bind(("127.0.0.1", port))  # nothing of it is left
