"""Envoy configurations as control planes make them from the manifests, for the real Envoy.

Istio and Envoy Gateway are not run here. What each of them would deliver for a Gateway and an HTTPRoute to the decoders
is written down as they write it (names, and the defaults that matter: buffer limits, retries), only that routes and
endpoints are inline instead of discovered. Then the manifests' patches are applied, by the rules of each.
"""

from tests.support.mesh.common import OTHER_PATH, Json, PatchError
from tests.support.mesh.envoy_gateway import apply_patch_policy, envoy_gateway
from tests.support.mesh.inference_pool import inference_pool
from tests.support.mesh.istio import apply_envoy_filter, istio

__all__ = [
    "OTHER_PATH",
    "Json",
    "PatchError",
    "apply_envoy_filter",
    "apply_patch_policy",
    "envoy_gateway",
    "inference_pool",
    "istio",
]
