"""A mixture of experts with a sigmoid router.

    s = sigmoid(W_r x)                              [X] scores in float32
    e = top_k(s + bias)                             among the groups whose two best of s + bias sum highest
    w = scaling · s_e / Σ s_e                       the bias steers the choice alone
    y = Σ_e w_e expert_e(x) + shared(x)             each a gated MLP (`kda_fn.swiglu`)

With a latent size the routed experts work in fewer channels: y = up rms_norm(Σ_e w_e expert_e(down x)) +
shared(x), while the router and the shared expert read x (Kimi K3).

x, y [*B D]     X experts, I their intermediate size, Z the latent size or D

Source: DeepSeek-V3, arXiv:2412.19437; Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Function

from kda_fn import _check
from kda_fn.layers.mlp import (
    SwiGLUParams,
    apply_swiglu,
    check_situ,
    check_swiglu,
    gated,
    init_swiglu,
    normal_weight,
)
from kda_fn.primitives._kernel import one_node, operator, wants_torch_operations
from kda_fn.primitives._primitive import check_impl
from kda_fn.primitives.linear import linear
from kda_fn.types import W8A8, Float, Impl, Tensor

__all__ = ["MoEConfig", "MoEParams", "init_moe", "moe", "route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The sizes and choices of one mixture of experts.

    shared_size       intermediate size of the shared expert, 0 for none
    num_groups        groups of experts, of which the best topk_groups are chosen from
    latent_size       channels in which the routed experts work; None: hidden_size
    latent_norm       whether their sum is normalised before it returns to hidden_size
    situ              None: SwiGLU. (a, b): SiTU-GLU (`kda_fn.swiglu`)
    """

    hidden_size: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    scaling: float = 1.0
    latent_size: int | None = None
    latent_norm: bool = False
    norm_eps: float = 1e-5
    situ: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        caller = "MoEConfig"
        sizes = "hidden_size num_experts experts_per_token intermediate_size num_groups topk_groups".split()
        for name in sizes:
            _check.positive_integer(caller, name, getattr(self, name))
        if self.shared_size != 0:
            _check.positive_integer(caller, "shared_size", self.shared_size)
        if self.latent_size is not None:
            _check.positive_integer(caller, "latent_size", self.latent_size)
        for name in ("renormalize", "latent_norm"):
            _check.one_of(caller, name, getattr(self, name), (False, True))
        _check.number(caller, "scaling", self.scaling)
        _check.epsilon(caller, "norm_eps", self.norm_eps)
        check_situ(caller, self.situ)
        X, groups = self.num_experts, self.num_groups
        if X % groups or (groups > 1 and X // groups < 2):
            raise ValueError(
                f"{caller}: num_experts must be num_groups times at least two, got {X} and {groups}"
            )
        if self.topk_groups > groups:
            raise ValueError(
                f"{caller}: topk_groups must be at most num_groups={groups}, got {self.topk_groups}"
            )
        eligible = self.topk_groups * X // groups
        if self.experts_per_token > eligible:
            raise ValueError(
                f"{caller}: experts_per_token must be at most the {eligible} experts of the chosen groups, "
                f"got {self.experts_per_token}"
            )

    @property
    def Z(self) -> int:
        """The channels in which the routed experts work."""
        return self.hidden_size if self.latent_size is None else self.latent_size


class MoEParams(NamedTuple):
    """The parameters of one mixture of experts. A tensor of shape [0] is absent."""

    router: Float[Tensor, "X D"]
    """float32."""
    bias: Float[Tensor, " X"]
    """The score correction, float32; it has no gradient."""
    gate_up: Float[Tensor, "X 2*I Z"]
    """Of each expert, gate above up."""
    down: Float[Tensor, "X Z I"]
    shared: SwiGLUParams
    """With an intermediate size of 0 there is no shared expert."""
    latent_down: Float[Tensor, "Z D"] | W8A8
    latent_norm: Float[Tensor, " Z_or_0"]
    latent_up: Float[Tensor, "D Z"] | W8A8


def moe(
    params: MoEParams, x: Float[Tensor, "*B D"], *, config: MoEConfig, impl: Impl | None = None
) -> Float[Tensor, "*B D"]:
    """The mixture of experts, for each vector on the last axis.

    Parameters
    ----------
    params : of `init_moe`, or loaded in its layout.
    x : [*B D], in the dtype of the weights.
    impl : of quantised projections.

    A token costs its own experts alone: tokens are sorted by expert and each expert is one product.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> config = MoEConfig(hidden_size=8, num_experts=4, experts_per_token=2, intermediate_size=16)
    >>> params, x = init_moe(config), torch.randn(5, 8)
    >>> y = moe(params, x, config=config)
    >>> torch.allclose(y[3], moe(params, x[3], config=config), atol=1e-5)  # a token has its own experts
    True
    """
    _check.instance("moe", "config", config, MoEConfig)
    _check.instance("moe", "params", params, MoEParams)
    _check.floating("moe", {"x": x, **_check.leaves("params", params)})
    if x.ndim < 1 or x.shape[-1] != config.hidden_size:
        raise ValueError(f"moe: x has shape {tuple(x.shape)}, expected [*B D] with D={config.hidden_size}")
    check_moe("moe", params, config, "x", x)
    check_impl("moe", impl)
    return apply_moe(params, x, config, impl)


def apply_moe(
    params: MoEParams, x: Float[Tensor, "*B D"], config: MoEConfig, impl: Impl | None
) -> Float[Tensor, "*B D"]:
    """`moe` of what has been checked."""
    experts, weights = route(params, x, config=config)
    routed = x if config.latent_size is None else linear(x, params.latent_down, impl=impl)
    k, rows = config.experts_per_token, routed.reshape(-1, config.Z)
    expert = experts.reshape(-1)
    repeated = rows.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
    gate, up = expert_linear(repeated, params.gate_up, expert).chunk(2, -1)
    y = expert_linear(gated(gate, up, config.situ), params.down, expert)
    y = (y.unflatten(0, (rows.shape[0], k)) * weights.reshape(-1, k, 1)).sum(1)
    y = y.to(x.dtype).reshape(routed.shape)
    if params.latent_norm.numel():
        y = F.rms_norm(y, params.latent_norm.shape, params.latent_norm, config.norm_eps)
    if config.latent_size is not None:
        y = linear(y, params.latent_up, impl=impl)
    return y + apply_swiglu(params.shared, x, config.situ, impl) if config.shared_size else y


def route(
    params: MoEParams, x: Float[Tensor, "*B D"], *, config: MoEConfig
) -> tuple[Tensor, Float[Tensor, "*B k"]]:
    """The experts of each token, [*B k] int64, and their weights, float32 at least.

    >>> config = MoEConfig(hidden_size=8, num_experts=4, experts_per_token=2, intermediate_size=16)
    >>> experts, weights = route(init_moe(config), torch.randn(5, 8), config=config)
    >>> experts.shape, torch.allclose(weights.sum(-1), torch.ones(5))
    (torch.Size([5, 2]), True)
    """
    wide = torch.promote_types(x.dtype, params.router.dtype)
    scores = F.linear(x.to(wide), params.router.to(wide)).sigmoid()
    choice = scores.detach() + params.bias.detach()
    if config.num_groups > 1:
        grouped = choice.unflatten(-1, (config.num_groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(config.topk_groups, -1).indices
        chosen = torch.arange(config.num_groups, device=x.device) == best.unsqueeze(-1)
        choice = grouped.masked_fill(~chosen.any(-2).unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(config.experts_per_token, -1).indices
    weights = scores.gather(-1, experts)
    if config.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * config.scaling


def expert_linear(
    x: Float[Tensor, "M D"], weight: Float[Tensor, "X O D"], expert: Tensor
) -> Float[Tensor, "M O"]:
    """y_m = W_e x_m with e = expert[m]; every transform of torch goes through."""
    if wants_torch_operations():
        return torch.bmm(weight[expert], x.unsqueeze(-1)).squeeze(-1)
    return _apply(x, weight, expert)


@one_node
def _apply(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return _ExpertLinear.apply(x, weight, expert)


class _ExpertLinear(Function):
    """Its derivatives are itself and `_ExpertOuter`; a mapped axis joins the rows, or the experts."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        return _expert_linear(x, weight, expert)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = cotangents
        x, weight, expert = ctx.saved_tensors
        dx = _ExpertLinear.apply(dy, weight.transpose(1, 2), expert) if ctx.needs_input_grad[0] else None
        dw = _ExpertOuter.apply(dy, x, expert, weight.shape[0]) if ctx.needs_input_grad[1] else None
        return dx, dw, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        n, (x, weight, expert) = info.batch_size, args
        x, expert = (_leading(a, d, n) for a, d in zip((x, expert), (in_dims[0], in_dims[2]), strict=True))
        if in_dims[1] is not None:
            weight = weight.movedim(in_dims[1], 0)
            expert = _own_experts(expert, weight.shape[1])
            weight = weight.flatten(0, 1)
        y = _ExpertLinear.apply(x.flatten(0, 1), weight, expert.flatten())
        return y.unflatten(0, x.shape[:2]), 0


class _ExpertOuter(Function):
    """G_e = Σ of dy_m x_m^T over the rows m of expert e, [X O D]."""

    @staticmethod
    def forward(dy: Tensor, x: Tensor, expert: Tensor, X: int) -> Tensor:
        return _expert_outer(dy, x, expert, X)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (dG,) = cotangents
        dy, x, expert = ctx.saved_tensors
        ddy = _ExpertLinear.apply(x, dG, expert) if ctx.needs_input_grad[0] else None
        dx = _ExpertLinear.apply(dy, dG.transpose(1, 2), expert) if ctx.needs_input_grad[1] else None
        return ddy, dx, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        n, (dy, x, expert, X) = info.batch_size, args
        dy, x, expert = (_leading(a, d, n) for a, d in zip((dy, x, expert), in_dims[:3], strict=True))
        expert = _own_experts(expert, X).flatten()
        G = _ExpertOuter.apply(dy.flatten(0, 1), x.flatten(0, 1), expert, n * X)
        return G.unflatten(0, (n, X)), 0


def _leading(x: Tensor, dim: int | None, n: int) -> Tensor:
    """The mapped axis first; n copies of what has none."""
    return x.unsqueeze(0).expand(n, *x.shape) if dim is None else x.movedim(dim, 0)


def _own_experts(expert: Tensor, X: int) -> Tensor:
    """Row b of `expert` numbers experts of its own: those of a weight [n X ..] flattened."""
    return expert + X * torch.arange(expert.shape[0], device=expert.device).unsqueeze(1)


def _sorted_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    order, stops = _by_expert(expert, weight.shape[0])
    sorted_x = x[order]
    if _grouped_mm_serves(x, weight):
        grouped = F.grouped_mm(sorted_x, weight.transpose(1, 2), offs=stops)
        return y.index_copy_(0, order, grouped)
    parts = [F.linear(sorted_x[rows], weight[e]) for e, rows in _rows_of_experts(stops)]
    return y.index_copy_(0, order, torch.cat(parts)) if parts else y


def _sorted_outer(dy: Tensor, x: Tensor, expert: Tensor, X: int) -> Tensor:
    G = x.new_zeros(X, dy.shape[1], x.shape[1])
    order, stops = _by_expert(expert, X)
    dy, x = dy[order], x[order]
    for e, rows in _rows_of_experts(stops):
        torch.mm(dy[rows].T, x[rows], out=G[e])
    return G


def _by_expert(expert: Tensor, X: int) -> tuple[Tensor, Tensor]:
    """The rows in the order of their experts, and where each expert's end, int32."""
    return expert.argsort(stable=True), torch.bincount(expert, minlength=X).cumsum(0).to(torch.int32)


def _rows_of_experts(stops: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and where they are in their order."""
    start = 0
    for e, stop in enumerate(stops.tolist()):
        if stop > start:
            yield e, slice(start, stop)
        start = stop


def _grouped_mm_serves(x: Tensor, weight: Tensor) -> bool:
    """torch's grouped product reads no counts but wants rows of whole 16 bytes; torch 2.11 may lack it."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.numel() > 0 and hasattr(F, "grouped_mm")


_expert_linear = operator(
    "expert_linear(Tensor x, Tensor weight, Tensor expert) -> Tensor",
    _sorted_linear,
    lambda x, weight, expert: x.new_empty(x.shape[0], weight.shape[1]),
)
_expert_outer = operator(
    "expert_outer(Tensor dy, Tensor x, Tensor expert, int X) -> Tensor",
    _sorted_outer,
    lambda dy, x, expert, X: x.new_empty(X, dy.shape[1], x.shape[1]),
)


def check_moe(
    caller: str,
    params: MoEParams,
    config: MoEConfig,
    input_name: str,
    input_like: Tensor,
    name: str = "params",
) -> None:
    """That the shapes and dtypes fit the config and the input."""
    D, X, I, Z = config.hidden_size, config.num_experts, config.intermediate_size, config.Z  # noqa: E741
    latent = config.latent_size is not None
    _check.instance(caller, f"{name}.shared", params.shared, SwiGLUParams)
    _check.exact_shapes(
        caller,
        {
            f"{name}.router": (params.router, (X, D)),
            f"{name}.bias": (params.bias, (X,)),
            f"{name}.gate_up": (params.gate_up, (X, 2 * I, Z)),
            f"{name}.down": (params.down, (X, Z, I)),
            f"{name}.shared.gate": (params.shared.gate, (config.shared_size, D)),
            f"{name}.latent_down": (params.latent_down, (Z, D) if latent else (0,)),
            f"{name}.latent_norm": (params.latent_norm, (Z,) if config.latent_norm else (0,)),
            f"{name}.latent_up": (params.latent_up, (D, Z) if latent else (0,)),
        },
    )
    check_swiglu(caller, params.shared, input_name, input_like, D, f"{name}.shared")
    alike = {
        n: x for n, x in _check.leaves(name, params).items() if n not in (f"{name}.router", f"{name}.bias")
    }
    _check.same_dtype(caller, {input_name: input_like, **alike})


def init_moe(
    config: MoEConfig,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MoEParams:
    """Normal weights with the standard deviation of 1/sqrt(inputs), a bias of zeros; router and bias in
    float32 at least.

    >>> config = MoEConfig(hidden_size=8, num_experts=4, experts_per_token=2, intermediate_size=16)
    >>> init_moe(config).gate_up.shape  # of each expert, gate above up
    torch.Size([4, 32, 8])
    """
    _check.float_dtype("init_moe", dtype)
    where: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
    wide = {**where, "dtype": torch.promote_types(dtype, torch.float32)}
    D, X, I, Z = config.hidden_size, config.num_experts, config.intermediate_size, config.Z  # noqa: E741
    none = torch.zeros(0, dtype=dtype, device=device)
    latent = config.latent_size is not None
    return MoEParams(
        router=normal_weight(X, D, **wide),
        bias=torch.zeros(X, dtype=wide["dtype"], device=device),
        gate_up=normal_weight(X * 2 * I, Z, **where).unflatten(0, (X, 2 * I)),
        down=normal_weight(X * Z, I, **where).unflatten(0, (X, Z)),
        shared=init_swiglu(D, config.shared_size, **where),
        latent_down=normal_weight(Z, D, **where) if latent else none,
        latent_norm=torch.ones(Z, dtype=dtype, device=device) if config.latent_norm else none,
        latent_up=normal_weight(D, Z, **where) if latent else none,
    )


torch.serialization.add_safe_globals([MoEParams])
