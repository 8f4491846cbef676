"""Does the placement of the Hopper kernel's roles see their loops, and find room where they do not crowd each other?"""

import re

import pytest

from scripts import place_code
from scripts.place_code import FOLDER, ROLES, SETS, Code


def code(**lines: range) -> Code:
    return {role: set(lines.get(role, ())) for role in ROLES}


def test_lines_are_crowded_where_more_than_two_share_an_address_modulo_the_cache():
    assert place_code.crowded(code(builder=range(4), scaler=range(64, 68)), 0, 0, 0) == 0
    three = code(builder=range(4), scaler=range(64, 68), consumer=range(128, 130))
    assert place_code.crowded(three, 0, 0, 0) == 3 / 4 * 6  # on the three schedulers that have a builder
    assert place_code.crowded(three, 0, 0, 2) == 3 / 4 * 6
    assert place_code.crowded(three, 0, 0, 4) == 0
    assert place_code.crowded(three, 0, SETS, 0) == 3 / 4 * 6


def test_the_room_that_is_found_is_the_least_that_crowds_nothing():
    three = code(builder=range(4), mover=range(4), scaler=range(64, 68), consumer=range(128, 132))
    assert place_code.crowded(three, 0, 0, 0) > 0
    crowded, mover, scaler, consumer = place_code.best_placement(three)
    assert crowded == place_code.crowded(three, mover, scaler, consumer) == 0
    assert (mover, scaler, consumer) == (0, 0, 4)


def test_code_that_does_not_fit_is_placed_as_well_as_it_can_be():
    most = code(builder=range(60), mover=range(40), scaler=range(60, 120), consumer=range(120, 160))
    crowded, *room = place_code.best_placement(most)
    assert 0 < crowded <= place_code.crowded(most, 0, 0, 0)
    assert crowded == place_code.crowded(most, *room)


def listing() -> str:
    """A disassembly of roles of 16 instructions each, a line hoisted out of their loops before and a cold one inside."""
    kernel, text, address = str(FOLDER / "kernel.cuh"), ["\t.section\t.text", ".text.chunk_kda_fwd_kernel:"], 0
    call = 1 + next(i for i, line in enumerate(place_code.source(kernel)) if ".run(" in line)
    for role in ROLES:
        path = str(FOLDER / f"{role}.cuh")
        loop = place_code.loop_of(path)[1]
        builder = str(FOLDER / "builder.cuh")
        cold = 1 + next(i for i, line in enumerate(place_code.source(builder)) if "restore_keys(stage" in line)
        kinds = ["hoisted"] * 8 + ["hot"] * 8 + ["cold"] * 8 + ["hot"] * 8
        for index, kind in enumerate(kinds):
            if index == 8:
                text.append(f".L_x_{role}:")
            if kind == "cold":
                text.append(f'\t//## File "{builder}", line {cold} inlined at "{kernel}", line {call}')
            text.append(f'\t//## File "{path}", line {loop} inlined at "{kernel}", line {call}')
            text.append(f'\t//## File "{kernel}", line {call}')
            opcode = "HGMMA.64x32x16.F32.BF16 R88" if role == "consumer" and index == 9 else "FMUL R1, R2, R3"
            opcode = f"@P0 BRA `(.L_x_{role})" if index == 31 else opcode
            text.append(f"        /*{address:04x}*/                   {opcode} ;   /* 0x0 */")
            address += 16
    return "\n".join(text)


def test_loops_are_read_without_what_is_hoisted_out_of_them_or_rarely_executed():
    (kind,) = place_code.read(listing(), place_code.COLD)
    for index, role in enumerate(ROLES):  # each has four lines: hoisted, hot, cold, hot
        assert kind[role] == {4 * index + 1, 4 * index + 3}


def test_a_kernel_of_pairs_has_two_kinds_of_work():
    first = listing()
    end = 4 * 32 * 16 + place_code.LOOP_END_BYTES // 16 * 16
    second = re.sub(r"/\*([0-9a-f]{4,})\*/", lambda at: f"/*{int(at[1], 16) + end:04x}*/", listing())
    second = second.split(".text.chunk_kda_fwd_kernel:")[1].replace(".L_x_", ".L_x_2")
    assert len(place_code.read(first + "\n" + second, place_code.COLD)) == 2


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_its_loop_and_its_call(role):
    loop = place_code.loop_of(str(FOLDER / f"{role}.cuh"))
    assert 5 < len(loop) < 60
    kernel = place_code.source(str(FOLDER / "kernel.cuh"))
    assert any(f"{role.capitalize()}<" in line for line in kernel) and any("role.run(" in line for line in kernel)


def test_every_kind_of_work_has_a_placement():
    text = place_code.PLACEMENT.read_text()
    for dtype in ("__nv_bfloat16", "float"):
        for kernel, (_, forms) in place_code.KERNELS.items():
            for form in forms:
                kind = f"Kernel::{kernel}, Form::{form}"
                assert re.search(rf"kPlacement<{dtype}, {kind}> = \{{\d+, \d+, \d+\}};", text)


@pytest.mark.parametrize("text", place_code.COLD + place_code.MODES)
def test_what_is_rarely_executed_is_still_written_so_in_the_source(text):
    lines = [line for path in FOLDER.glob("*.cuh") for line in place_code.source(str(path))]
    assert any(text in line for line in lines), "renamed: placement would take it for part of a loop"
