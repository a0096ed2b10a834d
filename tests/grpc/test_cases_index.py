"""Every case has its tests, named by its id: through the scripted Envoy, and where Envoy matters the real one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.grpc.stand import MODES

TESTS: Final = Path(__file__).parents[1]

REPORTED: Final = "B01 B03 B04 B05 B07 B08 B09 B10 B12 B15 B16 B17 B18 B19 B20 B21 B24 B29 B30 B31 B32 B34 B35".split()
BELOW_THE_MESSAGES: Final = "B36 B37 B38 B39 B40".split()
"""Of the libraries under the service."""
ODDITIES: Final = [f"O{number}" for number in range(1, 27)]
CASES: Final = [*REPORTED, *BELOW_THE_MESSAGES, *ODDITIES]

ENVOYS_OWN: Final = {"O13", "O19", "O21", "O24"}
"""What Envoy does with them is the case: a scripted one shows nothing."""
OF_NO_MODE: Final = {"O20"}
"""Of the connection, not of a request."""
WHERE_ENVOY_MATTERS: Final = {
    *ENVOYS_OWN,
    *("B01", "B03", "B04", "B07", "B08", "B09", "B10", "B12", "B15", "B16", "B24", "B29", "B30", "B31", "B32", "B34"),
    *("B36", "O11", "O12"),
}
STREAMED_ALONE: Final = {"B05", "B17"}
"""Of chunks and trailers: only one mode has them."""

BOTH: Final = frozenset(MODES)
SHOWN_BY: Final = {
    "grpc": {"mode": BOTH, "envoy": BOTH},
    "envoy": {
        **dict.fromkeys(("mode", "either", "limited"), BOTH),
        "streaming": frozenset({"FULL_DUPLEX_STREAMED"}),
        **dict.fromkeys(("gateway", "small_gateway", "falling_back", "hasty"), frozenset({"BUFFERED"})),
    },
}
"""A test's body modes, by its fixtures."""


def cases_in(directory: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Names, and the modes that the test runs in; none where its fixtures do not say."""
    for file in sorted((TESTS / directory).glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef) and node.name.startswith("test_"):
                fixtures = (SHOWN_BY[directory].get(argument.arg, frozenset()) for argument in node.args.args)
                yield node.name, frozenset().union(*fixtures)


def ids(name: str) -> list[str]:
    return re.findall(r"(?<=_)[BO][0-9]{1,2}(?=_)", name)


def modes_by_id(directory: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, modes in cases_in(directory):
        for case in ids(name):
            found.setdefault(case, set()).update(modes)
    return found


SCRIPTED: Final = modes_by_id("grpc")
REAL: Final = modes_by_id("envoy")


def test_no_test_is_of_a_case_that_there_is_not() -> None:
    assert (SCRIPTED.keys() | REAL.keys()) <= set(CASES)
    assert len(CASES) == len(set(CASES)) == 28 + 26


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_shown(case: str) -> None:
    if case not in ENVOYS_OWN:
        assert SCRIPTED.get(case) == (set() if case in OF_NO_MODE else BOTH)
    if case in WHERE_ENVOY_MATTERS:
        assert REAL.get(case) == BOTH
    if case in STREAMED_ALONE:
        assert case in REAL


def test_ids_are_read_from_names() -> None:
    assert ids("test_B03_B04_the_limit_is_exact") == ["B03", "B04"]
    assert ids("test_O1_logprobs") == ["O1"]
    assert ids("test_a_POST_without_B5") == []
