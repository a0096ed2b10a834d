"""The status page in a real Chromium, over a real gateway: what happened to each kind of request can be seen."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from extproc.demo.stack import Stack
from tests.browser.traffic import ENGINE_ARGUMENTS, SETTINGS, Traffic, over, patient, raw
from tests.support.chromium import Chromium, PageError

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

# Everything about one row, as it is on the screen.
ROW: Final = """
(id => {
  const row = [...document.querySelectorAll('#exchanges tr')].find(row => row.dataset.id === id);
  if (!row) return null;
  const text = selector => row.querySelector(selector)?.innerText ?? null;
  const track = row.querySelector('.track').getBoundingClientRect();
  return {
    request: text('.request'), pair: text('.pair'), what: text('.tag'), detail: text('.what'), total: text('.ms'),
    struck: text('s'), title: row.querySelector('.request').title,
    color: getComputedStyle(row.querySelector('.tag')).color,
    marks: row.querySelectorAll('i.release').length,
    parts: [...row.querySelectorAll('.track i:not(.release)')].map(part => {
      const box = part.getBoundingClientRect();
      return {name: part.className, title: part.title, left: box.left - track.left, width: box.width};
    }),
  };
})(%s)
"""


@dataclass(frozen=True)
class Shown:
    """One row of the page, and the service's record of the same request."""

    row: dict[str, Any]
    record: dict[str, Any]

    @property
    def parts(self) -> list[str]:
        return [part["name"] for part in self.row["parts"]]


class StatusPage:
    def __init__(self, stack: Stack, browser: Chromium) -> None:
        self.stack = stack
        self.browser = browser

    async def shows(self, name: str) -> Shown:
        """The request with that client's id, once the page has all that is known of it."""
        record = await self.stack.exchange(name, over)
        if record["outcome"] == "decode_refused" and record["prefiller"]:
            record = await self.stack.exchange(name, lambda record: "release" in record)
        id_ = f"'{record['request_id']}'"
        # Rows are drawn from what was fetched: this one must be as far as the record is.
        fetched = f"JSON.parse(shown.records ?? '[]').find(record => record.request_id === {id_})"
        await self.browser.until(f"(r => r && {json.dumps(list(record))}.every(field => field in r))({fetched})")
        return Shown(await self.browser.evaluate(ROW % id_), record)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    async with Stack(folder, settings=SETTINGS, engine_arguments=ENGINE_ARGUMENTS, change_bootstrap=patient) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chromium]:
    async with Chromium.started(tmp_path_factory.mktemp("browser")) as browser:
        await browser.resize(1300, 900)
        await browser.prefer("light")
        yield browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(stack: Stack, browser: Chromium) -> StatusPage:
    await browser.open(f"{stack.admin_url}/")
    await browser.until("document.getElementById('ready').textContent === 'serving'")
    return StatusPage(stack, browser)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traffic(stack: Stack) -> AsyncIterator[Traffic]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        yield Traffic(stack, client)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_else(page: StatusPage) -> AsyncIterator[None]:
    """Whatever a test does: no complaint in the console, and no request to anything but the admin port."""
    page.browser.complaints.clear()
    yield
    assert page.browser.complaints == []
    elsewhere = [url for url in page.browser.requested if not url.startswith((f"{page.stack.admin_url}/", "data:"))]
    assert elsewhere == []


GOOD, WARN, BAD = "rgb(29, 132, 89)", "rgb(169, 105, 10)", "rgb(201, 58, 85)"


# ── before the first request ──────────────────────────────────────────────────────────────────────────────────────────


async def test_an_idle_gateway(page: StatusPage) -> None:
    assert await page.browser.evaluate("document.querySelector('.empty').innerText") == (
        "No requests yet. Send one through Envoy."
    )
    names = await page.browser.evaluate("[...document.querySelectorAll('.engine')].map(card => card.dataset.name)")
    assert names == ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    card = await page.browser.until("(t => t.includes('waiting') && t)(document.querySelector('.engine').innerText)")
    assert re.fullmatch(
        r"prefill-1\s+prefill · ready\s+127\.0\.0\.1:\d+ · nixl\s+0 in flight · 0 running, 0 waiting · KV 0 %", card
    )
    assert await page.browser.evaluate("document.getElementById('version').innerText") != ""


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_that_went_well(page: StatusPage, traffic: Traffic) -> None:
    await traffic.streamed("support-4821")
    shown = await page.shows("support-4821")
    row, record = shown.row, shown.record
    assert row["request"] == "support-4821 /v1/chat/completions"
    assert row["pair"] == f"{record['prefiller']} → {record['decoder']}"
    assert (row["what"], row["color"], row["detail"]) == ("completed", GOOD, "completed")
    assert (row["marks"], row["struck"]) == (0, None)
    assert shown.parts == ["queue", "prefill-seg", "handoff", "first", "decode-seg"]
    assert record["request_id"] in row["title"]

    # The bar is true to scale: each part as long as it took, one after the other, to the request's end.
    axis = await page.browser.evaluate("document.getElementById('axis').lastChild.innerText")
    width = await page.browser.evaluate("document.querySelector('.track').getBoundingClientRect().width")
    scale = _milliseconds(axis)
    decode = row["parts"][-1]
    took = record["ended_ms"] - record["first_byte_ms"]
    assert decode["title"] == f"decode {_text(took)}"
    assert decode["width"] == pytest.approx(took / scale * width, abs=1.5)
    assert decode["left"] + decode["width"] == pytest.approx(record["ended_ms"] / scale * width, abs=1.5)
    lefts = [part["left"] for part in row["parts"]]
    assert lefts == sorted(lefts)


async def test_a_request_without_a_prefill_leg(page: StatusPage, traffic: Traffic) -> None:
    await traffic.bypassed("console")
    shown = await page.shows("console")
    assert shown.row["pair"] == f"– → {shown.record['decoder']}"
    assert (shown.row["what"], shown.row["color"]) == ("completed", GOOD)
    assert shown.row["detail"] == "completed no prefill leg · method"
    assert "prefill-seg" not in shown.parts

    await traffic.several_choices("draft-77")
    assert (await page.shows("draft-77")).row["detail"] == "completed no prefill leg · several choices"


async def test_a_prefill_leg_that_moved(page: StatusPage, traffic: Traffic) -> None:
    shown = await page.shows(await traffic.moved_to_another_prefiller("agent-12"))
    assert shown.row["pair"].startswith("prefill-2 → ")
    assert (shown.row["what"], shown.row["color"]) == ("completed", GOOD)
    assert shown.row["detail"] == "completed after status 5xx"
    assert [name for name in shown.parts if name in ("failed", "prefill-seg", "decode-seg")] == [
        "failed",
        "prefill-seg",
        "decode-seg",
    ]


async def test_a_decoder_that_prefilled(page: StatusPage, traffic: Traffic) -> None:
    await traffic.fallback("agent-13")
    shown = await page.shows("agent-13")
    assert shown.row["pair"] == f"– → {shown.record['decoder']}"
    assert (shown.row["what"], shown.row["color"]) == ("completed", WARN)
    assert shown.row["detail"] == "completed decoder prefilled · after 2 × unusable no params"
    assert "failed" in shown.parts
    assert "prefill-seg" not in shown.parts


async def test_a_decode_leg_that_moved(page: StatusPage, traffic: Traffic) -> None:
    shown = await page.shows(await traffic.moved_to_another_decoder("search-903"))
    assert shown.row["pair"] == f"{shown.record['prefiller']} → decode-1 decode-2"
    assert (shown.row["struck"], shown.row["color"]) == ("decode-1", GOOD)


async def test_requests_that_were_refused(page: StatusPage, traffic: Traffic) -> None:
    await traffic.refused_by_us("fuzzer-1")
    shown = await page.shows("fuzzer-1")
    assert (shown.row["what"], shown.row["color"], shown.row["pair"]) == ("refused", WARN, "– → –")
    assert shown.row["detail"] == "refused 400 · json too deep"

    await traffic.refused_by_the_prefiller("notebook-5")
    shown = await page.shows("notebook-5")
    assert (shown.row["what"], shown.row["color"]) == ("refused by engine", WARN)
    assert shown.row["detail"] == "refused by engine 400"
    assert shown.row["pair"] == f"{shown.record['prefiller']} → –"


async def test_a_release(page: StatusPage, traffic: Traffic) -> None:
    await traffic.failed_by_the_decoder("support-4822")
    shown = await page.shows("support-4822")
    assert (shown.row["what"], shown.row["color"], shown.row["marks"]) == ("decode refused", BAD, 1)
    assert re.fullmatch(r"decode refused 500 · blocks released in [\d.]+ m?s", shown.row["detail"])
    assert shown.parts[-1] == "cut"


async def test_streams_that_broke(page: StatusPage, traffic: Traffic) -> None:
    await traffic.died_mid_stream("support-4823")
    shown = await page.shows("support-4823")
    assert (shown.row["what"], shown.row["color"], shown.parts[-1]) == ("decode reset", BAD, "cut")
    assert shown.row["detail"] == "decode reset while decoding"

    await traffic.left_mid_stream("mobile-311")
    shown = await page.shows("mobile-311")
    assert (shown.row["what"], shown.row["color"], shown.parts[-1]) == ("client left", WARN, "cut")
    assert shown.record["first_byte_ms"] is not None
    assert shown.row["detail"].startswith("client left while decoding")

    await traffic.left_during_the_prefill("mobile-312")
    shown = await page.shows("mobile-312")
    assert (shown.row["what"], shown.row["color"]) == ("client left", WARN)
    assert shown.row["detail"].startswith("client left in the prefill")
    assert shown.row["pair"].endswith(" → –")  # no decoder has seen it
    assert shown.parts[-1] == "cut"
    assert "decode-seg" not in shown.parts


async def test_a_long_prompt(page: StatusPage, traffic: Traffic) -> None:
    """Most of such a request is its prefill, and most of the bar."""
    await traffic.long_prompt("rag-2210")
    widths = {part["name"]: part["width"] for part in (await page.shows("rag-2210")).row["parts"]}
    assert widths["prefill-seg"] > widths["decode-seg"]


async def test_a_request_that_still_runs(page: StatusPage, traffic: Traffic) -> None:
    async with traffic.failing("prefill", "hang"):
        async with traffic.open("batch-9"):
            running = "[...document.querySelectorAll('#exchanges tr')].find(row => row.innerText.includes('batch-9'))"
            assert await page.browser.until(f"{running}?.querySelector('.tag').innerText") == "running"
            assert await page.browser.evaluate(f"{running}.querySelector('.track i').className") == "running"
            engines = "[...document.querySelectorAll('.engine')].map(card => card.innerText).join()"
            await page.browser.until(f"{engines}.includes('1 in flight')")
        shown = await page.shows("batch-9")
    assert shown.row["what"] == "client left"


async def test_the_screenshot(page: StatusPage, traffic: Traffic, tmp_path: Path) -> None:
    """While two answers are being generated. ``STATUS_PAGE_PNG`` names a further file for it: docs/status-page.png."""
    more = {"stream": True, "max_tokens": 3000, "words": 600}
    async with traffic.open("essay-7", **more), traffic.open("essay-8", **more):
        await page.browser.until("document.querySelectorAll('.track .running').length === 2")
        pairs = "[...document.querySelectorAll('#exchanges tr')].slice(0, 2).map(row => row.children[2].innerText)"
        await page.browser.until(f"/^prefill-1 → decode-\\d,prefill-2 → decode-\\d$/.test({pairs}.sort().join())")
        full = "[...document.querySelectorAll('.decode .meter i')].every(bar => parseFloat(bar.style.width) > 8)"
        await page.browser.until(full)
        await page.browser.until("document.querySelectorAll('.track .prefill-seg + .running.decoding').length === 2")
        picture = await page.browser.screenshot(1300)
        await page.browser.resize(1300, 900)
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20]) == 1300
    _keep(picture, tmp_path / "status-page.png", os.environ.get("STATUS_PAGE_PNG"))


# ── hostile clients ───────────────────────────────────────────────────────────────────────────────────────────────────

_MARKUP: Final = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


async def test_what_clients_choose_is_text(page: StatusPage) -> None:
    name = f"{_MARKUP}&amp;'\"`${{1}}"
    path = "/v1/<b>bold</b>\"'><svg/onload=document.title='owned'>"
    await raw(page.stack, name.encode(), path.encode())
    shown = await page.shows(name)
    assert shown.row["request"] == f"{name} {path}"
    inside = "document.querySelectorAll('#exchanges :is(img, script, svg, b, style, iframe, a)').length"
    assert await page.browser.evaluate(inside) == 0
    assert await page.browser.evaluate("document.title") == "extproc"


async def test_what_is_absurdly_long_or_reversed_leaves_the_table_in_shape(page: StatusPage) -> None:
    name = "\u202e" + "w" * 120 + "\x85\x9b31m"
    await raw(page.stack, name.encode("utf-8")[:250], b"/" + b"p" * 3000)
    await page.browser.until("document.querySelector('#exchanges').innerText.includes('/pppp')")
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await page.browser.evaluate(width) == 0
    rows = "Math.max(...[...document.querySelectorAll('#exchanges tr')].map(row => row.getBoundingClientRect().height))"
    assert await page.browser.evaluate(rows) < 40  # one line each


async def test_the_policy_stops_what_is_not_the_pages_own(page: StatusPage) -> None:
    add = "Object.assign(document.createElement('script'), {textContent: 'window.owned = 1'})"
    await page.browser.evaluate(f"document.body.append({add})")
    assert await page.browser.evaluate("window.owned ?? 'no'") == "no"
    with pytest.raises(PageError, match="Failed to fetch"):
        await page.browser.evaluate(f"fetch('{page.stack.url}/v1/models')")
    assert len(page.browser.complaints) >= 2
    assert all("Content Security Policy" in text for text in page.browser.complaints)
    page.browser.complaints.clear()
    page.browser.requested[:] = [url for url in page.browser.requested if not url.startswith(page.stack.url)]


# ── engines ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_drained_engine(page: StatusPage) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"{page.stack.admin_url}/fleet/decode-2/drain")
        text = await page.browser.until("document.querySelector('.engine.draining')?.innerText")
        assert re.match(r"decode-2\s+decode · draining\s", text)
        assert await page.browser.evaluate("document.querySelectorAll('.engine.draining').length") == 1
        await client.post(f"{page.stack.admin_url}/fleet/decode-2/undrain")
    await page.browser.until("document.querySelectorAll('.engine.draining').length === 0")


async def test_what_engines_hold(page: StatusPage, traffic: Traffic) -> None:
    """While a long answer is generated, the decoder's card tells of it."""
    async with traffic.open("essay-1", max_tokens=4000, stream=True):
        busy = "[...document.querySelectorAll('.engine.decode')].find(card => card.innerText.includes('1 running'))"
        text = await page.browser.until(f"{busy}?.innerText")
        assert re.search(r"1 in flight · 1 running, 0 waiting · KV \d+ %", text)
        await page.browser.until(f"parseFloat({busy}?.querySelector('.meter i').style.width) > 0")
    await page.shows("essay-1")


# ── looks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_it_follows_the_systems_colours(page: StatusPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    await page.browser.prefer("dark")
    assert await page.browser.evaluate(background) == "rgb(17, 20, 26)"
    await page.browser.prefer("light")
    assert await page.browser.evaluate(background) == "rgb(246, 247, 249)"


@pytest.mark.parametrize("width", [390, 800, 1100, 1300])
async def test_it_fits_narrow_screens(page: StatusPage, width: int) -> None:
    """Nothing has to be scrolled sideways, and a bar is never a stub."""
    await page.browser.resize(width, 900)
    try:
        over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.browser.evaluate(over) == 0
        lines = "[...document.querySelectorAll('#exchanges .track')].map(track => track.getBoundingClientRect())"
        boxes = await page.browser.evaluate(f"{lines}.map(box => [box.left, box.right])")
        assert boxes
        assert all(0 <= left < left + 200 < right <= width for left, right in boxes)
        axis = await page.browser.evaluate(
            "(box => [box.left, box.right])(document.getElementById('axis').getBoundingClientRect())"
        )
        assert axis == pytest.approx(boxes[0], abs=1)
        shown = (
            "[...document.querySelectorAll('#exchanges .tag')].every(tag => tag.getBoundingClientRect().right <= {})"
        )
        assert await page.browser.evaluate(shown.format(width))
    finally:
        await page.browser.resize(1300, 900)


async def test_a_service_that_is_gone(page: StatusPage) -> None:
    """Last: the page says so, and keeps what it knew."""
    rows = await page.browser.evaluate("document.querySelectorAll('#exchanges tr').length")
    await page.stack.service.stop()
    await page.browser.until("document.getElementById('ready').textContent === 'no answer'")
    assert await page.browser.evaluate("document.querySelectorAll('#exchanges tr').length") == rows
    assert all("ERR_CONNECTION_REFUSED" in text for text in page.browser.complaints)
    page.browser.complaints.clear()


def _keep(picture: bytes, *files: Path | str | None) -> None:
    for file in files:
        if file:
            Path(file).write_bytes(picture)


def _milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * (1000 if unit == "s" else 1)


def _text(milliseconds: float) -> str:
    """As the page rounds it."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.2f} s" if milliseconds < 9950 else f"{milliseconds / 1000:.1f} s"
    return f"{math.floor(milliseconds + 0.5)} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
