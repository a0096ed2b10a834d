"""Where the search starts: bodies as clients send them, honest and not, and the bytes of a few streams."""

from __future__ import annotations

from typing import Final

_NAME: Final = "kv_transfer_params"

BODIES: Final[list[bytes]] = [
    b'\x00{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"stream":true}',
    b'\x01{"prompt":["a"],"n":1,"stream_options":{"include_usage":true},"min_tokens":2}',
    b'\x00{"vllm_xargs":{"kv_transfer_params":"","a":[1,"b"]},"kv_transfer_params":{"do_remote_prefill":true}}',
    b'\x02{"sampling_params":{"extra_args":{"kv_transfer_params":{}},"vllm_xargs":{}},"input":"x"}',
    b'\x00{"kv_transfer_param\\u0073":1,"\\u006bv_transfer_params":2,"a":NaN,"b":"\\ud800","c":1e999}',
    b'\x00 \r\n{"a":[[[[[{"b":[]}]]]]],"a":1,"\\"[":"]\\\\"}\n',
    *(b"\x00" + f'{{"prompt":"é☃","{_NAME}":0}}'.encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-32-be")),
    b'\x03--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{"kv_transfer_params":0}\r\n--x--\r\n',
    b"\x04vllm_xargs=%7B%22kv%5Ftransfer%5Fparams%22%3A0%7D",
]

# A byte for the behaviour of the prefillers and of the stream, then one for each message and what it needs.
STREAMS: Final[list[bytes]] = [
    bytes([0, 0, 0, 0, 10, 60, 20, 60, 30, 60, 40]),
    bytes([1, 2, 3, 5, 10, 0, 0, 20, 1, 30, 0, 70, 90]),
    bytes(range(64)),
    b'\x00\x01\x02\x00\x00\x00\x00\x10{"model":"m"}\x20\x30',
]
