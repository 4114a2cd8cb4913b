"""KDA in Triton: two launches for a prefill, one for a few tokens, four more for the gradients.

A sequence of more than STEPS tokens is cut into chunks of C = 64, and `fallback.py`'s equations are computed
in two launches: `chunk_terms` for all chunks at once, `_chunk_scan` along each sequence. A shorter one takes
the recurrence itself, in `_steps`. The choice is made for each sequence of a packed batch, so that it gives
the bits that it gives alone.

Here e = d / beta is what is solved for, so that no division by beta is needed and the scans never see it:

    P_ij = Σ_c k_ic k_jc D_c(j -> i)   (j < i)            Y = (I + P diag(beta))^-1
    e  = Y (v - (k · D(start -> .)) S)                    A, k_out: column j, row j times beta_j
    o  = (scale q · D(start -> .)) S + A e                S' = diag(D(start -> end)) S + k_out^T e

Backward, `chunk_terms` runs again and the scan keeps S and e of every chunk; `_chunk_scan_back` takes the
state's cotangent from the last chunk to the first, and `chunk_gradients` turns both into gradients, for all
chunks at once. Nothing but the inputs is saved: the terms are 2 KB a token and head, and quick to have again.

Nothing is promised about the gates: a chunk is visited in blocks of M = 16 tokens, every exponent is a sum of
gates over its own range, and two blocks meet at the later one's start, where both exponents are at most 0.
Terms and gradients are each target's own (`cuda/`, `ascend/`): a tile that fills one does not fit the other.

A layer's own gates, l2 normalisation and sigmoid can be had on the way (`Gate`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_batch, on_device, piece_at, pieces
from kda_fn.types import Tensor

__all__ = ["Call", "Gate", "launch_kda", "launch_kda_backward", "launch_kda_step", "launch_kda_step_backward"]

C = 64
"""Tokens of a chunk."""
M = 16
"""Tokens of a block: the smallest matrix that matrix units take."""
STEPS = 8
"""Sequences up to this long take the recurrence: a chunk's matrices would be mostly padding."""
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def launch_kda(
    outputs: tuple[Tensor, ...],
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    chunk_size: int,
    cu_seqlens: tuple[int, ...] | None,
) -> None:
    final_state, o = outputs
    if final_state.numel() or o.numel():
        Call(initial_state, q, k, v, g, beta, scale, cu_seqlens).forward(final_state, o)


def launch_kda_backward(
    gradients: tuple[Tensor, ...],
    d_final_state: Tensor,
    d_o: Tensor,
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    chunk_size: int,
    cu_seqlens: tuple[int, ...] | None,
    rows: int,
) -> None:
    Call(initial_state, q, k, v, g, beta, scale, cu_seqlens).backward(d_final_state, d_o, gradients)


def launch_kda_step(
    outputs: tuple[Tensor, ...],
    state: Tensor,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    g_t: Tensor,
    beta_t: Tensor,
    *,
    scale: float | None,
) -> None:
    new_state, o_t = outputs
    if new_state.numel() or o_t.numel():
        inputs = (x.unsqueeze(-3) for x in (q_t, k_t, v_t, g_t))
        Call(state, *inputs, beta_t.unsqueeze(-2), scale, None).forward(new_state, o_t.unsqueeze(-3))


def launch_kda_step_backward(
    gradients: tuple[Tensor, ...],
    d_new_state: Tensor,
    d_o_t: Tensor,
    state: Tensor,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    g_t: Tensor,
    beta_t: Tensor,
    *,
    scale: float | None,
    rows: int,
) -> None:
    inputs = (x.unsqueeze(-3) for x in (q_t, k_t, v_t, g_t))
    d_state, *d_inputs, d_beta = gradients
    d_tensors = (d_state, *(d.unsqueeze(-3) for d in d_inputs), d_beta.unsqueeze(-2))
    call = Call(state, *inputs, beta_t.unsqueeze(-2), scale, None)
    call.backward(d_new_state, d_o_t.unsqueeze(-3), d_tensors)


class Gate(NamedTuple):
    """What makes g of its logits, beta of its logits, and unit vectors of q and k."""

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    most_beta: float
    eps: float

    @property
    def kind(self) -> str:
        return "softplus" if self.lower_bound is None else "bounded"


class Call:
    """A call's tensors, with one batch axis. With a gate, g and beta are logits, q and k of any length."""

    def __init__(
        self,
        initial_state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None,
        cu_seqlens: tuple[int, ...] | None,
        gate: Gate | None = None,
    ) -> None:
        (self.T, self.H, self.K), (self.HV, self.V) = q.shape[-3:], v.shape[-2:]
        self.G = self.HV // self.H
        self.scale = self.K**-0.5 if scale is None else scale
        self.packed = cu_seqlens is not None
        self.bounds = (0, self.T) if cu_seqlens is None else cu_seqlens
        self.initial_state = as_batch(initial_state, 3).contiguous()
        self.q, self.k, self.v, self.g = (as_batch(x, 3) for x in (q, k, v, g))
        self.beta = as_batch(beta, 2)
        self.gate = gate
        self.B = len(self.q)
        self.target = _targets.target_of(q)
        self.gluon = _targets.in_gluon(self.K, self.V, self.q, self.k, self.v, self.g)

    def forward(self, final_state: Tensor, o: Tensor) -> None:
        self._steps(final_state, o)
        chunks = self._chunks(lambda length: length > STEPS)
        if chunks is not None:
            self._scan(chunks, self._as_scanned(self._terms(chunks)), final_state, o, None, None)

    def backward(
        self, d_final_state: Tensor, d_o: Tensor, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Fills the gradients of the six tensors.

        With a gate those of q and k are of the unit vectors, and the result is dA_log and ddt_bias, both by
        chunk and channel.
        """
        chunks = self._chunks(lambda _length: True)
        if chunks is None:
            return None
        d_initial_state, d_q, d_k, d_v, d_g, d_beta = gradients
        d_o = as_batch(d_o, 3)
        if self.gluon and any(stride % 16 for stride in d_o.stride()[:-1]):
            d_o = d_o.contiguous()
        # Saved are the inputs alone: a chunk's terms are large, and quick to have again.
        rows = self.q.new_empty(self.B, self.HV, chunks.count, 3, C, dtype=torch.float32)
        terms = self._terms(chunks, rows)
        scanned = self._as_scanned(terms)
        states, e = self._scan_again(chunks, scanned)
        d_states = self._scan_back(chunks, scanned, as_batch(d_final_state, 3), d_o, d_initial_state, d_v)
        # Gluon's kernel makes them of what it has at hand.
        pairs = (None, None, None) if self.gluon else self._pairs_back(chunks, e, d_v, d_o)
        if self.G == 1:
            wide = d_q, d_k
        else:
            shape = self.B, self.T, self.HV, self.K
            wide = tuple(self.q.new_empty(shape, dtype=torch.float32) for _ in range(2))
        sums = self._gradients(chunks, rows, states, e, d_states, *pairs, d_v, d_o, *wide, d_g, d_beta)
        if self.G > 1:
            for d, of_heads in zip((d_q, d_k), wide, strict=True):
                d.copy_(of_heads.unflatten(-2, (self.H, self.G)).sum(-2).view(d.shape))
        return sums

    def _steps(self, final_state: Tensor, o: Tensor) -> None:
        """Sequences of no more than a few tokens: the recurrence, token by token."""
        table = pieces(self.bounds, C, wanted=lambda length: length <= STEPS)
        if not table:
            return
        tile = _targets.kda_steps_tile(self.target, self.K, self.V)
        tasks = self.B * len(table) * self.HV * triton.cdiv(self.V, tile.columns)
        _steps[self.target.vector_grid(tasks)](
            self.initial_state,
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            *self._gate_weights(),
            final_state,
            o,
            self._on_device(table),
            self.B,
            self.T,
            len(self.bounds) - 1,
            len(table),
            self.HV,
            self.G,
            *self._strides(self.q, self.k, self.v, self.g),
            *self.beta.stride()[:2],
            *self._gate_numbers(),
            self.K,
            self.V,
            self.packed,
            *self._gate_kind(),
            tile.rows,
            tile.columns,
            **tile.launch,
        )

    def _chunks(self, wanted: Callable[[int], bool]) -> _Chunks | None:
        """The chunks of the sequences of wanted lengths."""
        table = pieces(self.bounds, C, wanted=wanted)
        if not table:
            return None
        sequences = [
            (n, index, start, length) for index, (n, first, start, length) in enumerate(table) if not first
        ]
        return _Chunks(len(table), self._on_device(table), len(sequences), self._on_device(sequences))

    def _terms(self, chunks: _Chunks, kept: Tensor | None = None) -> _Terms:
        """What each chunk does to a state, for all at once."""
        all_chunks = self.B, self.HV, chunks.count
        rows = self.q.new_empty(3, *all_chunks, C, self.K)
        squares = self.q.new_empty(2, *all_chunks, C, C)
        decay = self.q.new_empty(*all_chunks, self.K, dtype=torch.float32)
        terms = _Terms(*rows.unbind(), *squares.unbind(), decay)
        tile = _targets.kda_terms_tile(self.target, self.q.dtype, self.K, gluon=self.gluon)
        kernel = _gluon().chunk_terms if self.gluon else _of(self.target).chunk_terms
        kernel[self.target.cube_grid(self.B * self.HV * chunks.count)](
            self.q,
            self.k,
            self.g,
            self.beta,
            *self._gate_weights(),
            *terms,
            kept,
            chunks.table,
            self.B,
            self.T,
            chunks.count,
            self.HV,
            self.G,
            *self._strides(self.q, self.k, self.g),
            *self.beta.stride()[:2],
            *self._gate_numbers(),
            self.K,
            self.packed,
            kept is not None,
            *self._gate_kind(),
            tile.precision,
            C,
            M,
            tile.rows,
            tile.columns,
            **tile.launch,
        )
        return terms

    def _scan_again(self, chunks: _Chunks, scanned: tuple[object, ...]) -> tuple[Tensor, Tensor]:
        """`_scan` for its states at the chunks' starts and its e."""
        states = self.q.new_empty(self.B, self.HV, chunks.count, self.K, self.V)
        e = self.q.new_empty(self.B, self.HV, chunks.count, C, self.V)
        self._scan(chunks, scanned, None, None, states, e)
        return states, e

    def _scan(
        self,
        chunks: _Chunks,
        scanned: tuple[object, ...],
        final_state: Tensor | None,
        o: Tensor | None,
        states: Tensor | None,
        e: Tensor | None,
    ) -> None:
        """The chunks of each sequence, one after another; None is not kept."""
        tile, tasks = self._scan_tile(chunks)
        kernel = _gluon().chunk_scan if self.gluon else _chunk_scan
        kernel[self.target.cube_grid(tasks)](
            self.initial_state,
            *scanned,
            self.v,
            final_state,
            o,
            states,
            e,
            chunks.sequence_table,
            self.B,
            self.T,
            len(self.bounds) - 1,
            chunks.sequences,
            chunks.count,
            self.HV,
            *self._strides(self.v),
            self.K,
            self.V,
            self.packed,
            states is not None,
            tile.precision,
            C,
            tile.rows,
            tile.columns,
            **tile.launch,
        )

    def _scan_back(
        self,
        chunks: _Chunks,
        scanned: tuple[object, ...],
        d_final_state: Tensor,
        d_o: Tensor,
        d_initial_state: Tensor,
        d_v: Tensor,
    ) -> Tensor:
        """The state's cotangent at the chunks' ends; and v's."""
        d_states = self.q.new_empty(self.B, self.HV, chunks.count, self.K, self.V)
        tile, tasks = self._scan_tile(chunks)
        kernel = _gluon().chunk_scan_back if self.gluon else _chunk_scan_back
        kernel[self.target.cube_grid(tasks)](
            d_final_state.contiguous(),
            *scanned,
            d_o,
            d_initial_state,
            d_states,
            d_v,
            chunks.sequence_table,
            self.B,
            self.T,
            len(self.bounds) - 1,
            chunks.sequences,
            chunks.count,
            self.HV,
            *self._strides(d_o),
            self.K,
            self.V,
            self.packed,
            tile.precision,
            C,
            tile.rows,
            tile.columns,
            **tile.launch,
        )
        return d_states

    def _scan_tile(self, chunks: _Chunks) -> tuple[_targets.Tile, int]:
        """The tile of a scan, and how many tasks there are."""
        heads = self.B * chunks.sequences * self.HV
        of_gluon = heads if self.gluon else None
        tile = _targets.kda_scan_tile(self.target, self.q.dtype, self.K, self.V, heads=of_gluon)
        return tile, heads * triton.cdiv(self.V, tile.columns)

    def _as_scanned(self, terms: _Terms) -> tuple[object, ...]:
        """Terms as the scans take them."""
        return _gluon().described(terms) if self.gluon else terms

    def _pairs_back(
        self, chunks: _Chunks, e: Tensor, d_v: Tensor, d_o: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The cotangents of each chunk's pairs of tokens, of A and P before beta, and of A's diagonal."""
        dtype = torch.bfloat16 if self.q.dtype == torch.bfloat16 else torch.float32
        dA, dP = (self.q.new_empty(*e.shape[:-1], C, dtype=dtype) for _ in range(2))
        d_self = self.q.new_empty(e.shape[:-1], dtype=torch.float32)
        tile = _targets.kda_gradients_tile(self.target, self.q.dtype, self.K, self.V)
        _chunk_pairs_back[self.target.cube_grid(self.B * self.HV * chunks.count)](
            e,
            d_v,
            d_o,
            dA,
            dP,
            d_self,
            chunks.table,
            self.B,
            self.T,
            chunks.count,
            self.HV,
            *self._strides(d_o),
            self.V,
            self.packed,
            tile.precision,
            C,
            tile.rows,
            **tile.launch,
        )
        return dA, dP, d_self

    def _gradients(
        self,
        chunks: _Chunks,
        rows: Tensor,
        states: Tensor,
        e: Tensor,
        d_states: Tensor,
        dA: Tensor | None,
        dP: Tensor | None,
        d_self: Tensor | None,
        d_v: Tensor,
        d_o: Tensor,
        d_q: Tensor,
        d_k: Tensor,
        d_g: Tensor,
        d_beta: Tensor,
    ) -> tuple[Tensor, Tensor] | None:
        """The rest of the gradients, for all chunks and parts of K at once."""
        sums = None
        if self.gate is not None:
            shape = self.B, self.HV, chunks.count, self.K
            d_A_log, d_dt_bias = (self.q.new_empty(shape, dtype=torch.float32) for _ in range(2))
            sums = d_A_log, d_dt_bias
        tile = _targets.kda_gradients_tile(self.target, self.q.dtype, self.K, self.V, gluon=self.gluon)
        kernel = _gluon().chunk_gradients if self.gluon else _of(self.target).chunk_gradients
        parts = triton.cdiv(self.K, tile.columns)
        d_betas = self.q.new_empty(*d_beta.shape, parts, dtype=torch.float32)
        kernel[self.target.cube_grid(self.B * self.HV * chunks.count * parts)](
            self.q,
            self.k,
            self.g,
            *self._gate_weights(),
            rows,
            states,
            e,
            d_states,
            dA,
            dP,
            d_self,
            d_v,
            d_o,
            d_q,
            d_k,
            d_g,
            d_betas,
            *(sums or (None, None)),
            chunks.table,
            self.B,
            self.T,
            chunks.count,
            self.HV,
            self.G,
            *self._strides(self.q, self.k, self.g, d_o),
            *self._gate_numbers(),
            self.K,
            self.V,
            self.packed,
            *self._gate_kind(),
            tile.precision,
            C,
            M,
            tile.columns,
            tile.rows,
            **tile.launch,
        )
        d_beta.copy_(d_betas.sum(-1))
        return sums

    def _on_device(self, table: list[tuple[int, int, int, int]]) -> Tensor | None:
        return on_device(table, self.q) if self.packed else None

    @staticmethod
    def _strides(*tensors: Tensor) -> tuple[int, ...]:
        return tuple(stride for x in tensors for stride in x.stride()[:3])

    def _gate_weights(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.gate is None else (self.gate.A_log, self.gate.dt_bias)

    def _gate_numbers(self) -> tuple[float, float, float, float]:
        if self.gate is None:
            return self.scale, 0.0, 0.0, 0.0
        return self.scale, self.gate.eps, self.gate.lower_bound or 0.0, self.gate.most_beta

    def _gate_kind(self) -> tuple[str, bool]:
        return ("none", False) if self.gate is None else (self.gate.kind, self.gate.A_log.numel() > 0)


def _of(target: _targets.Target) -> ModuleType:
    """The kernels that a target has of its own. They call some of those here."""
    folder = "cuda" if target is _targets.CUDA else "ascend"
    return importlib.import_module(f"kda_fn.primitives.kda.{folder}.kernels")


def _gluon() -> ModuleType:
    """The kernels that are written for Hopper alone."""
    return importlib.import_module("kda_fn.primitives.kda.cuda.gluon")


class _Chunks(NamedTuple):
    count: int
    table: Tensor | None
    sequences: int
    sequence_table: Tensor | None


class _Terms(NamedTuple):
    q_in: Tensor
    """scale q · D(start -> .)   [C K]"""
    k_in: Tensor
    """k · D(start -> .)   [C K]"""
    k_out: Tensor
    """beta k · D(. -> end)   [C K]"""
    A: Tensor
    """[C C]"""
    Y: Tensor
    """[C C]"""
    decay: Tensor
    """D(start -> end)   [K], of each chunk"""


@triton.jit(do_not_specialize=["B", "T", "N", "count", "HV", "G"])
def _steps(
    initial_state_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    final_state_ptr,
    o_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    HV,
    G,
    q_batch,
    q_time,
    q_head,
    k_batch,
    k_time,
    k_head,
    v_batch,
    v_time,
    v_head,
    g_batch,
    g_time,
    g_head,
    beta_batch,
    beta_time,
    scale,
    eps,
    lower_bound,
    most_beta,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    columns = tl.cdiv(V, BV)
    c = tl.arange(0, BK)
    for task in range(tl.program_id(0), B * count * HV * columns, tl.num_programs(0)):
        e = (task % columns) * BV + tl.arange(0, BV)
        hv = (task // columns) % HV
        row = (task // (columns * HV)) % count
        b = tl.cast(task // (columns * HV * count), tl.int64)
        n, _first, start, length = piece_at(table_ptr, row, 0, T, PACKED)
        h = hv // G
        q_at = q_ptr + b * q_batch + start * q_time + h * q_head + c
        k_at = k_ptr + b * k_batch + start * k_time + h * k_head + c
        v_at = v_ptr + b * v_batch + start * v_time + hv * v_head + e
        g_at = g_ptr + b * g_batch + start * g_time + hv * g_head + c
        beta_at = beta_ptr + b * beta_batch + start * beta_time + hv
        o_at = o_ptr + ((b * T + start) * HV + hv) * V + e
        state_at = ((b * N + n) * HV + hv) * K * V + c[:, None] * V + e[None, :]
        inside = (c < K)[:, None] & (e < V)[None, :]
        S = tl.load(initial_state_ptr + state_at, mask=inside, other=0.0).to(tl.float32)
        for t in range(0, length):
            q = tl.load(q_at + t * q_time, mask=c < K, other=0.0).to(tl.float32)
            k = tl.load(k_at + t * k_time, mask=c < K, other=0.0).to(tl.float32)
            v = tl.load(v_at + t * v_time, mask=e < V, other=0.0).to(tl.float32)
            g = tl.load(g_at + t * g_time, mask=c < K, other=0.0).to(tl.float32)
            beta = tl.load(beta_at + t * beta_time).to(tl.float32)
            if GATE != "none":
                g += tl.load(dt_bias_ptr + hv * K + c, mask=c < K, other=0.0).to(tl.float32)
                g = tl.where(c < K, _log2_decay(g, _rate(A_log_ptr + hv, HAS_RATE), lower_bound, GATE), 0.0)
                beta = most_beta / (1.0 + tl.exp(-beta))
                q *= tl.rsqrt(tl.sum(q * q, 0) + eps)
                k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
            else:
                g *= LOG2_E
            S = S * tl.exp2(g)[:, None]
            d = beta * (v - tl.sum(S * k[:, None], 0))
            S = S + k[:, None] * d[None, :]
            o = scale * tl.sum(S * q[:, None], 0)
            tl.store(o_at + t * HV * V, o.to(o_ptr.dtype.element_ty), mask=e < V)
        tl.store(final_state_ptr + state_at, S.to(final_state_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rate(A_log_at, HAS_RATE: tl.constexpr):
    """exp(A_log), finite: inf times 0 would be NaN."""
    rate = 1.0
    if HAS_RATE:
        rate = tl.exp(tl.minimum(tl.load(A_log_at).to(tl.float32), 87.0))
    return rate


@triton.jit
def _log2_decay(x, rate, lower_bound, GATE: tl.constexpr):
    """log2 of the decay, from logits with their bias."""
    if GATE == "bounded":
        g = (lower_bound * LOG2_E) * _reciprocal(1.0 + tl.exp2(-(rate * LOG2_E) * x))
    else:
        # log2(1 + u), u = exp(-|x|): by its series where 1 + u has lost digits of u.
        u = tl.exp2(-LOG2_E * tl.abs(x))
        series = u * (1.0 - u * (0.5 - u * (1.0 / 3.0 - u * (0.25 - u * 0.2))))
        rest = tl.where(u < 0.0625, LOG2_E * series, tl.log2(1.0 + u))
        g = -rate * (LOG2_E * tl.maximum(x, 0.0) + rest)
    return g


@triton.jit
def _reciprocal(x):
    """1 / x of positive x: a division takes ten instructions, this two."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _product_of_wide(a, b, PRECISION: tl.constexpr):
    """a b for a float32 b: beside a half-precision a, b as the sum of two numbers of that precision."""
    high = b.to(a.dtype)
    if a.dtype == tl.float32:
        return tl.dot(a, high, input_precision=PRECISION)
    low = (b - high.to(tl.float32)).to(a.dtype)
    return tl.dot(a + 0.0, high, input_precision=PRECISION) + tl.dot(a, low, input_precision=PRECISION)


@triton.jit
def _load(at, stride, rows, columns, R: tl.constexpr, F: tl.constexpr):
    """[R F] in float32, of which `rows` and `columns` exist; zeros elsewhere."""
    r = tl.arange(0, R)
    f = tl.arange(0, F)
    # A mask is a bound on each index, or Ascend reads all of the tile.
    mask = (r < rows)[:, None] & (f < columns)[None, :]
    return tl.load(at + r[:, None] * stride + f[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(at, x, stride, rows, columns, R: tl.constexpr, F: tl.constexpr):
    """The same part of x [R F], at rows of the given stride."""
    r = tl.arange(0, R)
    f = tl.arange(0, F)
    mask = (r < rows)[:, None] & (f < columns)[None, :]
    tl.store(at + r[:, None] * stride + f[None, :], x.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["B", "T", "N", "count", "chunks", "HV"])
def _chunk_scan(
    initial_state_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    A_ptr,
    Y_ptr,
    decay_ptr,
    v_ptr,
    final_state_ptr,
    o_ptr,
    states_ptr,
    e_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    chunks,
    HV,
    v_batch,
    v_time,
    v_head,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """o and the final state; or with KEEP every chunk's first state and its e, for the gradients."""
    dtype = q_in_ptr.dtype.element_ty
    columns = tl.cdiv(V, BV)
    c = tl.arange(0, BK)
    row = tl.arange(0, C)
    for task in range(tl.program_id(0), B * count * HV * columns, tl.num_programs(0)):
        x = (task % columns) * BV + tl.arange(0, BV)
        hv = (task // columns) % HV
        b = tl.cast(task // (columns * HV * count), tl.int64)
        n, chunk, start, length = piece_at(table_ptr, (task // (columns * HV)) % count, 0, T, PACKED)
        state_at = c[:, None] * V + x[None, :]
        inside = (c < K)[:, None] & (x < V)[None, :]
        keys = row[:, None] * K + c[None, :]
        key_mask = (row < C)[:, None] & (c < K)[None, :]
        pairs = row[:, None] * C + row[None, :]
        values = row[:, None] * v_time + x[None, :]
        outputs = row[:, None] * (HV * V) + x[None, :]
        v_at = v_ptr + b * v_batch + start * v_time + hv * v_head
        own = (b * HV + hv) * chunks + chunk

        S_at = initial_state_ptr + ((b * N + n) * HV + hv) * K * V
        S = tl.load(S_at + state_at, mask=inside, other=0.0).to(tl.float32)
        for step in range(0, tl.cdiv(length, C)):
            # Addresses of a long sequence pass 2^31: those of a chunk's first token are of 64 bits.
            first = tl.cast(step * C, tl.int64)
            alive = (row < length - step * C)[:, None]
            value_mask = alive & (x < V)[None, :]
            k_in = tl.load(k_in_ptr + (own + step) * (C * K) + keys, mask=key_mask, other=0.0)
            k_out = tl.load(k_out_ptr + (own + step) * (C * K) + keys, mask=key_mask, other=0.0)
            Y = tl.load(Y_ptr + (own + step) * (C * C) + pairs)
            v = tl.load(v_at + first * v_time + values, mask=value_mask, other=0.0).to(tl.float32)
            decay = tl.load(decay_ptr + (own + step) * K + c, mask=c < K, other=0.0)

            # What the memory lacks and what fills it keep more digits than the inputs: they add up in S.
            narrow = S.to(dtype)
            e = _product_of_wide(Y, v - tl.dot(k_in, narrow, input_precision=PRECISION), PRECISION)
            if KEEP:
                tl.store(states_ptr + (own + step) * (K * V) + state_at, narrow, mask=inside)
                kept = e_ptr + (own + step) * (C * V) + row[:, None] * V + x[None, :]
                tl.store(kept, e.to(e_ptr.dtype.element_ty), mask=(row < C)[:, None] & (x < V)[None, :])
            else:
                q_in = tl.load(q_in_ptr + (own + step) * (C * K) + keys, mask=key_mask, other=0.0)
                A = tl.load(A_ptr + (own + step) * (C * C) + pairs)
                o = tl.dot(q_in, narrow, input_precision=PRECISION) + _product_of_wide(A, e, PRECISION)
                o_at = o_ptr + ((b * T + start + first) * HV + hv) * V
                tl.store(o_at + outputs, o.to(o_ptr.dtype.element_ty), mask=value_mask)
            S = S * decay[:, None] + _product_of_wide(tl.trans(k_out), e, PRECISION)
        if not KEEP:
            final = final_state_ptr + ((b * N + n) * HV + hv) * K * V + state_at
            tl.store(final, S.to(final_state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "T", "N", "count", "chunks", "HV"])
def _chunk_scan_back(
    d_final_state_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    A_ptr,
    Y_ptr,
    decay_ptr,
    d_o_ptr,
    d_initial_state_ptr,
    d_states_ptr,
    d_v_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    chunks,
    HV,
    d_o_batch,
    d_o_time,
    d_o_head,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """`_chunk_scan` in reverse, linear in the cotangents: those of every chunk's last state, and dv."""
    dtype = q_in_ptr.dtype.element_ty
    columns = tl.cdiv(V, BV)
    c = tl.arange(0, BK)
    row = tl.arange(0, C)
    for task in range(tl.program_id(0), B * count * HV * columns, tl.num_programs(0)):
        x = (task % columns) * BV + tl.arange(0, BV)
        hv = (task // columns) % HV
        b = tl.cast(task // (columns * HV * count), tl.int64)
        n, chunk, start, length = piece_at(table_ptr, (task // (columns * HV)) % count, 0, T, PACKED)
        state_at = c[:, None] * V + x[None, :]
        inside = (c < K)[:, None] & (x < V)[None, :]
        keys = row[:, None] * K + c[None, :]
        key_mask = (row < C)[:, None] & (c < K)[None, :]
        pairs = row[:, None] * C + row[None, :]
        outputs = row[:, None] * d_o_time + x[None, :]
        values = row[:, None] * (HV * V) + x[None, :]
        d_o_at = d_o_ptr + b * d_o_batch + start * d_o_time + hv * d_o_head
        own = (b * HV + hv) * chunks + chunk
        own_state = ((b * N + n) * HV + hv) * K * V

        dS = tl.load(d_final_state_ptr + own_state + state_at, mask=inside, other=0.0).to(tl.float32)
        steps = tl.cdiv(length, C)
        for back in range(0, steps):
            step = steps - 1 - back
            first = tl.cast(step * C, tl.int64)
            alive = (row < length - step * C)[:, None]
            value_mask = alive & (x < V)[None, :]
            q_in = tl.load(q_in_ptr + (own + step) * (C * K) + keys, mask=key_mask, other=0.0)
            k_in = tl.load(k_in_ptr + (own + step) * (C * K) + keys, mask=key_mask, other=0.0)
            k_out = tl.load(k_out_ptr + (own + step) * (C * K) + keys, mask=key_mask, other=0.0)
            Y = tl.load(Y_ptr + (own + step) * (C * C) + pairs)
            A = tl.load(A_ptr + (own + step) * (C * C) + pairs)
            d_o = tl.load(d_o_at + first * d_o_time + outputs, mask=value_mask, other=0.0).to(dtype)
            decay = tl.load(decay_ptr + (own + step) * K + c, mask=c < K, other=0.0)

            narrow = dS.to(dtype)
            tl.store(d_states_ptr + (own + step) * (K * V) + state_at, narrow, mask=inside)
            d_e = tl.dot(tl.trans(A), d_o, input_precision=PRECISION)
            d_e += tl.dot(k_out, narrow, input_precision=PRECISION)
            d_v = _product_of_wide(tl.trans(Y), d_e, PRECISION)
            d_v_at = d_v_ptr + ((b * T + start + first) * HV + hv) * V
            tl.store(d_v_at + values, d_v.to(d_v_ptr.dtype.element_ty), mask=value_mask)
            dS = dS * decay[:, None] + tl.dot(tl.trans(q_in), d_o, input_precision=PRECISION)
            dS -= _product_of_wide(tl.trans(k_in), d_v, PRECISION)
        d_initial = d_initial_state_ptr + own_state + state_at
        tl.store(d_initial, dS.to(d_initial_state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "T", "count", "HV"])
def _chunk_pairs_back(
    e_ptr,
    d_v_ptr,
    d_o_ptr,
    dA_ptr,
    dP_ptr,
    d_self_ptr,
    table_ptr,
    B,
    T,
    count,
    HV,
    d_o_batch,
    d_o_time,
    d_o_head,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
):
    dtype = e_ptr.dtype.element_ty
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    for task in range(tl.program_id(0), B * count * HV, tl.num_programs(0)):
        hv = task % HV
        piece = (task // HV) % count
        b = tl.cast(task // (HV * count), tl.int64)
        _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
        token = start + first
        left = length - first
        own = (b * HV + hv) * count + piece
        d_o_at = d_o_ptr + b * d_o_batch + token * d_o_time + hv * d_o_head
        d_v_at = d_v_ptr + ((b * T + token) * HV + hv) * V
        dA = tl.zeros((C, C), dtype=tl.float32)
        dP = tl.zeros((C, C), dtype=tl.float32)
        for at in range(0, V, BV):
            e = tl.trans(_load(e_ptr + own * C * V + at, V, C, V - at, C, BV).to(dtype))
            d_o = _load(d_o_at + at, d_o_time, left, V - at, C, BV).to(dtype)
            dA += tl.dot(d_o, e, input_precision=PRECISION)
            d_v = _load(d_v_at + at, HV * V, left, V - at, C, BV).to(dtype)
            dP -= tl.dot(d_v, e, input_precision=PRECISION)
        _store(dA_ptr + own * C * C, tl.where(i > j, dA, 0.0), C, C, C, C, C)
        tl.store(d_self_ptr + own * C + tl.arange(0, C), tl.sum(tl.where(i == j, dA, 0.0), 1))
        _store(dP_ptr + own * C * C, tl.where(i > j, dP, 0.0), C, C, C, C, C)
