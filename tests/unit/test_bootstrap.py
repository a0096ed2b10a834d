import functools
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from extproc import classify, cli, openai, replies
from extproc.bootstrap import CLIENT_HEADERS_REMOVED, HANDOFF_BYTES, render
from extproc.bootstrap_comments import COMMENTS, annotate
from extproc.config import Config, build
from extproc.errors import ConfigError
from extproc.processes import find_envoy

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "one IPv4 decoder": {"fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]}},
    "IPv6": {
        "fleet": {"decode": [{"url": "http://[2001:db8::1]:8000"}, {"url": "http://[2001:db8::2]"}]},
        "envoy": {"listen": "[::]:8080", "admin": "[::1]:9901", "extproc": "[2001:db8::3]:9002"},
    },
    "names": {
        "fleet": {"decode": [{"url": "http://decode-1:8000"}, {"url": "http://10.0.0.9:8000"}], "resolve_s": 7},
        "envoy": {"extproc": "extproc.vllm.svc:9002"},
    },
    "https": {
        "fleet": {
            "decode": [
                {"url": "https://decode-2"},
                {"url": "https://10.0.0.9:8443"},
                {"url": "http://decode-1:8000"},
                {"url": "https://decode-2:9443"},
            ]
        }
    },
    "discovered decoders": {
        "fleet": {"file": "/etc/extproc/engines.yaml", "prefill": [{"url": "http://10.0.0.7:8000"}]},
        "grpc": {"workers": 3},
        "limits": {"in_flight": 100},
        "envoy": {"extproc": "10.0.0.3:9002"},
    },
    "TLS to the service": {
        "fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]},
        "grpc": {"tls": {"certificate": "/tls/server.pem", "key": "/tls/server.key"}},
        "envoy": {"extproc": "extproc.vllm.svc:9002"},
    },
    "fail closed, no admin, one choice": {
        "fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]},
        "envoy": {"fail_open": False, "admin": None, "route_timeout_s": 600, "message_timeout_s": 0.5},
        "prefill": {"timeout_s": 7, "attempts": 3, "keepalive_s": 1.5},
        "routing": {"decode_choices": 1},
        "limits": {"body_bytes": 1_000_000, "in_flight": 77},
    },
}


def configuration(name: str) -> Config:
    return build(CONFIGURATIONS[name])


@functools.cache
def printed(name: str) -> dict[str, Any]:
    parsed = yaml.safe_load(render(configuration(name)))
    assert isinstance(parsed, dict)
    return parsed


def manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    (listener,) = bootstrap["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    (connection_manager,) = chain["filters"]
    config = connection_manager["typed_config"]
    assert isinstance(config, dict)
    return config


def external_processor(bootstrap: dict[str, Any]) -> dict[str, Any]:
    ext_proc, *others = manager(bootstrap)["http_filters"]
    assert ext_proc["name"] == "envoy.filters.http.ext_proc"
    assert [one["name"] for one in others] == ["envoy.filters.http.lua", "envoy.filters.http.router"]
    config = ext_proc["typed_config"]
    assert isinstance(config, dict)
    return config


def cluster(bootstrap: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in bootstrap["static_resources"]["clusters"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


def hosts(found: dict[str, Any]) -> list[tuple[str, int]]:
    (locality,) = found["load_assignment"]["endpoints"]
    addresses = [one["endpoint"]["address"]["socket_address"] for one in locality["lb_endpoints"]]
    return [(address["address"], address["port_value"]) for address in addresses]


@pytest.mark.envoy
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_envoy_accepts_it_without_a_warning(name: str, tmp_path: Path) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(render(configuration(name)))
    command = [find_envoy(), "--mode", "validate", "--log-level", "warning", "-c", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"configuration '{file}' OK\n"


def test_the_filter_asks_for_what_the_service_serves() -> None:
    config = external_processor(printed("one IPv4 decoder"))
    assert config["processing_mode"] == {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    }
    assert config["allow_mode_override"] is True
    assert config["metadata_options"] == {"receiving_namespaces": {"untyped": ["envoy.lb", "extproc"]}}
    assert config["grpc_service"]["envoy_grpc"] == {"cluster_name": "extproc"}


@pytest.mark.parametrize(
    ("name", "fail_open", "patience"),
    [("one IPv4 decoder", True, "5s"), ("fail closed, no admin, one choice", None, "0.500s")],
)
def test_failure_and_time(name: str, fail_open: bool | None, patience: str) -> None:
    config = external_processor(printed(name))
    assert config.get("failure_mode_allow") is fail_open
    assert config["message_timeout"] == patience
    # The service gives up first, and answers.
    assert config["max_message_timeout"] == f"{configuration(name).prefill.budget_s + 15:.0f}s"


def test_clients_headers_are_removed_before_any_filter_runs() -> None:
    (extension,) = manager(printed("one IPv4 decoder"))["early_header_mutation_extensions"]
    assert extension["typed_config"]["mutations"] == [
        {"remove": "x-gateway-destination-endpoint"},
        {"remove": "x-gateway-destination-endpoint-subset"},
        {"remove": "x-gateway-destination-endpoint-served"},
        {"remove": "x-data-parallel-rank"},
        {"remove_on_match": {"key_matcher": {"prefix": "x-extproc-", "ignore_case": True}}},
        {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-", "ignore_case": True}}},
    ]


def test_only_refused_connections_are_retried_and_requests_may_last() -> None:
    (host,) = manager(printed("one IPv4 decoder"))["route_config"]["virtual_hosts"]
    assert [route["match"] for route in host["routes"]] == [{"path": "/v1/realtime"}, {"prefix": "/"}]
    for route in host["routes"]:
        assert route["route"]["cluster"] == "decode"
        assert route["route"]["timeout"] == "0s"
        policy = route["route"]["retry_policy"]
        assert (policy["retry_on"], policy["num_retries"]) == ("connect-failure", 2)
    assert manager(printed("one IPv4 decoder"))["stream_idle_timeout"] == "0s"


def test_the_configured_limits() -> None:
    bootstrap = printed("fail closed, no admin, one choice")
    (host,) = manager(bootstrap)["route_config"]["virtual_hosts"]
    assert host["request_body_buffer_limit"] == 1_000_000 + HANDOFF_BYTES
    assert [route["route"]["timeout"] for route in host["routes"]] == ["600s", "600s"]
    assert host["routes"][1]["route"]["retry_policy"]["num_retries"] == 0
    for name in ("decode", "extproc"):
        (thresholds,) = cluster(bootstrap, name)["circuit_breakers"]["thresholds"]
        assert thresholds == {
            "max_connections": 154,
            "max_pending_requests": 154,
            "max_requests": 154,
            "max_retries": 154,
        }
    (monitor,) = bootstrap["overload_manager"]["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == "154"
    options = cluster(bootstrap, "decode")["typed_extension_protocol_options"]
    (http,) = options.values()
    assert http["common_http_protocol_options"] == {"idle_timeout": "1.500s"}
    assert "admin" not in bootstrap


def test_the_decoders_are_found_by_metadata_else_in_turn() -> None:
    (policy,) = cluster(printed("one IPv4 decoder"), "decode")["load_balancing_policy"]["policies"]
    config = policy["typed_extension_config"]["typed_config"]
    (source,) = config["override_host_sources"]
    assert source == {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
    (fallback,) = config["fallback_policy"]["policies"]
    assert fallback["typed_extension_config"]["name"] == "envoy.load_balancing_policies.round_robin"


def test_addresses_are_static() -> None:
    decode, service = (cluster(printed("IPv6"), name) for name in ("decode", "extproc"))
    assert (decode["type"], hosts(decode)) == ("STATIC", [("2001:db8::1", 8000), ("2001:db8::2", 80)])
    assert (service["type"], hosts(service)) == ("STATIC", [("2001:db8::3", 9002)])
    (listener,) = printed("IPv6")["static_resources"]["listeners"]
    address = {"address": "::", "port_value": 8080, "ipv4_compat": True}
    assert listener["address"]["socket_address"] == address


def test_names_are_resolved_by_envoy_in_the_configured_order() -> None:
    decode, service = (cluster(printed("names"), name) for name in ("decode", "extproc"))
    assert hosts(decode) == [("decode-1", 8000), ("10.0.0.9", 8000)]
    assert hosts(service) == [("extproc.vllm.svc", 9002)]
    for found in (decode, service):
        assert "type" not in found
        assert found["cluster_type"]["name"] == "envoy.clusters.dns"
        assert found["cluster_type"]["typed_config"]["dns_refresh_rate"] == "7s"


def test_https_engines_get_tls_and_the_others_do_not() -> None:
    decode = cluster(printed("https"), "decode")
    assert hosts(decode) == [("decode-2", 443), ("10.0.0.9", 8443), ("decode-1", 8000), ("decode-2", 9443)]
    (locality,) = decode["load_assignment"]["endpoints"]
    marks = [
        endpoint.get("metadata", {}).get("filter_metadata", {}).get("envoy.transport_socket_match")
        for endpoint in locality["lb_endpoints"]
    ]
    assert marks == [{"tls": "decode-2"}, {"tls": "10.0.0.9"}, None, {"tls": "decode-2"}]
    sockets = {match["match"]["tls"]: match["transport_socket"] for match in decode["transport_socket_matches"]}
    assert sorted(sockets) == ["10.0.0.9", "decode-2"]
    for host, kind in (("10.0.0.9", "IP_ADDRESS"), ("decode-2", "DNS")):
        context = sockets[host]["typed_config"]
        assert context.get("sni") == (None if kind == "IP_ADDRESS" else host)
        assert context["common_tls_context"]["validation_context"] == {
            "trusted_ca": {"filename": "/etc/ssl/certs/ca-certificates.crt"},
            "match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": host}}],
        }


def test_discovered_decoders_are_asked_of_the_service() -> None:
    decode, service = (cluster(printed("discovered decoders"), name) for name in ("decode", "extproc"))
    assert decode["type"] == "EDS"
    assert "load_assignment" not in decode
    (source,) = decode["eds_cluster_config"]["eds_config"]["api_config_source"]["grpc_services"]
    assert source == {"envoy_grpc": {"cluster_name": "extproc"}}
    # Each worker has a port of its own, and its own limits.
    assert hosts(service) == [("10.0.0.3", 9002), ("10.0.0.3", 9003), ("10.0.0.3", 9004)]
    assert service["circuit_breakers"]["thresholds"][0]["max_requests"] == 600


def test_listed_decoders_may_be_asked_of_the_service_too(tmp_path: Path) -> None:
    """Then one that drains, or that probes find dead, is one for Envoy as well."""
    file = tmp_path / "extproc.yaml"
    file.write_text(yaml.safe_dump(CONFIGURATIONS["one IPv4 decoder"]))
    result = CliRunner().invoke(cli.app, ["envoy", "--config", str(file), "--eds"])
    assert result.exit_code == 0
    listed, told = printed("one IPv4 decoder"), yaml.safe_load(result.stdout)
    assert (cluster(listed, "decode")["type"], cluster(told, "decode")["type"]) == ("STATIC", "EDS")
    source = cluster(told, "decode")["eds_cluster_config"]["eds_config"]
    assert (source["resource_api_version"], source["api_config_source"]["transport_api_version"]) == ("V3", "V3")
    assert source["initial_fetch_timeout"] == "5s"


def test_discovered_decoders_cannot_be_https() -> None:
    names = [
        {"role": "decode", "name": "decode.vllm.svc", "scheme": "https"},
        {"role": "prefill", "name": "prefill.vllm.svc", "scheme": "https"},
    ]
    config = build({"fleet": {"dns": names, "decode": [{"url": "https://one"}, {"url": "http://two"}]}})
    with pytest.raises(ConfigError) as raised:
        render(config)
    assert str(raised.value).splitlines() == [
        "fleet.decode: https://one: Envoy cannot speak https to decoders that are discovered",
        "fleet.dns: decode.vllm.svc: Envoy cannot speak https to decoders that are discovered",
    ]


def test_tls_to_the_service() -> None:
    context = cluster(printed("TLS to the service"), "extproc")["transport_socket"]["typed_config"]
    assert context == {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "validation_context": {
                "trusted_ca": {"filename": "/etc/ssl/certs/ca-certificates.crt"},
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "extproc.vllm.svc"}}],
            },
        },
        "sni": "extproc.vllm.svc",
    }
    assert "transport_socket" not in cluster(printed("names"), "extproc")


def test_a_stalled_connection_to_the_service_ends_within_the_lease_of_what_lies_in_it() -> None:
    config = configuration("fail closed, no admin, one choice")
    options = cluster(yaml.safe_load(render(config)), "extproc")["typed_extension_protocol_options"]
    (http,) = options.values()
    keepalive = http["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    patience = sum(float(keepalive[part].removesuffix("s")) for part in ("interval", "timeout"))
    assert 0 < patience <= config.fleet.lease_s / 2


def test_every_worker_has_a_port() -> None:
    values = {"fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]}, "envoy": {"extproc": "10.0.0.3:65535"}}
    render(build(values))
    with pytest.raises(ConfigError, match=r"envoy\.extproc: 2 workers need as many ports from 65535 on"):
        render(build({**values, "grpc": {"workers": 2}}))


def test_a_service_that_asks_for_client_certificates_needs_one_for_envoy() -> None:
    values: dict[str, Any] = {
        "fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]},
        "grpc": {"tls": {"certificate": "/s.pem", "key": "/s.key", "client_ca": "/ca.pem"}},
        "envoy": {"service_certificate": "/e.pem", "service_ca_file": "/our-ca.pem"},
    }
    with pytest.raises(ConfigError, match=r"envoy\.service_certificate, envoy\.service_key: required"):
        render(build(values))
    values["envoy"]["service_key"] = "/e.key"
    context = cluster(yaml.safe_load(render(build(values))), "extproc")["transport_socket"]["typed_config"]
    assert context["common_tls_context"]["tls_certificates"] == [
        {"certificate_chain": {"filename": "/e.pem"}, "private_key": {"filename": "/e.key"}}
    ]
    assert context["common_tls_context"]["validation_context"]["trusted_ca"] == {"filename": "/our-ca.pem"}


def test_what_clients_may_not_send_is_what_the_service_thinks_it_is() -> None:
    assert set(CLIENT_HEADERS_REMOVED) == classify.STEERING


@pytest.mark.parametrize(
    ("body_bytes", "window"), [(4096, 65_535), (100_000, 100_000), (16 << 20, 16 << 20), (32 << 20, 16 << 20)]
)
def test_a_piece_of_a_body_is_no_larger_than_the_service_takes(body_bytes: int, window: int) -> None:
    fleet = {"decode": [{"url": "http://10.0.0.1:8000"}]}
    found = manager(yaml.safe_load(render(build({"fleet": fleet, "limits": {"body_bytes": body_bytes}}))))
    assert found["http2_protocol_options"] == {"initial_stream_window_size": window}


def test_limits_are_the_services_own() -> None:
    limits = {"headers": 40, "header_bytes": 20_000, "body_timeout_s": 12.5, "body_bytes": 4096}
    fleet = {"decode": [{"url": "http://10.0.0.1:8000"}]}
    bootstrap = yaml.safe_load(render(build({"fleet": fleet, "limits": limits})))
    found = manager(bootstrap)
    assert found["common_http_protocol_options"] == {"max_headers_count": 80}  # there the service's 431 gets out
    assert (found["max_request_headers_kb"], found["request_timeout"]) == (40, "12.500s")
    (host,) = found["route_config"]["virtual_hosts"]
    assert host["request_body_buffer_limit"] == 4096 + HANDOFF_BYTES


def test_the_guard_goes_by_the_header_that_the_service_sets() -> None:
    _, guard, _ = manager(printed("one IPv4 decoder"))["http_filters"]
    source = guard["typed_config"]["default_source_code"]["inline_string"]
    assert f'headers:get("{replies.DESTINATION}")' in source
    assert all("_transfer_params" in key for key in openai.CONNECTOR_KEYS)


def test_how_ends_are_told() -> None:
    (log,) = manager(printed("one IPv4 decoder"))["access_log"]
    assert log["typed_config"]["additional_request_headers_to_log"] == ["x-request-id"]
    assert log["typed_config"]["common_config"] == {
        "log_name": "extproc",
        "grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}},
        "transport_api_version": "V3",
        "buffer_flush_interval": "0.050s",
        "buffer_size_bytes": 16384,
        "grpc_stream_retry_policy": {
            "num_retries": 3,
            "retry_back_off": {"base_interval": "0.020s", "max_interval": "0.200s"},
        },
    }


def test_every_comment_is_printed() -> None:
    printed = "\n".join(render(configuration(name)) for name in CONFIGURATIONS)
    text = " ".join(line.strip(" #") for line in printed.splitlines() if line.strip()[:1] == "#")
    missing = [key for key, comment in COMMENTS.items() if " ".join(comment.split()) not in text]
    assert missing == []


def test_comments_stand_above_what_they_explain_and_change_nothing() -> None:
    text = textwrap.dedent(
        """\
        clusters:
        - name: one
          retry:
            on: [a, b]
        - name: two
          retry: {on: c}
          hosts:
          - address: x
        """
    )
    comments = {"two/retry": "Why two retries.", "clusters/one": "The first.", "hosts/address": "Where. " * 20}
    annotated = annotate(text, comments)
    assert yaml.safe_load(annotated) == yaml.safe_load(text)
    assert annotated == textwrap.dedent(
        f"""\
        clusters:
        # The first.
        - name: one
          retry:
            on: [a, b]
        - name: two
          # Why two retries.
          retry: {{on: c}}
          hosts:
          # {"Where. " * 15}Where.
          # Where. Where. Where. Where.
          - address: x
        """
    )
