"""The manifests under envoy/: valid, of one piece, and in step with the service's own defaults and names."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from extproc.bootstrap import CLIENT_HEADERS_REMOVED, HANDOFF_BYTES
from extproc.config import Config, build
from extproc.replies import DESTINATION, LB_NAMESPACE, OWN_NAMESPACE
from tests.support.manifests import (
    RENDERED,
    ROOT,
    Object,
    documents,
    of_kind,
    one,
    render,
    service_configuration,
    validate,
)

MESHES = [name for name in RENDERED if name.split("/")[0] in ("istio", "gateway-api")]
TICKET_KEY = {"EXTPROC_RELEASE__TICKET_KEY": "0123456789abcdef"}


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.yaml")), ids=lambda file: str(file.relative_to(ROOT)))
def test_every_file_is_yaml(file: Path) -> None:
    assert documents(file)


@pytest.mark.parametrize("directory", RENDERED)
def test_every_object_is_valid(directory: str) -> None:
    for item in render(directory):
        validate(item)


@pytest.mark.parametrize("name", ["servicemonitor.yaml", "prometheus-rules.yaml"])
def test_what_needs_the_prometheus_operator_is_valid(name: str) -> None:
    (item,) = documents(ROOT / "kubernetes" / name)
    validate(item)
    assert item["metadata"]["namespace"] == "llm"


def deployment(item: Object) -> None:
    item["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}


def replicas(item: Object) -> None:
    item["spec"]["maxReplicas"] = "10"


def context(item: Object) -> None:
    item["spec"]["configPatches"][0]["match"]["context"] = "GATEWAYS"


def scope(item: Object) -> None:
    del item["spec"]["workloadSelector"]


def body(item: Object) -> None:
    item["spec"]["extProc"][0]["processingMode"]["request"]["body"] = "BUFFERED"


def fail_open(item: Object) -> None:
    item["spec"]["extProc"][0]["failOpen"] = True


def picker(item: Object) -> None:
    item["spec"]["endpointPickerRef"]["port"] = 9002


@pytest.mark.parametrize(
    ("directory", "kind", "fault", "says"),
    [
        ("kubernetes", "Deployment", deployment, "readinesProbe"),
        ("kubernetes", "HorizontalPodAutoscaler", replicas, "'10' is not of type"),
        ("istio", "EnvoyFilter", context, "GATEWAYS"),
        ("istio", "EnvoyFilter", scope, "is not valid under any of the given schemas"),
        ("gateway-api", "EnvoyExtensionPolicy", body, "BUFFERED"),
        ("gateway-api/full-duplex", "EnvoyExtensionPolicy", fail_open, "should not be valid"),
        ("gateway-api/inference-pool", "InferencePool", picker, "9002 is not of type 'object'"),
    ],
)
def test_an_invalid_one_is_found(directory: str, kind: str, fault: Callable[[Object], None], says: str) -> None:
    (item,) = of_kind(render(directory), kind)
    broken = copy.deepcopy(item)
    fault(broken)
    validate(item)
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError), match=re.escape(says)):
        validate(broken)


def kustomize(directory: str) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    built = subprocess.run(
        [kubectl, "kustomize", str(ROOT / directory)], capture_output=True, text=True, timeout=60, check=True
    )
    # The generated ConfigMap's name has a hash of its content.
    return list(yaml.safe_load_all(re.sub(r"\bextproc-[a-z0-9]{10}\b", "extproc", built.stdout)))


@pytest.mark.parametrize("directory", RENDERED)
def test_kustomize_renders_them_as_the_tests_do(directory: str) -> None:
    def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
        return {(item["kind"], item["metadata"]["name"]): item for item in objects}

    assert by_name(kustomize(directory)) == by_name(render(directory))


# ── one piece ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pods(objects: list[Object]) -> list[dict[str, str]]:
    return [item["spec"]["template"]["metadata"]["labels"] for item in of_kind(objects, "Deployment")]


def selected(selector: dict[str, str], objects: list[Object]) -> bool:
    return any(selector.items() <= labels.items() for labels in pods(objects))


def test_selectors_select() -> None:
    objects = [*render("kubernetes"), *render("kubernetes/vllm")]
    selectors = [item["spec"]["selector"] for item in of_kind(objects, "Service")]
    selectors += [item["spec"]["selector"]["matchLabels"] for item in of_kind(objects, "PodDisruptionBudget")]
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in of_kind(objects, "NetworkPolicy")]
    (pool,) = of_kind(render("gateway-api/inference-pool"), "InferencePool")
    selectors.append(pool["spec"]["selector"]["matchLabels"])
    assert len(selectors) == 6
    for selector in selectors:
        assert selected(selector, objects), selector
    (monitor,) = documents(ROOT / "kubernetes/servicemonitor.yaml")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items()
        <= one(objects, "Service", "extproc")["metadata"]["labels"].items()
    )
    ports = {port["name"] for port in one(objects, "Service", "extproc")["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports
    target = one(objects, "HorizontalPodAutoscaler", "extproc")["spec"]["scaleTargetRef"]
    assert one(objects, target["kind"], target["name"])["spec"].get("replicas") is None


@pytest.mark.parametrize("directory", MESHES)
def test_references_lead_somewhere(directory: str) -> None:
    objects = render(directory)
    ports = {
        (item["metadata"]["name"], port["port"])
        for item in of_kind(objects, "Service")
        for port in item["spec"]["ports"]
    }
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for target in find(objects, "targetRefs"):
        assert {(ref["kind"], ref["name"]) for ref in target} <= names
    for target in find(objects, "targetRef"):
        assert (target["kind"], target["name"]) in names
    for references in find(objects, "backendRefs"):
        for reference in references:
            if reference.get("kind") == "InferencePool":
                assert ("InferencePool", reference["name"]) in names
            else:
                assert (reference["name"], reference["port"]) in ports
    for reference in find(objects, "endpointPickerRef"):
        assert (reference["name"], reference["port"]["number"]) in ports
    for reference in find(objects, "parametersRef"):
        assert (reference["kind"], reference["name"]) in names
    for cluster in find(objects, "cluster_name"):
        direction, port, subset, host = cluster.split("|")
        assert (direction, subset) == ("outbound", "")
        assert (host.removesuffix(".llm.svc.cluster.local"), int(port)) in ports
    (gateway,) = of_kind(objects, "Gateway")
    (route,) = of_kind(objects, "HTTPRoute")
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    assert [rule["timeouts"]["request"] for rule in route["spec"]["rules"]] == ["0s"]


def find(value: Any, key: str) -> Iterator[Any]:
    """Every value under that key, however deep."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from find(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, key)


def configuration(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> Config:
    """As the container reads it: the file, and the environment over it. Secrets that are optional are not there."""
    (container,) = one(objects, "Deployment", "extproc")["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        if not variable.get("valueFrom", {}).get("secretKeyRef", {}).get("optional"):
            monkeypatch.setenv(variable["name"], variable.get("value", TICKET_KEY.get(variable["name"], "")))
    return build(service_configuration(objects))


@pytest.mark.parametrize("directory", ["kubernetes", *MESHES])
def test_the_service_takes_its_configuration(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(directory)
    config = configuration(objects, monkeypatch)
    key = config.release.ticket_key
    assert key is not None
    assert key.get_secret_value() == "0123456789abcdef"

    pod = one(objects, "Deployment", "extproc")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (config.grpc.listen, config.admin.listen) == (f"0.0.0.0:{ports['grpc']}", f"0.0.0.0:{ports['admin']}")
    assert pod["terminationGracePeriodSeconds"] > config.life.drain_s + 5
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["serve", "--config", f"{mounted['config']}/extproc.yaml"]
    services = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "Service")}
    for entry in config.fleet.dns:
        spec = services[entry.name.removesuffix(".llm.svc.cluster.local")]
        assert (spec["clusterIP"], spec["ports"][0]["targetPort"]) == ("None", entry.port)
        assert spec["selector"]["extproc/role"] == entry.role
    assert {entry.role for entry in config.fleet.dns} == {"prefill", "decode"}

    if directory == "gateway-api/inference-pool":
        assert config.grpc.tls is not None
        assert {config.grpc.tls.certificate.parent, config.grpc.tls.key.parent} == {Path(mounted["tls"])}
        assert "grpc" not in container["readinessProbe"]
    else:
        assert config.grpc.tls is None
        assert container["readinessProbe"]["grpc"]["port"] == ports["grpc"]


def test_the_pods_run_with_nothing_they_do_not_need() -> None:
    pod = one(render("kubernetes"), "Deployment", "extproc")["spec"]["template"]["spec"]
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert pod["securityContext"]["runAsNonRoot"] is True
    dockerfile = (ROOT.parent / "Dockerfile").read_text()
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == [user]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize(("directory", "labels"), [
    ("istio", {"gateway.networking.k8s.io/gateway-name": "inference"}),
    ("gateway-api", {"gateway.envoyproxy.io/owning-gateway-name": "inference"}),
])  # fmt: skip
def test_envoy_alone_reaches_the_grpc_port(directory: str, labels: dict[str, str]) -> None:
    objects = render(directory)
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    grpc, admin = policy["spec"]["ingress"]
    assert [port["port"] for port in grpc["ports"]] == [9002]
    assert labels in [peer["podSelector"]["matchLabels"] for peer in grpc["from"]]
    assert all(peer["podSelector"]["matchLabels"] for peer in grpc["from"])
    assert [port["port"] for port in admin["ports"]] == [9003]
    assert admin["from"]
    for envoy_filter in of_kind(objects, "EnvoyFilter"):
        assert envoy_filter["spec"]["workloadSelector"]["labels"] == labels


def test_the_engines_example_hands_over() -> None:
    objects = render("kubernetes/vllm")
    roles, versions = {}, set()
    for item in of_kind(objects, "Deployment"):
        (container,) = item["spec"]["template"]["spec"]["containers"]
        (argument,) = [one for one in container["args"] if one.startswith("--kv-transfer-config=")]
        transfer = json.loads(argument.partition("=")[2])
        assert transfer["kv_connector"] == "NixlConnector"
        roles[item["metadata"]["labels"]["extproc/role"]] = transfer
        versions.add(container["image"])
    assert {role: transfer["kv_role"] for role, transfer in roles.items()} == {
        "prefill": "kv_producer",
        "decode": "kv_consumer",
    }
    lease = service_configuration(render("kubernetes"))["fleet"]["lease_s"]
    assert roles["prefill"]["kv_connector_extra_config"] == {"kv_lease_duration": lease}
    assert len(versions) == 1


# ── the filter ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("directory", ["istio", "istio/full-duplex"])
def test_B17_the_envoyfilter_is_for_the_gateway_and_its_trailers_fit_its_bodies(directory: str) -> None:
    (envoy_filter,) = of_kind(render(directory), "EnvoyFilter")
    patches = envoy_filter["spec"]["configPatches"]
    assert {patch["match"]["context"] for patch in patches} == {"GATEWAY"}
    (mode,) = find(patches, "processing_mode")
    streamed = "FULL_DUPLEX_STREAMED" in (mode["request_body_mode"], mode["response_body_mode"])
    assert streamed is (directory == "istio/full-duplex")
    trailers = (mode["request_trailer_mode"], mode["response_trailer_mode"])
    assert trailers == (("SEND", "SEND") if streamed else ("SKIP", "SKIP"))
    assert (mode["request_header_mode"], mode["response_header_mode"], mode["response_body_mode"]) == (
        "SEND",
        "SEND",
        "NONE",
    )


def seconds(duration: str) -> float:
    found = re.fullmatch(r"([0-9.]+)(ms|s)", duration)
    assert found is not None
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


@pytest.mark.parametrize("directory", ["istio", "istio/full-duplex"])
def test_istios_filter_fits_the_service(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(directory)
    config = configuration(objects, monkeypatch)
    (envoy_filter,) = of_kind(objects, "EnvoyFilter")
    filter_, route, manager, cluster = (patch["patch"]["value"] for patch in envoy_filter["spec"]["configPatches"])
    processor = filter_["typed_config"]
    assert processor["metadata_options"]["receiving_namespaces"]["untyped"] == [LB_NAMESPACE, OWN_NAMESPACE]
    assert seconds(processor["max_message_timeout"]) >= config.prefill.budget_s + 10
    assert (filter_["disabled"], processor["failure_mode_allow"]) == (True, False)
    assert list(route["typed_per_filter_config"]) == [filter_["name"]]
    assert route["request_body_buffer_limit"] == config.limits.body_bytes + HANDOFF_BYTES
    assert route["route"]["retry_policy"]["retry_on"] == "connect-failure"
    assert route["route"]["retry_policy"]["num_retries"] == config.routing.decode_choices - 1
    (http_route,) = of_kind(objects, "HTTPRoute")
    name = f"{http_route['metadata']['namespace']}.{http_route['metadata']['name']}.0"
    assert [found["name"] for found in find(envoy_filter, "route") if "name" in found] == [name]
    assert list(find(manager, "expression")) == [f"xds.route_name == '{name}'"]
    removed = {mutation["remove"] for mutations in find(manager, "mutations") for mutation in mutations}
    assert set(CLIENT_HEADERS_REMOVED) <= removed
    assert list(find(cluster, "metadata")) == [{"key": LB_NAMESPACE, "path": [{"key": DESTINATION}]}]


@pytest.mark.parametrize("directory", ["gateway-api", "gateway-api/full-duplex"])
def test_envoy_gateways_policies_fit_the_service(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(directory)
    config = configuration(objects, monkeypatch)
    (processor,) = one(objects, "EnvoyExtensionPolicy", "extproc")["spec"]["extProc"]
    assert processor["metadata"]["writableNamespaces"] == [LB_NAMESPACE, OWN_NAMESPACE]
    assert seconds(processor["messageTimeout"]) >= config.prefill.budget_s + 10
    assert processor["processingMode"]["response"] == {}
    traffic = one(objects, "BackendTrafficPolicy", "extproc")["spec"]
    assert traffic["retry"]["retryOn"] == {"triggers": ["connect-failure"]}
    assert traffic["retry"]["numRetries"] == config.routing.decode_choices - 1
    assert traffic["loadBalancer"]["endpointOverride"]["extractFrom"] == [{"header": DESTINATION}]
    client = one(objects, "ClientTrafficPolicy", "extproc")["spec"]
    limit = int(client["connection"]["bufferLimit"].removesuffix("Mi")) * 1024 * 1024
    assert limit >= config.limits.body_bytes + HANDOFF_BYTES
    assert set(CLIENT_HEADERS_REMOVED) <= set(client["headers"]["earlyRequestHeaders"]["remove"])


def test_both_meshes_remove_the_same_headers() -> None:
    (envoy_filter,) = of_kind(render("istio"), "EnvoyFilter")
    removed = [mutation["remove"] for mutations in find(envoy_filter, "mutations") for mutation in mutations]
    client = one(render("gateway-api"), "ClientTrafficPolicy", "extproc")["spec"]
    assert client["headers"]["earlyRequestHeaders"]["remove"] == removed


@pytest.mark.parametrize("directory", MESHES)
def test_what_is_ours_can_be_found_and_taken_away_by_its_label(directory: str) -> None:
    """docs/mesh.md, "How to undo it"."""
    for item in render(directory):
        assert item["metadata"]["labels"]["app.kubernetes.io/part-of"] == "extproc"
