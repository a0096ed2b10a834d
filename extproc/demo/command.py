"""``extproc demo``: the main job on this machine, shown step by step."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def demo(
    once: Annotated[bool, typer.Option(help="Send the requests, then end (status 1 if any went wrong).")] = False,
    engine: Annotated[
        Literal["sim", "vllm"], typer.Option(help="Simulated engines, or real vLLM on CPU (`make vllm` first).")
    ] = "sim",
) -> None:
    """Run Envoy, the service and engines on this machine; send requests and show what happened to each."""
    from extproc.demo.run import run

    run(once=once, kind=engine)
