"""Listening sockets, and what to say where one cannot be had."""

from __future__ import annotations

import errno
import os
import socket

from extproc.configtypes import split_listen
from extproc.errors import ConfigError


def bound(key: str, listen: str) -> socket.socket:
    """A listening socket at ``host:port``. Raises ConfigError, which names the key and the reason."""
    host, port = split_listen(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"{key}: {listen} cannot be bound: {reason}") from error


def check(key: str, listen: str) -> None:
    """Raises ConfigError where an address cannot be bound: gRPC tells no reason, it only writes one past our log."""
    try:
        bound(key, listen).close()
    except ConfigError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno == errno.EAFNOSUPPORT):  # gRPC takes 0.0.0.0 for [::], too
            raise error from None
