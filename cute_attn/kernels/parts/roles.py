"""The roles of a block's warps in the "roles" arrangement, and the mbarriers between them, declared in one place.

    warps 0-3   gemm0    S^T = K Q^T of 64 tokens each, and the tile's softmax
    warps 4-7   gemm1    O^T += V^T P^T; in groups that share tokens and split the head dim among their warps

    gemm0 warp w  --- p_full[w]: P tile, row max, row sum --->  gemm1 group that reads the tile
                  <-- p_empty[w]: tile read, row max of the group ---

A barrier's phase i belongs to the block's step i. Within a warp, cp.async groups say when its own copies have landed;
only where a group of gemm1 loads V together, other warps must know:

    gemm1 warps of a group  --- v_full[buffer] --->  the same warps
                            --- v_empty[buffer] ->   the same warps, before the buffer is filled again
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from cute_attn.decode_configs import GEMM0_WARPS, TOKENS_PER_GEMM0_WARP, WARP, RolesConfig
from cute_attn.decode_problem import DecodeProblem

MBARRIER_BYTES = 8
RINGS_READ = 1  # the named barrier at which gemm0 arrives and gemm1 waits, when both are done with their rings


@dataclass(frozen=True)
class Edge:
    """A kind of mbarrier.

    Attributes:
        name: by which kernels ask for it.
        count: how many there are.
        arrivals: that end a phase.
        producers, consumers: who arrives, and who waits.
        protects: what may be read or overwritten after the wait.
    """

    name: str
    count: int
    arrivals: int
    producers: str
    consumers: str
    protects: str


def edges(config: RolesConfig, problem: DecodeProblem) -> tuple[Edge, ...]:
    """All mbarriers of a block, in the order in which they lie in shared memory."""
    group = config.warps_per_group(problem)
    readers = TOKENS_PER_GEMM0_WARP // config.v_tile * group  # arrivals by a warp for each tile of V
    between_roles = (
        Edge("p_full", GEMM0_WARPS, 1, "a lane of gemm0 warp w", "gemm1", "the warp's P tile, row max and row sum"),
        Edge("p_empty", GEMM0_WARPS, readers, "a lane of each gemm1 warp that reads P", "gemm0 warp w",
             "the buffers of P, row max and row sum; the group's row max"),
    )  # fmt: skip
    if not config.group_loads_v(problem):
        return between_roles
    buffers = config.groups(problem) * config.v_buffers
    return (
        *between_roles,
        Edge("v_full", buffers, WARP * group, "copies of all lanes of the group", "the group", "a tile of V"),
        Edge("v_empty", buffers, group, "a lane of each warp of the group", "the group", "the buffer of a tile of V"),
    )


@dataclass(frozen=True)
class Barriers:
    """A block's mbarriers.

    Attributes:
        edges: what ``edges`` says.
        base: address of the first in shared memory.
    """

    edges: tuple[Edge, ...]
    base: Int32

    def at(self, name: str, index: Int32 | int) -> Int32:
        """Address of one of an edge's mbarriers."""
        before = 0
        for edge in self.edges:
            if edge.name == name:
                return self.base + (before + index) * MBARRIER_BYTES
            before += edge.count
        raise KeyError(name)
