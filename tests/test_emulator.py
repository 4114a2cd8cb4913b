"""The emulator against torch, and what it must refuse."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from emulator import CAPACITY, TARGETS, BoundsError, CompileError, Emulator, missing, toolchain
from emulator.execution import Program
from torch import Tensor

pytestmark = pytest.mark.usefixtures("emulation")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38, 2.5]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("emulator_kernels")


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator(strict=True) as emulator:
        yield emulator


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# Numerics


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64])
def test_add(kernels: Any, emulator: Emulator, generator: torch.Generator, dtype: torch.dtype) -> None:
    x, y = (torch.randn(100, generator=generator).mul(10).to(dtype) for _ in range(2))
    out = torch.full((130,), 7, dtype=dtype)
    kernels.add[(2,)](x, y, out[:100], 100, BLOCK=64)
    same(out[:100], x + y)
    same(out[100:], torch.full((30,), 7, dtype=dtype))


@pytest.mark.parametrize("to", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int64], ids=str)
def test_casts(
    kernels: Any, emulator: Emulator, generator: torch.Generator, dtype: torch.dtype, to: torch.dtype
) -> None:
    x = torch.randn(1000, generator=generator).mul(100)
    if dtype in FLOATS and to in FLOATS:
        # Halfway between two bfloat16, and their neighbours.
        halves = torch.arange(0x3F7F_0000, 0x3F8A_0000, 0x2000, dtype=torch.int32)
        ties = torch.cat([halves, halves - 1, halves + 1]).view(torch.float32)
        x = torch.cat([x, ties, -ties, torch.tensor(SPECIAL)])
    x = (x > 0) if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)
    out = torch.empty(len(x), dtype=to)
    kernels.convert[(-(-len(x) // 256),)](x, out, len(x), BLOCK=256)
    same(out, x.to(to))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["exp", "exp2", "log", "sqrt", "rsqrt", "sigmoid", "abs", "relu"])
def test_elementwise(
    kernels: Any, emulator: Emulator, generator: torch.Generator, name: str, dtype: torch.dtype
) -> None:
    x = torch.cat([torch.randn(100, generator=generator) * 4, torch.tensor(SPECIAL)]).to(dtype)
    out = torch.empty_like(x)
    kernels.elementwise[(1,)](x, out, len(x), NAME=name, BLOCK=128)
    reference: Callable[[Tensor], Tensor] = getattr(torch, name)
    if name == "relu":  # where(NaN > 0, NaN, 0)
        x = x.nan_to_num(0.0, float("inf"), float("-inf"))
    expected = reference(x.float()).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["sum", "max"])
def test_reductions(
    kernels: Any, emulator: Emulator, generator: torch.Generator, name: str, axis: int, dtype: torch.dtype
) -> None:
    x = torch.randn(16, 32, generator=generator).to(dtype)
    x[3, 4], x[5, 6] = float("inf"), float("-inf")
    out = torch.empty(x.shape[1 - axis], dtype=dtype)
    kernels.reduce[(1,)](x, out, ROWS=16, COLUMNS=32, AXIS=axis, NAME=name)
    expected = getattr(torch, {"max": "amax"}.get(name, name))(x.float(), axis).to(dtype)
    torch.testing.assert_close(out, expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-5)


def test_sum_keeps_nan(kernels: Any, emulator: Emulator) -> None:
    x, out = torch.ones(16, 32), torch.empty(32)
    x[2, 3] = float("nan")
    kernels.reduce[(1,)](x, out, ROWS=16, COLUMNS=32, AXIS=0, NAME="sum")
    same(out, x.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_cumsum(
    kernels: Any, emulator: Emulator, generator: torch.Generator, axis: int, reverse: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(16, 32, generator=generator).mul(100).to(dtype)
    out = torch.empty_like(x)
    kernels.cumsum[(1,)](x, out, ROWS=16, COLUMNS=32, AXIS=axis, REVERSE=reverse)
    expected = x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)
    torch.testing.assert_close(out, expected.to(dtype), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum_of_vectors_in_a_loop(
    kernels: Any, emulator: Emulator, generator: torch.Generator, reverse: bool
) -> None:
    x = torch.randn(5, 32, generator=generator)
    out = torch.empty_like(x)
    kernels.cumsum_in_loop[(1,)](x, out, 5, N=32, REVERSE=reverse)
    expected = x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_dot(
    kernels: Any, emulator: Emulator, generator: torch.Generator, transposed: bool, dtype: torch.dtype
) -> None:
    m, n, k = 70, 50, 90
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    out = torch.full((m, n), float("nan"))
    b_given = b.T.contiguous() if transposed else b
    kernels.matmul[(3, 2)](a, b_given, out, m, n, k, M=32, N=32, K=32, TRANSPOSED=transposed)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("programs", [1, 2, 20])
def test_persistent_recurrence(
    kernels: Any, emulator: Emulator, generator: torch.Generator, programs: int, dtype: torch.dtype
) -> None:
    tasks, T, K, V = 7, 9, 16, 32
    k, v = (torch.randn(tasks, T, size, generator=generator).to(dtype) for size in (K, V))
    decay = -torch.rand(tasks, T, K, generator=generator)
    out = torch.empty(tasks, K, V, dtype=dtype)
    kernels.recurrence[(programs,)](k, v, decay, out, tasks, T, 0.25, K=K, V=V)
    state = torch.zeros(tasks, K, V)
    for t in range(T):
        state = state * decay[:, t].exp()[:, :, None]
        state = state + 0.25 * k[:, t].float()[:, :, None] * v[:, t].float()[:, None, :]
    torch.testing.assert_close(out, state.to(dtype), rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 6, 7])
def test_loops_may_exchange_what_they_carry(kernels: Any, emulator: Emulator, n: int) -> None:
    x, y = torch.arange(32.0), torch.ones(32)
    a, b = x.clone(), y.clone()
    for _ in range(n):
        a, b = b, a + b
    kernels.swap[(1,)](x, y, n, BLOCK=32)
    same(torch.stack([x, y]), torch.stack([a, b]))


def test_static_range(kernels: Any, emulator: Emulator) -> None:
    x, out = torch.linspace(0, 2, 16), torch.empty(4, 16)
    kernels.powers[(1,)](x, out, COUNT=4, BLOCK=16)
    torch.testing.assert_close(out, torch.stack([x**n for n in range(1, 5)]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_from_memory(kernels: Any, emulator: Emulator, dtype: torch.dtype) -> None:
    x, out = torch.arange(100.0), torch.empty(20)
    indices = torch.arange(0, 100, 5, dtype=dtype).flip(0).contiguous()
    kernels.gather[(1,)](x, indices, out, 20, BLOCK=32)
    same(out, x[indices.long()])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("step", [1, 2, 16])
@pytest.mark.parametrize("n", [1, 10])
def test_scalars_that_triton_specialises(
    kernels: Any, emulator: Emulator, n: int, step: int, scale: float, bias: bool
) -> None:
    x, b, out = torch.arange(256.0), torch.ones(16), torch.zeros(16)
    kernels.scalars[(1,)](x, b if bias else None, out, n, step, scale, BLOCK=16)
    same(out[:n], x[::step][:n] * scale + bias)
    same(out[n:], torch.zeros(16 - n))


def test_program_ids(kernels: Any, emulator: Emulator) -> None:
    out = torch.empty(2, 3, 4, dtype=torch.int32)
    kernels.coordinates[(4, 3, 2)](out)
    z, y, x = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    same(out, (x + 10 * y + 100 * z).int())


def test_kernels_may_be_called_anything(kernels: Any, emulator: Emulator) -> None:
    x, out = torch.ones(1), torch.zeros(1)
    kernels.nan[(1,)](x, out)
    assert out.item() == 2


def test_views(kernels: Any, emulator: Emulator) -> None:
    """A pointer is where a view starts; two views of a storage see each other's writes."""
    storage = torch.arange(64.0)
    x, y, out = storage[3:13], storage[20:30], storage[15:].as_strided((10,), (1,))
    expected = x + y
    before = storage.clone()
    kernels.add[(1,)](x, y, storage[40:50], 10, BLOCK=16)
    same(storage[40:50], expected)
    same(storage[:40], before[:40])
    same(storage[50:], before[50:])
    kernels.add[(1,)](x, out, out, 10, BLOCK=16)
    same(out, before[3:13] + before[15:25])


def test_empty_tensors_and_grids(kernels: Any, emulator: Emulator) -> None:
    empty = torch.empty(0)
    kernels.add[(1,)](empty, empty, empty, 0, BLOCK=16)
    kernels.add[(0,)](empty, empty, empty, 0, BLOCK=16)
    assert [launch.bytes for launch in emulator.launches] == [0, 0]


# Bounds


@pytest.mark.parametrize("offset", [-1, 16, -20_000, 17_000, 1 << 20, -(1 << 27), (1 << 28) - 100])
def test_writes_outside_are_errors(kernels: Any, offset: int) -> None:
    outer = torch.ones(64)
    with (
        Emulator(),
        pytest.raises(BoundsError, match=r"write writes.* outside of .*out: [+-]\d+ bytes"),
    ):
        kernels.write[(1,)](torch.ones(16), offset, BLOCK=16)
    # Elsewhere in the same storage is where a view may write.
    with Emulator():
        kernels.write[(1,)](outer[16:32], 16, BLOCK=16)
    same(outer, torch.cat([torch.ones(32), torch.zeros(16), torch.ones(16)]))


def test_nothing_is_written_back_after_an_error(kernels: Any) -> None:
    out = torch.ones(16)
    with Emulator(), pytest.raises(BoundsError):
        kernels.write[(1,)](out, 8, BLOCK=16)
    same(out, torch.ones(16))


def both(launch: Callable[[], object], message: str) -> None:
    """What runs, but in strict mode is an error that says no more than `message`, a pattern."""
    with Emulator():
        launch()
    with Emulator(strict=True), pytest.raises(BoundsError, match=f"^{message}$"):
        launch()


@pytest.mark.parametrize(
    ("start", "where"), [(-1, -4), (1, 64), (-(1 << 20), -(4 << 20)), (17_000, 68_000), (1 << 27, 4 << 27)]
)
def test_strict_finds_reads_outside(kernels: Any, start: int, where: int) -> None:
    x, out = torch.ones(16), torch.empty(16)
    message = rf"read reads outside of x: \{where:+} bytes from the start of its storage of 64"
    both(lambda: kernels.read[(1,)](x, out, start, BLOCK=16), message)
    assert out.isnan().sum() == min(abs(start), 16)


@pytest.mark.parametrize("offset", [-1, 1, 1 << 20])
def test_strict_finds_writes_outside(kernels: Any, offset: int) -> None:
    with (
        Emulator(strict=True),
        pytest.raises(BoundsError, match=r"^write writes outside of out: [+-]\d+ bytes from the start"),
    ):
        kernels.write[(1,)](torch.ones(16), offset, BLOCK=16)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int64], ids=str)
def test_strict_lets_boxes_pass_whatever_their_size(
    kernels: Any, emulator: Emulator, dtype: torch.dtype
) -> None:
    for n in [*range(1, 70), 4096, 5000]:
        x, out = torch.arange(n).to(dtype), torch.zeros(n, dtype=dtype)
        kernels.add[(-(-n // 64),)](x, x, out, n, BLOCK=64)
        same(out, x + x)


@pytest.mark.parametrize(("start", "where"), [(-3, -12), (30, 160), (10, None)])
def test_strict_finds_what_a_mask_discards_too_late(kernels: Any, start: int, where: int | None) -> None:
    """triton-ascend loads a whole tile where the mask of a load is no box of it, and selects afterwards."""
    x, out = torch.arange(40.0), torch.empty(16)
    expected = torch.cat([torch.zeros(16), x, torch.zeros(16)])[16 + start :][:16]

    def launch(box: bool) -> None:
        kernels.window[(1,)](x, out, start, 40, BOX=box, BLOCK=16)
        same(out, expected)

    with Emulator(strict=True):
        launch(box=True)
        if where is None:
            launch(box=False)
    if where is not None:
        message = rf"window reads outside of x: \{where:+} bytes from the start of its storage of 160"
        both(lambda: launch(box=False), message)


def test_strict_finds_tiles_that_leave_a_tensor(kernels: Any) -> None:
    x, out = torch.randn(10, 300), torch.empty(10, 16)
    message = r"staircase reads outside of x: \+12000 bytes from the start of its storage of 12,000"
    both(lambda: kernels.staircase[(1,)](x, out, 10, 300, ROWS=64, COLUMNS=16), message)
    same(out, x[:, :16].tril())


def test_strict_finds_stores_of_whole_tiles(kernels: Any) -> None:
    """Where the mask of a store is no box, a whole tile is loaded, and stored again."""
    expected = 1 - torch.ones(16, 4).tril()
    whole, part = torch.ones(16, 4), torch.ones(10, 4)
    with Emulator(strict=True):
        kernels.triangle[(1,)](whole, 16, ROWS=16, COLUMNS=4)
        same(whole, expected)
        # A copy of many bytes may begin at its end.
        with pytest.raises(
            BoundsError, match=r"^triangle reads outside of out: \+\d+ .*; writes outside of out: \+\d+ "
        ):
            kernels.triangle[(1,)](part, 10, ROWS=16, COLUMNS=4)
    same(part, torch.ones(10, 4))


def test_strict_finds_loads_that_clang_would_skip(kernels: Any) -> None:
    x, out = torch.ones(17), torch.ones(1)
    message = r"read_then_select reads outside of x: \+68 bytes from the start of its storage of 68"
    both(lambda: kernels.read_then_select[(1,)](x, out, 17, 17), message)
    assert out.item() == 0


def test_strict_counts_bytes(kernels: Any, emulator: Emulator) -> None:
    """A storage may end within what would be the next element."""
    x, out = torch.empty(66, dtype=torch.uint8)[:64].view(torch.float32).fill_(1), torch.zeros(16)
    kernels.read[(1,)](x, out, 0, BLOCK=16)
    same(out, torch.ones(16))
    with pytest.raises(BoundsError, match=r"reads outside of x: \+66 bytes"):
        kernels.read[(1,)](x, out, 1, BLOCK=16)


def test_strict_finds_far_reads(kernels: Any) -> None:
    x, out, far = torch.ones(16), torch.ones(16), torch.arange(16, dtype=torch.int32)
    far[3], far[5] = 1 << 27, -(1 << 26)
    message = r"gather reads outside of x: \+536870912 bytes from the start of its storage of 64"
    both(lambda: kernels.gather[(1,)](x, far, out, 16, BLOCK=16), message)
    assert out.isnan().sum() == out[[3, 5]].isnan().sum() == 2


def test_strict_finds_uninitialised_temporaries() -> None:
    ir = """func.func @copy(%arg0: memref<?xi8>, %arg1: memref<?xi8>, %arg2: memref<?xf32>, %arg3: i32,
      %arg4: i32, %arg5: i32, %arg6: i32, %arg7: i32, %arg8: i32) attributes {} {
      %alloc = memref.alloc() : memref<4xf32>
      %out = memref.reinterpret_cast %arg2 to offset: [0], sizes: [4], strides: [1]
        : memref<?xf32> to memref<4xf32, strided<[1]>>
      memref.copy %alloc, %out : memref<4xf32> to memref<4xf32, strided<[1]>>
      return
    }"""
    program = Program("copy", ir, ["out"], toolchain.CACHE)
    out = torch.ones(4)
    program((1, 1, 1), {"out": out}, strict=False)
    assert out.isnan().all()
    with pytest.raises(
        BoundsError, match="copy reads temporaries that it never wrote: out came out different"
    ):
        program((1, 1, 1), {"out": out}, strict=True)


def test_what_would_kill_the_process_is_an_exception(kernels: Any, emulator: Emulator) -> None:
    x, out, nowhere = torch.ones(16), torch.ones(16), torch.full((16,), 1 << 50)
    with pytest.raises(BoundsError, match="gather writes or reads far outside"):
        kernels.gather[(1,)](x, nowhere, out, 16, BLOCK=16)
    one, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ZeroDivisionError, match="divide divides"):
        kernels.divide[(1,)](one, zero, one)


def test_only_cpu_tensors_run(kernels: Any, emulator: Emulator) -> None:
    x = torch.empty(16, device="meta")
    with pytest.raises(ValueError, match="add: x is on meta"):
        kernels.add[(1,)](x, x, x, 16, BLOCK=16)


# Compilation


@pytest.mark.parametrize("target", TARGETS)
def test_compilation_plans_memory(kernels: Any, target: str) -> None:
    a, out = torch.randn(64, 64), torch.empty(64, 64)
    with Emulator(target, compile=True) as emulator:
        kernels.add[(64,)](a, a, out, 4096, BLOCK=64)
        kernels.matmul[(1, 1)](a, a, out, 64, 64, 64, M=64, N=64, K=64, TRANSPOSED=False)
        torch.testing.assert_close(out, a @ a, rtol=1e-4, atol=1e-4)
    vector, cube = (launch.compiled for launch in emulator.launches)
    assert vector is not None and cube is not None
    assert (vector.kernel, vector.target, vector.mix_mode) == ("add", target, "aiv")
    assert vector.used.keys() == CAPACITY.keys()
    assert vector.used["ub"] >= 2 * 64 * 4 and vector.used["l0c"] == 0
    assert cube.target == target and cube.mix_mode in ("aic", "mix") and cube.seconds > 0
    assert cube.used["l0c"] >= 64 * 64 * 4 and cube.used["l1"] >= 64 * 64 * 4
    assert all(cube.used[space] <= CAPACITY[space] for space in CAPACITY)


@pytest.mark.parametrize("target", TARGETS)
def test_overflows_are_errors(kernels: Any, target: str) -> None:
    x = torch.empty(512, 512)
    with Emulator(target, run=False, compile=True) as emulator:
        with pytest.raises(CompileError, match=rf"(?s)add does not compile for {target}: .*ub overflow"):
            kernels.add[(1,)](x, x, x, 512 * 512, BLOCK=1 << 16)
        half = x.half()
        with pytest.raises(CompileError, match=rf"(?s)matmul does not compile for {target}: .*cc overflow"):
            kernels.matmul[(1, 1)](half, half, x, 512, 512, 512, M=512, N=512, K=64, TRANSPOSED=False)
        assert emulator.launches == []


def test_what_fits_only_without_double_buffers_is_an_overflow(kernels: Any) -> None:
    x = torch.empty(1 << 16)
    with Emulator(run=False, compile=True) as emulator:
        kernels.add_in_loop[(1,)](x, x, x, 1 << 16, BLOCK=8192)
        with pytest.raises(CompileError, match=r"Ub overflow detected; .*enable-auto-multi-buffer to false"):
            kernels.add_in_loop[(1,)](x, x, x, 1 << 16, BLOCK=16384)
        kernels.add_in_loop[(1,)](x, x, x, 1 << 16, BLOCK=16384, multibuffer=False)
    doubled, single = (launch.compiled for launch in emulator.launches)
    assert doubled is not None and single is not None
    assert doubled.used["ub"] == 2 * 3 * 8192 * 4 and single.used["ub"] == 2 * 16384 * 4


def test_compilation_alone_touches_no_tensor(kernels: Any) -> None:
    huge = torch.empty(1 << 40, device="meta")
    with Emulator(run=False, compile=True) as emulator:
        kernels.add[(65_535,)](huge, huge[1:], huge, 1 << 40, BLOCK=64)
    assert emulator.launches[0].tensors == {"x": 4 << 40, "y": (4 << 40) - 4}
    assert emulator.launches[0].compiled is not None


def test_what_the_emulator_cannot_run_says_so(kernels: Any) -> None:
    x = torch.randn(16)
    with Emulator(), pytest.raises(CompileError, match="sort does not compile for x86"):
        kernels.sort[(1,)](x, torch.empty(16), N=16)


def test_grids_are_limited(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(16)
    with Emulator(run=False) as emulator:
        kernels.add[(255, 257)](x, x, x, 16, BLOCK=16)
        with pytest.raises(RuntimeError, match="65536"):
            kernels.add[(256, 256)](x, x, x, 16, BLOCK=16)
        monkeypatch.setenv("TRITON_ALL_BLOCKS_PARALLEL", "1")
        with pytest.raises(ValueError, match="65,535"):
            kernels.add[(256, 256)](x, x, x, 16, BLOCK=16)
    assert len(emulator.launches) == 1


# Records


def test_records(kernels: Any) -> None:
    x, y, out = torch.randn(2, 50), torch.randn(50).half(), torch.empty(50)
    with Emulator() as emulator:
        kernels.add[(2,)](x[0], x[1], out, 50, BLOCK=32)
        kernels.add[(1, 2, 1)](x[0], x[0], x, 25, BLOCK=32)
        kernels.convert[(1,)](y, out, 32, BLOCK=32)
    assert [(launch.kernel, launch.grid) for launch in emulator.launches] == [
        ("add", (2, 1, 1)),
        ("add", (1, 2, 1)),
        ("convert", (1, 1, 1)),
    ]
    assert [launch.tensors for launch in emulator.launches] == [
        {"x": 200, "y": 200, "out": 200},
        {"x": 200, "out": 400},
        {"x": 100, "out": 200},
    ]
    assert [launch.bytes for launch in emulator.launches] == [600, 600, 300]
    assert all(launch.compiled is None for launch in emulator.launches)


# The context


def test_modes_do_not_leak_into_each_other(kernels: Any) -> None:
    """One JIT function, launched alike for two targets and in every mode."""
    for target in [*TARGETS, *TARGETS]:
        for run, compile_ in ((True, False), (False, True), (True, True), (False, False)):
            x, out = torch.ones(16), torch.zeros(16)
            with Emulator(target, run=run, compile=compile_) as emulator:
                kernels.add[(1,)](x, x, out, 16, BLOCK=16)
            (launch,) = emulator.launches
            assert (out.sum() == 32) == run
            assert (launch.compiled is not None) == compile_
            assert launch.compiled is None or launch.compiled.target == target


def test_contexts_nest_and_restore(kernels: Any) -> None:
    from triton.backends import backends
    from triton.compiler import compiler
    from triton.runtime import driver

    def active() -> Any:
        return driver.active

    def state() -> tuple[object, ...]:
        return (
            driver.active,
            dict(backends),
            compiler.MLIRCompilationError,
            os.environ.get("TRITON_CACHE_DIR"),
        )

    before = state()
    x, out = torch.ones(16), torch.zeros(16)
    with Emulator("Ascend910B3") as outer:
        kernels.add[(1,)](x, x, out, 16, BLOCK=16)
        with Emulator("Ascend910_9382", run=False, compile=True) as inner:
            assert active().get_current_target().arch == "Ascend910_9382"
            assert active().utils.get_device_properties(0)["num_vectorcore"] == 48
            kernels.add[(1,)](x, x, out, 16, BLOCK=16)
        assert active().get_current_target().arch == "Ascend910B3"
        kernels.add[(1,)](x, x, out, 16, BLOCK=16)
        with pytest.raises(CompileError), inner:
            kernels.add[(1,)](x, x, out, 16, BLOCK=1 << 17)
    assert [len(outer.launches), len(inner.launches)] == [2, 1]
    assert all(a is b or a == b for a, b in zip(state(), before, strict=True))


def count_tools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    tools: list[str] = []
    execute = toolchain.subprocess.run

    def counted(command: list[str], **options: Any) -> Any:
        tools.append(Path(command[0]).name)
        return execute(command, **options)

    monkeypatch.setattr(toolchain.subprocess, "run", counted)
    return tools


def test_what_is_made_is_kept(kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = count_tools(monkeypatch)

    def launch(**options: Any) -> Tensor:
        x, out = torch.arange(16.0), torch.zeros(16)
        with Emulator(cache=tmp_path, compile=True, **options):
            kernels.add[(1,)](x, x, out, 16, BLOCK=16)
        return out

    same(launch(), 2 * torch.arange(16.0))
    assert {"triton-adapter-opt", "bishengir-compile", "mlir-opt", "clang"} <= set(tools)
    tools.clear()
    kernels.add.cache.clear()
    same(launch(), 2 * torch.arange(16.0))
    assert tools == []
    launch(target="Ascend910_9382")
    assert [tool for tool in tools if tool != "triton-adapter-opt"] == ["bishengir-compile"]
    assert {path.name for path in tmp_path.iterdir() if len(path.name) != 2} == {".gitignore", "triton"}


def test_several_may_make_the_same_file_at_once(tmp_path: Path) -> None:
    all_are_at_it = Barrier(4, timeout=60)

    def make(_: Path, file: Path) -> None:
        file.write_text("half")
        all_are_at_it.wait()
        file.write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(lambda _: toolchain.cached(tmp_path, "file", "key", make), range(4)))
    assert len(set(files)) == 1 and files[0].read_text() == "whole"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [files[0]]


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("triton", "needs triton-ascend's triton: pip install triton-ascend"),
        ("pybind11", "needs pybind11.*: pip install pybind11"),
        ("ascendnpuir", r"pip install ascendnpu-ir"),
        ("llvm", "needs mlir-19-tools and clang-19: apt-get install"),
    ],
)
def test_what_is_missing_is_named(
    gone: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == gone else find_spec(name))
    if gone == "llvm":
        monkeypatch.setattr(toolchain, "LLVM", tmp_path)
    with pytest.raises(RuntimeError, match=message):
        Emulator()


def test_upstream_triton_will_not_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(toolchain.importlib.import_module("sys").modules, "triton", raising=False)
    assert "in place of another triton: pip uninstall -y triton triton-ascend && pip" in str(missing())


def test_targets_are_a_closed_list() -> None:
    with pytest.raises(ValueError, match="Ascend910B3, Ascend910_9382"):
        Emulator("Ascend310")
