"""``extproc sim``: one simulated engine in this process."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Option = typer.Option


def sim(
    role: Annotated[
        Literal["prefill", "decode", "both"], Option(help="A label; requests decide what happens.")
    ] = "both",
    port: Annotated[int, Option(help="HTTP port; 0 takes a free one.")] = 8000,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    connector: Annotated[Literal["nixl", "mooncake-ascend"], Option(help="How KV blocks move.")] = "nixl",
    side_channel_host: Annotated[
        str | None, Option(help="Bound, and advertised as remote_host; --host by default.")
    ] = None,
    side_channel_port: Annotated[
        int, Option(help="NIXL's listener, or the first of Ascend's --tp ports; 0 takes free ones.")
    ] = 0,
    control_port: Annotated[int, Option(help="Where /sim/state and /sim/fail are served too; 0 takes a free one.")] = 0,
    tp: Annotated[int, Option(min=1, help="Tensor-parallel ranks.")] = 1,
    model: Annotated[str, Option(help="The served name; aliases after commas.")] = "tiny",
    api_key: Annotated[str | None, Option(envvar="VLLM_API_KEY", show_envvar=True, help="Required under /v1.")] = None,
    seed: Annotated[int, Option(help='The "weights": equal on engines that share a model.')] = 0,
    blocks: Annotated[int, Option(min=2, help="KV blocks, one of them the null block.")] = 1024,
    block_size: Annotated[int, Option(min=1, help="Tokens in a block.")] = 32,
    prefix_caching: Annotated[bool, Option(help="Find blocks again by their prompt's prefix.")] = True,
    max_num_seqs: Annotated[int, Option(min=1, help="Requests that run at once.")] = 256,
    max_model_len: Annotated[int, Option(min=1, help="Longest prompt and answer, in tokens.")] = 8192,
    eos_after: Annotated[
        int | None, Option(min=0, help="Every answer ends after so many tokens; by default the prompt decides, 32-287.")
    ] = None,
    prefill_us_per_token: Annotated[float, Option(min=0, help="Microseconds for each uncached prompt token.")] = 20.0,
    decode_ms_per_token: Annotated[float, Option(min=0, help="Milliseconds for each answer token.")] = 2.0,
    lease_s: Annotated[
        float | None, Option(min=0, help="How long pinned blocks wait; 30 for nixl, 480 for mooncake-ascend.")
    ] = None,
    load_failure_policy: Annotated[
        Literal["recompute", "fail"], Option(help="What a decoder does when the KV cannot be pulled.")
    ] = "fail",
    handshake_timeout_s: Annotated[float, Option(min=0, help="A decoder's patience with a side channel.")] = 5.0,
    ascend_variant: Annotated[Literal["v1", "hybrid"], Option(help="Shape of mooncake-ascend's params.")] = "v1",
    ascend_abort: Annotated[bool, Option(help="The listener knows abort_request_msg.")] = False,
    ascend_reject_notify: Annotated[bool, Option(help="Rejected decode requests notify the prefiller.")] = False,
    multimodal: Annotated[bool, Option(help="Accept message parts other than text.")] = True,
    tool_parser: Annotated[bool, Option(help="Accept tool choices, as with vLLM's tool-call parser.")] = True,
    prompt_tokens_details: Annotated[bool, Option(help="Tell cached tokens in usage.")] = False,
    record: Annotated[bool, Option(help="Keep headers and bodies for /sim/state?full=1.")] = False,
    fail: Annotated[
        list[str] | None,
        Option(metavar="MODE[:key=value,…]", help="Fail from the start, e.g. 503:count=2,leg=prefill."),
    ] = None,
) -> None:
    """Run a simulated vLLM engine that keeps the real ones' rules.

    Prints one line of JSON with its ports when it serves, and runs until SIGTERM. Exits with 1 when its core dies.
    """
    options = dict(locals())
    failures = options.pop("fail") or []

    from extproc.sim.run import run

    run(options, failures)
