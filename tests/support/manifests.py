"""The manifests under envoy/ as `kubectl apply -k` would send them.

The renderer knows those parts of a kustomization that the manifests use, and refuses others. Names that kustomize makes
up (a ConfigMap's hash) stay as written.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jsonpath
import jsonschema
import kubernetes_validate
import yaml

from tests.support.crds import SCHEMAS

ROOT: Final = Path(__file__).parents[2] / "envoy"
KUBERNETES: Final = "1.34"
RENDERED: Final = (
    *("kubernetes", "kubernetes/vllm", "istio", "istio/full-duplex"),
    *("gateway-api", "gateway-api/full-duplex", "gateway-api/inference-pool"),
)

Object = dict[str, Any]

_CLUSTER_SCOPED: Final = ("Namespace",)
_KNOWN: Final = set("apiVersion kind namespace labels resources configMapGenerator images patches".split())


def documents(file: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document is not None]


def render(directory: str | Path) -> list[Object]:
    """All objects of a kustomization, in their order."""
    return copy.deepcopy(_render(ROOT / directory))


@lru_cache
def _render(directory: Path) -> list[Object]:
    (kustomization,) = documents(directory / "kustomization.yaml")
    assert kustomization.keys() <= _KNOWN, f"{directory}: {kustomization.keys() - _KNOWN}"
    objects: list[Object] = []
    for resource in kustomization["resources"]:
        path = (directory / resource).resolve()
        objects += copy.deepcopy(_render(path)) if path.is_dir() else documents(path)
    for generated in kustomization.get("configMapGenerator", []):
        data = {name: (directory / name).read_text(encoding="utf-8") for name in generated["files"]}
        metadata = {"name": generated["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for item in objects:
        if "namespace" in kustomization and item["kind"] not in _CLUSTER_SCOPED:
            item["metadata"]["namespace"] = kustomization["namespace"]
        for labels in kustomization.get("labels", []):
            item["metadata"]["labels"] = {**item["metadata"].get("labels", {}), **labels["pairs"]}
        for image in kustomization.get("images", []):
            _set_image(item, image)
    for patch in kustomization.get("patches", []):
        (number,) = [number for number, item in enumerate(objects) if _is(item, patch["target"])]
        objects[number] = jsonpath.patch.apply(yaml.safe_load(io.StringIO(patch["patch"])), objects[number])
    return objects


def _is(item: Object, target: Mapping[str, str]) -> bool:
    return (item["kind"], item["metadata"]["name"]) == (target["kind"], target["name"])


def _set_image(item: Object, image: Mapping[str, str]) -> None:
    for container in item.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        if container["image"] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"


def one(objects: list[Object], kind: str, name: str) -> Object:
    """The only object of that kind and name."""
    (found,) = [item for item in objects if _is(item, {"kind": kind, "name": name})]
    return found


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def service_configuration(objects: list[Object]) -> dict[str, Any]:
    """The service's configuration in the ConfigMap."""
    values: dict[str, Any] = yaml.safe_load(one(objects, "ConfigMap", "extproc")["data"]["extproc.yaml"])
    return values


def validate(item: Object) -> None:
    """Raises a ValidationError (of kubernetes_validate or jsonschema) that says what is wrong."""
    key = item["apiVersion"], item["kind"]
    schema = SCHEMAS.get(key)
    if schema is None:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    else:
        jsonschema.Draft202012Validator(schema).validate(item)
