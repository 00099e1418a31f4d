# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The instructions that are known: one table of exact forms.

A row is (section of the PTX ISA 9.1, opcodes, operands, meaning). `{x,y}` in an opcode stands for
either; what the table does not list is refused. Operands are a letter each, with `?` behind what
may be absent:

* `d` destination, `e` destination of the second half of `d|p`, `D` destination or vector of them;
* `a` to `c` values, `p` to `r` predicates, `i` to `k` literals, `V` vector of values or one value;
* `x` to `z` addresses, `t` a tensor map with coordinates.

The meaning is Python that `block` fills in: `{a}` is the operand in the opcode's last type,
`{a:u}` its bits, `{a:b32}` another type. `kind = expression` stores: `u`, `s`, `f`, `p` say how the
result is represented (with a width if it is not the type's), `v` that it is a vector; `do` stores
nothing; `@name` is a method of `block.Block`. An address is base and offset; `M` active lanes, `W`
the warp."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

_INT = "{u16,s16,u32,s32,u64,s64}"
_BITS = "{b16,b32,b64}"
_ANY = "{b16,b32,b64,u16,u32,u64,s16,s32,s64,f32,f64}"
_ELEMENTS = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}"
_TX = "mbarrier::complete_tx::bytes"
_BOX = "cp.async.bulk.tensor.{1d,2d,3d,4d,5d}"
_SUM = "cp.reduce.async.bulk.tensor.{1d,2d,3d,4d,5d}"
_GROUP = "{,.cta_group::1,.cta_group::2}"
_RELEASE = "{,.release.cta,.release.cluster}"
_CACHE = "{,.L2::cache_hint}"
_SCALED = "W, {x}, {a:b64}, {b:b64}, {c:b32}, {q}, '{kind}', ({y}, {z}), {group}, M"
_MMA = "{,.collector::a::discard,.collector::a::lastuse,.collector::a::fill,.collector::a::use}"

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARE = tuple(
    row
    for name, sign in _SIGNS.items()
    for row in (
        ("9.7.6.2", f"setp.{name}.{{b16,b32,b64,u16,u32,u64,s16,s32,s64,f32}}", "dab",
         f"p = {{a}} {sign} {{b}}"),
        ("9.7.7.2", f"setp.{name}.{{bf16,f16}}", "dab", f"p = widen({{a}}) {sign} widen({{b}})"),
    )
)  # fmt: skip

_ARITHMETIC = (
    ("9.7.1.1", f"add.{_INT}", "dab", "u = {a:u} + {b:u}"),
    ("9.7.1.2", f"sub.{_INT}", "dab", "u = {a:u} - {b:u}"),
    ("9.7.1.3", f"mul.lo.{_INT}", "dab", "u = {a:u} * {b:u}"),
    ("9.7.1.3", "mul.hi.{s32,u32}", "dab", "u32 = high(twice({a}) * twice({b}))"),
    ("9.7.1.3", "mul.wide.{s16,u16}", "dab", "u32 = bits(twice({a}) * twice({b}))"),
    ("9.7.1.3", "mul.wide.{s32,u32}", "dab", "u64 = bits(twice({a}) * twice({b}))"),
    ("9.7.1.4", f"mad.lo.{_INT}", "dabc", "u = {a:u} * {b:u} + {c:u}"),
    ("9.7.1.4", "mad.wide.{s32,u32}", "dabc", "u64 = bits(twice({a}) * twice({b})) + {c:b64}"),
    ("9.7.1.8", "div.{s32,u32,s64,u64}", "dab", "u = divide({a}, {b})"),
    ("9.7.1.9", "rem.{s32,u32,s64,u64}", "dab", "u = {a:u} - divide({a}, {b}) * {b:u}"),
    ("9.7.1.10", "abs.{s32,s64}", "da", "s = np.abs({a})"),
    ("9.7.1.11", "neg.{s16,s32,s64}", "da", "u = ~{a:u} + one({a:u})"),
    ("9.7.1.12", f"min.{_INT}", "dab", "T = np.minimum({a}, {b})"),
    ("9.7.1.13", f"max.{_INT}", "dab", "T = np.maximum({a}, {b})"),
    ("9.7.1.14", "popc.b32", "da", "u32 = population({a})"),
    ("9.7.1.15", "clz.b32", "da", "u32 = leading_zeros({a})"),
    ("9.7.3.3-5", "{add,sub,mul}{,.rn}.f32", "dab", "f = {a} {sign} {b}"),
    ("9.7.3.5", "mul.rn.sat.f32", "dab", "f = unit({a} * {b})"),
    ("9.7.3.3-5", "{add,sub,mul}.ftz.f32", "dab", "f = ftz(ftz({a}) {sign} ftz({b}))"),
    ("9.7.3.3-5", "{add,sub,mul}{,.rn}.f32x2", "dab",
     "u64 = bits64(floats({a}) {sign} floats({b}))"),
    ("9.7.3.6", "fma.rn.f32", "dabc", "f = fma({a}, {b}, {c})"),
    ("9.7.3.6", "fma.rn.ftz.f32", "dabc", "f = ftz(fma(ftz({a}), ftz({b}), ftz({c})))"),
    ("9.7.3.6", "fma.rn.f32x2", "dabc", "u64 = bits64(fma(floats({a}), floats({b}), floats({c})))"),
    ("9.7.3.8", "div.{rn,full}.f32", "dab", "f = {a} / {b}"),
    ("9.7.3.9", "abs.f32", "da", "u = {a:u} & U32(0x7FFFFFFF)"),
    ("9.7.3.10", "neg.f32", "da", "u = {a:u} ^ U32(0x80000000)"),
    ("9.7.3.11-12", "{min,max}.f32", "dabc?", "f = {extreme}({a}, {b}, {c})"),
    ("9.7.3.11-12", "{min,max}.NaN.f32", "dabc?", "f = {extreme}_nan({a}, {b}, {c})"),
    ("9.7.3.15", "sqrt.rn.f32", "da", "f = np.sqrt({a})"),
    ("9.7.3.13", "rcp.{approx,rn}.f32", "da", "f = F32(1) / {a}"),
    ("9.7.3.13", "rcp.approx.ftz.f32", "da", "f = ftz(F32(1) / ftz({a}))"),
    ("9.7.3.15", "sqrt.approx.ftz.f32", "da", "f = ftz(np.sqrt(ftz({a})))"),
    ("9.7.3.16", "rsqrt.approx.ftz.f32", "da", "f = F32(1) / np.sqrt(ftz({a}))"),
    ("9.7.3.20", "lg2.approx.ftz.f32", "da", "f = np.log2(ftz({a}))"),
    ("9.7.3.20", "lg2.approx.f32", "da", "f = np.log2({a})"),
    ("9.7.3.21", "ex2.approx.f32", "da", "f = np.exp2({a})"),
    ("9.7.3.21", "ex2.approx.ftz.f32", "da", "f = ftz(np.exp2(ftz({a})))"),
    ("9.7.3.22", "tanh.approx.f32", "da", "f = np.tanh({a})"),
    ("9.7.4.1-3", "{add,sub,mul}{,.rn}.bf16", "dab",
     "u16 = narrow_bf16(widen({a}) {sign} widen({b}))"),
    ("9.7.4.1-3", "{add,sub,mul}{,.rn}.bf16x2", "dab",
     "u32 = bf16x2({a}, {b}, lambda x, y: x {sign} y)"),
    ("9.7.4.4", "fma.rn.bf16x2", "dabc", "u32 = fma_bf16x2({a}, {b}, {c})"),
    ("9.7.4.6", "abs.bf16x2", "da", "u32 = bf16x2({a}, {a}, lambda x, y: np.abs(x))"),
    ("9.7.4.7-8", "{min,max}.bf16x2", "dab", "u32 = bf16x2({a}, {b}, {extreme})"),
    ("9.7.4.7-8", "{min,max}.NaN.bf16x2", "dab", "u32 = bf16x2({a}, {b}, {extreme}_nan)"),
    ("9.7.5.1-2", "{add,sub}.rn.f32.bf16", "dab", "f32 = widen({a:b16}) {sign} {b:f32}"),
)  # fmt: skip

_LOGIC = (
    ("9.7.8.1", f"and.{_BITS}", "dab", "u = {a} & {b}"),
    ("9.7.8.2", f"or.{_BITS}", "dab", "u = {a} | {b}"),
    ("9.7.8.3", f"xor.{_BITS}", "dab", "u = {a} ^ {b}"),
    ("9.7.8.4", f"not.{_BITS}", "da", "u = ~{a}"),
    ("9.7.8.1", "and.pred", "dpq", "p = {p} & {q}"),
    ("9.7.8.2", "or.pred", "dpq", "p = {p} | {q}"),
    ("9.7.8.3", "xor.pred", "dpq", "p = {p} ^ {q}"),
    ("9.7.8.4", "not.pred", "dp", "p = ~{p}"),
    ("9.7.8.8", f"shl.{_BITS}", "dab", "u = shift_left({a}, {b:b32})"),
    ("9.7.8.9", "shr.{b16,b32,b64,u16,u32,u64,s16,s32,s64}", "dab",
     "T = shift_right({a}, {b:b32})"),
    ("9.7.8.6", "lop3.b32", "dabci", "u32 = logic3({a}, {b}, {c}, {i})"),
    ("9.7.8.7", "shf.{l,r}.{wrap,clamp}.b32", "dabc",
     "u32 = funnel_{way}({a}, {b}, {c}, '{mode}')"),
    ("9.7.9.7", "prmt.b32", "dabc", "u32 = permute_bytes({a}, {b}, {c})"),
    ("9.7.6.3", f"selp.{_ANY}", "dabp", "T = select({p}, {a}, {b})"),
    ("9.7.9.3", f"mov.{_ANY}", "Da", "@move"),
    ("9.7.9.3", "mov.pred", "dp", "p = {p}"),
    ("9.7.9.3", "mov.b128", "Da", "@move"),
    ("9.7.9.20", "cvta.{global,shared,param,local}.u64", "da", "u64 = {space}_window(W, {a})"),
    ("9.7.9.20", "cvta.to.{global,shared,shared::cta,shared::cluster}.u64", "da",
     "u64 = to_{space}(W, {a})"),
    ("9.7.9.23", "mapa.shared::cluster.u32", "dab", "u32 = map_to_rank(W, {a}, {b})"),
)  # fmt: skip

_CONVERT = (
    ("9.7.9.21", "cvt.{u8,s8,u16,s16,u32,s32,u64,s64}.{u8,s8,u16,s16,u32,s32,u64,s64}", "da",
     "@resize"),
    ("9.7.9.21", "cvt.f32.{bf16,f16}", "da", "f32 = widen_{T}({a})"),
    ("9.7.9.21", "cvt.rn.f32.{s32,u32}", "da", "f32 = {a}.astype(F32)"),
    ("9.7.9.21", "cvt.{rni,rzi,rmi,rpi}.f32.f32", "da", "f32 = {integral}({a})"),
    ("9.7.9.21", "cvt.{rni,rzi,rmi,rpi}.s32.f32", "da", "s32 = saturate_s32({integral}({a}))"),
    ("9.7.9.21", "cvt.rn.{bf16,f16}.f32", "da", "u16 = narrow_{R}({a})"),
    ("9.7.9.21", "cvt.rn.{bf16x2,f16x2}.f32", "dab",
     "u32 = pack16(narrow_{R}({a}), narrow_{R}({b}))"),
    ("9.7.9.21", "cvt.rz.bf16x2.f32", "dab",
     "u32 = pack16(truncate_bf16({a}), truncate_bf16({b}))"),
    ("9.7.9.21", "cvt.rn.relu.bf16x2.f32", "dab", "u32 = pack16(relu_bf16({a}), relu_bf16({b}))"),
    ("9.7.9.21", "cvt.rna.tf32.f32", "da", "u32 = narrow_tf32({a})"),
    ("9.7.9.21", "cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32", "dab",
     "u16 = pack8(narrow_{R}({a}), narrow_{R}({b}))"),
    ("9.7.9.21", "cvt.rn.satfinite.{e4m3x2,e5m2x2}.f16x2", "da",
     "u16 = narrow_f16x2({a}, narrow_{R})"),
    ("9.7.9.21", "cvt.rn.satfinite.e2m1x2.f32", "dab",
     "u8 = pack4(narrow_e2m1({a}), narrow_e2m1({b}))"),
    ("9.7.9.21", "cvt.{rp,rz}.ue8m0x2.f32", "dab",
     "u16 = pack8(narrow_e8m0({a}, {up}), narrow_e8m0({b}, {up}))"),
    ("9.7.9.21", "cvt.{rp,rz}.satfinite.ue8m0x2.f32", "dab",
     "u16 = pack8(narrow_e8m0({a}, {up}, True), narrow_e8m0({b}, {up}, True))"),
    ("9.7.9.21", "cvt.rn.bf16x2.ue8m0x2", "da", "u32 = widen_e8m0x2({a:b16})"),
    ("9.7.9.21", "cvt.rn.f16x2.{e4m3x2,e5m2x2}", "da", "u32 = widen_{T}({a:b16})"),
)  # fmt: skip

_LANES = (
    ("9.7.9.6", "shfl.sync.{up,down,bfly,idx}.b32", "dabci?",
     "u32 = shuffle_{shfl}({a}, {b}, {c})"),
    ("9.7.13.9", "vote.sync.ballot.b32", "dpi", "u32 = ballot({p}, M)"),
    ("9.7.13.9", "vote.sync.{any,all}.pred", "dpi", "p = vote_{vote}({p}, M)"),
    ("9.7.13.11", "activemask.b32", "d", "u32 = ballot(np.True_, M)"),
    ("9.7.13.12", "redux.sync.{add,min,max}.{u32,s32}", "dai", "T = reduce_{redux}({a}, M)"),
    ("9.7.13.12", "redux.sync.{min,max}.NaN.f32", "dai", "f = reduce_{redux}({a}, M)"),
    ("9.7.13.14", "elect.sync", "dei", "@elect"),
)  # fmt: skip

_MEMORY = (
    ("9.7.9.8", f"ld.param{{,.v2,.v4}}.{_ELEMENTS}", "Dx",
     "v = W.load_parameter({x}, {size}, {n})"),
    ("9.7.9.8", f"ld.{{global,shared,local}}{{,.v2,.v4,.v8}}.{_ELEMENTS}", "Dx",
     "v = W.load_{space}({x}, {size}, {n}, M)"),
    ("9.7.9.8", f"ld.shared::cta{{,.v2,.v4}}.{_ELEMENTS}", "Dx",
     "v = W.load_shared({x}, {size}, {n}, M)"),
    ("9.7.9.9", f"ld.global.nc{{,.v2,.v4,.v8}}.{_ELEMENTS}", "Dx",
     "v = W.load_global({x}, {size}, {n}, M)"),
    ("9.7.9.11", f"st.{{global,shared,local}}{{,.v2,.v4,.v8}}.{_ELEMENTS}", "xV",
     "do W.store_{space}({x}, {size}, {V}, M)"),
    ("9.7.9.11", f"st.shared::cta{{,.v2,.v4}}.{_ELEMENTS}", "xV",
     "do W.store_shared({x}, {size}, {V}, M)"),
    ("9.7.9.12", f"st.async.shared::cluster.{_TX}.{{b32,u32,s32,b64,u64,s64}}", "xVy",
     "do copies.store_async(W, {x}, {size}, {V}, {y}, M)"),
    ("9.7.9.12", f"st.async.shared::cluster.{_TX}.{{v2,v4}}.{{b32,u32,s32}}", "xVy",
     "do copies.store_async(W, {x}, {size}, {V}, {y}, M)"),
    ("9.7.13.5", "atom.global.{add,min,max}.{u32,s32}", "dxa",
     "u32 = W.atomic({x}, {a}, '{atom}', M)"),
    ("9.7.13.5", "atom.global.add.f32", "dxa", "u32 = W.atomic({x}, {a}, '{atom}', M)"),
    ("9.7.13.6", "red.global.add{,.relaxed.gpu}.{f32,u32,s32}", "xa",
     "do W.atomic({x}, {a}, 'add', M)"),
    ("9.7.13.6", "red.global.add.noftz.bf16x2", "xa", "do W.atomic({x}, {a:u}, 'bf16x2', M)"),
    ("9.7.9.15", "prefetch.tensormap", "x", "do None"),
    ("9.7.9.18", "createpolicy.fractional.L2::{evict_first,evict_last}.b64", "di?", "u64 = U64(0)"),
    ("9.7.9.25.3.1", "cp.async.{ca,cg}.shared.global", "xyia?",
     "do copies.start(W, {x}, {y}, {i}, {a:b32}, M)"),
    ("9.7.9.25.3.2", "cp.async.commit_group", "", "do copies.commit(W)"),
    ("9.7.9.25.3.3", "cp.async.wait_group", "i", "do copies.wait(W, {i})"),
    ("9.7.9.25.3.3", "cp.async.wait_all", "", "do copies.wait(W, 0)"),
    ("9.7.13.15.15", "cp.async.mbarrier.arrive.noinc.shared.b64", "x",
     "do copies.arrive(W, {x}, M)"),
)  # fmt: skip

_TENSOR = (
    ("9.7.9.27.1.2", f"{_BOX}.{{shared::cluster,shared::cta}}.global.tile.{_TX}{_CACHE}{_GROUP}",
     "xtya?", "do tma.load(W, {x}, {t}, {y}, None, {group}, M)"),
    ("9.7.9.27.1.2",
     f"{_BOX}.shared::cluster.global.tile.{_TX}.multicast::cluster{_CACHE}{_GROUP}", "xtyab?",
     "do tma.load(W, {x}, {t}, {y}, {a:b16}, {group}, M)"),
    ("9.7.9.27.1.2", f"{_BOX}.global.shared::cta.tile.bulk_group{_CACHE}", "txa?",
     "do tma.store(W, {t}, {x}, False, M)"),
    ("9.7.9.27.1.3", f"{_SUM}.global.shared::cta.add.tile.bulk_group{_CACHE}",
     "txa?", "do tma.store(W, {t}, {x}, True, M)"),
    ("9.7.9.27.2.1", "cp.async.bulk.commit_group", "", "do tma.commit(W)"),
    ("9.7.9.27.2.2", "cp.async.bulk.wait_group", "i", "do tma.wait(W, {i}, False)"),
    ("9.7.9.27.2.2", "cp.async.bulk.wait_group.read", "i", "do tma.wait(W, {i}, True)"),
    ("9.7.16.7.1", "tcgen05.alloc.cta_group::{1,2}.sync.aligned.shared::cta.b32", "xa",
     "do tensor.allocate(W, {x}, {a:b32})"),
    ("9.7.16.7.1", "tcgen05.dealloc.cta_group::{1,2}.sync.aligned.b32", "ab",
     "do tensor.free(W, {a:b32}, {b:b32})"),
    ("9.7.16.7.1", "tcgen05.relinquish_alloc_permit.cta_group::{1,2}.sync.aligned", "",
     "do tensor.relinquish(W)"),
    ("9.7.16.8.3", "tcgen05.ld.sync.aligned.32x32b.{x1,x2,x4,x8,x16,x32,x64,x128}.b32", "Dx",
     "v = tensor.load(W, {x}, {n})"),
    ("9.7.16.8.5", "tcgen05.wait::ld.sync.aligned", "", "do tensor.wait_load(W)"),
    ("9.7.16.9.2", "tcgen05.cp.cta_group::{1,2}.32x128b.warpx4", "xa",
     "do core.copy(W, {x}, {a:b64}, {group}, M)"),
    ("9.7.16.10.9.1", f"tcgen05.mma.cta_group::{{1,2}}.kind::f16{_MMA}", "xabcV?q",
     "do core.multiply(W, {x}, {a:b64}, {b:b64}, {c:b32}, {q}, '{kind}', None, {group}, M)"),
    ("9.7.16.10.9.1",
     f"tcgen05.mma.cta_group::{{1,2}}.kind::mxf8f6f4.block_scale.block32{_MMA}", "xabcyzq",
     f"do core.multiply({_SCALED})"),
    ("9.7.16.10.9.1",
     f"tcgen05.mma.cta_group::{{1,2}}.kind::mxf4nvf4.block_scale.block16{_MMA}", "xabcyzq",
     f"do core.multiply({_SCALED})"),
    ("9.7.16.12.1", "tcgen05.commit.cta_group::{1,2}.mbarrier::arrive::one.shared::cluster.b64",
     "x", "do core.commit(W, {x}, None, M)"),
    ("9.7.16.12.1", "tcgen05.commit.cta_group::{1,2}.mbarrier::arrive::one.shared::cluster"
     ".multicast::cluster.b64", "xa", "do core.commit(W, {x}, {a:b16}, M)"),
    ("9.7.16.11.1", "tcgen05.fence::{before,after}_thread_sync", "", "do None"),
)  # fmt: skip

_SYNCHRONISE = (
    ("9.7.13.1", "{bar,barrier}.sync{,.aligned}", "ab?",
     "do barriers.named(W, {a:b32}, {b:b32}, False)"),
    ("9.7.13.1", "{bar,barrier}.arrive{,.aligned}", "ab",
     "do barriers.named(W, {a:b32}, {b:b32}, True)"),
    ("9.7.13.2", "bar.warp.sync", "a", "do W.converge(M)"),
    ("9.7.13.3", "barrier.cluster.arrive{,.release,.relaxed}{,.aligned}", "",
     "do barriers.cluster_arrive(W, {relaxed})"),
    ("9.7.13.3", "barrier.cluster.wait{,.acquire}{,.aligned}", "", "do barriers.cluster_wait(W)"),
    ("9.7.13.4", "fence.{acq_rel,sc}.{cta,cluster,gpu,sys}", "", "do W.fence()"),
    ("9.7.13.4", "fence.mbarrier_init.release.cluster", "", "do barriers.fence_init(W)"),
    ("9.7.13.4", "fence.proxy.async{,.shared::cta,.shared::cluster,.global}", "",
     "do W.fence_proxy()"),
    ("9.7.13.4", "fence.proxy.tensormap::generic.acquire.{cta,cluster,gpu,sys}", "xi",
     "do tma.acquire_map(W, {x}, M)"),
    ("9.7.13.15.9", "mbarrier.init.{shared,shared::cta}.b64", "xa",
     "do barriers.initialise(W, {x}, {a:b32}, M)"),
    ("9.7.13.15.10", "mbarrier.inval.{shared,shared::cta}.b64", "x",
     "do barriers.invalidate(W, {x}, M)"),
    ("9.7.13.15.13", f"mbarrier.arrive{_RELEASE}.{{shared,shared::cta}}.b64", "dxa?",
     "u64 = barriers.arrive(W, {x}, {a:b32}, None, M)"),
    ("9.7.13.15.13", f"mbarrier.arrive{_RELEASE}.shared::cluster.b64", "dxa?",
     "u64 = barriers.arrive(W, {x}, {a:b32}, None, M)"),
    ("9.7.13.15.13", f"mbarrier.arrive.expect_tx{_RELEASE}"
     ".{shared,shared::cta,shared::cluster}.b64", "dxa",
     "u64 = barriers.arrive(W, {x}, None, {a:b32}, M)"),
    ("9.7.13.15.16", "mbarrier.{try_wait,test_wait}.parity{,.acquire.cta,.acquire.cluster}"
     ".{shared,shared::cta}.b64", "dxab?", "p = barriers.try_wait(W, {x}, {a:b32}, M)"),
    ("9.7.13.17", f"clusterlaunchcontrol.try_cancel.async.shared::cta.{_TX}"
     "{,.multicast::cluster::all}.b128", "xy",
     "do barriers.try_cancel(W, {x}, {y}, {multicast}, M)"),
    ("9.7.13.18", "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", "da",
     "p = {a}[1] != U64(0)"),
    ("9.7.13.18", "clusterlaunchcontrol.query_cancel.get_first_ctaid::{x,y,z}.b32.b128", "da",
     "u32 = barriers.first_cta({a}, '{axis}')"),
)  # fmt: skip

_CONTROL = (
    ("9.7.13.13", "griddepcontrol.{launch_dependents,wait}", "", "do None"),
    ("9.7.19.2", "nanosleep.u32", "a", "do None"),
    ("9.7.19.5", "setmaxnreg.{inc,dec}.sync.aligned.u32", "i", "do None"),
    ("9.7.12.3", "bra{,.uni}", "", "@branch"),
    ("9.7.12.6", "ret{,.uni}", "", "@leave"),
    ("9.7.12.7", "exit", "", "@leave"),
)


@dataclass(frozen=True)
class Form:
    """One exact opcode.

    Attributes:
        section: Of the PTX ISA.
        required: Letters of the operands that must be there, in order.
        letters: All letters, in order.
        meaning: See the module.
    """

    op: str
    section: str
    required: str
    letters: str
    meaning: str


def _expand(pattern: str) -> list[str]:
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
    return ["".join(c) for c in product(*choices)]


def _table() -> dict[str, Form]:
    table: dict[str, Form] = {}
    groups = (
        _COMPARE,
        _ARITHMETIC,
        _LOGIC,
        _CONVERT,
        _LANES,
        _MEMORY,
        _TENSOR,
        _SYNCHRONISE,
        _CONTROL,
    )
    for section, pattern, operands, meaning in (row for rows in groups for row in rows):
        required = re.sub(r"\w\?", "", operands)
        for op in _expand(pattern):
            assert op not in table, op
            table[op] = Form(op, section, required, operands.replace("?", ""), meaning)
    return table


FORMS = _table()
