"""vLLM's NixlConnector, pull mode: the prefill returns coordinates, the decoder fetches the blocks.

Read from vLLM 0.13 to 0.33. Without a truthy ``remote_block_ids``, or without any one of the other keys, a decoder's
scheduler asserts or waits for ever, and its engine dies when the client leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from extproc.connectors.base import Connector

_PREFILL_EDITS: Mapping[str, bytes | None] = {
    "kv_transfer_params": (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
    )
}


class Nixl(Connector):
    name: ClassVar[str] = "nixl"
    cancel: ClassVar[Literal["disconnect", "finish"]] = "disconnect"

    def prefill_edits(self) -> Mapping[str, bytes | None]:
        return _PREFILL_EDITS

    def required(self) -> tuple[str, ...]:
        return ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_port")
