"""Work that may block for ever, in a thread that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def start(work: Callable[[], _Result], name: str) -> asyncio.Future[_Result]:
    """The future result of ``work``. Cancelling it leaves the thread to itself.

    ``asyncio.to_thread`` has the loop's end, and the interpreter's, wait for its threads: a read that hangs (a network
    file system, a pipe) would keep a process that has been told to end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, fault = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 (it is raised where the result is awaited)
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
