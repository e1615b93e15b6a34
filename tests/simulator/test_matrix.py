"""ldmatrix and stmatrix there and back, and mma.sync alone and in runs that are computed together."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.simulator.module import launch, messages, place
from tests.simulator.small import kinds

SCHEDULES = ("lockstep", "serial", "reversed", "random")
WORDS = np.random.default_rng(13).integers(0, 2**32, 64 * 4, np.uint32)


def vector(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{i}" for i in range(first, first + count)) + "}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transpose", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_there_and_back(count: int, transpose: str, schedule: str) -> None:
    """Rows at scattered places: what stmatrix stores, ldmatrix loads; between them lies row-major memory."""
    form = f"m8n8.x{count}{transpose}.shared.b16"
    loads = "".join(f"    ld.global.u32 %r{16 + i}, [%rd3+{4 * i}];\n" for i in range(count))
    stores = "".join(f"    st.global.u32 [%rd4+{4 * i}], %r{24 + i};\n" for i in range(count))
    body = place("%rd3", "%rd1", 16) + place("%rd4", "%rd2", 16) + loads + f"""
    mad.lo.u32 %r8, %r4, 5, 3;
    and.b32 %r8, %r8, 31;
    mad.lo.u32 %r9, %r5, 1024, %r3;
    mad.lo.u32 %r9, %r8, 16, %r9;
    stmatrix.sync.aligned.{form} [%r9+512], {vector(16, count)};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.{form} {vector(24, count)}, [%r9+512];
""" + stores  # fmt: skip
    out = np.zeros((64, 4), np.uint32)
    report = launch(body, WORDS, out, block=64, target="sm_90a", schedule=schedule)
    assert not report.findings
    assert (out[:, :count] == WORDS.reshape(64, 4)[:, :count]).all()
    plain = body.replace(f"ldmatrix.sync.aligned.{form}", f"ldmatrix.sync.aligned.{form.replace('.trans', '')}")
    launch(plain, WORDS, out, block=64, target="sm_90a", schedule=schedule)
    assert (out[:, :count] == WORDS.reshape(64, 4)[:, :count]).all() == (transpose == "")
    unordered = body.replace("    bar.warp.sync -1;\n", "")
    assert kinds(launch(unordered, WORDS, out, block=64, target="sm_90a", schedule=schedule)) == {"race"}


@pytest.mark.parametrize("transpose", ["", ".trans"])
def test_what_ldmatrix_gives_each_lane(transpose: str) -> None:
    """Matrix i of four, element (row, column) is 1000 i + 10 row + column."""
    matrix, row, column = np.indices((4, 8, 8))
    tiles = (1000 * matrix + 10 * row + column).astype(np.uint16)
    body = place("%rd3", "%rd1", 16) + place("%rd4", "%rd2", 16) + f"""
    ld.global.v4.u32 {vector(16, 4)}, [%rd3];
    mad.lo.u32 %r9, %r4, 16, %r3;
    st.shared.v4.u32 [%r9], {vector(16, 4)};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{transpose}.shared.b16 {vector(24, 4)}, [%r9];
    st.global.v4.u32 [%rd4], {vector(24, 4)};
"""  # fmt: skip
    out = np.zeros((32, 4, 2), np.uint16)
    assert not launch(body, tiles, out).findings
    for lane in range(32):
        for i in range(4):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                at = (i, column, row) if transpose else (i, row, column)
                assert out[lane, i, half] == tiles[at]
    assert kinds(launch(body.replace("    bar.warp.sync -1;\n", ""), tiles, out)) == {"race"}


@pytest.mark.parametrize(
    ("instruction", "kind", "words"),
    [
        (
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r8,%r9,%r10,%r11}, [%r13+8];",
            "misaligned",
            "thread 0: .*multiple of 16",
        ),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r8,%r9}, [%r13+272];", "out_of_bounds", "thread 15: "),
        ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r13-16], {%r4};", "out_of_bounds", "thread 0: "),
        ("@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r13];", "divergence", "31 of 32 lanes"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r8}, [%r13];", "uninitialized", "shared address 0x0"),
    ],
)
def test_wrong_rows_are_found(instruction: str, kind: str, words: str) -> None:
    body = f"    setp.ne.u32 %p1, %r4, 9;\n    mad.lo.u32 %r13, %r4, 16, %r3;\n    {instruction}\n"
    report = launch(body, np.zeros(1), shared=512, target="sm_90a")
    (message,) = messages(report, kind)
    assert re.search(words, message), message


FORMS = {
    "m16n8k16.row.col.f32.f16.f16.f32": (4, 2, 4),
    "m16n8k16.row.col.f32.bf16.bf16.f32": (4, 2, 4),
    "m16n8k16.row.col.f16.f16.f16.f16": (4, 2, 2),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (4, 2, 4),
    "m16n8k32.row.col.s32.s8.s8.s32": (4, 2, 4),
}
ACCUMULATORS = 16  # registers from %r32 on; A and B from %r12 to %r27


def random_runs(form: str, seed: int) -> list[str]:
    """Products that take A and B from anywhere, accumulators of others among them, and may overwrite their own."""
    a, b, c = FORMS[form]
    chance = random.Random(seed)

    def start(count: int, aligned: int) -> int:
        accumulates = chance.random() < 0.25
        low, high = (32, 32 + ACCUMULATORS) if accumulates else (12, 28)
        return chance.randrange(low, high - count + 1, aligned)

    found = []
    for _ in range(14):
        d = chance.randrange(32, 32 + ACCUMULATORS, c)
        addend = d if chance.random() < 0.6 else chance.randrange(32, 32 + ACCUMULATORS, c)
        operands = (vector(d, c), vector(start(a, 4), a), vector(start(b, 2), b), vector(addend, c))
        found.append(f"    mma.sync.aligned.{form} {', '.join(operands)};\n")
    return found


def products(lines: list[str], between: str, form: str) -> NDArray[np.uint32]:
    """All accumulators of all lanes after the products."""
    mask = {"s8": 0x03030303, "tf": 0x3FFFE000}.get(form.split(".")[4][:2], 0x3BFF3BFF)  # small numbers, no infinities
    start = "".join(
        f"    mad.lo.u32 %r{i}, %r4, {2654435761 * i % 2**32}, {97531 * i};\n    and.b32 %r{i}, %r{i}, {mask};\n"
        for i in [*range(12, 28), *range(32, 32 + ACCUMULATORS)]
    )
    end = "".join(f"    st.global.u32 [%rd3+{4 * i}], %r{32 + i};\n" for i in range(ACCUMULATORS))
    out = np.zeros((64, ACCUMULATORS), np.uint32)
    body = start + between.join(lines) + place("%rd3", "%rd1", 4 * ACCUMULATORS) + end
    assert not launch(body, out, block=64).findings
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", FORMS)
def test_runs_of_products_are_the_same_together_and_apart(form: str, seed: int) -> None:
    lines = random_runs(form, seed)
    together = products(lines, "", form)
    assert (together == products(lines, "    mov.u32 %r30, 0;\n", form)).all()
    assert len(np.unique(together)) > 50


def test_a_product_against_numpy() -> None:
    rng = np.random.default_rng(17)
    a, b = rng.integers(-4, 5, (16, 16)).astype(np.float16), rng.integers(-4, 5, (8, 16)).astype(np.float16)
    both = np.concatenate(
        [
            a.reshape(2, 8, 2, 8).transpose(2, 0, 1, 3).reshape(32, 8),
            b.reshape(8, 2, 8).transpose(1, 0, 2).reshape(16, 8),
        ]
    )
    body = place("%rd3", "%rd1", 16) + place("%rd4", "%rd2", 16) + f"""
    mad.lo.u32 %r9, %r4, 16, %r3;
    ld.global.v4.u32 {vector(16, 4)}, [%rd3];
    st.shared.v4.u32 [%r9], {vector(16, 4)};
    setp.lt.u32 %p1, %r4, 16;
    @%p1 ld.global.v4.u32 {vector(16, 4)}, [%rd3+512];
    @%p1 st.shared.v4.u32 [%r9+512], {vector(16, 4)};
    bar.warp.sync -1;
    and.b32 %r10, %r4, 15;
    mad.lo.u32 %r10, %r10, 16, %r3;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {vector(20, 4)}, [%r9];
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {vector(24, 2)}, [%r10+512];
    mov.f32 %f1, 0f3F000000;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f2,%f3,%f4,%f5}}, {vector(20, 4)}, {vector(24, 2)},
        {{%f1,%f1,%f1,%f1}};
    st.global.v4.f32 [%rd4], {{%f2,%f3,%f4,%f5}};
"""  # fmt: skip
    out = np.zeros((32, 4), np.float32)
    assert not launch(body, both, out).findings
    product = a.astype(np.float32) @ b.astype(np.float32).T + 0.5
    of_lanes = product.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4)
    assert (out == of_lanes).all()
