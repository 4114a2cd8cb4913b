"""torch_npu's `npu_mla_prolog_v3`: bfloat16, inference only. Contract: it has never run on an NPU.

    here                       there
    x, q_norm, kv_norm, k_up   token_x, rmsnorm_gamma_cq, rmsnorm_gamma_ckv, weight_uk: contiguous
    q_down, q_up, kv_down      weight_dq, weight_uq_qr, weight_dkv_kr: [in, out], in the format FRACTAL_NZ
    latent, shared             written into kv_cache and kr_cache: new ones, of these very tokens

It always rotates, and returns the rotated channels as `reference.rotate` does: firsts of pairs, then seconds.

Sources: docs/context/torch_npu-npu_mla_prolog_v3.md of Ascend/op-plugin for arguments, layouts, limits, its
test/test_custom_ops/test_mla_prolog_v3.py for the order of the rotated channels; aclnnMlaPrologV3WeightNz.md
of cann/ops-transformer for the products.
"""

from __future__ import annotations

import torch

from kda_fn.primitives._kernel import eager_inference_only
from kda_fn.primitives._targets import lacks
from kda_fn.types import W8A8, Float, Tensor

DEVICE = "npu"
FRACTAL_NZ = 29
PRODUCTS = ("Ascend910B", "Ascend910_93", "Ascend950")
"""Names of devices start so: Atlas A2, Atlas A3, Ascend 950."""
SIZES = {
    "D": (7168, 7680),
    "R": (1536,),
    "H": (1, 2, 4, 8, 16, 32, 64, 128),
    "K": (128,),
    "L": (512,),
    "E": (64,),
}
BLOCK = 128
"""Tokens in a block of the caches."""


def unsupported(
    x: Tensor,
    q_down: Tensor | W8A8 | None,
    q_norm: Tensor | None,
    q_up: Tensor | W8A8,
    k_up: Tensor,
    kv_down: Tensor | W8A8,
    kv_norm: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
) -> str | None:
    """Why the operator cannot serve this call, or None."""
    if x.device.type != DEVICE:
        return f"npu_mla_prolog_v3 runs on npu devices, these tensors are on {x.device}"
    if q_down is None or q_norm is None:
        return "npu_mla_prolog_v3 needs queries of low rank, and q_down and q_norm are None"
    if isinstance(q_down, W8A8) or isinstance(q_up, W8A8) or isinstance(kv_down, W8A8):
        return "npu_mla_prolog_v3 is given floating weights only, not its own quantised ones"
    if x.dtype != torch.bfloat16:
        return f"npu_mla_prolog_v3 computes in bfloat16, not in {x.dtype}"
    H, K, L = k_up.shape
    sizes = {"D": x.shape[-1], "R": q_down.shape[0], "H": H, "K": K, "L": L, "E": kv_down.shape[0] - L}
    for letter, size in sizes.items():
        if size not in SIZES[letter]:
            fits = " or ".join(map(str, SIZES[letter]))
            return f"npu_mla_prolog_v3 takes {letter} = {fits}, not {size}"
    return (
        eager_inference_only("npu_mla_prolog_v3", x, q_down, q_norm, q_up, k_up, kv_down, kv_norm, cos, sin)
        or lacks("npu_mla_prolog_v3", "get_npu_format")
        or _other_product(x)
        or _in_other_layout({"q_down": q_down, "q_up": q_up, "kv_down": kv_down})
    )


def _other_product(x: Tensor) -> str | None:
    import torch_npu  # pyright: ignore[reportMissingImports]

    product = torch_npu.npu.get_device_name(x.device.index)
    if not product.startswith(PRODUCTS):
        return f"npu_mla_prolog_v3 is documented for {', '.join(PRODUCTS)}, this is an {product}"
    return None


def _in_other_layout(weights: dict[str, Tensor]) -> str | None:
    import torch_npu  # pyright: ignore[reportMissingImports]

    for name, weight in weights.items():
        if not weight.T.is_contiguous() or torch_npu.get_npu_format(weight) != FRACTAL_NZ:
            kept = f"torch_npu.npu_format_cast({name}.T.contiguous(), {FRACTAL_NZ}).T"
            return (
                f"npu_mla_prolog_v3 reads {name} as [in, out] in FRACTAL_NZ, and a copy in each call would "
                f"cost more than it saves: keep {kept}, made once with "
                f"torch_npu.npu.config.allow_internal_format = True"
            )
    return None


def mla_prolog(
    x: Float[Tensor, "*B T D"],
    q_down: Float[Tensor, "R D"] | W8A8 | None,
    q_norm: Float[Tensor, " R"] | None,
    q_up: Float[Tensor, "H_K_E R_or_D"] | W8A8,
    k_up: Float[Tensor, "H K L"],
    kv_down: Float[Tensor, "L_E D"] | W8A8,
    kv_norm: Float[Tensor, " L"],
    *,
    cos: Float[Tensor, "*#B #T E"] | None = None,
    sin: Float[Tensor, "*#B #T E"] | None = None,
    eps: float = 1e-6,
) -> tuple[
    Float[Tensor, "*B T H L"], Float[Tensor, "*B T H E"], Float[Tensor, "*B T L"], Float[Tensor, "*B T E"]
]:
    import torch_npu  # pyright: ignore[reportMissingImports]

    assert q_norm is not None
    assert isinstance(q_down, Tensor) and isinstance(q_up, Tensor) and isinstance(kv_down, Tensor)
    H, _, L = k_up.shape
    lead, E = x.shape[:-1], kv_down.shape[0] - L
    tokens = x.flatten(0, -2).contiguous()
    count = tokens.shape[0]
    if not count:
        return (
            x.new_empty(*lead, H, L),
            x.new_empty(*lead, H, E),
            x.new_empty(*lead, L),
            x.new_empty(*lead, E),
        )
    angles = (x.new_zeros(count, E), x.new_ones(count, E))
    if cos is not None and sin is not None:
        angles = tuple(a.expand(*lead, E).reshape(count, E).contiguous() for a in (sin, cos))
    blocks = -(-count // BLOCK)
    caches = x.new_empty(blocks, BLOCK, 1, L), x.new_empty(blocks, BLOCK, 1, E)
    q_latent, q_shared, *_ = torch_npu.npu_mla_prolog_v3(
        tokens,
        q_down.T,
        q_up.T,
        k_up.contiguous(),
        kv_down.T,
        q_norm.contiguous(),
        kv_norm.contiguous(),
        *angles,
        *caches,
        cache_index=torch.arange(count, device=x.device),
        rmsnorm_epsilon_cq=float(eps),
        rmsnorm_epsilon_ckv=float(eps),
        cache_mode="PA_BSND",
    )
    latent, shared = (cache.flatten(0, 2)[:count].clone() for cache in caches)
    if cos is None:
        q_shared, shared = _pairs_together(q_shared), _pairs_together(shared)
    return (
        q_latent.reshape(*lead, H, L),
        q_shared.reshape(*lead, H, E),
        latent.reshape(*lead, L),
        shared.reshape(*lead, E),
    )


def _pairs_together(x: Tensor) -> Tensor:
    """Undoes the order in which the operator returns channels."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
