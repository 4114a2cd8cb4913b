"""Small kernels for test_emulator.py, one for each thing that the emulator must get right."""

# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def convert(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def add_in_loop(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def elementwise(x, out, n, NAME: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=1.0).to(tl.float32)
    if NAME == "exp":
        value = tl.exp(value)
    elif NAME == "exp2":
        value = tl.exp2(value)
    elif NAME == "log":
        value = tl.log(value)
    elif NAME == "sqrt":
        value = tl.sqrt(value)
    elif NAME == "rsqrt":
        value = tl.rsqrt(value)
    elif NAME == "sigmoid":
        value = tl.sigmoid(value)
    elif NAME == "abs":
        value = tl.abs(value)
    elif NAME == "relu":
        value = tl.where(value > 0, value, 0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < n)


@triton.jit
def reduce(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, NAME: tl.constexpr):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    value = tl.load(x + r[:, None] * COLUMNS + c[None, :]).to(tl.float32)
    result = tl.sum(value, axis=AXIS) if NAME == "sum" else tl.max(value, axis=AXIS)
    tl.store(out + (c if AXIS == 0 else r), result.to(out.dtype.element_ty))


@triton.jit
def cumsum(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tl.cumsum(tl.load(x + at), axis=AXIS, reverse=REVERSE))


@triton.jit
def cumsum_in_loop(x, out, n, N: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, N)
    for row in range(0, n):
        tl.store(out + row * N + i, tl.cumsum(tl.load(x + row * N + i), axis=0, reverse=REVERSE))


@triton.jit
def matmul(a, b, out, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr):
    im = tl.program_id(0) * M + tl.arange(0, M)
    jn = tl.program_id(1) * N + tl.arange(0, N)
    sums = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        ik = start + tl.arange(0, K)
        left = tl.load(
            a + im[:, None] * k + ik[None, :], mask=(im < m)[:, None] & (ik < k)[None, :], other=0.0
        )
        if TRANSPOSED:
            mask = (jn < n)[:, None] & (ik < k)[None, :]
            right = tl.trans(tl.load(b + jn[:, None] * k + ik[None, :], mask=mask, other=0.0))
        else:
            mask = (ik < k)[:, None] & (jn < n)[None, :]
            right = tl.load(b + ik[:, None] * n + jn[None, :], mask=mask, other=0.0)
        sums += tl.dot(left, right, input_precision="ieee")
    tl.store(out + im[:, None] * n + jn[None, :], sums, mask=(im < m)[:, None] & (jn < n)[None, :])


@triton.jit
def _decayed(state, decay):
    return state * tl.exp(decay)[:, None]


@triton.jit
def recurrence(k, v, decay, out, tasks, T, scale, K: tl.constexpr, V: tl.constexpr):
    """A state of shape [K, V] carried along T, for a persistent grid."""
    ik = tl.arange(0, K)
    iv = tl.arange(0, V)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        state = tl.zeros((K, V), tl.float32)
        for t in range(0, T):
            row = task.to(tl.int64) * T + t
            key = tl.load(k + row * K + ik).to(tl.float32) * scale
            value = tl.load(v + row * V + iv).to(tl.float32)
            state = _decayed(state, tl.load(decay + row * K + ik)) + key[:, None] * value[None, :]
        place = out + task.to(tl.int64) * K * V + ik[:, None] * V + iv[None, :]
        tl.store(place, state.to(out.dtype.element_ty))


@triton.jit
def swap(x, y, n, BLOCK: tl.constexpr):
    """A loop that carries two tiles and exchanges them."""
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    for _ in range(0, n):
        c = a + b
        a = b
        b = c
    tl.store(x + i, a)
    tl.store(y + i, b)


@triton.jit
def powers(x, out, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    power = value
    for n in tl.static_range(COUNT):
        tl.store(out + n * BLOCK + i, power)
        power = power * value


@triton.jit
def gather(x, indices, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    index = tl.load(indices + i, mask=i < n, other=0)
    tl.store(out + i, tl.load(x + index, mask=i < n), mask=i < n)


@triton.jit
def staircase(x, out, n, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    mask = (r[:, None] >= c[None, :]) & (r < n)[:, None]
    tile = tl.load(x + r[:, None] * stride + c[None, :], mask=mask, other=0.0)
    tl.store(out + r[:, None] * COLUMNS + c[None, :], tile, mask=(r < n)[:, None] & (c < COLUMNS)[None, :])


@triton.jit
def triangle(out, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    tl.store(out + r * COLUMNS + c, tl.zeros((ROWS, COLUMNS), tl.float32), mask=(r >= c) & (r < n))


@triton.jit(do_not_specialize=["start", "n"])
def window(x, out, start, n, BOX: tl.constexpr, BLOCK: tl.constexpr):
    """Two masks that say the same; triton-ascend makes a box of the one only."""
    i = start + tl.arange(0, BLOCK)
    mask = ((i >= 0) if BOX else (i > -1)) & (i < n)
    tl.store(out + tl.arange(0, BLOCK), tl.load(x + i, mask=mask, other=0.0))


@triton.jit(do_not_specialize=["start"])
def read(x, out, start, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + start + i))


@triton.jit(do_not_specialize=["at", "n"])
def read_then_select(x, out, at, n):
    value = tl.load(x + at)
    tl.store(out, tl.where(at < n, value, 0.0))


@triton.jit(do_not_specialize=["n"])
def scalars(x, bias, out, n, step, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i * step, mask=i < n) * scale
    if bias is not None:
        value += tl.load(bias + i, mask=i < n)
    tl.store(out + i, value, mask=i < n)


@triton.jit
def coordinates(out):
    x = tl.program_id(0)
    y = tl.program_id(1)
    z = tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out + at, x + 10 * y + 100 * z)


@triton.jit
def write(out, offset, BLOCK: tl.constexpr):
    tl.store(out + offset + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


@triton.jit
def nan(x, out):
    """Named as a function of libm."""
    tl.debug_barrier()
    tl.store(out, tl.load(x) + 1)


@triton.jit
def divide(x, y, out):
    tl.store(out, tl.load(x) // tl.load(y))


@triton.jit
def sort(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.sort(tl.load(x + i)))
