"""Does the reader of profiles tell roles apart, and count what they do?"""

import csv

import pytest

from scripts import profile_roles

TITLES = ["Address", "Source", "# Samples", "Instructions Executed", "stall_no_inst"]
HEADS = 66
CHUNKS = HEADS * 2 * profile_roles.TOKENS // profile_roles.CHUNK  # two blocks a head


@pytest.fixture
def profile(tmp_path):
    """A source page of three roles, and of a loop that asks a barrier again, far from the role that asks."""
    apart = hex(0x7F0000000000 + 16 * 60)
    code = (
        [("LDC R1, c[0x0][0x28]", 3, 50, 0), ("USETMAXREG.DEALLOC.CTAPOOL 0x60", 0, 50, 0)]
        + [("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2", 1, CHUNKS, 0), (f"@!P0  BRA {apart}", 4, CHUNKS, 1)]
        + [("LDSM.16.M88.4 R4, [R12]", 5, CHUNKS, 2), ("HMMA.16816.F32.BF16 R0, R4, R8, R0", 5, CHUNKS, 2)] * 2
        + [("EXIT", 0, 50, 0)]
        + [("LDGSTS.E.BYPASS.128 [R1], [R2.64]", 2, CHUNKS, 1)] * 2
        + [("EXIT", 0, 50, 0), ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0", 0, 50, 0)]
        + [("HGMMA.64x32x16.F32.BF16 R88, R112, gdesc[UR16], RZ, !UPT", 10, 8 * CHUNKS, 5)] * 30
        + [("FMUL R1, R2, R3", 1, 1, 0)]  # no part of the loop
        + [("EXIT", 0, 50, 0)]
    )
    code += [("NOP", 0, 0, 0)] * (60 - len(code))
    code += [("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2", 6, 500, 0), ("BRA 0x7f0000000030", 2, 500, 0)]
    path = tmp_path / "kernel.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        kernel = "void chunk_kda_fwd_kernel<__nv_bfloat16, (kda::sm90::Kernel)1>(ChunkKdaFwdParams)"
        writer.writerow(["Kernel Name", kernel, ""])
        writer.writerow(TITLES)
        for index, (text, samples, executed, starved) in enumerate(code):
            writer.writerow([hex(0x7F0000000000 + 16 * index), "      " + text, samples, executed, starved])
    return path


def test_roles_are_told_apart_and_counted(profile):
    rows = {row["role"]: row for row in profile_roles.role_rows(split(profile), CHUNKS)}
    builders, consumers = rows["builders"], rows["consumers"]
    assert builders["instructions_a_chunk"] == 6 and builders["samples"] == 25
    assert builders["waiting_percent"] == pytest.approx(100 * (4 + 6 + 2) / 25, abs=0.1)  # with the loop apart
    assert builders["no_instruction_percent"] == pytest.approx(100 * 9 / 25, abs=0.1)
    assert consumers["instructions_a_chunk"] == 30 * 8 and consumers["waiting_percent"] == 0
    assert consumers["lines"] == 5  # 30 instructions from the fifth of a line on
    assert rows["mover"]["samples"] == 4 and rows["scalers"]["samples"] == 0


def test_lines_are_counted_by_how_many_share_their_set(profile):
    rows = profile_roles.set_rows(split(profile), CHUNKS)
    # Of the consumers' lines 1 to 5 the first is left out, since it may be jumped to.
    assert sum(row["lines"] for row in rows) == 4
    assert {row["others_in_the_set"] for row in rows} == {0}
    assert rows[0]["starved_per_10000"] == pytest.approx(10_000 * (8 + 8 + 8 + 3) * 5 / (8 * CHUNKS) / 4, rel=0.01)


def test_rows_are_added_to_tables(profile, tmp_path, capsys):
    tables = tmp_path / "roles.csv", tmp_path / "sets.csv"
    for name in ("1", "2"):
        where = ["--roles", str(tables[0]), "--sets", str(tables[1])]
        arguments = [str(profile), "--heads", str(HEADS), "--try", name, *where]
        assert profile_roles.main(arguments) == 0
    rows = list(csv.DictReader(tables[0].open()))
    assert [row["try"] for row in rows] == ["1"] * 4 + ["2"] * 4 and {row["blocks_a_head"] for row in rows} == {"2"}
    assert [row["lines"] for row in csv.DictReader(tables[1].open())] == ["4", "4"]
    assert "consumers" in capsys.readouterr().out


def test_other_files_are_refused(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is not what"):
        profile_roles.read(other)


def split(profile):
    return profile_roles.split_roles(profile_roles.read(profile)[1])
