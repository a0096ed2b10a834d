"""TLS for the gRPC port. Certificates are read again when their files change, so that rotation needs no restart."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from extproc.errors import ConfigError
from extproc.telemetry.logs import log

if TYPE_CHECKING:
    from extproc import configsections


class Certificates:
    """The files of one ``grpc.tls`` section, as gRPC asks for them at each handshake."""

    def __init__(self, settings: configsections.Tls) -> None:
        self._settings = settings
        self._paths = [path for path in (settings.certificate, settings.key, settings.client_ca) if path]
        self._seen: list[_Stamp] = []
        """The files as they were last looked at, whether they could be used or not."""

    def credentials(self) -> grpc.ServerCredentials:
        """Server credentials that follow the files; with ``client_ca``, clients must show a certificate of it (mTLS).

        Raises ConfigError, which names the key, when a file cannot be used now.
        """
        self._seen = self._stamps()
        return grpc.dynamic_ssl_server_credentials(
            self._read(), self._fetch, require_client_authentication=self._settings.client_ca is not None
        )

    def _read(self) -> Any:
        """Raises ConfigError. gRPC itself takes any bytes, and fails each handshake then."""
        settings = self._settings
        content = {name: _content(f"grpc.tls.{name}", path) for name, path in settings if path is not None}
        _check_pair(settings)
        if settings.client_ca is not None:
            _check_roots(settings.client_ca)
        return grpc.ssl_server_certificate_configuration(
            [(content["key"], content["certificate"])], root_certificates=content.get("client_ca")
        )

    def _fetch(self) -> Any:
        """New certificates, or None to keep the ones in force. Called by gRPC before each handshake."""
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        self._seen = stamps
        try:
            made = self._read()
        except ConfigError as error:  # or half of a rotation: the other half changes the files again
            log.error("certificates cannot be used; the last ones stay", problem=str(error))
            return None
        if self._stamps() != stamps:
            self._seen = []  # written while we read; the next handshake looks again
            return None
        log.info("certificates read again")
        return made

    def _stamps(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._paths]


_Stamp = tuple[int, int, int] | None


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _content(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


def _check_pair(settings: configsections.Tls) -> None:
    """Raises ConfigError where certificate and key are no PEM, or do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # a password is never right: it keeps OpenSSL from asking for one on the terminal
        context.load_cert_chain(settings.certificate, settings.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"grpc.tls.key: {settings.key} does not belong to {settings.certificate}"
        elif _is_chain(settings.certificate):
            problem = f"grpc.tls.key: {settings.key} is no PEM private key without a password"
        else:
            problem = f"grpc.tls.certificate: {settings.certificate} is no PEM certificate chain"
        raise ConfigError(problem) from None


def _is_chain(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _check_roots(path: Path) -> None:
    """Raises ConfigError."""
    if not _is_chain(path):
        raise ConfigError(f"grpc.tls.client_ca: {path} holds no PEM certificates")
