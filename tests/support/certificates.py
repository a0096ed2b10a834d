"""Certificates as files: an authority of one's own, and what it issued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme


@dataclass(frozen=True)
class Files:
    """PEM files: the authority's certificate, and a certificate of it with its key."""

    ca: Path
    certificate: Path
    key: Path

    def __iter__(self) -> Iterator[Path]:
        return iter((self.ca, self.certificate, self.key))

    def replace(self, other: Files) -> None:
        """Put another's content in place of this one's, each file in one step."""
        for mine, theirs in zip(self, other, strict=True):
            theirs.replace(mine)

    def client(self, *, certificate: bool = True) -> grpc.ChannelCredentials:
        """Credentials of a gRPC client that trusts this authority, and shows this certificate."""
        if not certificate:
            return grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


def issued(folder: Path, name: str = "127.0.0.1", authority: trustme.CA | None = None) -> Files:
    """A certificate for that name or address, by a new authority if none is given; the files go into ``folder``."""
    authority = authority or trustme.CA()
    made = authority.issue_cert(name)
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    authority.cert_pem.write_to_path(str(files.ca))
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(str(files.key))
    return files
