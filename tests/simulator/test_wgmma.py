"""wgmma in kernels: products of tiles under every schedule, and what is found when a kernel does not wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layouts.simulator.launch import capture
from layouts.simulator.memory import GlobalMemory
from layouts.simulator.report import Report
from layouts.simulator.scheduler import SCHEDULES
from layouts.simulator.simulate import place, run_launch, simulate
from tests.simulator import small
from tests.simulator.wgmma_kernel import Case
from tests.simulator.wgmma_product import CTAS, compile_product

Array = np.ndarray[Any, Any]

CASES = [
    (Case(64, 32, 64, "K_INTER", "MN_INTER"), 1),
    (Case(128, 64, 64, "K_SW128", "MN_SW128"), 2),
    (Case(128, 64, 64, "MN_SW64", "K_SW32"), 1),
    (Case(128, 32, 64, "", "K_SW64"), 2),
    (Case(64, 32, 64, "K_SW64", "K_SW32", "s8"), 1),
]


def inputs(case: Case) -> tuple[list[Array], Array]:
    """a, b and an empty out; and what out is to be."""
    rng = np.random.default_rng(0)
    a: Array
    b: Array
    shapes = (CTAS, case.m, case.k), (CTAS, case.n, case.k)
    if case.kind == "s8":
        a, b = (rng.integers(-9, 9, shape, dtype=np.int8) for shape in shapes)
    else:
        a, b = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    out = np.full((CTAS, case.m, case.n), np.nan, np.float32)
    return [a, b, out], a.astype(np.float32) @ b.astype(np.float32).swapaxes(1, 2)


@pytest.fixture(scope="module", params=range(len(CASES)))
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Any]:
    case, warpgroups = CASES[request.param]
    return case, compile_product(case, warpgroups, tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_of_tiles(compiled: tuple[Case, Any], schedule: str) -> None:
    case, function = compiled
    arguments, expected = inputs(case)
    report = simulate(function, arguments, schedule=schedule)
    assert not report.findings
    np.testing.assert_allclose(arguments[2], expected, atol=1e-4)


def test_unchecked(compiled: tuple[Case, Any]) -> None:
    case, function = compiled
    arguments, expected = inputs(case)
    simulate(function, arguments, checked=False)
    np.testing.assert_allclose(arguments[2], expected, atol=1e-4)


def test_eight_bit_floats_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    case = Case(64, 64, 64, "K_SW64", "K_SW64", "e4m3")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(CTAS, rows, case.k, generator=generator).to(torch.float8_e4m3fn) for rows in (case.m, case.n))
    out = torch.full((CTAS, case.m, case.n), torch.nan)
    report = simulate(compile_product(case, 1, tmp_path), [a, b, out])
    assert not report.findings
    torch.testing.assert_close(out, a.float() @ b.float().mT, rtol=0, atol=1e-4)


def run_mutant(function: Any, arguments: list[Array], line: str, count: int) -> Report:
    """Without all lines that hold this text, which must be so many."""
    memory = GlobalMemory()
    (launch,) = capture(function, arguments, place(memory, arguments))
    kept = [each for each in launch.ptx.splitlines() if line not in each]
    assert len(launch.ptx.splitlines()) - len(kept) == count
    return run_launch(replace(launch, ptx="\n".join(kept)), memory)


@pytest.mark.parametrize(
    ("line", "count", "kind"),
    [
        ("wgmma.wait_group.sync.aligned \t0", 1, "async"),
        ("wgmma.wait_group", 5, "async"),
        ("wgmma.fence", 1, "async"),
        ("fence.proxy.async", 1, "async"),
        ("bar.sync", 1, "race"),
    ],
)
def test_what_is_missing_is_found(tmp_path: Path, line: str, count: int, kind: str) -> None:
    case = Case(64, 32, 64, "K_INTER", "MN_INTER")
    arguments, expected = inputs(case)
    report = run_mutant(compile_product(case, 1, tmp_path), arguments, line, count)
    assert kind in small.kinds(report)
    if "wait" in line:
        assert not np.allclose(arguments[2], expected, atol=1e-4)


# By hand: A is 64 x 16 ones, written by all threads, and B its first 8 rows.

STORE = """
    mov.b32 %r9, 0x3c003c00;
    shl.b32 %r10, %r1, 4;
    add.s32 %r10, %r10, %r6;
    st.shared.v4.b32 [%r10], {%r9, %r9, %r9, %r9};
    fence.proxy.async.shared::cta;
"""
BARRIER = "    bar.sync 0;\n"
DESCRIPTORS = """
    shr.u32 %r11, %r6, 4;
    cvt.u64.u32 %rd4, %r11;
    or.b64 %rd4, %rd4, 0x1000080000;
    mov.b64 %rd5, %rd4;
"""
FENCE = "    wgmma.fence.sync.aligned;\n"
ISSUE = """
    setp.ne.b32 %p1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r20, %r21, %r22, %r23}, %rd4, %rd5, %p1, 1, 1, 0, 0;
"""
FROM_REGISTERS = ISSUE.replace("%rd4,", "{%r9, %r9, %r9, %r9},").replace("1, 1, 0, 0", "1, 1, 0")
COMMIT = "    wgmma.commit_group.sync.aligned;\n"
WAIT = "    wgmma.wait_group.sync.aligned 0;\n"
WAIT_1 = "    wgmma.wait_group.sync.aligned 1;\n"
RESULT = "    mov.b32 %r5, %r20;\n"
READY = STORE + BARRIER + DESCRIPTORS + FENCE


def run(*parts: str, schedule: str = "lockstep", threads: int = 256, shared: int = 4096) -> tuple[set[str], str, Array]:
    """The kinds of what is found, the messages, and the results of two CTAs."""
    source = np.ones(2 * threads, np.float32)
    report, out = small.run("".join(parts), source, grid=2, schedule=schedule, target="sm_90a", shared=shared)
    return small.kinds(report), " ".join(finding.message for finding in report.findings), out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("issue", [ISSUE, FROM_REGISTERS])
def test_a_product_by_hand(issue: str, schedule: str) -> None:
    kinds, _, out = run(READY, issue, COMMIT, WAIT, RESULT, schedule=schedule)
    assert not kinds
    assert (out == 16).all()


ADD = ISSUE.replace("setp.ne", "setp.eq")


@pytest.mark.parametrize("between", ["", COMMIT, COMMIT + WAIT_1, COMMIT + WAIT])
def test_products_of_an_accumulator_follow_each_other(between: str) -> None:
    kinds, _, out = run(READY, ISSUE, between, ADD, between, ADD, COMMIT, WAIT, RESULT)
    assert not kinds
    assert (out == 48).all()


def test_what_the_accumulator_held_is_added_to() -> None:
    start = "".join(f"    mov.b32 %r{i}, 0f3F800000;\n" for i in range(20, 24))
    kinds, _, out = run(STORE, BARRIER, DESCRIPTORS, start, FENCE, ADD, COMMIT, WAIT, RESULT)
    assert not kinds
    assert (out == 17).all()


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ((READY, ISSUE, COMMIT, RESULT, WAIT), "async", "%r5, %r20: it uses an accumulator of wgmma"),
        ((READY, ISSUE, COMMIT, ISSUE.replace("%r2", "%r3"), COMMIT, WAIT_1, RESULT, WAIT), "", ""),
        ((READY, ISSUE.replace("%r2", "%r3"), COMMIT, ISSUE, COMMIT, WAIT_1, RESULT, WAIT), "async", "%r5, %r20: it"),
        ((READY, ISSUE, WAIT, COMMIT, RESULT), "async", "never waited for"),
        ((READY, ISSUE, WAIT, RESULT), "async", "never committed"),
        ((READY, ADD, COMMIT, WAIT, RESULT), "register", "%r20 is read"),
    ],
)
def test_results_before_and_after_their_wait(parts: tuple[str, ...], kind: str, message: str) -> None:
    kinds, messages, out = run(*parts)
    assert kinds == ({kind} if kind else set())
    assert message in messages
    assert (out == 16).all() == (kind in ("", "register"))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((READY, ISSUE, "    mov.b32 %r21, 0;\n", COMMIT, WAIT), "an accumulator is written before the wait"),
        ((READY, FROM_REGISTERS, "    mov.b32 %r9, 0;\n", COMMIT, WAIT), "a register of A is written before the wait"),
        ((READY, FROM_REGISTERS, "    mov.b32 %r9, 0x3c003c00;\n", COMMIT, WAIT), "it writes a register of A of wgmma"),
        ((READY, ISSUE, ISSUE.replace("%r23", "%r24"), COMMIT, WAIT), "still has some of its accumulators"),
        ((STORE, BARRIER, DESCRIPTORS, ISSUE, COMMIT, WAIT), "there is no wgmma.fence"),
    ],
)
def test_registers_in_use(parts: tuple[str, ...], message: str) -> None:
    kinds, messages, _ = run(*parts)
    assert "async" in kinds
    assert message in messages


def test_descriptors_are_taken_at_once() -> None:
    kinds, _, out = run(READY, ISSUE, "    mov.b64 %rd4, 0;\n", COMMIT, "    mov.b64 %rd5, 0;\n", WAIT, RESULT)
    assert not kinds
    assert (out == 16).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_operands_in_use(schedule: str) -> None:
    """What a warp overwrites after its wait another warpgroup may still read. The second one reads B, too."""
    kinds, _, _ = run(READY, ISSUE, COMMIT, STORE, WAIT, schedule=schedule)
    assert kinds
    kinds, _, _ = run(READY, ISSUE, COMMIT, WAIT, STORE, schedule=schedule)
    assert "race" in kinds
    kinds, _, _ = run(READY, ISSUE, COMMIT, WAIT, STORE, schedule=schedule, threads=128)
    assert not kinds
    kinds, _, _ = run(READY, ISSUE, COMMIT, WAIT, BARRIER, STORE, schedule=schedule)
    assert not kinds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_orders_products_and_nothing_else(schedule: str) -> None:
    """A warp that read a word by itself before its product is not known to have done so."""
    neighbour = "    xor.b32 %r12, %r1, 32;\n    shl.b32 %r12, %r12, 2;\n    add.s32 %r12, %r12, %r6;\n"
    read, write = "    ld.shared.b32 %r13, [%r12+2048];\n", "    st.shared.b32 [%r7+2048], %r9;\n"
    start = (STORE, write, BARRIER, DESCRIPTORS, neighbour, FENCE)
    kinds, _, _ = run(*start, read, ISSUE, COMMIT, WAIT, write, schedule=schedule, threads=128)
    assert "race" in kinds
    kinds, _, _ = run(*start, read, ISSUE, COMMIT, WAIT, BARRIER, write, schedule=schedule, threads=128)
    assert not kinds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_written_operands_need_a_barrier(schedule: str) -> None:
    kinds, _, _ = run(STORE, DESCRIPTORS, FENCE, ISSUE, COMMIT, WAIT, schedule=schedule, threads=128)
    assert "race" in kinds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warp_may_write_its_own_rows_of_a(schedule: str) -> None:
    """As of P in attention: no barrier of the warpgroup. The next 2048 bytes are B, which nobody changes."""
    later = DESCRIPTORS + "    add.s64 %rd5, %rd5, 128;\n"
    again = STORE.replace("0x3c003c00", "0x40004000")
    body = (STORE, BARRIER, later, FENCE, ISSUE, COMMIT, WAIT, again, ISSUE, COMMIT, WAIT, RESULT)
    skip = "    setp.gt.u32 %p2, %r1, 127;\n    @%p2 bra end;\n"
    kinds, _, out = run(STORE, BARRIER, skip, *body[2:], "end:\n", schedule=schedule)
    assert not kinds
    assert (out.reshape(2, 2, 128)[:, 0] == 32).all()


@pytest.mark.parametrize(
    ("before", "kind", "message"),
    [
        ("    add.s64 %rd5, %rd5, 250;\n", "out_of_bounds", "beyond the block's 4096 bytes"),
        ("    setp.eq.s32 %p2, %r1, 5;\n    @%p2 add.s64 %rd4, %rd4, 8;\n", "divergence", "differ in a descriptor"),
        ("    setp.gt.u32 %p2, %r1, 223;\n    @%p2 bra end;\n", "deadlock", "6] wait in wgmma"),
        ("    setp.eq.s32 %p2, %r1, 5;\n    @%p2 bra end;\n", "divergence", "lanes execute it"),
    ],
)
@pytest.mark.parametrize("schedule", ["lockstep", "serial"])
def test_wrong_uses(before: str, kind: str, message: str, schedule: str) -> None:
    kinds, messages, _ = run(READY, before, ISSUE, COMMIT, WAIT, RESULT, "end:\n", schedule=schedule)
    assert kind in kinds
    assert message in messages
