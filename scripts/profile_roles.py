"""What do the roles of the Hopper kernel do with their time, and does their code fit the instruction cache?

    ncu --clock-control none --kernel-name regex:chunk_kda_fwd --launch-skip 2 --launch-count 1 --set full \\
        --import-source no -o kernel python scripts/profile_roles.py --run --heads 132
    ncu --import kernel.ncu-rep --page source --csv > kernel.csv
    python scripts/profile_roles.py kernel.csv --heads 132 [--try NAME] [--roles ROLES.csv] [--sets SETS.csv]

`--run` makes three calls of so many heads (132: a block a head, 66: two), 2048 tokens, inputs as for the benchmark's rows
of short memory; it needs a GPU and torch. Reading a profile needs neither. Rows are added to files that exist, with the name of
the try and the blocks a head. ROLES.csv: role, warps' instructions a chunk (waiting
loops left out), samples, and of those the percentage at barriers and without an instruction to issue, and the lines of
128 bytes that the role executes. SETS.csv: for lines that share their address modulo 8 KB with so many others of the
same scheduler (consumers, scalers, and either the mover or builders), how many there are, and how often a warp was
found there without an instruction, per 10,000 executions.
"""

import argparse
import csv
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKENS, CHUNK = 2048, 16
ROLES = ("consumers", "scalers", "builders", "mover")
INSTRUCTION_BYTES, LINE_BYTES = 16, 128
LINE = LINE_BYTES // INSTRUCTION_BYTES
# The part of an address that chooses a set, as the samples of several layouts of the same code say.
SETS = 8192 // LINE_BYTES
# Instructions that run less often than this, per chunk, are no part of a role's loop.
HOT_PER_CHUNK = 0.2


@dataclass
class Instruction:
    address: int
    text: str
    executed: int
    samples: int
    starved: int  # samples without an instruction to issue

    @property
    def opcode(self) -> str:
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"\b0x([0-9a-f]+)$", self.text)
        return int(found[1], 16) if found and self.opcode.startswith("BRA") else None


@dataclass
class Role:
    instructions: list[Instruction] = field(default_factory=list)
    waiting: int = 0  # samples at barriers, in the role's code and in loops that lie apart from it

    def lines(self, chunks: int) -> dict[int, int]:
        """Executions of each line of the role's loop, by its number."""
        lines: dict[int, int] = {}
        for one in self.instructions:
            if one.executed > HOT_PER_CHUNK * chunks:
                number = one.address // LINE_BYTES
                lines[number] = max(lines.get(number, 0), one.executed)
        return lines


def read(path: Path) -> tuple[int, list[Instruction]]:
    """How many blocks share a head, and the kernel's instructions, whose addresses begin with 0, from a source page.

    Raises:
        ValueError: the file is no such page.
    """
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    titles = next((row for row in rows if row[:2] == ["Address", "Source"]), None)
    kernel = re.search(r"chunk_kda_fwd_kernel<\w+, \(kda::sm90::Kernel\)([01])>", " ".join(rows[0]) if rows else "")
    if titles is None or kernel is None:
        raise ValueError(f"{path} is not what `ncu --page source --csv` prints of the kernel")
    columns = [titles.index(name) for name in ("Instructions Executed", "# Samples", "stall_no_inst")]
    body = [row for row in rows[rows.index(titles) + 1 :] if len(row) == len(titles)]
    first = int(body[0][0], 16)
    texts = [re.sub(r"0x([0-9a-f]{8,})$", lambda at: hex(int(at[1], 16) - first), row[1].strip()) for row in body]
    return 1 + int(kernel[1]), [
        Instruction(int(row[0], 16) - first, text, *(int(row[column] or 0) for column in columns))
        for row, text in zip(body, texts, strict=True)
    ]


def role_of(instructions: list[Instruction]) -> str | None:
    """Whose code this is, by what only that role does."""
    opcodes = Counter(one.opcode for one in instructions)

    def count(prefix: str) -> int:
        return sum(n for opcode, n in opcodes.items() if opcode.startswith(prefix))

    if count("HGMMA"):
        return "consumers"
    if count("LDSM"):
        return "builders"
    if count("MUFU.EX2") > 20:
        return "scalers"
    return "mover" if count("LDGSTS") else None


def split_roles(instructions: list[Instruction]) -> dict[str, Role]:
    """Roles by name: between registers that change hands and exits, each is a stretch of code."""
    roles = {name: Role() for name in ROLES}
    stretch: list[Instruction] = []
    for one in [*instructions, None]:
        if one is not None and one.opcode != "EXIT" and not one.opcode.startswith("USETMAXREG"):
            stretch.append(one)
            continue
        name = role_of(stretch)
        if name is not None:
            roles[name].instructions += stretch
        stretch = []
    by_address = {one.address: index for index, one in enumerate(instructions)}
    for role in roles.values():
        asks = False
        for one in role.instructions:
            asks = asks or "TRYWAIT" in one.opcode
            if not asks or one.target is None:
                continue
            asks = False
            role.waiting += one.samples
            for apart in instructions[by_address[one.target] :]:  # asks again, then goes back
                role.waiting += apart.samples
                if apart.target is not None and not apart.text.startswith("@"):
                    break
    return roles


def role_rows(roles: dict[str, Role], chunks: int) -> list[dict]:
    rows = []
    for name, role in roles.items():
        samples = sum(one.samples for one in role.instructions)
        starved = sum(one.starved for one in role.instructions)
        rows.append(
            {
                "role": name,
                "instructions_a_chunk": round(sum(one.executed for one in role.instructions) / chunks),
                "samples": samples,
                "waiting_percent": round(100 * role.waiting / max(samples, 1), 1),
                "no_instruction_percent": round(100 * starved / max(samples, 1), 1),
                "lines": len(role.lines(chunks)),
            }
        )
    return rows


def set_rows(roles: dict[str, Role], chunks: int) -> list[dict]:
    lines = {name: role.lines(chunks) for name, role in roles.items()}
    starved: Counter = Counter()
    for role in roles.values():
        for one in role.instructions:
            starved[one.address // LINE_BYTES] += one.starved
    rates = defaultdict(list)
    for name, own in lines.items():
        beside = [other for other in ROLES if {name, other} != {"mover", "builders"}]
        together = Counter(number % SETS for other in beside for number in lines[other])
        for number, executed in own.items():
            if number - 1 in own:  # a line that is jumped to waits for other reasons, too
                rates[together[number % SETS] - 1].append(10_000 * starved[number] / executed)
    return [
        {"others_in_the_set": others, "lines": len(found), "starved_per_10000": round(sum(found) / len(found), 2)}
        for others, found in sorted(rates.items())
    ]


def run(heads: int) -> None:
    sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(ROOT / "scripts"))
    import benchmark_rows
    import torch

    from fla_kda_backend import chunk_kda

    arguments = benchmark_rows.inputs(benchmark_rows.Row(1, TOKENS, heads), device="cuda")
    with torch.no_grad():
        for _ in range(3):
            chunk_kda(**arguments)
    torch.cuda.synchronize()


def write(rows: list[dict], path: Path | None) -> None:
    """As CSV to the end of a file, and for people to the screen."""
    if not rows:
        return
    titles = list(rows[0])
    print("  ".join(titles))
    for row in rows:
        print("  ".join(str(row[title]).rjust(len(title)) for title in titles))
    print()
    if path is not None:
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, titles, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", type=Path, help="a source page as CSV")
    parser.add_argument("--run", action="store_true", help="make the calls that are to be profiled, and stop")
    parser.add_argument("--heads", type=int, default=132)
    parser.add_argument("--try", dest="name", default="", help="what the rows are called")
    parser.add_argument("--roles", type=Path, help="where the table of roles goes as CSV")
    parser.add_argument("--sets", type=Path, help="where the table of sets goes as CSV")
    options = parser.parse_args(arguments)
    if options.run:
        run(options.heads)
        return 0
    if options.profile is None:
        parser.error("a profile, or --run")
    blocks_a_head, instructions = read(options.profile)
    chunks = options.heads * blocks_a_head * TOKENS // CHUNK
    roles = split_roles(instructions)
    label = {"try": options.name, "blocks_a_head": blocks_a_head}
    write([label | row for row in role_rows(roles, chunks)], options.roles)
    write([label | row for row in set_rows(roles, chunks)], options.sets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
