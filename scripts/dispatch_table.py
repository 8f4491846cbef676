"""What are the rules by which a call is decided, in their order? The table of docs/dispatch.md, from the rules.

    python scripts/dispatch_table.py            print the table
    python scripts/dispatch_table.py --write    put it into docs/dispatch.md

The order, and what becomes of a call that a rule stops, are found by deciding: `dispatch.decide` runs on a call that
every rule lets through, once for a GPU and once for the CPU, with its helpers watched, and then again with one group of
rules stopping it. What a rule says is read from its code, with … for what the call fills in.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from fla_kda_backend import dispatch  # noqa: E402
from fla_kda_backend.call import Call  # noqa: E402

PAGE = ROOT / "docs" / "dispatch.md"
BEGIN = "<!-- made by scripts/dispatch_table.py --write: begin -->"
END = "<!-- made by scripts/dispatch_table.py --write: end -->"
DEVICES = {"GPU": dispatch.DeviceFacts("cuda", (9, 0)), "CPU": dispatch.DeviceFacts("cpu")}
# Checks of `decide` that are no group of rules: the helper that shows when they happen, and what holds their sentences.
CHECKS = {
    "sizes_can_be_read": dispatch._wrong_dimensions,
    "device_is_known": dispatch.decide,
    "kernels_for_the_device": dispatch.library_for,
    "forced_path": dispatch._cuda_decision,
}


def groups() -> dict[str, tuple[Callable, ...]]:
    """The groups of rules by name."""
    return {
        name: value
        for name, value in vars(dispatch).items()
        if name.isupper() and isinstance(value, tuple) and value and all(inspect.isfunction(rule) for rule in value)
    }


@contextlib.contextmanager
def watched(device: str, seen: list[str], stopped_by: str | None = None) -> Iterator[None]:
    """Inside, `decide` notes its steps in `seen`, and the group `stopped_by` stops every call."""
    names = {rules: name for name, rules in groups().items()}

    def first(rules, call, dims):
        seen.append(names[rules])
        return "stopped" if names[rules] == stopped_by else None

    def noting(name, result):
        def helper(*args):
            seen.append(name)
            return result

        return helper

    dims = dispatch.Dims(1, 1, 1, 1, 1, 1)
    accepted = dispatch.Decision("hopper")
    with (
        mock.patch.object(dispatch, "_first", first),
        mock.patch.object(dispatch.Dims, "of", noting("sizes_can_be_read", dims)),
        mock.patch.object(dispatch, "device_facts", noting("device_is_known", DEVICES[device])),
        mock.patch.object(dispatch, "library_for", noting("kernels_for_the_device", ("90a", ""))),
        mock.patch.object(dispatch, "_cuda_decision", noting("forced_path", accepted)),
    ):
        yield


def decide(device: str, stopped_by: str | None = None) -> tuple[list[str], dispatch.Decision]:
    """(the steps in their order, the decision) for a call on this device."""
    seen: list[str] = []
    tensor = torch.empty(1, 1, 1, 1, device="meta")
    with watched(device, seen, stopped_by):
        decision = dispatch.decide(Call(q=tensor, k=tensor, v=tensor, g=tensor, beta=tensor))
    return seen, decision


def outcome(device: str, step: str) -> str:
    """Who takes a call that this step stops."""
    decision = decide(device, stopped_by=step)[1]
    return "FLA" if decision.error is None else f"`{decision.error.__name__}`"


def sentences(function: Callable) -> list[str]:
    """What a function returns as a reason: literal texts, with … for what is filled in."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            value = node.value
            if isinstance(value, ast.Call):  # Decision(path, reason)
                parts = value.args[1:] if getattr(value.func, "id", "") == "Decision" else []
            else:
                parts = value.elts if isinstance(value, ast.Tuple) else [value]
            found += [(node.lineno, text) for part in parts if (text := _text(part))]
    return list(dict.fromkeys(text.replace("……", "…") for _, text in sorted(found)))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value
        else:  # constants of the module are shown, everything else is of the call
            name = getattr(part.value, "id", "")
            text += str(getattr(dispatch, name)) if name.isupper() and hasattr(dispatch, name) else "…"
    return text


def table() -> str:
    """The table in Markdown."""
    order = {device: decide(device)[0] for device in DEVICES}
    steps = list(order["GPU"])
    for index, step in enumerate(order["CPU"]):
        if step not in steps:
            before = order["CPU"][index - 1]
            steps.insert(steps.index(before) + 1, step)
    lines = ["| rule | the log says | GPU | CPU |", "|---|---|---|---|"]
    for step in steps:
        cells = [
            f"{order[device].index(step) + 1} → {outcome(device, step) if step in groups() else 'FLA'}"
            if step in order[device]
            else "–"
            for device in DEVICES
        ]
        rules = {rule.__name__: rule for rule in groups().get(step, ())} or {step: CHECKS[step]}
        for name, rule in rules.items():
            said = "<br>".join(sentence.replace("|", "\\|") for sentence in sentences(rule))
            if not said:
                raise ValueError(f"{name} says nothing that can be read from its code")
            lines.append(f"| `{name}` | {said} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="The table of the rules of the dispatcher.")
    parser.add_argument("--write", action="store_true", help="put it into docs/dispatch.md")
    if not parser.parse_args().write:
        print(table())
        return 0
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
