"""Totals, tables, JSON, the listing and the picture of a simulation's report."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from layouts.simulator import heatmap
from layouts.simulator.counters import InstructionCounts, opcode_group
from layouts.simulator.report import Finding, Report, SimulationError, merge_findings


def example() -> Report:
    copy = "cp.async.cg.shared.global"
    return Report(
        kernel="attend",
        target="sm_80",
        grid=(2, 3, 1),
        block=(128, 1, 1),
        warps=24,
        seconds=0.5,
        labels={"loop": 1, "done": 6},
        instructions=[
            InstructionCounts(0, "mov.u32 %r1, %tid.x", "mov.u32", "a.py:1", executions=24, lanes=768),
            InstructionCounts(1, f"{copy} [%r2], [%rd1], 16", copy, "a.py:2", 48, 1536, 192, 192, 960, 768, 24576),
            InstructionCounts(2, "ld.shared.v4.b32 {..}, [%r3]", "ld.shared.v4.b32", "a.py:2", 24, 768, 192, 96),
            InstructionCounts(3, "st.global.b32 [%rd2], %r1", "st.global.b32", None, 24, 600, 0, 0, 72, 72, 2400),
            InstructionCounts(4, "st.shared.b32 [%r3], %r1", "st.shared.b32", "a.py:9"),
            InstructionCounts(5, "mma.sync.aligned.f32 {..}", "mma.sync.aligned.f32", "a.py:9", 240, 7680),
        ],
        findings=[
            Finding(
                "race", "warps 0 and 1 write byte 64", 2, "a.py:2", details={"address": np.int64(64), "lanes": (3, 4)}
            ),
            Finding("deadlock", "warps 0 to 3 wait for barrier 1"),
            Finding("race", "warps 2 and 3 write byte 128", 2, "a.py:2", count=4),
        ],
    )


def test_totals() -> None:
    report = example()
    assert report.warp_instructions == 360
    assert (report.shared_wavefronts, report.ideal_shared_wavefronts, report.excess_wavefronts) == (384, 288, 96)
    assert (report.global_sectors, report.ideal_sectors, report.excess_sectors) == (1032, 840, 192)
    assert (report.shared_accesses, report.global_accesses) == (72, 72)
    assert report.sector_efficiency == pytest.approx(840 / 1032)
    assert list(report.instruction_mix.items()) == [
        ("tensor cores", 240),
        ("asynchronous copies", 48),
        ("global memory", 24),
        ("moves and selects", 24),
        ("shared memory", 24),
    ]


@pytest.mark.parametrize(
    ("opcode", "group"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "tensor cores"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", "tensor cores"),
        ("wgmma.wait_group.sync.aligned", "barriers"),
        ("mbarrier.try_wait.parity.shared::cta.b64", "barriers"),
        ("bar.sync", "barriers"),
        ("cp.async.wait_group", "asynchronous copies"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "matrix moves"),
        ("ld.shared.v4.b32", "shared memory"),
        ("st.shared::cta.b32", "shared memory"),
        ("st.global.v4.b32", "global memory"),
        ("ld.param.b64", "moves and selects"),
        ("ld.local.b32", "other memory"),
        ("atom.global.add.u32", "atomics"),
        ("shfl.sync.bfly.b32", "warp exchange"),
        ("cvt.rn.bf16x2.f32", "conversions"),
        ("bra.uni", "control flow"),
        ("ret", "control flow"),
        ("ex2.approx.ftz.f32", "floating point"),
        ("fma.rn.bf16x2", "floating point"),
        ("setp.lt.s32", "integers and logic"),
        ("brev.b32", "integers and logic"),
        ("mad.lo.s64", "integers and logic"),
    ],
)
def test_groups_of_opcodes(opcode: str, group: str) -> None:
    assert opcode_group(opcode) == group


def test_findings_merge_by_kind_and_instruction() -> None:
    given = [
        Finding("race", "first", 1),
        Finding("async", "other", 1),
        Finding("race", "second", 1),
        Finding("race", "x"),
    ]
    merged = merge_findings(given)
    assert [(f.kind, f.message, f.instruction, f.count) for f in merged] == [
        ("race", "first", 1, 2),
        ("async", "other", 1, 1),
        ("race", "x", None, 1),
    ]
    assert [finding.count for finding in given] == [1] * 4
    assert merge_findings(merged) == merged


def test_by_source_sums_in_order() -> None:
    lines = example().by_source()
    assert [line.source for line in lines] == ["a.py:1", "a.py:2", None, "a.py:9"]
    second = lines[1]
    assert [counts.index for counts in second.instructions] == [1, 2]
    assert (second.warp_instructions, second.shared_wavefronts, second.excess_wavefronts) == (72, 384, 96)
    assert lines[0].sector_efficiency == 1.0


def test_memory_instructions_with_the_most_excess_first() -> None:
    assert [counts.index for counts in example().memory_instructions()] == [2, 1, 3]


def test_table() -> None:
    report = example()
    text = report.table()
    assert str(report) == text
    assert "attend for sm_80\ngrid 2 x 3 x 1, block 128 x 1 x 1, 24 warps, lockstep schedule" in text
    assert "360 warp instructions in 0.50 s, 720 a second" in text
    assert "5.3 wavefronts per warp access, ideal 4.0 (72 accesses, 384 wavefronts, ideal 288, excess 96)" in text
    assert "14.3 sectors per warp access, ideal 11.7 (72 accesses, 1,032 sectors, ideal 840, efficiency 81.4%)" in text
    assert "tensor cores 66.7%" in text
    assert "findings       2, seen 6 times in all" in text
    rows = [line.split() for line in text.splitlines() if "%r3" in line or "%rd2" in line]
    assert rows[0][:9] == ["2", "24", "192", "96", "8.0", "/", "4.0", ".", "."]
    assert all(line == line.rstrip() for line in text.splitlines())


def test_table_of_few_rows_says_what_it_leaves_out() -> None:
    text = example().table(limit=1)
    assert "ld.shared.v4.b32" in text
    assert "cp.async" not in text.split("memory instructions, ")[1].split("... and")[0]
    assert "... and 2 more with 0 excess wavefronts" in text
    assert "... and" not in example().table(limit=None)


def test_listing_has_every_instruction_once_with_its_findings_below() -> None:
    report = example()
    lines = report.listing().splitlines()
    for counts in report.instructions:
        assert sum(line.endswith(counts.text) for line in lines) == 1
    place = next(i for i, line in enumerate(lines) if "ld.shared" in line)
    assert lines[place].split()[:4] == ["24", "8.0", "4.0", "a.py:2"]
    assert lines[place + 1].strip() == "!!! race x5 at instruction 2 (a.py:2): warps 0 and 1 write byte 64"
    copy = next(i for i, line in enumerate(lines) if "cp.async" in line)
    assert lines[copy].split()[:6] == ["48", "4.0", "4.0", "20.0", "16.0", "a.py:2"]
    assert lines[copy - 1].strip() == "loop:"
    assert [line.strip() for line in lines[-2:]] == ["done:", "!!! deadlock: warps 0 to 3 wait for barrier 1"]
    never = next(line for line in lines if "st.shared" in line)
    assert never.split()[0] == "a.py:9"


def test_json_round_trip() -> None:
    report = example()
    report.instructions[1].wavefronts = np.int64(192)
    values = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(values) == report
    assert Report.from_json(values).to_json() == values
    assert values["totals"]["excess_wavefronts"] == 96
    assert values["findings"][0]["details"] == {"address": 64, "lanes": [3, 4]}
    with pytest.raises(TypeError, match="colour"):
        Report.from_json(values | {"colour": 1})


def test_raise_for_findings() -> None:
    report = example()
    with pytest.raises(SimulationError) as error:
        report.raise_for_findings()
    assert error.value.report is report
    assert str(error.value).splitlines() == [
        "attend: 2 findings",
        "  1. race x5 at instruction 2 (a.py:2): warps 0 and 1 write byte 64",
        "       ld.shared.v4.b32 {..}, [%r3]",
        "       address: 64",
        "       lanes: [3, 4]",
        "  2. deadlock: warps 0 to 3 wait for barrier 1",
    ]
    report.findings = []
    report.raise_for_findings()


def test_a_report_of_nothing() -> None:
    report = Report("empty")
    assert (report.sector_efficiency, report.instruction_mix, report.memory_instructions()) == (1.0, {}, [])
    assert "shared memory  no access\nglobal memory  no access\ninstructions   none executed" in report.table()
    assert report.listing()
    assert "no access to shared or global memory" in report.heatmap()
    assert Report.from_json(report.to_json()) == report


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_heatmap_by_instruction_and_by_source(tmp_path: Path) -> None:
    report = example()
    path = tmp_path / "heat.svg"
    svg = report.heatmap(path)
    assert path.read_text(encoding="utf-8") == svg == report.heatmap()
    found = texts(svg)
    assert found[0] == "Memory traffic of attend"
    assert {"    2  a.py:2  ld.shared.v4.b32", "8.0 / 4.0", "20.0 / 16.0", "96"} <= set(found)
    assert not any("mma" in text or "mov" in text for text in found)
    assert {"a.py:2  (2 instructions)", "5.3 / 4.0"} <= set(texts(report.heatmap(by="source")))
    with pytest.raises(ValueError, match="by is 'warp'"):
        report.heatmap(by="warp")


def test_heatmap_escapes_and_bounds_its_labels() -> None:
    report = example()
    report.kernel = "<&>" * 200
    report.instructions[1].opcode = "<" * 500
    found = texts(report.heatmap())
    assert max(map(len, found)) < 120


def test_colours_darken_with_the_excess() -> None:
    def brightness(factor: float) -> int:
        return sum(heatmap.colour(factor))

    factors = (1.0001, 1.2, 2, 4, 8)
    assert [brightness(f) for f in factors] == sorted((brightness(f) for f in factors), reverse=True)
    assert heatmap.colour(8) == heatmap.colour(1000)
    assert heatmap.colour(1) == heatmap.IDEAL_COLOUR
