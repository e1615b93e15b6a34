"""The two products of attention on tensor cores, fed from shared memory by ldmatrix.

gemm0   S (tile_m, tile_n)    = Q (tile_m, head_dim) K^T       A from shared memory or registers
gemm1   O (tile_m, head_dim_v) += P (tile_m, tile_n) V         A in registers: S's own accumulators
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from cute_attn.kernels.parts.softmax import OnlineSoftmax
from cute_attn.kernels.parts.tiles import as_a_operand, rows_and_columns


@dataclass(frozen=True)
class Operand:
    """A thread's fragments of an operand and the shared memory they come from.

    Attributes:
        copy: tiled ldmatrix copy.
        fragments: registers for one tile (fragment, rows, contraction / 16).
        source: shared memory as ldmatrix reads it (fragment, rows, contraction / 16, slot).
        target: ``fragments`` as ldmatrix writes them.
    """

    copy: cute.TiledCopy
    fragments: cute.Tensor
    source: cute.Tensor
    target: cute.Tensor

    @staticmethod
    def of(copy: cute.TiledCopy, thread: Int32, tiles: cute.Tensor, fragments: cute.Tensor) -> Operand:
        """The operand in ``tiles`` (rows, contraction, slots) of shared memory."""
        mine = copy.get_slice(thread)
        return Operand(copy, fragments, mine.partition_S(tiles), mine.retile(fragments))

    @property
    def steps(self) -> int:
        """Steps of 16 along the contraction."""
        return cute.size(self.fragments, mode=[2])

    def fetch(self, step: int, slot: Int32) -> None:
        """ldmatrix of one step of the contraction."""
        cute.copy(self.copy, self.source[None, None, step, slot], self.target[None, None, step])


def gemm_scores(mma: cute.TiledMma, scores: cute.Tensor, q: Operand, k: Operand, slot: Int32, q_in_regs: bool) -> None:
    """gemm0: scores += Q K^T over one tile of keys."""
    for step in range(k.steps):
        if not q_in_regs:
            q.fetch(step, 0)
        k.fetch(step, slot)
        cute.gemm(mma, scores, q.fragments[None, None, step], k.fragments[None, None, step], scores)


def gemm_output(mma: cute.TiledMma, out: cute.Tensor, scores: cute.Tensor, v: Operand, slot: Int32,
                softmax: OnlineSoftmax) -> None:  # fmt: skip
    """gemm1: out += P V over one tile of keys, where P is the softmax of ``scores``.

    P is made 16 keys at a time, so that the exponentials of the next 16 run under the products of these.
    """
    p = cute.make_rmem_tensor_like(scores, v.fragments.element_type)
    p_operand = cute.make_tensor(p.iterator, as_a_operand(p.layout))
    p_rows = cute.make_tensor(p.iterator, rows_and_columns(p.layout))
    score_rows = cute.make_tensor(scores.iterator, rows_and_columns(scores.layout))
    for step in range(v.steps):
        v.fetch(step, slot)
        softmax.weigh(score_rows, p_rows, step)
        cute.gemm(mma, out, p_operand[None, None, step], v.fragments[None, None, step], out)
        softmax.add(p_operand[None, None, step], first=step == 0, last=step == v.steps - 1)
