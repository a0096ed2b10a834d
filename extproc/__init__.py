"""Prefill/decode disaggregated vLLM behind any Envoy."""

__version__ = "0.1.0"
