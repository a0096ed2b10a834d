"""A release listener for upstream vLLM: the counterpart, inside a prefiller, of this package's ZMQ release.

vLLM's NIXL connector keeps a finished prefill's KV blocks until a decoder has read them or their lease (30 s) ends; it
has no way to be told that nobody will come. This plugin adds one. Load it on prefillers (decoders keep
``NixlConnector``)::

    --kv-transfer-config '{"kv_connector": "AbortableNixlConnector",
                           "kv_connector_module_path": "extproc.vllm_plugin.nixl",
                           "kv_role": "kv_producer",
                           "kv_connector_extra_config": {"abort_port": 5700}}'

The engine's Python must find it: ``pip install --no-deps extproc`` in its environment, or a copy of this package on
PYTHONPATH. It needs nothing beyond what vLLM brings (pyzmq, msgspec) and imports nothing of the rest of ``extproc``.

Settings, in ``kv_connector_extra_config``:

=================  =====================================================================================================
``abort_port``     required. The engine's worker of rank *r* listens on ``abort_port + r``; with internal data
                   parallelism on ``abort_port + data_parallel_index * world_size + r`` (world size: TP × PP)
``abort_host``     address to bind; default ``VLLM_NIXL_SIDE_CHANNEL_HOST``, like NIXL's own side channel
``abort_grace_s``  how long an abort waits for a request that is still computed to finish; default 0.5
=================  =====================================================================================================

Like the side channels of vLLM itself, the port has no authentication: keep it inside the cluster's network.

A prefill's answer then carries two more ``kv_transfer_params``: ``abort_port`` (the port of that engine's rank 0,
beside ``remote_host``) and ``abort_ranks`` (on how many ports from there its workers listen). Decoders ignore them. For
the messages see :mod:`extproc.vllm_plugin.listener`.
"""
