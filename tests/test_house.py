"""The rules of the house, checked by machine: what imports what, what is public, what is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kda_fn
from kda_fn.primitives._primitive import PRIMITIVES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kda_fn"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


# Imports


class Import(NamedTuple):
    """One import statement: of which module, and whether it runs when its own module is imported."""

    target: str
    at_import: bool


def imports(name: str) -> list[Import]:
    """Every import in a module, `from a import b` as `a.b` where that is a module."""
    found = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, at_import) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.append(Import(submodule if submodule in MODULES else node.module, at_import))
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_import and not lazy)

    visit(ast.parse(MODULES[name].read_text(encoding="utf-8")), True)
    return found


ORDER = [
    "kda_fn._check",
    "kda_fn.types",
    "kda_fn.scan kda_fn.ragged",
    "kda_fn.primitives",
    "kda_fn.layers",
    "kda_fn.serving kda_fn.transition",
    "kda_fn.distributed",
]
"""After these come demo, __main__, and whatever else stands on the layers."""


def rank(name: str) -> int:
    """The place of a module in the order of imports."""
    for place, names in enumerate(ORDER):
        if any(name == start or name.startswith(f"{start}.") for start in names.split()):
            return place
    return len(ORDER)


def primitive_of(name: str) -> str | None:
    """`kda` for `kda_fn.primitives.kda` and all in it, None elsewhere and for the private modules."""
    found = re.match(r"kda_fn\.primitives\.([a-z]\w*)", name)
    return found[1] if found else None


@pytest.mark.parametrize("name", [name for name in MODULES if name != "kda_fn"])
def test_imports_run_one_way(name: str) -> None:
    """_check <- types <- scan, ragged <- primitives <- layers <- serving, transition
    <- distributed <- the rest, and never by the public door."""
    for target, _ in imports(name):
        if target.split(".")[0] == "kda_fn":
            assert target in MODULES
            assert target != "kda_fn" or rank(name) == len(ORDER)
            assert target == "kda_fn" or rank(target) <= rank(name), f"{name} imports {target}"


def test_the_order_is_that_of_the_tree() -> None:
    """Every place in the order is taken by some module: the test above tests something."""
    assert {rank(name) for name in MODULES if name != "kda_fn"} >= set(range(len(ORDER)))
    assert any(target == "kda_fn.types" for target, _ in imports("kda_fn.scan"))


@pytest.mark.parametrize("name", [name for name in MODULES if primitive_of(name)])
def test_primitives_keep_to_themselves(name: str) -> None:
    """A primitive may call another's public function, not look into its modules.

    Save fused_kda, which is others put together: each of its modules is made of theirs of the same kind, its
    fallback of definitions too where these are fast.
    """
    for target, _ in imports(name):
        other, kind = primitive_of(target), target.rpartition(".")[2]
        if other not in (None, primitive_of(name), kind):
            own = name.rpartition(".")[2]
            assert name.startswith("kda_fn.primitives.fused_kda."), f"{name} imports {target}"
            assert kind == own or (own, kind) == ("fallback", "reference"), f"{name} imports {target}"


OWN_PLACE = {
    # package: the only files that import it, and whether they may not do so when they are imported themselves
    "jaxtyping": ({"types.py"}, False),
    "matplotlib": ({"demo.py"}, False),
    "safetensors": ({"checkpoint.py"}, True),
    "torch_npu": ({"ascendc.py", "_targets.py"}, True),
    "tqdm": ({"demo.py", "checkpoint.py"}, True),
    # Kernels are imported at their first launch: `test_importing_is_light`.
    "triton": ({"kernels.py", "gluon.py"}, False),
}


@pytest.mark.parametrize("name", MODULES)
def test_third_parties(name: str) -> None:
    """torch and optree; each other package in its own place only."""
    file = MODULES[name].name
    for target, at_import in imports(name):
        top = target.split(".")[0]
        if top in ("kda_fn", "torch", "optree", *sys.stdlib_module_names):
            continue
        where, lazily = OWN_PLACE.get(top, (set(), False))
        assert file in where, f"{name} imports {top}"
        assert not (lazily and at_import), f"{name} imports {top} when it is imported"


# A fresh interpreter: what this process has imported proves nothing.


def fresh(program: str) -> Any:
    """The JSON that a program prints, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ALONE = """
import json, sys

# torch, optree, and what those need.
ALLOWED = {
    "kda_fn", "torch", "torchgen", "functorch", "optree", "typing_extensions", "sympy", "mpmath", "networkx",
    "jinja2", "markupsafe", "fsspec", "filelock", *sys.stdlib_module_names,
}
refused = set()

class OnlyThese:
    '''Finds what `finder` finds, of the packages allowed: all others are not installed.'''

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ALLOWED:
            refused.add(name.split(".")[0])
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [
    finder if finder.__module__ == "_frozen_importlib" else OnlyThese(finder)
    for finder in sys.meta_path if hasattr(finder, "find_spec")
]

import torch
import kda_fn
from kda_fn import (
    KDAConfig, KimiLinearConfig, init_kimi_linear, init_kimi_linear_state, init_kimi_delta_attention,
    init_state, kda, kimi_linear, kimi_delta_attention,
)

state, o = kda(*(torch.ones(2, 3, 4), torch.ones(5, 1, 3), torch.ones(5, 1, 3), torch.ones(5, 2, 4)),
               -torch.ones(5, 2, 3), torch.ones(5, 2) / 2)
config = KDAConfig(hidden_size=8, num_heads=2, head_dim=4)
params = init_kimi_delta_attention(config)
_, y = kimi_delta_attention(params, init_state(config), torch.ones(5, 8), config=config)
lm = KimiLinearConfig(vocab_size=11, layer_types=("kda",) * 2, intermediate_size=8, kda=config)
_, logits = kimi_linear(init_kimi_linear(lm), init_kimi_linear_state(lm), torch.arange(5), config=lm)
print(json.dumps({
    "refused": sorted(refused),
    "results": [bool(x.isfinite().all() and x.abs().min() > 0) for x in (o, y, logits)],
    "foreign": sorted({name.split(".")[0] for name in sys.modules} - ALLOWED),
}))
"""


def test_torch_and_optree_are_enough() -> None:
    """The library imports and runs where nothing else is installed."""
    told = fresh(ALONE)
    assert told["results"] == [True, True, True]
    # jaxtyping is asked for, and done without: the wall stands.
    assert "jaxtyping" in told["refused"]
    assert not {"jaxtyping", "numpy", "beartype", "triton", "torch_npu"} & set(told["foreign"])


HEAVY = [
    "fla",
    "IPython",
    "matplotlib",
    "numpy",
    "pandas",
    "scipy",
    "torch._dynamo",
    "torch._inductor",
    "torch_npu",
    "tqdm",
    "transformers",
    "triton",
]


def test_importing_is_light() -> None:
    """`import kda_fn` brings in nothing heavy that torch and optree did not."""
    listing = "import json, sys, torch, optree; before = set(sys.modules); {}; "
    listing += "print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))"
    before, new = fresh(listing.format("import kda_fn"))
    assert "torch" in before and "kda_fn.primitives.kda" in new
    assert not [name for name in HEAVY if name in new]


# The public names


def test_all_is_what_there_is() -> None:
    """`__all__` holds every public name, no more."""
    assert len(set(kda_fn.__all__)) == len(kda_fn.__all__)
    public = {name for name, value in vars(kda_fn).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(kda_fn.__all__)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("kda_fn.__main__")])
def test_every_module_is_documented_and_says_what_it_has(name: str) -> None:
    """A docstring, and an `__all__` whose names exist, where there is anything to have."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)
    if defines and MODULES[name].name not in ("kernels.py", "gluon.py", "ascendc.py", "demo.py"):
        module = importlib.import_module(name)
        assert module.__all__ and all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", kda_fn.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    """By hand: dataclasses and NamedTuples are given a docstring by Python where they have none."""
    doc = inspect.getdoc(getattr(kda_fn, name))
    assert doc and not doc.startswith(f"{name}(")


def test_there_are_primitives() -> None:
    """Every function that is public from kda_fn.primitives is registered, and the layer's own."""
    assert len(PRIMITIVES) >= 7
    defined = {
        name for name in kda_fn.__all__ if getattr(kda_fn, name).__module__.startswith("kda_fn.primitives.")
    }
    internal = {"fused_kda", "mla_prolog"}
    assert {function.__name__ for function in PRIMITIVES} == defined - {
        "explain",
        "quantize",
        "quantize_layer",
    } | internal


@pytest.mark.parametrize("function", PRIMITIVES, ids=lambda function: function.__name__)
def test_primitives_are_documented(function: Any) -> None:
    """By an equation, and by their errors or where those are written down."""
    doc = inspect.getdoc(function)
    assert doc
    # An equation has its left side at the start of a line, or after a colon.
    assert re.search(r"(^|: ) *[\w']+ = \S", doc, re.MULTILINE)
    assert re.search(r"^Raises\b|errors are those of `\w+`", doc, re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "apply_layer_transition",
        "apply_transition",
        "attention_residual",
        "compose_transitions",
        "context_lengths",
        "distributed_kda",
        "distributed_kimi_delta_attention",
        "distributed_kimi_linear",
        "identity_transition",
        "kda_transition",
        "kimi_delta_attention",
        "kimi_linear",
        "layer_transition",
        "mla",
        "moe",
        "parallel_kda",
        "quantize",
        "sample",
        "scan",
        "shard_heads",
        "swiglu",
    ],
)
def test_other_functions_tell_their_errors(name: str) -> None:
    """The layers and scan too."""
    assert re.search(r"^Raises\b", inspect.getdoc(getattr(kda_fn, name)) or "", re.MULTILINE)


# One signature


def shape_of(function: Any, without: str | None = None) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != without]


@pytest.mark.parametrize("function", PRIMITIVES, ids=lambda function: function.__name__)
def test_implementations_share_the_signature(function: Any) -> None:
    """Each has the reference's names, kinds and defaults; the public function has impl besides."""
    implementations = PRIMITIVES[function].implementations
    expected = shape_of(implementations["reference"].call)
    for impl, implementation in implementations.items():
        assert shape_of(implementation.call) == expected, impl
    assert shape_of(function, without="impl") == expected
    assert shape_of(function)[-1] == ("impl", inspect.Parameter.KEYWORD_ONLY, None)


def implementation_functions() -> Iterator[tuple[Any, str, Any]]:
    """(public function, module, function of that name in it) of every implementation module."""
    for function in PRIMITIVES:
        package = function.__module__
        for name in MODULES:
            parent, _, leaf = name.rpartition(".")
            if parent == package and leaf in ("reference", "fallback", "ascendc"):
                found = getattr(importlib.import_module(name), function.__name__, None)
                if found is not None:
                    yield function, leaf, found


@pytest.mark.parametrize(
    ("function", "module", "found"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in implementation_functions()],
)
def test_modules_share_the_signature(function: Any, module: str, found: Any) -> None:
    """The same of what stands in a module but is not registered, and of the returned types."""
    assert shape_of(found) == shape_of(function, without="impl")
    assert inspect.signature(found).return_annotation == inspect.signature(function).return_annotation


def test_the_state_comes_first() -> None:
    """Stateful functions take the state first and return it first: lax.scan's order."""
    states = {
        "kda": "initial_state",
        "kda_step": "state",
        "fused_kda": "initial_state",
        "causal_conv1d": "conv_state",
    }
    for function in PRIMITIVES:
        if function.__name__ in states:
            assert next(iter(inspect.signature(function).parameters)) == states[function.__name__]
    for name in ("kimi_delta_attention", "kimi_linear", "mla"):
        assert list(inspect.signature(getattr(kda_fn, name)).parameters)[:2] == ["params", "state"]


# The tree


def test_typed() -> None:
    """Type checkers read the annotations of packages that say they have some."""
    assert (PACKAGE / "py.typed").is_file()


def test_versions_agree() -> None:
    """One version, and the changelog knows it."""
    version = re.escape(kda_fn.__version__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", kda_fn.__version__)
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^version = "{version}"$', pyproject, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^#+ .*\b{version}(?![\w.])", changelog, re.MULTILINE)


def tracked() -> list[Path]:
    """The text files under version control; everything outside hidden folders where there is none."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        paths = [
            path for path in ROOT.rglob("*") if not any(p[0] == "." for p in path.relative_to(ROOT).parts)
        ]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


# Put together here, so that this file does not hold them.
FOLDERS = "|".join(("wo" + "rk", "ro" + "ot", "op" + "t"))
PRIVATE_PATH = re.compile(rf"(?<![\w.}}])/(?:{FOLDERS})/")
REGISTRY = re.compile(
    "|".join(
        (
            r"https?://[^\s/\"']+" + "/" + r"(?:[^\s\"']*/)?" + "sim" + r"ple\b",  # a package index
            r"https?://[^\s/\"']*@",  # a name or a token in an address
            r"https?://(?:\d{1,3}\.){3}\d",
            r"https?://[\w.-]+\.(?:internal|local|corp|lan)\b",
            r"https?://[\w-]*(?:artifactory|nexus|jfrog|codeartifact|pypi-proxy)",
        )
    )
)


@pytest.mark.parametrize("path", tracked(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_addresses(path: Path) -> None:
    """No file names a folder of one machine, or a package registry."""
    text = path.read_text(encoding="utf-8")
    found = PRIVATE_PATH.search(text) or REGISTRY.search(text)
    assert found is None, found


@pytest.mark.parametrize(
    "text",
    [
        "see " + "/wo" + "rk/x",
        '"/ro' + 'ot/.cache"',
        "'/op" + "t/env'",
        "https://index.example.org" + "/sim" + "ple",
        "http://10.0" + ".0.1:8080/x",
        "https://user:secret" + "@example.org",
    ],
)
def test_private_addresses_would_be_found(text: str) -> None:
    """The patterns find what they are for."""
    assert PRIVATE_PATH.search(text) or REGISTRY.search(text)


@pytest.mark.parametrize(
    "text", ["a/wo" + "rk/b", "https://arxiv.org/abs/2510.26692", "torch/optim/adam", "x@y.example"]
)
def test_public_addresses_are_not_private(text: str) -> None:
    """And nothing else."""
    assert not PRIVATE_PATH.search(text) and not REGISTRY.search(text)
