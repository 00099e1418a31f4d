# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002 - the main loop calls these methods with all its arguments.
"""Everything that depends on QuACK's internals (quack-kernels 0.6.5), and nothing else.

QuACK gives the main loops, the TMA pipelines and the tile schedulers. Ours are the operands' views,
the epilogue operations and what an epilogue computes. A kernel is a class

    class FC1Act(Epilogue):             # _epi_ops, EpilogueArguments, epi_visit_subtile
    compile_kernel(FC1Act, ...)         # put in front of the main loop of an architecture

Views. TE stores FC1's weight as blocks of 32 gate rows and 32 linear rows (or two halves). The
kernels see the rows as pairs: row 2j is gate j, row 2j + 1 is linear j. This is a change of
strides, no data moves: a mode n with stride s becomes (2, 32, n / 64) : (32 s, s, 64 s), or
(2, n / 2) : (s n / 2, s) for two halves.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, const_expr
from quack import layout_utils
from quack.compile_utils import make_fake_tensor
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epilogue.mixin import ComposableEpiMixin
from quack.epilogue.ops import (
    ColVecLoad,
    ColVecReduce,
    EpiSmemBytes,
    RowVecLoad,
    Scalar,
    TileStore,
    _lane_warp_info_n,
)
from quack.gemm_runtime.host import FakeArgCtx
from quack.gemm_sm90 import GemmSm90
from quack.gemm_sm100 import GemmSm100
from quack.gemm_tvm_ffi_utils import (
    compile_gemm_kernel,
    make_fake_gemm_tensors,
    make_fake_scheduler_args,
    make_fake_varlen_args,
)
from quack.reduce import swap_shuffle_reduce
from quack.rounding import RoundingMode

from te_grouped_mlp.op.backends.cutedsl.config import Tile

__all__ = [
    "Epilogue",
    "RowPartials",
    "RowValue",
    "RowVecLoad",
    "Scalar",
    "TileStore",
    "mlir_namedtuple",
]

_MAIN_LOOPS = {9: GemmSm90, 10: GemmSm100}

_EXPERTS = {"m": (4,), "k": (10, 12)}
"""Where `kernel` of both main loops takes the tensors with a matrix per expert: B; D and C."""


@cute.jit
def _by_row(fragment, like):
    """Return the distinct rows of a fragment that is constant (or looked at) along N."""
    return layout_utils.convert_layout_zero_stride(fragment, like.layout)[None, 0]


@cute.jit
def _row_fragment(ctx):
    """Return (fp32 registers with one value per row of the tile, coordinates alike)."""
    shape = (ctx.tile_M, ctx.tile_N)
    vector = cute.make_rmem_tensor(cute.make_layout(shape, stride=(1, 0)), Float32)
    layout = ctx.partition_for_epilogue_fn(vector).layout
    coordinates = ctx.partition_for_epilogue_fn(cute.make_identity_tensor(shape))
    return cute.make_rmem_tensor(layout, Float32), coordinates


@cute.jit
def _row_range(ctx):
    """Return (first row of the tile in the buffer, valid rows of the tile)."""
    offset = ctx.tile_coord_mnkl[0] * ctx.tile_M
    first = ctx.varlen_manager.params.cu_seqlens_m[ctx.batch_idx]
    end = ctx.varlen_manager.params.cu_seqlens_m[ctx.batch_idx + 1]
    return first + offset, end - first - offset


class RowValue(ColVecLoad):
    """A value per row, (rows,) fp32 or bf16, read by plain loads into registers.

    No shared memory, no barrier: the loads overlap whatever the epilogue waits for first. Rows past
    the expert's end are not read.
    """

    def smem_bytes(self, arg_tensor, cta_tile_shape_mnk, epi_tile, warp_shape_mnk=None):
        """Of shared memory the values take no bytes."""
        return EpiSmemBytes()

    def smem_struct_field(self, gemm, params):
        """So the kernel's shared storage has no field for them."""
        return

    def get_smem_tensor(self, gemm, params, storage_epi):
        """And `begin` gets no tensor there."""
        return

    def needs_async_fence(self):
        """Plain loads need none."""
        return False

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        """Load the rows of this thread."""
        values, coordinates = _row_fragment(ctx)
        first, valid_rows = _row_range(ctx)
        for m in cutlass.range_constexpr(cute.size(values, mode=[3])):
            part = values[None, None, None, m, 0]
            rows = _by_row(coordinates[None, None, None, m, 0], part)
            by_row = _by_row(part, part)
            for r in cutlass.range_constexpr(cute.size(by_row)):
                row = rows[r][0]
                value = Float32(0.0)
                if row < valid_rows:
                    value = param[first + row].to(Float32)
                by_row[r] = value
        return values

    def begin_loop(self, gemm, state, epi_coord):
        """Return the registers of a sub-tile, constant along N."""
        return state[None, None, None, epi_coord[0], epi_coord[1]]


class RowPartials(ColVecReduce):
    """Row sums: one fp32 partial per (row, N tile), one writer, plain stores.

    The buffer is (rows, n_partials) with strides (1, rows), so that a warp's stores lie together. A
    partial is stored after the tile's last TMA store was issued: no proxy fence waits for it. Rows
    past the expert's end are not written.
    """

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):
        """Make the registers and load the row range."""
        sums, _ = _row_fragment(ctx)
        first, valid_rows = _row_range(ctx)
        return sums, smem_tensor, first, valid_rows

    def begin_loop(self, gemm, state, epi_coord):
        """Return the registers of a sub-tile; cleared at the first one of a stripe."""
        part = state[0][None, None, None, epi_coord[0], epi_coord[1]]
        if epi_coord[1] == 0:
            cute.filter_zeros(part).fill(0.0)
        return part

    def end_loop_stage(self, *args, **kwargs):
        """Nothing leaves the registers before `end`."""
        return

    @cute.jit
    def end(
        self, gemm, param, state, epi_tile, tiled_copy_t2r, tiled_copy_r2s, tile_coord_mnkl,
        varlen_manager, tidx,
    ):  # fmt: skip
        """Sum over the lanes that share a row, then store."""
        from functools import partial

        from quack.sm90_utils import partition_for_epilogue

        sums, _, first, valid_rows = state
        tiled_copy = tiled_copy_t2r if tiled_copy_t2r is not None else tiled_copy_r2s
        reference_src = tiled_copy_t2r is None
        lanes, warps, _, _ = _lane_warp_info_n(tiled_copy, reference_src, tidx)
        assert warps == 1, "two warps share a row; their sums would need shared memory"
        coordinates = partial(
            partition_for_epilogue, epi_tile=epi_tile, tiled_copy=tiled_copy, tidx=tidx,
            reference_src=reference_src,
        )(cute.make_identity_tensor(gemm.cta_tile_shape_mnk[:2]))  # fmt: skip
        lane = cute.arch.lane_idx() % lanes
        tile = tile_coord_mnkl[1]
        for m in cutlass.range_constexpr(cute.size(sums, mode=[3])):
            part = sums[None, None, None, m, 0]
            rows = _by_row(coordinates[None, None, None, m, 0], part)
            by_row = _by_row(part, part)
            count = const_expr(cute.size(by_row))
            slices = const_expr(min(lanes, count))
            per_lane = const_expr(count // slices)
            if const_expr(lanes > 1):
                swap_shuffle_reduce(
                    (by_row,), lambda a, b: (a[0] + b[0],), num_lanes=lanes, slice_elems=per_lane
                )
            # A cluster may hold a tile past the last column, which has no partial.
            if tile < param.shape[1] and lane < slices:
                for j in cutlass.range_constexpr(per_lane):
                    row = rows[lane * per_lane + j][0]
                    if row < valid_rows:
                        param[first + row, tile] = by_row[j]


class Epilogue(ComposableEpiMixin):
    """What every kernel of this folder has in front of the main loop.

    Attributes:
        pair_views: (operand, mode) of the operands seen as pairs, operand in "B", "C", "D", mode
            counted in kernel order (m or n, k).
        pair_width: Width of the alternating blocks, None for two halves.
        spec: The activation, where there is one.
        round_to_odd: Round what is stored for a requantization in that way.
        reversed_operands: Positions, among the arguments of the main loop's `kernel`, of the
            tensors that hold the last expert's matrix first.
    """

    pair_views: tuple[tuple[str, int], ...] = ()
    pair_width: int | None = None
    spec: Any = None
    round_to_odd: bool = False
    reversed_operands: tuple[int, ...] = ()

    def rotate_batch_last(self, mA, mB, mD, mC, epilogue_args, append_batch_if_2d=False):
        """Bring operands into kernel order and lay the pair views over them."""
        mA, mB, mD, mC, epilogue_args = super().rotate_batch_last(
            mA, mB, mD, mC, epilogue_args, append_batch_if_2d
        )
        operands = {"B": mB, "C": mC, "D": mD}
        for name, mode in self.pair_views:
            if const_expr(operands[name] is not None):
                operands[name] = _as_pairs(operands[name], mode, self.pair_width)
        return mA, operands["B"], operands["D"], operands["C"], epilogue_args

    def kernel(self, *operands):
        """Launch the main loop, after tensors that hold the last expert first were reversed.

        What is reversed are the coordinates that TMA gets, which the main loop indexes by expert.
        Schedulers and epilogue operations keep the experts' order.
        """
        return super().kernel(
            *(
                _last_first(operand)
                if index in self.reversed_operands and operand is not None
                else operand
                for index, operand in enumerate(operands)
            )
        )

    def epi_to_underlying_arguments(self, args, *, loc=None, ip=None):
        """Host arguments become kernel parameters."""
        self.rounding_mode = RoundingMode.RN
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))


def _last_first(coordinates):
    """Return a tensor of TMA coordinates whose last mode, the experts, runs backwards."""
    last = cute.size(coordinates, mode=[cute.rank(coordinates) - 1]) - 1
    start = cute.domain_offset((*(0,) * (cute.rank(coordinates) - 1), last), coordinates)
    *strides, step = coordinates.stride
    layout = cute.make_layout(
        coordinates.shape, stride=(*strides, cute.ScaledBasis(-step.value, step.mode))
    )
    return cute.make_tensor(start.iterator, layout)


def _as_pairs(tensor, mode: int, width: int | None):
    size, stride = cute.size(tensor, mode=[mode]), tensor.stride[mode]
    if const_expr(width is None):
        shape, strides = (2, size // 2), (size // 2 * stride, stride)
    else:
        shape = (2, width, size // (2 * width))
        strides = (width * stride, stride, 2 * width * stride)
    layout = cute.make_layout(
        (*tensor.shape[:mode], shape, *tensor.shape[mode + 1 :]),
        stride=(*tensor.stride[:mode], strides, *tensor.stride[mode + 1 :]),
    )
    return cute.make_tensor(tensor.iterator, layout)


@dataclass(frozen=True)
class Operands:
    """Types and orders of the operands of one launch.

    Attributes:
        a, b, d, c: Element types; None where there is no such operand.
        majors: Of A ("m" or "k"), B ("n" or "k"), D and C ("n").
        varlen: "m" (A, C and D are rows of all experts) or "k" (A and B are).
        b_transposed: B arrives as (experts, k, n).
        packed: C and D are bf16 pairs, seen as one 32-bit element.
        reversed_experts: The tensors with a matrix per expert hold the last expert first: B for
            "m", D and C for "k".
    """

    a: Any = BFloat16
    b: Any = BFloat16
    d: Any = BFloat16
    c: Any = None
    majors: str = "kkn"
    varlen: str = "m"
    b_transposed: bool = False
    packed: bool = False
    reversed_experts: bool = False


def compile_kernel(
    epilogue: type[Epilogue], tile: Tile, operands: Operands, values: dict[str, Any], arch: int
) -> Any:
    """Compile one kernel; every size and stride stays symbolic.

    Args:
        epilogue: The class of the kernel.
        tile: Its tile.
        operands: Its operands.
        values: Active epilogue operation to its `host_arg_key`.
        arch: 9 or 10; the target itself is the process's.

    Returns:
        A function of (A, B, D, C, epilogue's arguments, (active clusters, None, swizzle, None,
        None, None), (row offsets, None, None, None), None, None) that launches on torch's current
        stream. The offsets come second for "k"; tuples or their named kinds are taken alike.
    """
    tensors = make_fake_gemm_tensors(
        operands.a, operands.b, operands.d, operands.c, *operands.majors, operands.majors[2],
        varlen_m=operands.varlen == "m", varlen_k=operands.varlen == "k",
        b_kn=operands.b_transposed, packed_cd="n" if operands.packed else None,
    )  # fmt: skip
    *abdc, m, n, k, experts = tensors
    context = FakeArgCtx(m, n, k, experts, True, operands.varlen == "m")
    ops = {op.name: op for op in epilogue._epi_ops}
    arguments = {}
    for name, key in values.items():
        if isinstance(ops[name], RowPartials):
            arguments[name] = make_fake_tensor(Float32, (m, cute.sym_int()), leading_dim=0)
        elif isinstance(ops[name], RowValue):
            arguments[name] = make_fake_tensor(key, (m,), leading_dim=0)
        else:
            arguments[name] = ops[name].host_fake_arg(key, context)

    def configure(gemm: Any) -> None:
        # Schedulers read the row offsets before the wait of a dependent launch, and the kernel
        # that wrote them may be the one before this.
        gemm.use_pdl = False

    reversed_operands = _EXPERTS[operands.varlen] if operands.reversed_experts else ()
    members = {"reversed_operands": reversed_operands}
    return compile_gemm_kernel(
        type(epilogue.__name__, (epilogue, _MAIN_LOOPS[arch]), members),
        operands.a, (tile.m, tile.n), (tile.cluster_m, tile.cluster_n, 1), tile.pingpong, True,
        False, False, (arch, 0), *abdc, epilogue.EpilogueArguments(**arguments),
        make_fake_scheduler_args(False, False, experts),
        make_fake_varlen_args(operands.varlen == "m", operands.varlen == "k", False, None),
        post_init=configure, b_transposed=operands.b_transposed,
        cd_packed="n" if operands.packed else None,
    )  # fmt: skip
