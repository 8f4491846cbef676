"""Finds the numbers of placement.cuh: where the roles of the Hopper kernel should lie in the instruction cache.

    python scripts/place_code.py [--write]

Compiles the kernels for each dtype of g, reads which lines of 128 bytes its roles' loops take (without what only steep
chunks, other gates, short chunks or waiting need), and looks for the empty lines before roles with which the fewest of
these lie where more than two share their address modulo 8 KB. Prints the lines of
csrc/sm90/chunk_kda_fwd/placement.cuh, and with `--write` puts them there; as room before a role changes the code a
little, repeat until nothing changes. Needs nvcc, and nvdisasm, which comes with Triton; no GPU.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.profile_roles import LINE_BYTES, SETS  # noqa: E402

FOLDER = ROOT / "csrc/sm90/chunk_kda_fwd"
PLACEMENT = FOLDER / "placement.cuh"
WAYS = 2  # lines of a set
# The ends of their units' names, and the forms of their blocks in the order in which the compiler lays them out.
KERNELS = {
    "kSingles": ("", ("kSingle",)),
    "kPaired": ("_paired", ("kSingle", "kPair")),
    "kMaps": ("_maps", ("kTwins", "kPair")),
}
ROLES = ("builder", "mover", "scaler", "consumer")
# What full chunks of gates that are not steep do not execute without waiting, by the source lines it is inlined at.
COLD = (
    "scale_steep<",
    "sum_gates<kMode, true>",
    "update_state<true>",
    "SteepPairs(",
    "restore_keys(",
    "locate_next(",
    "begin_inputs(",
    "begin_values(",
)
# Of the gates' modes the one that models use with each dtype of g; the others are cold.
MODES = ("run<GateMode::kGiven>(", "run<GateMode::kSoftplus>(", "run<GateMode::kBounded>(")
USUAL_MODE = {"bf16": "run<GateMode::kBounded>(", "fp32": "run<GateMode::kGiven>("}
# Of a role, over chunks.
LOOP = re.compile(r"\s*for \((int )?(chunk|index) = (0|index_);")
# Beyond a consumer's last product there are as many bytes of its loop at most; then come loops of waiting.
LOOP_END_BYTES = 3300


# By role, the numbers of the lines of LINE_BYTES that one kind of work executes for every chunk.
Code = dict[str, set[int]]


@cache
def source(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@cache
def loop_of(path: str) -> tuple[int, ...]:
    """The lines of a role's loops over chunks."""
    text, lines = source(path), []
    for start in (i for i, line in enumerate(text) if LOOP.match(line)):
        indent = text[start][: len(text[start]) - len(text[start].lstrip())]
        lines += range(start + 1, next(i for i in range(start + 1, len(text)) if text[i] == indent + "}") + 2)
    return tuple(lines)


def cold_code(dtype: str) -> tuple[str, ...]:
    return COLD + tuple(mode for mode in MODES if mode != USUAL_MODE[dtype])


def role_of(places: list[tuple[str, int]], cold: tuple[str, ...]) -> str | None:
    """Whose loop an instruction belongs to, from the source lines that it was inlined at, the innermost first."""
    texts = [source(path)[line - 1] for path, line in places if path.startswith(str(ROOT)) and line <= len(source(path))]
    if any(one in text for text in texts for one in cold):
        return None
    for role in ROLES:
        own = str(FOLDER / f"{role}.cuh")
        if any(path == own and line in loop_of(own) for path, line in places):
            return role
    return None


def read(disassembly: str, cold: tuple[str, ...]) -> list[Code]:
    """The kinds of work of the kernel in `nvdisasm -gi -hex`, in the order in which they lie in memory."""
    instructions, labels, named, places, begins = [], {}, [], [], True
    kernel = False
    for line in disassembly.splitlines():
        if line.startswith(".text."):
            kernel = "chunk_kda_fwd_kernel" in line
        elif kernel and (found := re.match(r"(\.L_\w+):", line)):
            named.append(found[1])
        elif kernel and (found := re.match(r'\s+//## File "([^"]+)", line (\d+)', line)):
            places = [] if begins else places
            places.append((found[1], int(found[2])))
            begins = False
        elif kernel and (found := re.match(r"\s+/\*([0-9a-f]{4,6})\*/\s+(\S.*?) ;", line)):
            begins = True
            address, role = int(found[1], 16), role_of(places, cold)
            labels.update((name, address) for name in named)
            named = []
            if role is not None:
                instructions.append((address, role, found[2]))
    kinds: list[Code] = []
    end = 0
    while True:
        rest = [one for one in instructions if one[0] > end]
        products = [address for address, role, text in rest if role == "consumer" and "HGMMA" in text]
        if not products:
            return kinds
        last = products[0]  # of this kind: no other role's code lies between them
        for address, role, text in rest:
            if address > last and role in ("builder", "mover"):
                break
            last = address if role == "consumer" and "HGMMA" in text else last
        begin, end = end, last + LOOP_END_BYTES
        code: Code = {}
        for role in ROLES:
            own = [(address, text) for address, one, text in rest if one == role and address <= end]
            # What is hoisted out of the loop lies before its head, the first place that is jumped back to.
            jumps = [(address, re.search(r"BRA.*`\((\.L_\w+)\)", text)) for address, text in own]
            targets = [(address, labels[found[1]]) for address, found in jumps if found]
            head = min(target for address, target in targets if begin <= target <= address)
            code[role] = {address // LINE_BYTES for address, _ in own if address >= head}
        kinds.append(code)


def crowded(code: Code, mover: int, scaler: int, consumer: int) -> float:
    """How many lines lie where more than two do, on average over schedulers: one has the mover, three a builder."""
    shifts = {"builder": 0, "mover": mover, "scaler": mover + scaler, "consumer": mover + scaler + consumer}

    def on(helper: str) -> int:
        roles = ("consumer", "scaler", helper)
        together = Counter((line + shifts[role]) % SETS for role in roles for line in code[role])
        return sum(lines for lines in together.values() if lines > WAYS)

    return (3 * on("builder") + on("mover")) / 4


def best_placement(code: Code) -> tuple[float, int, int, int]:
    """(crowded lines, lines before mover, scaler and consumer), the shortest of the best."""
    # Scaler and consumer beside the builder first, which is what three of four schedulers have.
    pairs = []
    for scaler in range(SETS):
        for consumer in range(SETS):
            pairs.append((crowded(code, 0, scaler, consumer), scaler, consumer))
    found = []
    for _, scaler, consumer in sorted(pairs)[:60]:
        for mover in range(SETS):
            before = (scaler - mover) % SETS
            found.append((crowded(code, mover, before, consumer), mover + before + consumer, mover, before, consumer))
    lines, _, mover, before, consumer = min(found)
    return lines, mover, before, consumer


def disassemble(unit: str, folder: Path) -> str:
    binary = folder / f"{unit}.cubin"
    nvdisasm = shutil.which("nvdisasm")
    if nvdisasm is None:
        import triton

        nvdisasm = str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")
    command = ["nvcc", "-std=c++17", "-O3", "-lineinfo", f"-I{ROOT / 'csrc'}", "-gencode", "arch=compute_90a,code=sm_90a"]
    subprocess.run([*command, "-cubin", "-o", binary, FOLDER / "instantiations" / f"{unit}.cu"], check=True)
    return subprocess.run([nvdisasm, "-gi", "-hex", binary], check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="put the numbers into placement.cuh")
    arguments = parser.parse_args()
    text = PLACEMENT.read_text()
    changed = False
    with tempfile.TemporaryDirectory() as folder:
        for dtype, name in (("__nv_bfloat16", "bf16"), ("float", "fp32")):
            for kernel, (suffix, forms) in KERNELS.items():
                kinds = read(disassemble(f"gate_{name}{suffix}", Path(folder)), cold_code(name))
                if len(kinds) != len(forms):
                    print(f"gate_{name}{suffix}: {len(kinds)} kinds of work were found", file=sys.stderr)
                    return 1
                for form, code in zip(forms, kinds):
                    start = f"constexpr Placement kPlacement<{dtype}, Kernel::{kernel}, Form::{form}> = "
                    found = re.search(re.escape(start) + r"\{(\d+), (\d+), (\d+)\};", text)
                    now = crowded(code, 0, 0, 0)  # the numbers of today are in the code
                    best, *more = best_placement(code)
                    placed = [int(found[i + 1]) for i in range(3)]
                    if best < now - 2:  # less is not worth a change
                        placed = [(placed[i] + more[i]) % SETS for i in range(3)]
                        changed = True
                    line = f"{start}{{{placed[0]}, {placed[1]}, {placed[2]}}};"
                    print(*(f"{role} {len(lines)}" for role, lines in code.items()))
                    print(f"{line}  // {now} crowded lines now, {best} at best")
                    text = text.replace(found[0], line)
    if arguments.write and changed:
        PLACEMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
