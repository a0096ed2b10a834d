"""What one simulated engine is: its role, its sizes, its speed and how it talks to its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]
Connector = Literal["nixl", "mooncake-ascend"]
LoadFailurePolicy = Literal["recompute", "fail"]
AscendVariant = Literal["v1", "hybrid"]

VLLM_VERSION = "0.32.0"
"""The release whose behaviour is simulated."""


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """One simulated engine. Times are in seconds unless the name says otherwise; ports of 0 ask for a free one."""

    role: Role = "both"
    """The role is a label, as vLLM's ``kv_role`` is: the request's ``kv_transfer_params`` decide what happens."""
    host: str = "127.0.0.1"
    port: int = 0
    control_port: int = 0
    """``/sim/*`` is served here too, so that an engine which refuses connections can still be told to stop that."""
    connector: Connector = "nixl"
    side_channel_host: str | None = None
    """Bound, and advertised as ``remote_host`` (VLLM_NIXL_SIDE_CHANNEL_HOST); ``host`` by default."""
    side_channel_port: int = 0
    """NIXL: the one listener. Ascend: the first of ``tp`` consecutive ports."""
    tp: int = 1
    model: str = "tiny"
    """The served name; several names are separated by commas, the first is the one in answers."""
    api_key: str | None = None
    seed: int = 0
    """The "weights". Prefiller and decoder must agree, or a decoder makes other text of the same blocks."""

    blocks: int = 1024
    """KV blocks, of which one is the null block that vLLM never hands out."""
    block_size: int = 32
    prefix_caching: bool = True
    max_num_seqs: int = 256
    max_model_len: int = 8192
    eos_after: int | None = None
    """Length of every answer in tokens before EOS. None: a length from 32 to 287 that the prompt decides."""

    multimodal: bool = True
    """Messages may have parts other than text."""
    tool_parser: bool = True
    """As with --enable-auto-tool-choice and --tool-call-parser. The answers never call a tool."""
    prompt_tokens_details: bool = False
    """``usage.prompt_tokens_details`` tells the cached tokens (--enable-prompt-tokens-details)."""

    prefill_us_per_token: float = 20.0
    """Prefills take turns, as they do on one GPU. Tokens found in the prefix cache cost nothing."""
    decode_ms_per_token: float = 2.0

    lease_s: float | None = None
    """NIXL: kv_lease_duration, 30 s. Ascend: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480 s."""
    load_failure_policy: LoadFailurePolicy = "fail"
    """vLLM's ``kv_load_failure_policy``, and its default."""
    handshake_timeout_s: float = 5.0
    """A decoder's patience with a prefiller's side channel."""
    ascend_variant: AscendVariant = "v1"
    ascend_abort: bool = False
    """The listener knows ``abort_request_msg`` (vllm-project/vllm-ascend#14716)."""
    ascend_reject_notify: bool = False
    """A rejected decode request notifies the prefiller (vllm-project/vllm-ascend#14142); releases before it do not."""

    record: bool = False
    """Keep the headers and raw bodies of requests in the request log, for tests."""
    log_size: int = 10_000
    """Requests kept in the log."""

    def __post_init__(self) -> None:
        if self.tp < 1 or self.block_size < 1 or self.blocks < 2 or self.max_num_seqs < 1:
            raise ValueError("tp, block_size and max_num_seqs must be at least 1, blocks at least 2")
        if self.max_model_len > self.capacity_tokens:
            raise ValueError(
                f"max_model_len={self.max_model_len} does not fit into the KV cache: {self.blocks} blocks of "
                f"{self.block_size} tokens, one of them the null block, hold {self.capacity_tokens} tokens"
            )

    @property
    def capacity_tokens(self) -> int:
        return (self.blocks - 1) * self.block_size

    @property
    def models(self) -> list[str]:
        return [name for name in self.model.split(",") if name]

    @property
    def advertised_host(self) -> str:
        return self.side_channel_host or self.host

    @property
    def lease(self) -> float:
        """How long pinned blocks wait for their decoder, in seconds."""
        if self.lease_s is not None:
            return self.lease_s
        return 30.0 if self.connector == "nixl" else 480.0
