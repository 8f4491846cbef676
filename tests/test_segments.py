"""Into how many segments is a sequence cut, side by side or in turns? The Hopper kernel's rules, for an H200 and others."""

import re
from pathlib import Path

import pytest

from fla_kda_backend import ops


@pytest.mark.parametrize(
    "heads, tokens, segments",
    [
        (96, 8192, 1),  # the heads fill the device
        (64, 8192, 1),  # two segments would take as long as the whole
        (32, 8192, 3),
        (8, 8192, 9),
        (8, 131072, 9),  # longer segments, not more of them
        (4, 65536, 17),  # with half of V a block in the second pass
        (1, 8192, 32),  # none shorter than 256 tokens
        (8, 2048, 1),  # not worth two more launches
        (8, 0, 1),
        (0, 8192, 1),
    ],
)
def test_number_of_segments_on_132_multiprocessors(heads, tokens, segments):
    assert ops.count_segments(heads, tokens, 132) == segments


@pytest.mark.parametrize("multiprocessors", [78, 114, 132, 144])
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 24, 32, 48])
@pytest.mark.parametrize("tokens", [4096, 10000, 1 << 20])
def test_both_passes_over_segments_fit_the_device_at_once(heads, tokens, multiprocessors):
    segments = ops.count_segments(heads, tokens, multiprocessors)
    if segments > 1:
        assert heads * (2 * segments - 3) <= multiprocessors and 2 * heads * (segments - 1) <= multiprocessors
        assert tokens // segments >= ops.MIN_SEGMENT_TOKENS


@pytest.mark.parametrize(
    "heads, tokens, turns",
    [
        (96, 8192, 3),  # 36 to spare: 32 at a time
        (96, 3072, 3),
        (96, 3071, 0),  # not worth two more launches
        (67, 8192, 2),
        (66, 8192, 1),  # all have two blocks
        (110, 8192, 5),
        (120, 8192, 0),  # too many turns for what is to spare
        (132, 8192, 0),
        (400, 8192, 0),
        (0, 8192, 1),
        (96, 0, 0),
    ],
)
def test_number_of_turns_on_132_multiprocessors(heads, tokens, turns):
    assert ops.count_turns(heads, tokens, 132) == turns


@pytest.mark.parametrize("multiprocessors", [78, 114, 132, 144])
@pytest.mark.parametrize("heads", range(1, 160, 7))
def test_every_turn_fits_the_device_and_no_call_has_both(heads, multiprocessors):
    turns = ops.count_turns(heads, 1 << 20, multiprocessors)
    if turns > 1:
        assert heads + -(-heads // turns) <= multiprocessors < 2 * heads
        assert ops.count_segments(heads, 1 << 20, multiprocessors) == 1


def test_as_many_packed_sequences_are_ordered_as_the_kernel_orders():
    launch = (Path(__file__).parent.parent / "csrc/sm90/chunk_kda_fwd/launch.h").read_text()
    (most,) = re.findall(r"constexpr int kMaxRankedSequences = (\d+);", launch)
    assert ops.MAX_ORDERED_SEQUENCES == int(most)
