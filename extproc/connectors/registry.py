"""Connectors by the name that the configuration gives them."""

from __future__ import annotations

from typing import Final

from extproc.connectors.base import Connector
from extproc.connectors.mooncake_ascend import MooncakeAscend
from extproc.connectors.nixl import Nixl
from extproc.connectors.timer import Timer

_CONNECTORS: Final[dict[str, Connector]] = {
    connector.name: connector for connector in (Nixl(), MooncakeAscend(), Timer())
}


def connector(name: str) -> Connector:
    """Raises KeyError for a name that the configuration does not allow."""
    return _CONNECTORS[name]


def known(name: str) -> bool:
    return name in _CONNECTORS
