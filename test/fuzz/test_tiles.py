# SPDX-License-Identifier: Apache-2.0
"""Random programs of parts of tiles do on every executor what torch makes of them.

`grammar_run.py --tiles` runs as many as are asked for. The number of the sample chooses the seeds here.
TORCH_TILE_FUZZ=1000 runs that many programs, TORCH_TILE_FUZZ_SEED=n starts from another seed.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from grammar_run import TILE_TURNS, disagreement, outcomes, smallest
from tiles import generated
from tiles_reference import PACKED, packed, unpacked

COUNT, PARTS = int(os.environ.get("TORCH_TILE_FUZZ", "32")), 4
SAMPLE = Path(__file__).parents[2] / ".ci" / "sample"
NUMBER = int(SAMPLE.read_text()) if SAMPLE.exists() else 0
FIRST = int(os.environ.get("TORCH_TILE_FUZZ_SEED", 20_000_000 + COUNT * NUMBER))


@pytest.mark.slow  # about eight seconds
@pytest.mark.every_sample
@pytest.mark.filterwarnings("ignore:.*(swapped_indices|outside)")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs(part, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setenv("TORCH_TILE_VERIFY", "0")  # which other tests look at
    torch.set_num_threads(1)
    try:
        programs = [generated(seed) for seed in range(FIRST + part, FIRST + COUNT, PARTS)]
        found = outcomes(programs, TILE_TURNS[part % len(TILE_TURNS)], tmp_path)
    finally:
        torch.set_num_threads(threads)
    for o in found:
        if o.is_fault:
            program = smallest(o.seed, o.way, o.kind, tmp_path, generated)
            pytest.fail(f"seed {o.seed}, {o.way}, {o.kind}: {o.text}\n{program.text()}", pytrace=False)
    assert sum(o.kind == "same" for o in found) > len(found) // 2


def test_programs_have_every_part():
    text = "\n".join(generated(seed).text() for seed in range(150))
    for part in (
        "T.dynamic", "StridedTensor", "I[", ": 2]", ": 3]", "T.Layout(", "make_swizzled_layout", "transpose_A=True",
        "T.Pipelined", "T.view", "T.reshape", "T.atomic_add", "T.transpose", "T.cumsum", "reverse=True", "T.reduce_sum",
        "'int4'", "'float4_e2m1fn'", "T.unroll", "threads=96", " % 3 != 0", "// 2", "prefer_instruction='tma'",
    ):  # fmt: skip
        assert part in text, part


def test_a_program_whose_result_differs_is_a_fault(tmp_path):
    """The reference is looked at: another value in one element of the arguments is told."""
    for seed in range(12):
        program = generated(seed)
        wanted = program.arguments()
        program.expected(wanted)
        got = [x.clone() for x in wanted]
        assert not disagreement(program, got, wanted)
        last = got[-1].view(torch.uint8).reshape(-1)
        last[-1] ^= 1
        assert disagreement(program, got, wanted)


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_types_come_back(dtype):
    x = torch.arange(4).repeat(3, 4).to(torch.float32 if "float" in dtype else torch.int8)
    assert torch.equal(unpacked(packed(x, dtype), dtype).double(), x.double())
