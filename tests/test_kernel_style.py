"""The rules of kernel_style find what they are for and nothing else; and the kernels keep to them."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent, indent

import pytest
from kernel_style import RULES, Source, parse

ROOT = Path(__file__).parent.parent
PRIMITIVES = ROOT / "kda_fn" / "primitives"

# Snippets. The lines that a rule must find, and no others, end with `# here`.

HEAD = """
import triton
import triton.language as tl

"""

SIGNATURE = """@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, y_ptr, n, x, y, K: tl.constexpr, FLAG: tl.constexpr, BOTH: tl.constexpr):
"""


def body(text: str) -> str:
    """A module of one kernel with this body."""
    return HEAD + SIGNATURE + indent(dedent(text).strip("\n"), "    ") + "\n"


def module(text: str) -> str:
    """A module with this text."""
    return HEAD + dedent(text)


HELPER = """
@triton.jit
def product(p, q):
    return tl.dot(p, q, input_precision="ieee")

@triton.jit
def twice(p, q):
    return product(p, q) * 2

@triton.jit
def same(p):
    return tl.trans(p)

"""

SNIPPETS = {
    "dot_operand_reused": [
        body("""
            a = tl.load(x_ptr)
            b = tl.dot(a, x)
            tl.store(y_ptr, a + b)  # here
        """),
        body("""
            a = tl.load(x_ptr)
            b = tl.dot(a, x)
            c = tl.dot(a, y)  # here
        """),
        body("""
            a = tl.load(x_ptr)
            c = (
                tl.dot(a, x)
                + tl.dot(a, y)  # here
            )
        """),
        # Read before the dot, used after it.
        body("""
            a = x + tl.dot(x, y)  # here
            y += tl.dot(y, a)  # here
            b = tl.load(x_ptr)
            c = tl.dot(b, tl.dot(b, a))  # here
        """),
        # A loop comes round again.
        body("""
            a = tl.load(x_ptr)
            for i in range(n):
                b = tl.load(y_ptr + i)
                x += tl.dot(a, b)  # here
        """),
        body("""
            a = tl.load(x_ptr)
            while n > 0:
                n -= 1
                if FLAG:
                    continue
                x += tl.dot(a, y)  # here
        """),
        # What shares the memory.
        body("""
            a = tl.load(x_ptr)
            b = tl.dot(tl.trans(a), x) + tl.dot(y.to(tl.bfloat16), x)
            tl.store(x_ptr, a)  # here
            tl.store(y_ptr, y)  # here
        """),
        body("""
            a = tl.load(x_ptr)
            b = a.to(tl.float32)
            c, d = b.T, x
            d = tl.dot(other=x, input=c)
            tl.store(y_ptr, a)  # here
            tl.store(y_ptr, d)
        """),
        body("""
            a = x if FLAG else y
            b = tl.dot(a, y)
            tl.store(x_ptr, x)  # here
        """),
        # Through helpers, and helpers of helpers.
        module(HELPER + SIGNATURE + "    a = twice(q=y, p=x)\n    tl.store(y_ptr, x)  # here\n"),
        module(HELPER + SIGNATURE + "    a = tl.dot(same(x), y)\n    tl.store(y_ptr, x)  # here\n"),
        # Either branch.
        body("""
            a = tl.load(x_ptr)
            if FLAG:
                b = tl.dot(a, x)
            else:
                b = a + 1
            tl.store(y_ptr, a)  # here
        """),
        # Last round's tile is this round's operand, and then it is read.
        body("""
            before = tl.load(x_ptr)
            for i in range(n):
                now = tl.load(x_ptr + i)
                b = tl.dot(before, now)
                before += b  # here
                before = now
        """),
        # Good.
        body("""
            a = tl.load(x_ptr)
            b = tl.dot(a + 0.0, x)
            c = tl.dot((a * y).to(tl.bfloat16), x)
            d = tl.dot(a, x)
            e = tl.dot(d, y, d2)
        """),
        body("""
            a = tl.load(x_ptr)
            b = tl.dot(a, x)
            n = a.shape[0]
            a = tl.load(x_ptr)
            c = tl.dot(y, a)
        """),
        body("""
            for i in range(n):
                a = tl.load(x_ptr + i)
                x += tl.dot(a, y)
            for i in tl.static_range(3):
                x += tl.dot(tl.load(x_ptr + i), y)
        """),
        body("""
            before = tl.load(x_ptr)
            for i in range(n):
                now = tl.load(x_ptr + i)
                b = tl.dot(before, now)
                before = now
        """),
        body("""
            a = tl.load(x_ptr)
            if FLAG:
                b = tl.dot(a, x)
                return
            b = tl.dot(a, y) if BOTH else tl.dot(a, x)
        """),
        module(HELPER + SIGNATURE + "    a = twice(x + 0.0, y)\n    b = product(same(x), y)\n"),
    ],
    "block_pointers": [
        body("""
            p = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (K,), (0,))  # here
            p = tl.advance(p, (K,))  # here
        """),
        body("p = tl.make_tensor_descriptor(x_ptr, [n], [1], [K])  # here"),
        module("""
            from triton.tools.tensor_descriptor import TensorDescriptor

            def launch(x):
                return TensorDescriptor(x, [1], [1], [1])  # here
        """),
        body("p = x_ptr + tl.arange(0, K)\ntl.store(p, x, mask=p < n)"),
        module("def launch(state):\n    return state.advance(3)\n"),
    ],
    "chained_booleans": [
        body("if FLAG and BOTH and K > 3:  # here\n    x += 1"),
        body("m = 0 < K < 3  # here"),
        body("m = (n > 1) and (n < K)  # here"),
        body("if FLAG or n > 3:  # here\n    x += 1"),
        body("m = not (n > 3)  # here"),
        body("m = (n > 1) & (n < K) & (x < 3)"),
        body("""
            if FLAG and not BOTH:
                x += 1
            if (FLAG and BOTH) or K > 3:
                x += 1
            if x_ptr is not None and FLAG:
                x += 1
        """),
        module("def launch(a, b, c):\n    return a and b and c or 0 < a < b or not c\n"),
    ],
    "runtime_if_around_dot": [
        body("if n > 3:  # here\n    x = tl.dot(x, y)"),
        body("""
            for i in range(n):
                if FLAG and i > 0:  # here
                    if BOTH:
                        x = 1
                    else:
                        x = tl.dot(x, y)
        """),
        body("x = tl.dot(x, y) if n else y  # here"),
        body("""
            last = 1
            for i in range(n):
                if last:  # here
                    x = tl.dot(x, y)
                last = 0
        """),
        module(HELPER + SIGNATURE + "    if tl.load(x_ptr) > 0:  # here\n        x = twice(x, y)\n"),
        # Leaving is a branch around all that follows.
        body("""
            if n == 0:  # here
                return
            x = tl.dot(x, y)
        """),
        # Good.
        body("""
            wide: tl.constexpr = K > 64
            half = K // 2
            if wide and FLAG:
                x = tl.dot(x, y)
            if x_ptr is not None:
                x = tl.dot(x, y)
            if x_ptr.dtype.element_ty == tl.float32:
                x = tl.dot(x, y)
            for i in tl.static_range(half):
                x = tl.dot(x, y) if i < half else tl.dot(x, x)
        """),
        body("""
            if n > 3:
                x += 1
            for i in range(n):
                x = tl.dot(x, y)
            y = x if n else y
        """),
        body("""
            if FLAG:
                blocks = 2
            else:
                blocks = tl.cdiv(K, 64)
            if blocks > 1:
                x = tl.dot(x, y)
        """),
        module(
            HELPER + SIGNATURE + "    if FLAG:\n        x = twice(x, y)\n    if n:\n        x = same(x)\n"
        ),
    ],
    "pointer_advanced": [
        body("x_ptr += K  # here"),
        body("""
            for i in range(n):
                x_ptr = x_ptr + K  # here
        """),
        body("""
            p = x_ptr + tl.arange(0, K)
            for i in range(n):
                p += K  # here
        """),
        # By its use, whatever its name.
        body("""
            q = x + n
            a = tl.load(q + tl.arange(0, K))
            x -= K  # here
        """),
        body("""
            at = n * K
            at += 1
            a = tl.load(x_ptr + at)
            a += 1
        """),
        body("""
            for i in range(n):
                p = x_ptr + i * K
                tl.store(p, x)
                x = x + 1
        """),
    ],
    "raw_grids": [
        module("""
            @triton.jit
            def _one(x_ptr):
                tl.store(x_ptr, 0)

            def launch(x, n, target):
                _one[(n,)](x)  # here
                _one[n](x)  # here
                _one[lambda meta: (n,)](x)  # here
                start = _one[(1, n)]  # here
        """),
        module("""
            from elsewhere import norm_kernel

            def launch(x, grid, target):
                norm_kernel[grid](x)  # here
                two = (target.vector_grid(3)[0], 2)
                norm_kernel[two](x)  # here
        """),
        module("""
            def launch(x, target):
                grid = target.cube_grid(3)
                if x:
                    grid = (100_000,)
                _one[grid](x)  # here
        """),
        module("""
            def launch(x, target):
                _one[target.vector_grid(3)](x)
                programs = target.cube_grid(4)
                _one[programs](x)
        """),
        module("""
            TABLE = {3: print}

            def launch(x, target):
                TABLE[3](list[int](x))
                return x[3], x[3].sum()
        """),
    ],
    "masked_loads": [
        body("a = tl.load(x_ptr, mask=n > 3)  # here"),
        body("""
            a = tl.load(x_ptr, n > 3)  # here
            b = tl.load(
                x_ptr,
                mask=n > 3,
                eviction_policy="evict_first",
            ) + 1
        """).replace("b = tl.load(", "b = tl.load(  # here"),
        body("a = tl.load(x_ptr, mask=n > 3, other=0.0)\nb = tl.load(x_ptr, n > 3, 0.0)"),
        body("a = tl.load(x_ptr)\nb = tl.load(x_ptr, mask=None)\ntl.store(y_ptr, a, mask=n > 3)"),
    ],
    "dot_precision": [
        body("a = tl.dot(x, y)  # here"),
        body("a = tl.dot(x, y, allow_tf32=False) + tl.dot(x, y, input_precision=None)  # here"),
        body('a = tl.dot(x, y, input_precision="ieee")'),
        body("a = tl.dot(x, y, a, input_precision=FLAG)\nb = tl.sum(x * y, 1)"),
    ],
    "constexpr_cast": [
        body("a = K.to(tl.float32)  # here"),
        body("""
            half: tl.constexpr = K // 2
            a = (half + 1).to(tl.float32)  # here
            for i in tl.static_range(3):
                b = i.to(tl.int64)  # here
        """),
        body("a = tl.cast(K, tl.float32) + x.to(tl.float32) + (n * K).to(tl.int64)"),
        body("half = K // 2\na = half.to(tl.float32) + tl.zeros([K], tl.int32).to(tl.float32)"),
        module("def launch(x):\n    return x.to('cpu'), LATER.to('cpu')\n"),
    ],
    "forbidden_names": [
        body("a = x.to(tl.float64)  # here"),
        body("tl.atomic_add(x_ptr, 1.0)  # here\ntl.debug_barrier()  # here"),
        body("x_ptr.atomic_max(1.0)  # here"),
        body("tl.store(x_ptr, tl.exp2(x).to(tl.float32))"),
        module("import torch\n\ndef launch(x):\n    return x.to(torch.float64)\n"),
    ],
    "tasks": [
        body("i = tl.program_id(0)  # here"),
        body("""
            for i in range(tl.program_id(0), n, 20):  # here
                x += 1
            for i in range(tl.program_id(1), n, tl.num_programs(0)):  # here
                x += tl.program_id(axis=2)  # here
        """),
        body("for i in range(n, tl.program_id(0), tl.num_programs(0)):  # here\n    x += 1"),
        body("for i in range(tl.program_id(0), n, tl.num_programs(0)):\n    x += i"),
        body("for i in tl.range(tl.program_id(axis=0), n * K, tl.num_programs(0)):\n    x += i"),
    ],
    "language_is_tl": [
        "import triton.language as language  # here\n",
        "from triton import language  # here\nfrom triton.language import dot  # here\n",
        body("product = tl.dot  # here"),
        body("a = tl.dot(x, y)\nb = tl.float32"),
        "from triton import language as tl\nfrom triton import cdiv\nimport triton.testing as testing\n",
    ],
}


def marked(text: str) -> list[int]:
    """The numbers of the lines that are to be found."""
    return [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]


CASES = [
    pytest.param(rule, text, id=f"{rule}-{number}")
    for rule, texts in SNIPPETS.items()
    for number, text in enumerate(texts)
]


@pytest.mark.parametrize(("rule", "text"), CASES)
def test_rules(rule: str, text: str) -> None:
    """The lines that are found are the lines that are marked."""
    found = RULES[rule].find(parse(text))
    assert sorted({violation.line for violation in found}) == marked(text), found


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_tested(rule: str) -> None:
    """Each has snippets of both kinds, a reason and a docstring."""
    faults = [bool(marked(text)) for text in SNIPPETS[rule]]
    assert faults.count(True) >= 2 and faults.count(False) >= 2
    assert RULES[rule].reason and RULES[rule].find.__doc__


SHARED = """
import triton
import triton.language as tl

@triton.jit
def _inner(p, q):
    return tl.dot(p, q, input_precision="ieee")

@triton.jit
def outer(p, q):
    return _inner(p, q)
"""


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("from a.shared import outer", "outer"),
        ("from a.shared import outer as product", "product"),
        ("from a import shared", "shared.outer"),
        ("import a.shared as other", "other.outer"),
        ("import a.shared", "a.shared.outer"),
    ],
)
def test_helpers_of_other_modules(statement: str, call: str) -> None:
    """A helper is known by whatever name it is imported under, and so are its own helpers."""
    text = module(f"{statement}\n\n{SIGNATURE}    if n:  # here\n        a = {call}(x, y)\n        a += x\n")
    source = parse(text, {"a.shared": SHARED, "a.other": text})
    assert [violation.line for violation in RULES["runtime_if_around_dot"].find(source)] == marked(text)
    assert [violation.line for violation in RULES["dot_operand_reused"].find(source)] == [marked(text)[0] + 2]
    assert not RULES["runtime_if_around_dot"].find(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "import triton\n\ndef make():\n    @triton.jit\n    def inner(x_ptr):\n        pass\n",
        "@jit\ndef plain(x_ptr):\n    pass\n",
        "@build_later\ndef plain(x_ptr):\n    tl.store(x_ptr, 0)\n",
    ],
)
def test_jit_functions_are_found(text: str) -> None:
    """Inside of others, and by what they do."""
    assert len(parse(text).functions) == 1


def test_recursion_ends() -> None:
    """Functions that call each other, though Triton would refuse them; and modules that import each other."""
    text = HEAD + "from {} import {}\n\n@triton.jit\ndef {}(p, q):\n    {}(p, q)\n    tl.dot(p, q)\n"
    modules = {"a": text.format("b", "g", "f", "g"), "b": text.format("a", "f", "g", "f")}
    loop = body("kernel(x)\na = kernel(x)")
    for source in (parse(modules["a"], modules), parse(loop)):
        for rule in RULES.values():
            rule.find(source)


# The kernels


def name_of(path: Path) -> str:
    """The name that a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


TEXTS = {name_of(path): path.read_text(encoding="utf-8") for path in sorted(PRIMITIVES.rglob("*.py"))}


def sources() -> dict[str, Source]:
    """The modules with kernels, and those by the name of kernels."""
    read = {name: parse(text, TEXTS) for name, text in TEXTS.items()}
    return {
        name: source
        for name, source in read.items()
        if source.functions or name.rpartition(".")[2] == "kernels"
    }


SOURCES = sources()


OF_NPUS = {"dot_operand_reused", "runtime_if_around_dot"}
"""Rules that a target's own kernels for CUDA need not keep."""

OF_TRITON = {"block_pointers"}
"""And those in Gluon, whose releases are pinned."""


def _binds(rule: str, name: str) -> bool:
    return not ((rule in OF_NPUS and ".cuda." in name) or (rule in OF_TRITON and name.endswith(".gluon")))


@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name in SOURCES for rule in RULES if _binds(rule, name)]
)
def test_kernels_keep_the_rules(name: str, rule: str) -> None:
    """Every rule over every module with kernels."""
    violations = RULES[rule].find(SOURCES[name])
    report = "\n".join(f"{name}:{violation.line}: {violation.message}" for violation in violations)
    assert not violations, f"{RULES[rule].reason}\n{report}"


def test_all_kernels_are_seen() -> None:
    """Every kernels.py, each with a jit function but the one made of others; and no kernels elsewhere."""
    folders = {path.parent.name for path in PRIMITIVES.rglob("kernels.py")}
    seen = {name.split(".")[-2]: source for name, source in SOURCES.items() if name.endswith(".kernels")}
    assert set(seen) == folders
    for name, source in seen.items():
        assert source.functions or name == "fused_kda", f"{name} has no jit function"
    users = {
        name_of(path)
        for path in (ROOT / "kda_fn").rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr == "jit" and ast.unparse(node) == "triton.jit"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }
    assert users <= set(SOURCES)
