"""Does every kind of fault in docs/faults.md have tests, and are these still there?"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("Dispatch", "Numbers", "Memory and concurrency", "Build and install")


def rows(page: str) -> dict[str, list[tuple[str, str]]]:
    """The (file, test) pairs of each kind in the page's tables."""
    found = {}
    for line in page.splitlines():
        if not line.startswith("|") or line.startswith(("|---", "| kind |")):
            continue
        kind, tests = (cell.strip() for cell in line.strip("|").split("|"))
        found[kind] = re.findall(r"`([^`]+)::([^`]+)`", tests)
    return found


PAGE = (ROOT / "docs" / "faults.md").read_text()
KINDS = rows(PAGE)


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("kind", KINDS)
def test_every_test_that_is_named_for_a_kind_exists(kind):
    assert KINDS[kind], "no test is named"
    for file, test in KINDS[kind]:
        assert file.startswith("tests/") and test.startswith("test_")
        assert test in names_in(file), f"{file} has no {test}"


def test_the_page_is_read_whole():
    assert re.findall(r"^## (.*)$", PAGE, re.M) == list(SECTIONS)
    assert len(KINDS) > 30
    assert sum(len(tests) for tests in KINDS.values()) == PAGE.count("::")
