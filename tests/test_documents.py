"""Do README.md and docs/ agree with the code? Their log lines, environment variables, paths, reasons and sizes."""

import re
from pathlib import Path

import pytest
import torch

from fla_kda_backend import dispatch, ops, switches
from fla_kda_backend.log import Dispatch
from tests.test_dispatch import GPU, call_on, gpu, packed_on  # noqa: F401 (gpu is a fixture)

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIBRARY_FOR = dispatch.library_for  # the real one, which `gpu` replaces
LOG_LINES = re.findall(r"^\[fla_kda_backend\] .*$", README, re.M)


def parse(line: str) -> Dispatch:
    """The dispatch that a line of the log describes, from the line alone."""
    operator, rest = line.removeprefix("[fla_kda_backend] ").split(" -> ")
    head, _, shape = rest.partition(" B=")
    fields = dict(part.split("=") for part in f"B={shape}".split() if "=" in part)
    label, _, reason = head.removesuffix(" |").partition(": ")
    label, _, arch = label.partition(" (sm_")
    path = next(path for path, name in dispatch.PATH_LABELS.items() if name == label)
    sizes = {name: int(fields[name]) for name in ("B", "T", "H", "HV", "K", "V")}
    modes = {name: fields[name] for name in ("gate", "beta", "state")}
    dtype = re.search(r" (bf16|fp16|fp32|fp64) ", shape)[1]
    varlen = int(fields["varlen"]) if "varlen" in fields else None
    return Dispatch(operator, path, reason, arch.rstrip(")") or None, dtype=dtype, varlen=varlen, **sizes, **modes)


@pytest.mark.parametrize("line", LOG_LINES)
def test_log_lines_in_the_readme_are_what_the_log_prints(line):
    assert str(parse(line)) == line


def test_the_readme_shows_a_line_of_each_kind():
    assert {parse(line).path for line in LOG_LINES} >= {"hopper", "reference", "triton"}
    assert all(label in README for label in dispatch.PATH_LABELS.values())


def test_every_environment_variable_is_explained():
    read_by_code = set(switches.VARIABLES)
    for folder in ("fla_kda_backend", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh"):
                read_by_code |= set(re.findall(r"\bFLA_KDA_[A-Z_]+\b", path.read_text()))
    # Macros that the build hands to csrc, not variables.
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    macros = set(re.findall(r"\bFLA_KDA_[A-Z0-9_]+\b", sources))
    missing = {name for name in read_by_code - macros if f"`{name}" not in README and not name.endswith("_")}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"\b(?:docs|scripts|csrc|tests|fla_kda_backend)/[\w./-]*\w", page.read_text())
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_reasons_in_the_readme_are_those_that_the_dispatcher_gives(gpu, monkeypatch):  # noqa: F811
    half = torch.zeros(2, 6, 2, 128, dtype=torch.float16, device=GPU)
    calls = [
        call_on(GPU, q=half.bfloat16().requires_grad_()),
        call_on(GPU, K=64),
        call_on(GPU, q=half),
        call_on(GPU, lower_bound=-7.0, safe_gate=False),
        call_on(GPU, unknown=("window",)),
        packed_on(GPU, cu_seqlens=torch.tensor([0, 2, 2, 6])),
    ]
    given = [dispatch.decide(call).reason for call in calls]
    monkeypatch.setenv("FLA_KDA_FORCE", "triton")
    given.append(dispatch.decide(call_on(GPU)).reason)
    for library in (None, ops.LibraryInfo("", ("80",), "", "")):
        monkeypatch.setattr(ops, "library", lambda library=library: library)
        given.append(LIBRARY_FOR.__wrapped__((9, 0))[1])

    table = README.split("It says Triton", 1)[1].split("**There is no line", 1)[0]
    shown = re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `")))
    patterns = [".*".join(re.escape(part.strip()) for part in reason.split("…")) for reason in shown]
    for pattern in patterns:
        assert any(re.match(pattern, reason) for reason in given), f"nothing gives {pattern}"
    for reason in given:
        assert any(re.match(pattern, reason) for pattern in patterns), f"not explained: {reason}"


@pytest.mark.parametrize("page, folder", [("forward-portable.md", "sm80"), ("forward-hopper.md", "sm90")])
def test_constants_in_the_kernel_pages_are_those_of_the_kernels(page, folder):
    text = (ROOT / "docs" / page).read_text()
    config = (ROOT / "csrc" / folder / "chunk_kda_fwd" / "config.cuh").read_text()
    constants = dict(re.findall(r"constexpr \w+ (k\w+) = (-?[\d.]+)f?;", config))
    anchor = int(float(constants["kAnchor"]))
    stages = int(constants["kStages"])
    assert f"A = {anchor}" in text and f"G < −{2 * anchor}" in text
    assert f"| {stages} stages:" in text
    if folder == "sm90":
        assert f"| {constants['kInputs']} inputs:" in text and f"| {constants['kValues']} × v" in text
        assert f"| builders | {constants['kBuilders']}," in text
        assert f"2^−{-int(float(constants['kForgotten']))}" in text
