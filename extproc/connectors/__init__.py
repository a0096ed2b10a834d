"""How an engine pair moves KV blocks, one module per connector."""

from extproc.connectors.base import Connector, Handoff, UnusableHandoff
from extproc.connectors.registry import connector, known

__all__ = ["Connector", "Handoff", "UnusableHandoff", "connector", "known"]
