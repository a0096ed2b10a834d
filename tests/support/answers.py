"""How prefillers answer, or fail to: ``respond`` functions for recording engines."""

from __future__ import annotations

from tests.support.engines import Answer, CloseConnection, RecordedRequest, Respond, answer_prefill


def after(seconds: float) -> Respond:
    def respond(request: RecordedRequest) -> Answer:
        answer = answer_prefill(request)
        answer.delay_s = seconds
        return answer

    return respond


def json_answer(text: bytes, content_type: str = "application/json") -> Respond:
    return lambda _: Answer(headers=[("content-type", content_type)], body=text)


def closes(_: RecordedRequest) -> Answer:
    raise CloseConnection


def breaks_off(request: RecordedRequest) -> Answer:
    """Closes the connection in the middle of a good answer."""

    async def between(number: int) -> None:
        if number:
            raise CloseConnection

    body = answer_prefill(request).body
    return Answer(headers=[("content-type", "application/json")], events=[body[:40], body[40:]], between_events=between)
