"""Whatever does not fit is refused by name, before any work, alike under every transform."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kda_fn
from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    MLAConfig,
    MoEConfig,
    causal_conv1d,
    explain,
    gated_rms_norm,
    init_attention_residual,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_kimi_linear_state,
    init_mla,
    init_mla_state,
    init_moe,
    init_state,
    init_swiglu,
    kda,
    kda_gate,
    kda_step,
    kimi_delta_attention,
    kimi_linear,
    l2_norm,
    residual_gated_rms_norm,
    swiglu,
)
from kda_fn.primitives.fused_kda import fused_kda

# Valid calls. All sizes differ, so that no letter passes for another.

B, N, T, H, HV, K, V, W, P, F, D, INNER = 7, 3, 5, 2, 4, 6, 8, 10, 9, 11, 12, 13

CONFIG = KDAConfig(
    hidden_size=D, num_heads=H, num_v_heads=HV, head_dim=K, head_v_dim=V, conv_size=W, chunk_size=4
)
MLA_CONFIG = MLAConfig(hidden_size=D, num_heads=H, head_dim=K, shared_dim=K, head_v_dim=V, latent_dim=INNER)
MOE_CONFIG = MoEConfig(hidden_size=D, num_experts=4, experts_per_token=2, intermediate_size=INNER)
FULL_RANK = replace(CONFIG, output_gate="full_rank", lower_bound=-5.0)
LM_CONFIG = KimiLinearConfig(
    vocab_size=17, layer_types=("kda",) * 2, intermediate_size=INNER, tie_embeddings=True, kda=CONFIG
)


class Call(NamedTuple):
    """A public function, arguments that it takes, and the letters of each."""

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    letters: Mapping[str, str] = MappingProxyType({})


def rand(*shape: int) -> Tensor:
    """Reproducible positive numbers."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.5


def filled(letters: dict[str, str]) -> Callable[[], dict[str, Any]]:
    """A tensor for every argument, each letter at its size."""
    sizes = {"*B": B, "N": N, "T": T, "H": H, "HV": HV, "K": K, "V": V, "W": W, "W-1": W - 1, "P": P, "F": F}
    sizes["HV*K"] = HV * K
    return lambda: {name: rand(*(sizes[letter] for letter in spec.split())) for name, spec in letters.items()}


def primitive(function: Callable[..., Any], keywords: dict[str, Any], **letters: str) -> Call:
    """The call of a primitive with these letters."""
    tensors = filled(letters)
    return Call(function, lambda: {**tensors(), **keywords}, letters)


KDA = {
    "q": "*B T H K",
    "k": "*B T H K",
    "v": "*B T HV V",
    "g": "*B T HV K",
    "beta": "*B T HV",
}
FUSED = {
    "q": "*B T H K",
    "k": "*B T H K",
    "v": "*B T HV V",
    "raw": "*B T HV K",
    "beta": "*B T HV",
    "A_log": "HV",
    "dt_bias": "HV*K",
}
PACKED = {"cu_seqlens": (0, 2, 2, 5)}


def layer_arguments(config: KDAConfig, packed: bool = False) -> dict[str, Any]:
    """A valid call of the layer."""
    params = init_kimi_delta_attention(config, generator=torch.Generator().manual_seed(0))
    state = init_state(config, (B, N) if packed else (B,))
    return {
        "params": params,
        "state": state,
        "x": rand(B, T, D),
        "config": config,
        **(PACKED if packed else {}),
    }


def lm_arguments(packed: bool = False) -> dict[str, Any]:
    """A valid call of the language model."""
    params = init_kimi_linear(LM_CONFIG, generator=torch.Generator().manual_seed(0))
    state = init_kimi_linear_state(LM_CONFIG, (B, N) if packed else (B,))
    tokens = torch.arange(T).expand(B, T).contiguous()
    return {
        "params": params,
        "state": state,
        "tokens": tokens,
        "config": LM_CONFIG,
        **(PACKED if packed else {}),
    }


CALLS = {
    "kda": primitive(kda, {}, **KDA, initial_state="*B HV K V"),
    "kda packed": primitive(kda, PACKED, **KDA, initial_state="*B N HV K V"),
    "kda_step": primitive(
        kda_step,
        {},
        q_t="*B H K",
        k_t="*B H K",
        v_t="*B HV V",
        g_t="*B HV K",
        beta_t="*B HV",
        state="*B HV K V",
    ),
    "fused_kda": primitive(fused_kda, {}, **FUSED, initial_state="*B HV K V"),
    "fused_kda packed": primitive(fused_kda, PACKED, **FUSED, initial_state="*B N HV K V"),
    "causal_conv1d": primitive(causal_conv1d, {}, x="*B T P", weight="P W", bias="P", conv_state="*B W-1 P"),
    "causal_conv1d packed": primitive(
        causal_conv1d, PACKED, x="*B T P", weight="P W", bias="P", conv_state="*B N W-1 P"
    ),
    "kda_gate": primitive(kda_gate, {}, raw="*B HV K", A_log="HV", dt_bias="HV*K"),
    "kda_gate bounded": primitive(kda_gate, {"lower_bound": -5.0}, raw="*B HV K", A_log="HV", dt_bias="HV*K"),
    "gated_rms_norm": primitive(gated_rms_norm, {"eps": 1e-5}, x="*B F", gate="*B F", weight="F"),
    "residual_gated_rms_norm": primitive(
        residual_gated_rms_norm, {"eps": 1e-5}, residual="*B F", x="*B F", gate="*B F", weight="F"
    ),
    "l2_norm": primitive(l2_norm, {}, x="*B F"),
    "swiglu": Call(swiglu, lambda: {"params": init_swiglu(D, INNER), "x": rand(B, D)}),
    "layer": Call(kimi_delta_attention, lambda: layer_arguments(CONFIG)),
    "layer packed": Call(kimi_delta_attention, lambda: layer_arguments(CONFIG, packed=True)),
    "layer full rank": Call(kimi_delta_attention, lambda: layer_arguments(FULL_RANK)),
    "kimi_linear": Call(kimi_linear, lm_arguments),
    "kimi_linear packed": Call(kimi_linear, lambda: lm_arguments(packed=True)),
}
PRIMITIVES = [name for name, call in CALLS.items() if call.letters]
OF_PARTS = [name for name, call in CALLS.items() if not call.letters]


# Changes that make an argument wrong


def longer(axis: int) -> Callable[[Tensor], Tensor]:
    """One more along an axis."""
    return lambda x: torch.cat([x, x.narrow(axis, 0, 1)], axis)


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The same numbers in another dtype."""
    return lambda x: x.to(dtype)


def meta(x: Tensor) -> Tensor:
    """The same tensor on another device, one that every machine has."""
    return x.to("meta")


def at(path: str, change: Any) -> Callable[[Any], Any]:
    """A change of one leaf: `at("decay.down", cast(torch.int32))` of a tree of NamedTuples and tuples."""
    first, _, rest = path.partition(".")

    def changed(tree: Any) -> Any:
        inner = tree[int(first)] if first.isdigit() else getattr(tree, first)
        new = changed_value(at(rest, change) if rest else change, inner)
        if first.isdigit():
            return (*tree[: int(first)], new, *tree[int(first) + 1 :])
        return tree._replace(**{first: new})

    return changed


def changed_value(change: Any, value: Any) -> Any:
    """A function makes the new value of the old, anything else is the new value."""
    return change(value) if callable(change) else change


# What every error must be


class Work(TorchDispatchMode):
    """Writes down every operation on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done.append(str(func))
        return func(*args, **(kwargs or {}))


READS = (
    "aten.detach.default",
    "aten._local_scalar_dense.default",
    "aten._to_copy.default",
    "aten.unbind.int",
)
"""What reading cu_seqlens may take."""


def refused(
    function: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], before_work: bool = True
) -> str:
    """The message of the error that the call must raise, before any work and without a trace."""
    tree: Any = arguments
    tensors = [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    versions = [x._version for x in tensors]
    copies = [x.clone() for x in tensors]
    work = Work()
    with pytest.raises(error) as caught, work:
        function(**arguments)
    assert type(caught.value) is error
    if before_work:
        reads = READS if isinstance(arguments.get("cu_seqlens"), Tensor) else ()
        assert not [done for done in work.done if done not in reads]
    assert [x._version for x in tensors] == versions
    for x, copy in zip(tensors, copies, strict=True):
        assert x.is_meta or torch.equal(x, copy)
    return str(caught.value)


def wrong_call(name: str, changes: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The valid call of that name, changed."""
    call = CALLS[name]
    valid = call.arguments()
    return call.function, {**valid, **{arg: changed_value(c, valid.get(arg)) for arg, c in changes.items()}}


@pytest.mark.parametrize("name", CALLS)
def test_the_valid_calls_are_valid(name: str) -> None:
    """Every error below is the change's, not the call's."""
    call = CALLS[name]
    results = optree.tree_leaves(call.function(**call.arguments()))
    assert results and all(x.isfinite().all() for x in results)
    assert any(x.abs().max() > 0 for x in results)


# Shapes, dtypes, devices and kinds of every tensor argument


def sizes_that_must_agree() -> list[tuple[str, str, int]]:
    """(call, argument, axis) where the size of that axis is also the size of another."""
    found = []
    for name in PRIMITIVES:
        letters = CALLS[name].letters
        everywhere = [letter for spec in letters.values() for letter in set(bases(spec))]
        if "cu_seqlens" in CALLS[name].arguments():
            everywhere += ["T", "N"]
        for argument, spec in letters.items():
            for axis, letter in enumerate(spec.split()):
                if any(everywhere.count(base) > 1 for base in bases(letter)):
                    found.append((name, argument, axis))
    return found


def bases(spec: str) -> list[str]:
    """The letters of a spec: `HV*K` has two, `W-1` has one."""
    return [
        base
        for letter in spec.split()
        for base in ([letter] if letter.startswith("*") else letter.removesuffix("-1").split("*"))
    ]


@pytest.mark.parametrize(("name", "argument", "axis"), sizes_that_must_agree())
def test_sizes_must_agree(name: str, argument: str, axis: int) -> None:
    """The message names one of the two arguments that disagree, its shape and its letters."""
    letters = CALLS[name].letters
    function, arguments = wrong_call(name, {argument: longer(axis)})
    message = refused(function, arguments, ValueError)
    if "cu_seqlens" in message:
        assert letters[argument].split()[axis] in ("T", "N")
        assert re.search(r"must end at T = \d|holds N = \d states", message)
        return
    told = re.search(rf"^{function.__name__}: (\w+) has shape (\(.*?\)), expected \[(.*?)\]", message)
    assert told, message
    blamed, shape, spec = told.groups()
    assert shape == str(tuple(arguments[blamed].shape))
    assert spec == letters[blamed]
    # Heads that are no multiple are found last: the letters of blamed and changed must meet.
    assert set(bases(letters[argument].split()[axis])) & set(bases(spec))


def every_argument() -> list[tuple[str, str]]:
    """(call, argument) of every tensor of every primitive."""
    return [(name, argument) for name in PRIMITIVES for argument in CALLS[name].letters]


@pytest.mark.parametrize(("name", "argument"), every_argument())
def test_too_few_axes(name: str, argument: str) -> None:
    """One axis fewer than there are letters."""
    spec = CALLS[name].letters[argument]
    axes = len([letter for letter in spec.split() if not letter.startswith("*")])
    function, arguments = wrong_call(name, {argument: lambda x: x.flatten()[:1].reshape((1,) * (axes - 1))})
    message = refused(function, arguments, ValueError)
    given = re.escape(str((1,) * (axes - 1)))
    assert re.match(
        rf"{function.__name__}: {argument} has shape {given}, expected \[{re.escape(spec)}\]", message
    )


@pytest.mark.parametrize(
    ("name", "argument"), [pair for pair in every_argument() if "*" not in CALLS[pair[0]].letters[pair[1]][0]]
)
def test_too_many_axes(name: str, argument: str) -> None:
    """Parameters have no batch axes."""
    function, arguments = wrong_call(name, {argument: lambda x: x.unsqueeze(0)})
    message = refused(function, arguments, ValueError)
    given = re.escape(str(tuple(arguments[argument].shape)))
    assert re.match(rf"{function.__name__}: {argument} has shape {given}, expected \[", message)


DTYPES = [torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "argument"), every_argument())
def test_only_floats(name: str, argument: str, dtype: torch.dtype) -> None:
    """Integers, bools, complex and 8-bit numbers are refused by their name."""
    function, arguments = wrong_call(name, {argument: cast(dtype)})
    message = refused(function, arguments, TypeError)
    assert message.startswith(f"{function.__name__}: {argument} must be a float of 16, 32 or 64 bits")
    assert message.endswith(f"got {dtype}")


@pytest.mark.parametrize(
    ("name", "argument"), [pair for pair in every_argument() if len(CALLS[pair[0]].letters) > 1]
)
def test_one_device(name: str, argument: str) -> None:
    """The message says which tensor is where."""
    function, arguments = wrong_call(name, {argument: meta})
    message = refused(function, arguments, ValueError)
    assert message.startswith(f"{function.__name__}: all tensors must be on one device")
    assert f"{argument} on meta" in message
    assert re.search(r"\w on cpu", message)


NOT_TENSORS = {"ndarray": lambda x: x.numpy(), "list": lambda x: x.tolist(), "float": 1.0, "NoneType": None}


OPTIONAL = {
    ("causal_conv1d", "bias"),
    ("gated_rms_norm", "weight"),
    ("residual_gated_rms_norm", "weight"),
}


@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        (name, argument, kind)
        for (name, argument), kind in product(every_argument(), NOT_TENSORS)
        if kind != "NoneType" or (name.split()[0], argument) not in OPTIONAL
    ],
)
def test_only_tensors(name: str, argument: str, kind: str) -> None:
    """Arrays, lists, numbers and None are refused by their type."""
    function, arguments = wrong_call(name, {argument: NOT_TENSORS[kind]})
    message = refused(function, arguments, TypeError)
    assert message == f"{function.__name__}: {argument} must be a tensor, got {kind}"


# Everything else, one row for each mistake


class Wrong(NamedTuple):
    """A change to a valid call, the error it raises, and what its message says."""

    call: str
    change: dict[str, Any]
    error: type[Exception]
    says: list[str]


def offsets(call: str, caller: str, state: str) -> list[Wrong]:
    """What is wrong with cu_seqlens is told alike by all who take it; T is 5, N is 3."""
    rows = [
        ((1, 2, 2, 5), ValueError, ["start at 0", "starts at 1"]),
        ((0, 3, 2, 5), ValueError, ["not decrease", "3, 2"]),
        ((0, 2, 2, 4), ValueError, ["end at T = 5", "ends at 4"]),
        ((0, 2, 2, 6), ValueError, ["end at T = 5", "ends at 6"]),
        (torch.tensor([0, 2, 2, 6]), ValueError, ["end at T = 5", "ends at 6"]),
        ((), ValueError, [r"N\+1", r"\[\]"]),
        ([0], ValueError, [r"N\+1", r"\[0\]"]),
        (torch.tensor([[0, 2, 2, 5]]), ValueError, ["one axis", r"\(1, 4\)"]),
        (torch.tensor([[0], [2], [2], [5]]), ValueError, ["one axis", r"\(4, 1\)"]),
        (torch.tensor(5), ValueError, ["one axis", r"\(\)"]),
        (torch.tensor([0.0, 2.0, 2.0, 5.0]), TypeError, ["int32 or int64", "float32"]),
        (torch.tensor([False, True, True, True]), TypeError, ["int32 or int64", "bool"]),
        ((0.0, 2.0, 2.0, 5.0), TypeError, ["integers", r"0\.0"]),
        ((False, 2, 2, 5), TypeError, ["integers", "False"]),
        (5, TypeError, ["integers", "int"]),
        (torch.tensor([0, 2, 2, 5], device="meta"), ValueError, ["meta"]),
    ]
    many = [
        ((0, 5), ValueError, [f"{caller}: {state} ", "N = 3|3, ", "1 sequence|1, "]),
        (torch.tensor([0, 1, 2, 2, 5]), ValueError, [f"{caller}: {state} ", "N = 3|3, ", "4 sequence|4, "]),
    ]
    return [
        *(Wrong(call, {"cu_seqlens": given}, error, ["cu_seqlens", *says]) for given, error, says in rows),
        *(Wrong(call, {"cu_seqlens": given}, error, says) for given, error, says in many),
    ]


def impls(*calls: str) -> list[Wrong]:
    """An unknown name is a ValueError; a known one that cannot serve says that, and why."""
    return [
        row
        for call in calls
        for row in (
            Wrong(
                call, {"impl": "cuda"}, ValueError, ["impl must be None or one of", "'fallback'", "'cuda'"]
            ),
            Wrong(call, {"impl": 1}, ValueError, ["impl must be None or one of", "got 1"]),
            Wrong(
                call, {"impl": "ascendc"}, NotImplementedError, ["impl='ascendc' cannot serve", ": .+: .+"]
            ),
        )
    ]


def bounds(*calls: str) -> list[Wrong]:
    """lower_bound is None or in [-5, 0)."""
    return [
        Wrong(call, {"lower_bound": given}, error, ["lower_bound must be None or in", re.escape(repr(given))])
        for call in calls
        for given, error in (
            (-5.5, ValueError),
            (0.0, ValueError),
            (1.0, ValueError),
            (float("nan"), ValueError),
            (float("-inf"), ValueError),
            ("-5", TypeError),
        )
    ]


def numbers(argument: str, *calls: str) -> list[Wrong]:
    """A number must be one: `1e-5` in YAML is a string."""
    return [
        Wrong(call, {argument: "1e-5"}, TypeError, [f"{call}: {argument} must be a number", "'1e-5'"])
        for call in calls
    ]


double = cast(torch.float64)
half = cast(torch.bfloat16)
HEADS = {
    "v": lambda x: x[..., :3, :],
    "g": lambda x: x[..., :3, :],
    "beta": lambda x: x[..., :3],
    "initial_state": lambda x: x[..., :3, :, :],
}
FUSED_HEADS = {
    "v": HEADS["v"],
    "raw": HEADS["g"],
    "beta": HEADS["beta"],
    "A_log": lambda x: x[:3],
    "dt_bias": lambda x: x[: 3 * K],
    "initial_state": HEADS["initial_state"],
}
STEP_HEADS = {
    "v_t": HEADS["v"],
    "g_t": HEADS["g"],
    "beta_t": HEADS["beta"],
    "state": HEADS["initial_state"],
}

OF_PRIMITIVES = [
    # Dtypes that must agree.
    *(
        Wrong(
            "kda",
            {name: half},
            TypeError,
            ["kda: dtypes must agree", f"{name} torch.bfloat16", "torch.float32"],
        )
        for name in "qkv"
    ),
    Wrong("fused_kda", {"k": half}, TypeError, ["fused_kda: dtypes must agree", "k torch.bfloat16"]),
    Wrong("kda_step", {"k_t": half}, TypeError, ["kda_step: dtypes must agree", "k_t torch.bfloat16"]),
    Wrong(
        "causal_conv1d",
        {"conv_state": half},
        TypeError,
        ["dtypes must agree", "conv_state torch.bfloat16", "x torch.float32"],
    ),
    # The state is float32 at least, float64 beside float64.
    *(
        Wrong(
            "kda", {"initial_state": cast(d)}, TypeError, ["initial_state must be float32 or float64", str(d)]
        )
        for d in (torch.bfloat16, torch.float16)
    ),
    Wrong("kda packed", {"initial_state": half}, TypeError, ["initial_state must be float32 or float64"]),
    Wrong("kda_step", {"state": half}, TypeError, ["kda_step: state must be float32 or float64", "bfloat16"]),
    *(
        Wrong("kda", change, TypeError, ["initial_state must be float64 beside float64", "torch.float32"])
        for change in ({"q": double, "k": double, "v": double}, {"g": double}, {"beta": double})
    ),
    *(
        Wrong("fused_kda", change, TypeError, ["fused_kda: initial_state must be float64 beside float64"])
        for change in ({"raw": double}, {"beta": double}, {"dt_bias": double})
    ),
    Wrong("kda_step", {"g_t": double}, TypeError, ["state must be float64 beside float64", "torch.float32"]),
    # Heads.
    Wrong("kda", HEADS, ValueError, ["kda: ", "multiple", "HV=3", "H=2"]),
    Wrong("fused_kda", FUSED_HEADS, ValueError, ["fused_kda: ", "multiple", "HV=3", "H=2"]),
    Wrong("kda_step", STEP_HEADS, ValueError, ["kda_step: ", "multiple", "HV=3", "H=2"]),
    Wrong(
        "kda",
        {"q": lambda x: x[..., :0, :], "k": lambda x: x[..., :0, :]},
        ValueError,
        ["multiple", "HV=4", "H=0"],
    ),
    # One value of the state's batch axes is not broadcast.
    Wrong(
        "kda",
        {"initial_state": lambda x: x[:1]},
        ValueError,
        [r"initial_state has shape \(1, 4, 6, 8\)", r"expected \[\*B HV K V\]", r"\*B=\(7,\)"],
    ),
    Wrong("kda", {"initial_state": lambda x: x[0]}, ValueError, [r"initial_state has shape \(4, 6, 8\)"]),
    # Packed calls need the axis N, others have none.
    Wrong("kda", PACKED, ValueError, ["initial_state", r"expected \[\*B N HV K V\]"]),
    Wrong("kda packed", {"cu_seqlens": None}, ValueError, ["initial_state", r"expected \[\*B HV K V\]"]),
    Wrong("causal_conv1d", PACKED, ValueError, ["conv_state", r"expected \[\*B N W-1 P\]"]),
    *offsets("kda packed", "kda", "initial_state"),
    *offsets("fused_kda packed", "fused_kda", "initial_state"),
    *offsets("causal_conv1d packed", "causal_conv1d", "conv_state"),
    # Choices and numbers.
    *(
        Wrong("kda", {"chunk_size": given}, ValueError, ["chunk_size must be a power of two", repr(given)])
        for given in (0, 48, -64, 64.0, "64", None, True)
    ),
    *(
        Wrong(
            "causal_conv1d",
            {"activation": given},
            ValueError,
            ["activation must be one of", "'silu'", repr(given)],
        )
        for given in ("gelu", "sigmoid", True)
    ),
    *(
        Wrong(
            call,
            {"activation": given},
            ValueError,
            ["activation must be one of", "'sigmoid', 'silu'", repr(given)],
        )
        for call in ("gated_rms_norm", "residual_gated_rms_norm")
        for given in ("gelu", None)
    ),
    Wrong(
        "fused_kda", {"chunk_size": 48}, ValueError, ["fused_kda: chunk_size must be a power of two", "48"]
    ),
    *(
        Wrong(
            "fused_kda",
            {"allow_neg_eigval": given},
            ValueError,
            ["allow_neg_eigval must be one of", "True, False", repr(given)],
        )
        for given in ("yes", None)
    ),
    *bounds("kda", "fused_kda", "kda_gate"),
    *numbers("scale", "kda", "kda_step", "fused_kda"),
    *numbers("eps", "l2_norm", "fused_kda", "gated_rms_norm", "residual_gated_rms_norm"),
    *impls(
        "kda",
        "kda_step",
        "fused_kda",
        "causal_conv1d",
        "kda_gate",
        "gated_rms_norm",
        "residual_gated_rms_norm",
        "l2_norm",
    ),
    # The factor of 1 is the bounded gate's alone.
    Wrong(
        "kda_gate", {"A_log": lambda x: x[:0]}, ValueError, [r"A_log has shape \(0,\)", r"\[HV\] = \(4,\)$"]
    ),
    Wrong("fused_kda", {"A_log": lambda x: x[:0]}, ValueError, [r"fused_kda: A_log has shape \(0,\)"]),
    Wrong(
        "kda_gate bounded",
        {"A_log": lambda x: x[:1]},
        ValueError,
        [r"A_log has shape \(1,\)", r"\[HV\] = \(4,\), or \(0,\) for a factor of 1"],
    ),
    Wrong(
        "kda_gate",
        {"dt_bias": lambda x: x.unflatten(0, (HV, K))},
        ValueError,
        [r"dt_bias has shape \(4, 6\)", r"\[HV\*K\] = \(24,\)"],
    ),
]


def leaves_of(tree: Any, name: str) -> dict[str, tuple[str, Tensor]]:
    """`{"params.decay.down": ("decay.down", tensor), ..}` of a NamedTuple, a tuple, or one leaf."""
    if isinstance(tree, Tensor):
        return {name: ("", tree)}
    if hasattr(tree, "_asdict"):
        children = {field: (f"{name}.{field}", child) for field, child in tree._asdict().items()}
    else:
        children = {str(i): (f"{name}[{i}]", child) for i, child in enumerate(tree)}
    return {
        leaf_name: (f"{step}.{path}" if path else step, leaf)
        for step, (child_name, child) in children.items()
        for leaf_name, (path, leaf) in leaves_of(child, child_name).items()
    }


def parts(call: str) -> list[tuple[str, str, str, str]]:
    """(call, argument, path, name) of every tensor in params and state."""
    arguments = CALLS[call].arguments()
    return [
        (call, argument, path, name)
        for argument in ("params", "state")
        if argument in arguments
        for name, (path, _) in leaves_of(arguments[argument], argument).items()
    ]


EVERY_PART = [part for call in OF_PARTS if "packed" not in call for part in parts(call)]


def named(caller: str, name: str) -> str:
    """The pattern of a message that names this part."""
    return rf"^{caller}: .*{re.escape(name)}(?![\w.\[])"


@pytest.mark.parametrize(("call", "argument", "path", "name"), EVERY_PART)
def test_parts_that_do_not_fit(call: str, argument: str, path: str, name: str) -> None:
    """Every tensor of params and state: one more along each axis, one axis fewer, one more."""
    valid = CALLS[call].arguments()[argument]
    leaf = leaves_of(valid, argument)[name][1]
    changes = [lambda x: x.unsqueeze(0), *([lambda x: x.select(0, 0)] if leaf.numel() else [])]
    changes += [longer(axis) for axis in range(leaf.ndim)] if leaf.numel() else [lambda x: x.new_zeros(1)]
    for change in changes:
        function, arguments = wrong_call(call, {argument: at(path, change)})
        message = refused(function, arguments, ValueError)
        # An intermediate size shows at the other matrix, and the ranks of both gates where they are merged.
        family, _, field = name.rpartition(".")
        family = re.escape(family if field in ("down", "up", "gate") else name)
        if field in ("decay", "output_gate"):
            family = f"({family}|{re.escape(name.rpartition('.')[0])}.gates)"
        assert re.search(rf"^{function.__name__}: {family}\S* has shape \(.*\), expected", message)
        told = re.search(r": (\S+) has shape (\(.*?\)), expected", message)
        assert told
        actual = {key: leaf for key, (_, leaf) in leaves_of(arguments[argument], argument).items()}
        assert told[2] == str(tuple(actual[told[1]].shape))


@pytest.mark.parametrize(("call", "argument", "path", "name"), EVERY_PART)
def test_parts_of_a_wrong_kind(call: str, argument: str, path: str, name: str) -> None:
    """Every tensor of params and state: no float, elsewhere, no tensor at all."""
    for dtype in (torch.int32, torch.bool, torch.complex64):
        function, arguments = wrong_call(call, {argument: at(path, cast(dtype))})
        message = refused(function, arguments, TypeError)
        assert re.search(named(function.__name__, name), message) and str(dtype) in message
    function, arguments = wrong_call(call, {argument: at(path, meta)})
    message = refused(function, arguments, ValueError)
    assert "one device" in message and f"{name} on meta" in message
    for kind, change in NOT_TENSORS.items():
        function, arguments = wrong_call(call, {argument: at(path, change)})
        message = refused(function, arguments, TypeError)
        assert re.search(named(function.__name__, name), message) and f"got {kind}" in message


def of_one_dtype(call: str, name: str) -> bool:
    """Whether that part must have the dtype of x: not where the arithmetic is float32 at least."""
    wide = (
        "conv",
        "A_log",
        "dt_bias",
        "recurrent_state",
        "attention.norm" if call == "kimi_linear" else "params.norm",
    )
    return not name.endswith(wide)


@pytest.mark.parametrize(
    ("call", "argument", "path", "name"), [part for part in EVERY_PART if of_one_dtype(part[0], part[3])]
)
def test_parts_of_another_dtype(call: str, argument: str, path: str, name: str) -> None:
    """What is multiplied with x has its dtype."""
    function, arguments = wrong_call(call, {argument: at(path, half)})
    message = refused(function, arguments, TypeError)
    assert re.search(named(function.__name__, f"{name} torch.bfloat16"), message)
    assert "dtypes must agree" in message and "torch.float32" in message


LAYERS = [
    *(
        Wrong(call, {"x": change}, error, [f"^{caller}: x ", *says])
        for call, caller in (("layer", "kimi_delta_attention"), ("swiglu", "swiglu"))
        for change, error, says in (
            (lambda x: x[..., :-1], ValueError, [r"shape \(7, (5, )?11\)", r"expected \[.* D\]", "D=12"]),
            (lambda x: x.select(-1, 0).flatten()[0], ValueError, [r"shape \(\)", r"expected \[.* D\]"]),
            (cast(torch.int64), TypeError, ["must be a float", "torch.int64"]),
            (lambda x: x.numpy(), TypeError, ["must be a tensor", "ndarray"]),
            (lambda x: x.tolist(), TypeError, ["must be a tensor", "list"]),
            (None, TypeError, ["must be a tensor", "NoneType"]),
        )
    ),
    Wrong("layer", {"x": lambda x: x[0, 0]}, ValueError, [r"x has shape \(12,\), expected \[\*B T D\]"]),
    Wrong("layer", {"x": half}, TypeError, ["dtypes must agree", "x torch.bfloat16"]),
    Wrong("layer", {"x": meta}, ValueError, ["one device", "x on meta", "params.qkv on cpu"]),
    Wrong("swiglu", {"x": meta}, ValueError, ["one device", "x on meta", "params.gate on cpu"]),
    # Trees of the wrong kind.
    Wrong("layer", {"params": None}, TypeError, ["params .*must be KDAParams", "NoneType"]),
    Wrong("layer", {"params": tuple}, TypeError, ["params .*must be KDAParams", "tuple"]),
    Wrong("layer", {"params": lambda p: p._asdict()}, TypeError, ["params .*must be KDAParams", "dict"]),
    Wrong("layer", {"state": None}, TypeError, ["state .*KDAState", "NoneType"]),
    Wrong("layer", {"state": tuple}, TypeError, ["state .*KDAState", "tuple"]),
    Wrong("swiglu", {"params": tuple}, TypeError, ["params must be SwiGLUParams", "tuple"]),
    Wrong("layer", {"config": None}, TypeError, ["config must be (a )?KDAConfig", "NoneType"]),
    Wrong("layer", {"config": {"hidden_size": D}}, TypeError, ["config must be (a )?KDAConfig", "dict"]),
    Wrong("layer", {"config": LM_CONFIG}, TypeError, ["config must be (a )?KDAConfig", "KimiLinearConfig"]),
    Wrong("layer", {"params": at("decay", None)}, TypeError, ["params.decay", "NoneType"]),
    Wrong("layer", {"params": at("output_gate", None)}, TypeError, ["params.output_gate", "NoneType"]),
    # params and config that do not belong together.
    Wrong(
        "layer",
        {"config": replace(CONFIG, output_gate="full_rank")},
        ValueError,
        [r"params.output_gate has shape \(32, 8\)", r"expected \(0,\)"],
    ),
    Wrong(
        "layer full rank",
        {"config": replace(FULL_RANK, output_gate="low_rank")},
        ValueError,
        [r"params.output_gate has shape \(0,\)", r"expected \(32, 0\)"],
    ),
    Wrong(
        "layer",
        {"config": replace(CONFIG, head_v_dim=V + 1)},
        ValueError,
        ["has shape", r"expected \(7, 9, 77\)|expected .*\(7, 9, 60\)"],
    ),
    Wrong(
        "layer",
        {"params": at("A_log", lambda x: x[:0])},
        ValueError,
        [r"params.A_log has shape \(0,\)", r"expected .*\(4,\)"],
    ),
    Wrong(
        "layer",
        {"params": at("output_gate_bias", lambda x: x.new_zeros(3))},
        ValueError,
        [r"params.output_gate_bias has shape \(3,\)", r"\(32,\)"],
    ),
    # States of another call.
    Wrong(
        "layer", {"state": init_state(CONFIG, (3,))}, ValueError, [r"state.conv_state has shape \(3, 9, 56\)"]
    ),
    Wrong(
        "layer",
        {"state": init_state(CONFIG)},
        ValueError,
        [r"state.conv_state has shape \(9, 56\), expected \(7, 9, 56\): for this x .* batch_shape is \(7,\)"],
    ),
    Wrong(
        "layer",
        {"state": at("recurrent_state", lambda x: x[:3])},
        ValueError,
        [r"state.recurrent_state has shape \(3, 4, 6, 8\)", r"\(7, 4, 6, 8\)"],
    ),
    Wrong("layer packed", {"state": init_state(CONFIG, (B,))}, ValueError, ["state.conv_state has shape"]),
    Wrong(
        "layer",
        {"state": at("recurrent_state", half)},
        TypeError,
        ["state.recurrent_state must be float32 or float64", "bfloat16"],
    ),
    Wrong(
        "layer",
        {"params": at("dt_bias", double)},
        TypeError,
        ["state.recurrent_state must be float64 beside float64", "float32"],
    ),
    *offsets("layer packed", "kimi_delta_attention", r"state\.conv_state"),
    Wrong("layer", {"impl": "cuda"}, ValueError, ["impl must be None or one of", "'cuda'"]),
    # The language model.
    *(
        Wrong("kimi_linear", {"tokens": change}, error, ["^kimi_linear: tokens ", *says])
        for change, error, says in (
            (cast(torch.float32), TypeError, ["int32 or int64", "torch.float32"]),
            (cast(torch.bool), TypeError, ["int32 or int64", "torch.bool"]),
            (cast(torch.int16), TypeError, ["int32 or int64", "torch.int16"]),
            (lambda x: x.numpy(), TypeError, ["must be a tensor", "ndarray"]),
            (lambda x: x.tolist(), TypeError, ["must be a tensor", "list"]),
            (None, TypeError, ["must be a tensor", "NoneType"]),
            (lambda x: x[0, 0], ValueError, [r"shape \(\)", r"\[\*B T\]"]),
        )
    ),
    Wrong(
        "kimi_linear",
        {"tokens": meta},
        ValueError,
        ["one device", "tokens on meta", "params.embedding on cpu"],
    ),
    Wrong("kimi_linear", {"params": None}, TypeError, ["params must be (a )?KimiLinearParams", "NoneType"]),
    Wrong("kimi_linear", {"params": tuple}, TypeError, ["params must be (a )?KimiLinearParams", "tuple"]),
    Wrong(
        "kimi_linear", {"config": CONFIG}, TypeError, ["config must be (a )?KimiLinearConfig", "KDAConfig"]
    ),
    Wrong("kimi_linear", {"state": None}, TypeError, ["state must be", "NoneType"]),
    Wrong("kimi_linear", {"state": lambda s: s[0]}, TypeError, ["state must be", "KDAState"]),
    Wrong("kimi_linear", {"state": at("1", tuple)}, TypeError, [r"state\[1\]", "KDAState", "tuple"]),
    Wrong(
        "kimi_linear",
        {"params": at("blocks.1.attention", tuple)},
        TypeError,
        [r"blocks\[1\].attention", "KDAParams", "tuple"],
    ),
    Wrong(
        "kimi_linear",
        {"params": at("blocks.1.mlp", tuple)},
        TypeError,
        [r"blocks\[1\].mlp", "SwiGLUParams", "tuple"],
    ),
    Wrong(
        "kimi_linear",
        {"params": at("blocks.1", None)},
        TypeError,
        [r"blocks\[1\]", "KimiLinearBlock", "NoneType"],
    ),
    Wrong(
        "kimi_linear",
        {"state": lambda s: s[:1]},
        ValueError,
        ["config names 2 layers", "params hold 2 blocks", "state 1 layer"],
    ),
    Wrong(
        "kimi_linear",
        {"params": at("blocks", lambda b: b[:1])},
        ValueError,
        ["config names 2 layers", "params hold 1 block", "state 2 layers"],
    ),
    Wrong(
        "kimi_linear",
        {"state": lambda s: (s[0], init_state(CONFIG, (3,)))},
        ValueError,
        [r"state\[1\]\.conv_state has shape \(3, 9, 56\)"],
    ),
    *offsets("kimi_linear packed", "kimi_linear", r"state\[0\]\.conv_state"),
    Wrong("kimi_linear", {"impl": "cuda"}, ValueError, ["impl must be None or one of", "'cuda'"]),
]


def row_id(row: Wrong) -> str:
    """The call and what is changed."""
    return f"{row.call}-{'-'.join(row.change)}"


@pytest.mark.parametrize("row", [*OF_PRIMITIVES, *LAYERS], ids=row_id)
def test_refused(row: Wrong) -> None:
    """Each row of the tables."""
    function, arguments = wrong_call(row.call, row.change)
    message = refused(function, arguments, row.error)
    for part in row.says:
        assert re.search(part, message), message


@pytest.mark.parametrize("call", ["layer", "kimi_linear"])
def test_a_layer_says_which_primitive_lacks_an_implementation(call: str) -> None:
    """The reason is the primitive's own."""
    function, arguments = wrong_call(call, {"impl": "ascendc"})
    message = refused(function, arguments, NotImplementedError, before_work=False)
    assert re.match(r"\w+: impl='ascendc' cannot serve this call: .+", message)


@pytest.mark.parametrize("impl", [None, "reference", "fallback"])
@pytest.mark.parametrize(
    ("call", "change", "says"),
    [
        ("kda", {"v": longer(0)}, "v has shape"),
        ("kda packed", {"cu_seqlens": (0, 2, 2, 4)}, "must end at T = 5"),
        ("causal_conv1d", {"weight": longer(0)}, "weight has shape"),
    ],
)
def test_every_implementation_is_guarded(
    call: str, change: dict[str, Any], says: str, impl: str | None
) -> None:
    """The checks stand before the choice."""
    function, arguments = wrong_call(call, {**change, "impl": impl})
    assert says in refused(function, arguments, ValueError)


# explain


@pytest.mark.parametrize("name", PRIMITIVES)
def test_explain_raises_what_the_call_would(name: str) -> None:
    """The same error for the same arguments."""
    function, arguments = wrong_call(name, {next(iter(CALLS[name].letters)): None})
    message = refused(function, arguments, TypeError)
    assert refused(lambda **arguments: explain(function, **arguments), arguments, TypeError) == message


@pytest.mark.parametrize("primitive", [kimi_delta_attention, "kda", None])
def test_explain_knows_primitives_only(primitive: Any) -> None:
    """What has no choice of implementations has nothing to explain."""
    with pytest.raises(ValueError, match=r"explain: .* is not one of the primitives \[.*'kda'"):
        explain(primitive)


# Configs


BAD_SIZES = [0, -1, 2.0, "4", True]
BAD_CONFIGS = [
    *(
        ({field: given}, ValueError, [field, "positive integer", repr(given)])
        for field, given in product(
            ("hidden_size", "num_heads", "head_dim", "num_v_heads", "head_v_dim", "conv_size"), BAD_SIZES
        )
    ),
    *(
        ({field: None}, ValueError, [field, "positive integer", "None"])
        for field in ("hidden_size", "conv_size")
    ),
    ({"num_v_heads": 3}, ValueError, ["num_v_heads must be a multiple of num_heads", "3 and 2"]),
    ({"num_v_heads": 1}, ValueError, ["num_v_heads must be a multiple of num_heads", "1 and 2"]),
    *(
        ({"lower_bound": given}, ValueError, [r"lower_bound must be None or in \[-5, 0\)", repr(given)])
        for given in (-5.1, 0.0, 2.0, float("nan"))
    ),
    ({"lower_bound": "-5"}, TypeError, [r"lower_bound must be None or in \[-5, 0\)", "'-5'"]),
    *(
        (
            {"output_gate": given},
            ValueError,
            ["output_gate must be one of", "'low_rank', 'full_rank'", repr(given)],
        )
        for given in ("swish", None, True)
    ),
    *(
        ({"chunk_size": given}, ValueError, ["chunk_size must be a power of two", repr(given)])
        for given in (0, 3, -4, 4.0, None, True)
    ),
    ({"norm_eps": "1e-5"}, TypeError, ["norm_eps must be a number", "'1e-5'"]),
    ({"norm_eps": None}, TypeError, ["norm_eps must be a number", "None"]),
    ({"norm_eps": -1.0}, ValueError, ["norm_eps must", "-1.0"]),
    ({"allow_neg_eigval": "no"}, ValueError, ["allow_neg_eigval must be one of", "'no'"]),
    ({"allow_neg_eigval": None}, ValueError, ["allow_neg_eigval must be one of", "None"]),
]


@pytest.mark.parametrize(("change", "error", "says"), BAD_CONFIGS)
def test_config(change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    """A config that no layer fits is not made; the message names the field."""
    with pytest.raises(error, match=r"^KDAConfig: ") as caught:
        replace(CONFIG, **change)
    for part in says:
        assert caught.match(part)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        *(
            ({field: given}, ValueError, [field, "positive integer", repr(given)])
            for field in ("vocab_size", "intermediate_size")
            for given in BAD_SIZES
        ),
        ({"kda": None}, TypeError, ["kda must be (a )?KDAConfig", "NoneType"]),
        ({"kda": {"hidden_size": 4}}, TypeError, ["kda must be (a )?KDAConfig", "dict"]),
    ],
)
def test_lm_config(change: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    """The same of the model's config."""
    with pytest.raises(error, match=r"^KimiLinearConfig: ") as caught:
        replace(LM_CONFIG, **change)
    for part in says:
        assert caught.match(part)


def test_configs_are_keyword_only() -> None:
    """Eleven numbers in a row are no config."""
    with pytest.raises(TypeError, match="positional"):
        KDAConfig(8, 2, 4)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="hiden_size"):
        KDAConfig(hiden_size=8, num_heads=2, head_dim=4)  # pyright: ignore[reportCallIssue]


INITS: dict[str, Callable[..., Any]] = {
    "init_kimi_delta_attention": lambda **keywords: init_kimi_delta_attention(CONFIG, **keywords),
    "init_state": lambda **keywords: init_state(CONFIG, (2,), **keywords),
    "init_swiglu": lambda **keywords: init_swiglu(D, INNER, **keywords),
    "init_kimi_linear": lambda **keywords: init_kimi_linear(LM_CONFIG, **keywords),
    "init_kimi_linear_state": lambda **keywords: init_kimi_linear_state(LM_CONFIG, (2,), **keywords),
    "init_attention_residual": lambda **keywords: init_attention_residual(D, **keywords),
    "init_mla": lambda **keywords: init_mla(MLA_CONFIG, **keywords),
    "init_mla_state": lambda **keywords: init_mla_state(MLA_CONFIG, (2,), **keywords),
    "init_moe": lambda **keywords: init_moe(MOE_CONFIG, **keywords),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("init", INITS)
def test_initial_values_are_floats(init: str, dtype: torch.dtype) -> None:
    """Parameters and states that every call would refuse are not made."""
    with pytest.raises(TypeError, match=f"dtype must be a float of 16, 32 or 64 bits, got {dtype}"):
        INITS[init](dtype=dtype)


@pytest.mark.parametrize("init", [init_state, init_kimi_linear_state, init_mla_state])
def test_a_batch_shape_is_a_tuple(init: Callable[..., Any]) -> None:
    """A number, which is easily written for one axis, is named as what it is."""
    config = {init_state: CONFIG, init_kimi_linear_state: LM_CONFIG, init_mla_state: MLA_CONFIG}[init]
    with pytest.raises(TypeError, match=f"^{init.__name__}: batch_shape must be a tuple of sizes, got 4"):
        init(config, 4)


# Transforms


ALIKE = [
    # In the rows of a vmap the call has the shapes that it has without: they are mapped over one more axis.
    ("kda", {"v": longer(1)}, ValueError),
    ("kda", {"initial_state": longer(-1)}, ValueError),
    ("kda", {"initial_state": half}, TypeError),
    ("kda", {"k": half}, TypeError),
    ("kda", {"beta": cast(torch.int64)}, TypeError),
    ("kda", HEADS, ValueError),
    ("kda", {"chunk_size": 3}, ValueError),
    ("kda", {"impl": "cuda"}, ValueError),
    ("kda", {"impl": "ascendc"}, NotImplementedError),
    ("kda packed", {"cu_seqlens": (0, 2, 2, 4)}, ValueError),
    ("kda packed", {"cu_seqlens": (0, 5)}, ValueError),
    ("kda_step", {"g_t": longer(-1)}, ValueError),
    ("fused_kda", {"raw": longer(-1)}, ValueError),
    ("fused_kda", {"A_log": longer(0)}, ValueError),
    ("causal_conv1d", {"weight": longer(0)}, ValueError),
    ("causal_conv1d", {"conv_state": half}, TypeError),
    ("kda_gate", {"dt_bias": longer(0)}, ValueError),
    ("gated_rms_norm", {"gate": longer(-1)}, ValueError),
    ("l2_norm", {"x": lambda x: x[0, 0]}, ValueError),
    ("layer", {"x": longer(-1)}, ValueError),
    ("layer", {"state": at("conv_state", longer(0))}, ValueError),
    ("layer packed", {"cu_seqlens": (0, 2, 2, 6)}, ValueError),
    ("kimi_linear", {"state": at("1.recurrent_state", longer(0))}, ValueError),
]


def split(arguments: dict[str, Any]) -> tuple[list[Tensor], Callable[[list[Any]], dict[str, Any]]]:
    """The tensors among the arguments, and the way back."""
    static = {name: value for name, value in arguments.items() if name in ("config", "cu_seqlens")}
    rest: Any = {name: value for name, value in arguments.items() if name not in static}
    leaves, treedef = optree.tree_flatten(rest)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def together(tensors: list[Any]) -> dict[str, Any]:
        new = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            new[place] = tensor
        return {**optree.tree_unflatten(treedef, new), **static}

    return [leaves[i] for i in places], together


def under_vmap(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Two equal rows."""
    tensors, together = split(arguments)
    # Two rows, mapped over a last axis: no shape inside is one of outside.
    rows = [torch.stack([x, x], -1) for x in tensors]
    return torch.vmap(lambda *tensors: function(**together(list(tensors))), -1)(*rows)


def under_grad(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The gradient in every float tensor."""
    tensors, together = split(arguments)
    argnums = tuple(i for i, x in enumerate(tensors) if x.is_floating_point())

    def loss(*tensors: Tensor) -> Tensor:
        results = optree.tree_leaves(function(**together(list(tensors))))
        return torch.stack([x.sum() for x in results]).sum()

    return torch.func.grad(loss, argnums)(*tensors)


def under_vmap_of_grad(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Per-sample gradients."""
    return under_vmap(lambda **arguments: under_grad(function, arguments), arguments)


def under_jvp(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The directional derivative along the inputs themselves."""
    tensors, together = split(arguments)
    moving = [i for i, x in enumerate(tensors) if x.is_floating_point()]

    def moved(*primals: Tensor) -> Any:
        new = list(tensors)
        for i, primal in zip(moving, primals, strict=True):
            new[i] = primal
        return optree.tree_leaves(function(**together(new)))

    primals = tuple(tensors[i] for i in moving)
    return torch.func.jvp(moved, primals, primals)


TRANSFORMS = [under_vmap, under_grad, under_vmap_of_grad, under_jvp]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("call", "change", "error"), ALIKE)
def test_the_message_is_the_same_under_a_transform(
    call: str, change: dict[str, Any], error: type[Exception], transform: Callable[..., Any]
) -> None:
    """Word for word."""
    function, arguments = wrong_call(call, change)
    message = refused(function, arguments, error)
    with pytest.raises(error) as caught:
        transform(function, arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", ["kda", "causal_conv1d packed", "layer", "kimi_linear"])
def test_the_valid_calls_are_valid_under_a_transform(call: str, transform: Callable[..., Any]) -> None:
    """The errors above are not the transform's."""
    function, arguments = wrong_call(call, {})
    results = [x for x in optree.tree_leaves(transform(function, arguments)) if isinstance(x, Tensor)]
    assert results and any(x.abs().max() > 0 for x in results)


@pytest.mark.parametrize("call", ["kda packed", "causal_conv1d packed", "layer packed", "kimi_linear packed"])
def test_offsets_are_not_mapped(call: str) -> None:
    """Rows of a vmap share one packing: mapped offsets are refused, not read."""
    function, arguments = wrong_call(call, {})
    rows = torch.tensor([[0, 2, 2, 5], [0, 1, 2, 5]])
    with pytest.raises(ValueError, match="cu_seqlens must not be mapped by vmap"):
        torch.vmap(lambda cu_seqlens: function(**{**arguments, "cu_seqlens": cu_seqlens}))(rows)


def test_the_table_is_complete() -> None:
    """Every public function that takes tensors is here or in a file of its own, and what the layer calls."""
    functions = {name for name in kda_fn.__all__ if not isinstance(getattr(kda_fn, name), type)}
    elsewhere = {"explain", "scan", "pack", "pad", "lengths_of", "cu_seqlens_of", "linear", "quantize"}
    elsewhere |= {
        "quantize_layer",
        "quantize_tokens",
        "mla",
        "moe",
        "attention_residual",
        "sample",
        "decode_step",
    }
    for module in ("transition", "distributed"):
        elsewhere |= {n for n in functions if getattr(kda_fn, n).__module__ == f"kda_fn.{module}"}
    inits = {name for name in functions if name.startswith("init_")}
    assert inits == set(INITS)
    expected = functions - elsewhere - inits | {"fused_kda"}
    assert {call.function.__name__ for call in CALLS.values()} == expected
