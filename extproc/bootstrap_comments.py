"""Why each part of the printed bootstrap is there, and how the reasons get into the YAML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

import yaml

HEADER: Final = """\
# Envoy in front of prefill/decode disaggregated vLLM engines, with the extproc service beside it.
# Printed by `extproc envoy`; made for Envoy 1.40.
#
#   client -> Envoy -> (headers and body to the service, which prefills) -> the decoder that the service named -> client
"""

COMMENTS: Final[Mapping[str, str]] = {
    "early_header_mutation_extensions": """
        Clients must not steer: routing headers are the service's alone, and x-envoy-* would let a client set retries
        and timeouts (a handoff is good for one decoder, so a repeated request could read another request's KV blocks).
    """,
    "generate_request_id": """
        The service gives both legs an X-Request-Id of its own, and is told the client's as it was sent.
    """,
    "server_header_transformation": "The engine's own `server` header reaches the client.",
    "normalize_path": "Paths reach the engines as the client wrote them.",
    "accept_http_10": "HTTP/1.0 clients are answered 426 otherwise.",
    "initial_stream_window_size": """
        Of an HTTP/2 body, Envoy takes this much before it compares it with any limit, and sends it to the service in
        one message: more than the service's own limit allows would be 500 instead of 413.
    """,
    "stream_idle_timeout": "A long generation may be silent for minutes: no limit between two bytes.",
    "max_headers_count": """
        The service answers 431 well below this. Beyond it Envoy closes the connection: its own 431 is lost, as it would
        have to wait for the service.
    """,
    "request_timeout": """
        For receiving a whole request: a client that stalls in mid-body does not hold a buffer for ever.
    """,
    "envoy.filters.network.http_connection_manager/typed_config/upgrade_configs": """
        No upgrades (403) but where a route allows them.
    """,
    "engines/request_body_buffer_limit": """
        The largest request body (limits.body_bytes), and room for the KV transfer parameters that the service adds.
        The service itself refuses bodies above its limit, Envoy those above this one: 413 from either.
    """,
    "engines/routes/realtime": "The one path on which a WebSocket may be opened.",
    "engines/routes/all": "Everything, disaggregated or not, goes to the decoders; the service says to which one.",
    "engines/routes/all/route/retry_policy": """
        Only a refused connection is tried again, at the next decoder of the service's list. Whatever may have reached
        a decoder is not repeated: the KV blocks of its handoff may be taken already.
    """,
    "envoy.filters.http.ext_proc/typed_config/grpc_service/retry_policy": """
        A replica of the service that is down, or on its way out, is not the client's trouble.
    """,
    "failure_mode_allow": """
        true: without the service, requests run on the decoders alone, as on plain vLLM. false: they get 500.
    """,
    "envoy.filters.http.lua": """
        Stands in for the service while it is down (failure_mode_allow): bodies that name KV transfer parameters, in
        whatever spelling, get 503.
    """,
    "envoy.filters.http.ext_proc/typed_config/processing_mode": """
        The service sees the request, and of the response the headers. Of its body it sees nothing (NONE is the
        default, and not shown): tokens cost it nothing.
    """,
    "message_timeout": """
        For one answer of the service, which asks for more, up to max_message_timeout, while it waits for a prefiller.
    """,
    "mutation_rules": """
        The service changes neither pseudo headers (path, method, host) nor x-envoy-*; trying is an error.
    """,
    "allow_mode_override": """
        The service may let a request pass without its body: audio and the like, in which no parameters can be, and
        WebSockets, whose bytes never end.
    """,
    "receiving_namespaces": """
        Metadata of other namespaces is dropped without a word. envoy.lb says which decoder, extproc carries the ticket
        that the access log brings back.
    """,
    "local_reply_config": """
        Errors that Envoy itself answers, in the shape that OpenAI clients read. The service's own pass as they are.
    """,
    "access_log": """
        Tells the service, within 0.05 s, how each request ended: if no decoder took the KV blocks, it has them freed
        on the prefiller.
    """,
    "buffer_size_bytes": """
        Entries may share a message: one for each would cost the service a sixth of its CPU.
    """,
    "grpc_stream_retry_policy": """
        A replica of the service may be gone and not yet found out: without retries the entry would be lost with it.
    """,
    "static_resources/clusters/decode": """
        The decoders. The service names hosts by address in the metadata; without it (it is down), round robin.
    """,
    "decode/eds_cluster_config": """
        Decoders come and go: the service tells Envoy which ones there are. What it told last stays when it is down.
    """,
    "decode/circuit_breakers": """
        Envoy's own defaults (1024 requests, 3 retries at once) are far too low where each request streams for minutes.
    """,
    "common_http_protocol_options/idle_timeout": """
        Idle connections are closed before the engine does it (uvicorn: after 5 s): a request on a connection that is
        being closed would be lost.
    """,
    "decode/transport_socket_matches": "For engines with an https URL; the others get plain TCP.",
    "static_resources/clusters/extproc": "The service: ext_proc and access log on one port, over HTTP/2.",
    "extproc/transport_socket": "The service's certificate must be for the name that Envoy reaches it by.",
    "extproc/health_checks": """
        The service says NOT_SERVING as soon as it is told to stop; requests that it holds still get their answer.
    """,
    "extproc/common_lb_config/update_merge_window": """
        A replica that is back takes requests at once: by default Envoy may sit on the news for a second.
    """,
    "common_lb_config/healthy_panic_threshold": """
        0: if no replica is healthy none is tried, and failure_mode_allow decides.
    """,
    "extproc/circuit_breakers": "One gRPC stream for each request, open until the last token.",
    "resource_monitors": "Connections of clients, idle ones too; more are refused.",
    "connection_keepalive": "Finds out about a host that vanished. The service permits these pings.",
}
"""What a path of the YAML ends in (see :func:`annotate`) -> why it is there."""


def annotate(text: str, comments: Mapping[str, str]) -> str:
    """Put comments above the keys of a YAML text.

    A comment belongs to every path that ends in its key. Paths are keys joined by ``/``; an element of a list counts
    as its ``name`` if it has one, and is left out otherwise.
    """
    root = yaml.compose(text)
    above = {
        line: comment
        for path, line in (_places(root, "") if root else ())
        for suffix, comment in comments.items()
        if f"/{path}".endswith(f"/{suffix}")
    }
    lines = []
    for number, line in enumerate(text.splitlines()):
        if number in above:
            prefix = " " * (len(line) - len(line.lstrip(" "))) + "# "
            lines += textwrap.wrap(
                " ".join(above[number].split()), 118, initial_indent=prefix, subsequent_indent=prefix
            )
        lines.append(line)
    return "\n".join(lines) + "\n"


def _places(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    """``(path, line)`` of every key and of every named element."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = f"{path}/{key.value}" if path else key.value
            yield here, key.start_mark.line
            yield from _places(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            name = _name_of(item)
            here = path if name is None else f"{path}/{name}"
            if name is not None:
                yield here, item.start_mark.line
            yield from _places(item, here)


def _name_of(node: yaml.Node) -> str | None:
    if isinstance(node, yaml.MappingNode):
        return next((value.value for key, value in node.value if key.value == "name"), None)
    return None
