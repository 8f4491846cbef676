"""Do README.md and docs/ agree with the code? Their log lines, variables, paths, reasons, rules and sizes."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from fla_kda_backend import __version__, dispatch, log, ops, switches
from fla_kda_backend.doctor.page import page as doctors_page
from fla_kda_backend.log import Dispatch
from scripts.install_fla_versions import FLA_VERSIONS
from tests.test_dispatch import GPU, call_on, gpu, packed_on  # noqa: F401 (gpu is a fixture)
from tests.test_doctor import as_examined, without_gpu
from tests.test_registration import WAYS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import dispatch_table  # noqa: E402

README = (ROOT / "README.md").read_text()
DISPATCH = (ROOT / "docs" / "dispatch.md").read_text()
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
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
    variables = {name for name in read_by_code - macros if not name.endswith("_")}
    for text in (README, DISPATCH):
        assert not {name for name in variables if f"`{name}" not in text}


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
    for library in (None, ops.LibraryInfo("", ("80",), "", "", False)):
        monkeypatch.setattr(ops, "library", lambda library=library: library)
        given.append(LIBRARY_FOR.__wrapped__((9, 0))[1])

    table = README.split("It says Triton", 1)[1].split("**There is no line", 1)[0]
    shown = re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `")))
    patterns = [".*".join(re.escape(part.strip()) for part in reason.split("…")) for reason in shown]
    for pattern in patterns:
        assert any(re.match(pattern, reason) for reason in given), f"nothing gives {pattern}"
    for reason in given:
        assert any(re.match(pattern, reason) for pattern in patterns), f"not explained: {reason}"


# --- docs/dispatch.md -------------------------------------------------------------------------------------------------


def test_the_table_of_the_rules_is_up_to_date():
    shown = DISPATCH.split(dispatch_table.BEGIN)[1].split(dispatch_table.END)[0].strip()
    assert shown == dispatch_table.table(), "run scripts/dispatch_table.py --write"


def rows_of_the_rules() -> dict[str, list[str]]:
    rows = (line.split(" | ") for line in dispatch_table.table().splitlines()[2:])
    return {rule.strip("| `"): [said, on_gpu, on_cpu.strip(" |")] for rule, said, on_gpu, on_cpu in rows}


def test_the_table_has_every_rule_once_and_says_what_becomes_of_a_call(monkeypatch):
    kinds = {"cpu": dispatch.DeviceFacts("cpu"), GPU: dispatch.DeviceFacts("cuda", (9, 0))}
    monkeypatch.setattr(dispatch, "device_facts", lambda device: kinds[device.type])
    monkeypatch.setattr(dispatch, "library_for", lambda capability: ("90a", ""))
    rows = rows_of_the_rules()
    rules = [rule.__name__ for rules in dispatch_table.groups().values() for rule in rules]
    assert len(rules) == len(set(rules)) and rows.keys() == {*rules, *dispatch_table.CHECKS}
    for device, column in ((GPU, 1), ("cpu", 2)):
        misfit = dispatch.decide(call_on(device, initial_state=torch.zeros(1, 4, 128, 128, device=device)))
        taken_by = "FLA" if misfit.error is None else f"`{misfit.error.__name__}`"
        assert rows["state_fits"][column].endswith(f"→ {taken_by}")
    assert rows["cuda_head_dim"][0].startswith("head_dim K=… is not supported (128)")
    assert rows["cpu_dtypes"][1] == "–" and rows["cuda_gradients"][2] == "–"


def test_a_new_rule_appears_in_the_table(monkeypatch):
    def cuda_full_moon(call, dims):
        return f"the moon is full on day {dims.T}, or {'x'}"

    monkeypatch.setattr(dispatch, "CUDA_DOES_NOT", (cuda_full_moon, *dispatch.CUDA_DOES_NOT))
    assert rows_of_the_rules()["cuda_full_moon"] == ["the moon is full on day …, or …", "5 → FLA", "–"]


def test_the_versions_of_fla_are_those_that_are_tested_and_register_as_it_says():
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| `([\w.]+)` \|.*\| ([^|]+) \|$", DISPATCH, re.M)
    assert {version: way for version, way, _ in rows} == WAYS
    assert [version for version, *_ in rows] == list(FLA_VERSIONS)
    assert [version for version, _, decode in rows if decode == "served here"] == ["0.6.0"]


def test_the_log_is_described_as_it_is():
    paths = dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \| .*\|$", DISPATCH.split("| path | label |")[1], re.M)[:4])
    assert paths == dispatch.PATH_LABELS
    keys = DISPATCH.split("The JSON object has the keys", 1)[1].split(";", 1)[0]
    assert re.findall(r"`(\w+)`", keys) == [field.name for field in dataclasses.fields(Dispatch)] + ["label"]
    assert f"After {log.MAX_DISTINCT_LINES} distinct lines" in DISPATCH


# --- docs/troubleshooting.md, CHANGELOG.md ----------------------------------------------------------------------------


def test_the_doctors_page_is_shown_as_it_looks():
    shown = TROUBLESHOOTING.split("```\nfla_kda_backend doctor\n", 1)[1].split("```", 1)[0]
    real = doctors_page(as_examined(without_gpu())).removeprefix("fla_kda_backend doctor\n") + "\n"

    def parts(text: str) -> list[str]:
        """What does not depend on versions and measurements: names of facts, probes, and sentences."""
        facts, rest = text.split("\nprobes", 1)
        return [line[:16] for line in facts.splitlines()] + re.sub(r"\d\S+(, |s)? ?", "", rest).splitlines()

    assert parts(shown) == parts(real)


def test_the_probes_are_explained():
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TROUBLESHOOTING, re.M))))
    assert {"reference", "portable", "hopper", "fla", "triton"} <= explained


def test_the_changelog_has_an_entry_for_what_is_here():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", changelog, re.M)


# --- the pages of the kernels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page, folder", [("forward-portable.md", "sm80"), ("forward-hopper.md", "sm90")])
def test_constants_in_the_kernel_pages_are_those_of_the_kernels(page, folder):
    text = (ROOT / "docs" / page).read_text()
    config = (ROOT / "csrc" / folder / "chunk_kda_fwd" / "config.cuh").read_text()
    constants = dict(re.findall(r"constexpr \w+ (k\w+) = (-?[\d.]+)f?[,;]", config))
    # What depends on how blocks share the work, in the order in which the page has it.
    choices = {name: found for name, *found in re.findall(r"(k\w+) = k\w+ == [\w:]+ \? (\d+) : (\d+)[,;]", config)}
    anchor = int(float(constants["kAnchor"]))
    assert f"A = {anchor}" in text and f"G < −{2 * anchor}" in text
    for stages in choices.get("kStages") or [constants["kStages"]]:
        assert f"| {stages} stages:" in text
    if folder == "sm90":
        assert all(f"| {inputs} inputs:" in text for inputs in choices["kInputs"])
        assert f"| {constants['kValues']} × v" in text
        roles = [choices[f"k{role}Registers"] for role in ("Consumer", "Scaler", "Helper")]
        alone, two_blocks = (" / ".join(registers) for registers in zip(*roles, strict=True))
        assert f"| {alone} |" in text and f"| {two_blocks}, and {constants['kSpareRegisters']} for " in text
        assert f"| builders | {constants['kBuilders']}," in text
        assert f"2^−{-int(float(constants['kForgotten']))}" in text
