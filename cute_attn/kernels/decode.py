"""Decode attention: a few queries of each sequence over a long cache, at the memory's speed, on every GPU from sm_80.

The cache's tokens are the wide side of the tensor cores' products, and the query rows that share a head of the cache
their 8 (16, 32) columns, so that the cache is read once and next to nothing is padded (see ``parts.decode_products``).

Its two arrangements share everything but the way from tiles to the block's results: ``decode_streams``, where warps do
not wait for one another, and ``decode_roles``, where they have roles.

Results of parts of a block's tokens are merged in shared memory, and those of blocks that share a sequence in global
memory by the last of them (see ``parts.decode_output``): "flash decoding", https://pytorch.org/blog/flash-decoding/.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_attn.arch import Arch
from cute_attn.decode_configs import TOKENS_PER_GEMM0_WARP, DecodeConfig, RolesConfig, StreamsConfig
from cute_attn.decode_problem import DecodeArguments, DecodeProblem
from cute_attn.kernels.decode_roles import attend_by_roles
from cute_attn.kernels.decode_streams import attend_by_streams
from cute_attn.kernels.parts.cache_tiles import TileLayout
from cute_attn.kernels.parts.decode_products import Products
from cute_attn.kernels.parts.decode_softmax import Scales
from cute_attn.kernels.parts.decode_work import DecodeGrid, decode_place, decode_work
from cute_attn.kernels.parts.instructions import load_number


class DecodeKernel:
    """The decode kernel of one problem and config; call it under ``cute.compile``."""

    def __init__(self, problem: DecodeProblem, config: DecodeConfig, arch: Arch):
        self.problem = problem
        self.config = config
        tokens = config.tile_n if isinstance(config, StreamsConfig) else TOKENS_PER_GEMM0_WARP
        self.products = Products(problem, config.tile_m, TileLayout.of(problem, tokens), arch.capability)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        lengths: cute.Tensor,
        k_page_table: cute.Tensor | None,
        v_page_table: cute.Tensor | None,
        sinks: cute.Tensor | None,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        partials: cute.Tensor,
        semaphores: cute.Tensor,
        scale_log2: Float32,
        v_factor: Float32,
        softcap: Float32,
        window: Int32,
        num_splits: Int32,
        split_size: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches the kernel; the arguments are those of ``DecodeArguments``."""
        arguments = DecodeArguments(
            q, k, v, out, lse, lengths, k_page_table, v_page_table, sinks, k_scale, v_scale, partials, semaphores,
            scale_log2, v_factor, softcap, window, num_splits, split_size,
        )  # fmt: skip
        heads_kv = k.shape[2]
        group = q.shape[2] // heads_kv
        grid = DecodeGrid(group, cute.ceil_div(group * q.shape[1], self.config.tile_m))
        self.kernel(arguments, grid).launch(
            grid=(grid.row_tiles * heads_kv, q.shape[0], num_splits),
            block=(self.config.num_threads, 1, 1),
            min_blocks_per_mp=self.config.blocks_per_multiprocessor,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, arguments: DecodeArguments, grid: DecodeGrid) -> None:
        """One block: a tile of rows over its part of their sequence."""
        config, problem = self.config, self.problem
        smem = cutlass.memory.SmemAllocator()
        memory = smem.allocate_array(cutlass.Uint8, config.memory_bytes(problem), byte_alignment=128)
        kept = smem.allocate_array(cutlass.Uint8, config.kept_bytes(problem), byte_alignment=128)
        flag = cute.make_tensor(cute.recast_ptr(kept, dtype=Int32), cute.make_layout(1))
        place = decode_place(grid, arguments.q.shape[1], config.tile_m)
        length = load_number(arguments.lengths, place.batch, Int32)
        scales = Scales.load(problem, arguments)
        if const_expr(isinstance(config, RolesConfig)):
            work = decode_work(arguments, problem, config, place, length)
            if work.has_part:
                attend_by_roles((self.products, config), arguments, scales, work, (memory, kept, flag))
        else:
            attend_by_streams((self.products, config), arguments, scales, place, (memory, flag), length)
