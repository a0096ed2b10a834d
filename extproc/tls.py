"""TLS for the gRPC port. Certificates are read again when their files change, so that rotation needs no restart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from extproc.errors import ConfigError
from extproc.telemetry.logs import log

if TYPE_CHECKING:
    from extproc import config


class Certificates:
    """The files of one ``grpc.tls`` section, as gRPC asks for them at each handshake."""

    def __init__(self, settings: config.Tls) -> None:
        self._settings = settings
        self._paths = [path for path in (settings.certificate, settings.key, settings.client_ca) if path]
        self._stamps: list[tuple[int, int]] = []

    def credentials(self) -> grpc.ServerCredentials:
        """Server credentials that follow the files; with ``client_ca``, clients must show a certificate of it (mTLS).

        Raises ConfigError when a file cannot be read now.
        """
        try:
            first = self._read()
        except OSError as error:
            raise ConfigError(f"grpc.tls: {error.filename} cannot be read: {error.strerror}") from None
        return grpc.dynamic_ssl_server_credentials(
            first, self._fetch, require_client_authentication=self._settings.client_ca is not None
        )

    def _read(self) -> Any:
        stamps = [_stamp(path) for path in self._paths]
        settings = self._settings
        made = grpc.ssl_server_certificate_configuration(
            [(settings.key.read_bytes(), settings.certificate.read_bytes())],
            root_certificates=settings.client_ca.read_bytes() if settings.client_ca else None,
        )
        self._stamps = stamps
        return made

    def _fetch(self) -> Any:
        """New certificates, or None to keep the ones in force. Called by gRPC before each handshake."""
        try:
            if [_stamp(path) for path in self._paths] == self._stamps:
                return None
            made = self._read()
        except OSError as error:
            log.error("certificate cannot be read; the last one stays", file=error.filename, problem=error.strerror)
            return None
        log.info("certificates read again")
        return made


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino
