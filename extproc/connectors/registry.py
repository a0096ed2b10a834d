"""Connectors by the name that the configuration gives them."""

from __future__ import annotations

from typing import Final

from extproc.connectors.base import Connector
from extproc.connectors.nixl import Nixl

_CONNECTORS: Final[dict[str, Connector]] = {connector.name: connector for connector in (Nixl(),)}


def connector(name: str) -> Connector:
    """Raises KeyError for a name that the configuration does not allow."""
    return _CONNECTORS[name]
