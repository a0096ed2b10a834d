"""The least that an ext_proc service in Python can do: grpc.aio, three replies, no prefill. A yardstick for CPU."""

from __future__ import annotations

import argparse
from typing import Any

import grpc
import uvloop

from extproc import replies
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc


class Bare(external_processor_pb2_grpc.ExternalProcessorServicer):
    def __init__(self, destination: str) -> None:
        self._destination = destination

    async def Process(self, _: Any, context: Any) -> None:  # noqa: N802 (gRPC's name)
        while (message := await context.read()) is not grpc.aio.EOF:
            phase = message.WhichOneof("request")
            if phase == "request_body":
                headers = [(replies.DESTINATION, self._destination.encode())]
                reply = replies.buffered_body(headers, message.request_body.body)
                replies.route(reply, self._destination)
            else:
                reply = replies.nothing(phase)
            await context.write(reply)


async def _serve(port: int, destination: str) -> None:
    server = grpc.aio.server()
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Bare(destination), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("destination")
    options = parser.parse_args()
    uvloop.run(_serve(options.port, options.destination))


if __name__ == "__main__":
    main()
