"""A strict stand-in for torch_npu's `npu_mla_prolog_v3` on the CPU, written from its documentation alone.

It refuses what the documentation does not allow, with the documentation's names, and computes the documented
formulas in float32. Of the operator's scenarios it has the one without quantisation, in the cache modes
PA_BSND, BSND and TND.

    c^Q = γ^Q RmsNorm(x W^DQ)   q^N = c^Q W^UQ W^UK      q^R = ROPE(c^Q W^QR)
    k^C = γ^KV RmsNorm(x W^DKV)                          k^R = ROPE(x W^KR)

ROPE is that of the operator's own test: channels (0, 2, ..) then (1, 3, ..), times cos, plus rotate_half of
these times sin.

Sources: docs/context/torch_npu-npu_mla_prolog_v3.md and test/test_custom_ops/test_mla_prolog_v3.py of
Ascend/op-plugin; of its docs also npu_format_cast, get_npu_format and npu-config-allow_internal_format.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ND, FRACTAL_NZ = 2, 29
He, Hcq, Hckv, D, Dr, Nkv = (7168, 7680), 1536, 512, 128, 64, 1
N = (1, 2, 4, 8, 16, 32, 64, 128)
PAGED = "PA_BSND"
CACHE_MODES = (PAGED, "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "TND", "BSND")


class RefusedError(RuntimeError):
    """The call does not fit the documentation."""


def need(fits: bool, what: str) -> None:
    if not fits:
        raise RefusedError(f"npu_mla_prolog_v3: {what}")


class TorchNPU(ModuleType):
    """The module `torch_npu`, as far as it is documented for this operator."""

    def __init__(self, *, device_name: str = "Ascend910_9382", allow_internal_format: bool = True) -> None:
        super().__init__("torch_npu")
        self.npu = SimpleNamespace(
            get_device_name=lambda _device=None: device_name,
            config=SimpleNamespace(allow_internal_format=allow_internal_format),
        )
        # By address of the storage, which stays alive here and is not given to another tensor.
        self.internal: dict[int, Tensor] = {}
        self.calls: list[dict[str, Any]] = []

    def npu_format_cast(self, x: Tensor, acl_format: int) -> Tensor:
        """A copy in that format; in a base format where internal ones are not allowed."""
        need(acl_format in (ND, FRACTAL_NZ), f"format {acl_format}")
        cast = x.clone()
        if acl_format == FRACTAL_NZ and self.npu.config.allow_internal_format:
            self.internal[cast.untyped_storage().data_ptr()] = cast
        return cast

    def get_npu_format(self, x: Tensor) -> int:
        """Of the storage: views have their base's."""
        return FRACTAL_NZ if x.untyped_storage().data_ptr() in self.internal else ND

    def npu_mla_prolog_v3(
        self,
        token_x: Tensor,
        weight_dq: Tensor,
        weight_uq_qr: Tensor,
        weight_uk: Tensor,
        weight_dkv_kr: Tensor,
        rmsnorm_gamma_cq: Tensor,
        rmsnorm_gamma_ckv: Tensor,
        rope_sin: Tensor,
        rope_cos: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
        *,
        cache_index: Tensor | None = None,
        dequant_scale_x: Tensor | None = None,
        dequant_scale_w_dq: Tensor | None = None,
        dequant_scale_w_uq_qr: Tensor | None = None,
        dequant_scale_w_dkv_kr: Tensor | None = None,
        quant_scale_ckv: Tensor | None = None,
        quant_scale_ckr: Tensor | None = None,
        smooth_scales_cq: Tensor | None = None,
        actual_seq_len: Tensor | None = None,
        k_nope_clip_alpha: Tensor | None = None,
        rmsnorm_epsilon_cq: float = 1e-5,
        rmsnorm_epsilon_ckv: float = 1e-5,
        cache_mode: str = PAGED,
        query_norm_flag: bool = False,
        weight_quant_mode: int = 0,
        kv_cache_quant_mode: int = 0,
        query_quant_mode: int = 0,
        ckvkr_repo_mode: int = 0,
        quant_scale_repo_mode: int = 0,
        tile_size: int = 128,
        qc_qr_scale: float = 1.0,
        kc_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        scales = (dequant_scale_x, dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr)
        scales += (quant_scale_ckv, quant_scale_ckr, smooth_scales_cq, k_nope_clip_alpha)
        modes = (weight_quant_mode, kv_cache_quant_mode, query_quant_mode, ckvkr_repo_mode)
        need(all(scale is None for scale in scales), "a scale where nothing is quantised")
        need(modes == (0,) * 4 and quant_scale_repo_mode == 0 and tile_size == 128, "quantised modes")
        need(actual_seq_len is None, "actual_seq_len is for the PA_BLK modes")
        need(cache_mode in CACHE_MODES, f"cache_mode {cache_mode!r}")
        need(query_norm_flag is False, "query_norm_flag is not simulated")
        for name, number in (("cq", rmsnorm_epsilon_cq), ("ckv", rmsnorm_epsilon_ckv)):
            need(type(number) is float, f"rmsnorm_epsilon_{name} is {number!r}, not a float")

        given = {
            "token_x": token_x,
            "weight_dq": weight_dq,
            "weight_uq_qr": weight_uq_qr,
            "weight_uk": weight_uk,
            "weight_dkv_kr": weight_dkv_kr,
            "rmsnorm_gamma_cq": rmsnorm_gamma_cq,
            "rmsnorm_gamma_ckv": rmsnorm_gamma_ckv,
            "rope_sin": rope_sin,
            "rope_cos": rope_cos,
            "kv_cache": kv_cache,
            "kr_cache": kr_cache,
        }
        in_nz = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
        for name, x in given.items():
            need(x.dtype == torch.bfloat16, f"{name} is {x.dtype}")
            need(x.is_contiguous(), f"{name} is not contiguous")
            need(self.get_npu_format(x) == (FRACTAL_NZ if name in in_nz else ND), f"the format of {name}")
        addresses = [x.untyped_storage().data_ptr() for x in given.values() if x.numel()]
        for cache in (kv_cache, kr_cache):
            need(addresses.count(cache.untyped_storage().data_ptr()) == 1, "a cache shares its memory")

        need(token_x.ndim in (2, 3), f"token_x has {token_x.ndim} axes")
        *lead, hidden = token_x.shape
        heads = weight_uk.shape[0]
        need(hidden in He, f"He {hidden}")
        need(heads in N, f"N {heads}")
        shapes = {
            "weight_dq": (hidden, Hcq),
            "weight_uq_qr": (Hcq, heads * (D + Dr)),
            "weight_uk": (heads, D, Hckv),
            "weight_dkv_kr": (hidden, Hckv + Dr),
            "rmsnorm_gamma_cq": (Hcq,),
            "rmsnorm_gamma_ckv": (Hckv,),
            "rope_sin": (*lead, Dr),
            "rope_cos": (*lead, Dr),
        }
        for name, shape in shapes.items():
            need(given[name].shape == shape, f"{name} is {tuple(given[name].shape)}, not {shape}")
        rows = self._rows(cache_mode, lead, kv_cache, kr_cache, cache_index)

        x = token_x.reshape(-1, hidden).float()
        sin, cos = rope_sin.reshape(-1, Dr).float(), rope_cos.reshape(-1, Dr).float()
        cq = qc_qr_scale * _rms_norm(x @ weight_dq.float(), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
        q = (cq.bfloat16().float() @ weight_uq_qr.float()).reshape(-1, heads, D + Dr)
        query = torch.stack(
            [q[:, n, :D].bfloat16().float() @ weight_uk[n].float() for n in range(heads)], dim=1
        )
        query_rope = torch.stack([_rope(q[:, n, D:], cos, sin) for n in range(heads)], dim=1)
        kv = x @ weight_dkv_kr.float()
        ckv = kc_scale * _rms_norm(kv[:, :Hckv], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
        kv_cache.view(-1, Hckv)[rows] = ckv.bfloat16()
        kr_cache.view(-1, Dr)[rows] = _rope(kv[:, Hckv:], cos, sin).bfloat16()
        self.calls.append({**given, "cache_index": cache_index, "cache_mode": cache_mode})
        return (
            query.bfloat16().reshape(*lead, heads, Hckv),
            query_rope.bfloat16().reshape(*lead, heads, Dr),
            torch.empty(0),
            torch.empty(0, dtype=torch.bfloat16),
            torch.empty(0),
        )

    def _rows(
        self, mode: str, lead: list[int], kv_cache: Tensor, kr_cache: Tensor, index: Tensor | None
    ) -> Tensor:
        """Where each token is written, in caches taken as rows."""
        if mode in ("TND", "BSND"):
            need(len(lead) == (1 if mode == "TND" else 2), f"{mode} with token_x of {len(lead) + 1} axes")
            need(index is None, f"cache_index in mode {mode}")
            for cache, width in ((kv_cache, Hckv), (kr_cache, Dr)):
                need(cache.shape == (*lead, Nkv, width), f"a cache of {tuple(cache.shape)} in mode {mode}")
                need(cache.numel() > 0, f"an empty cache in mode {mode}")
            return torch.arange(kv_cache.numel() // Hckv)
        need(mode == PAGED, f"{mode} is not simulated")
        need(kv_cache.ndim == 4, f"kv_cache has {kv_cache.ndim} axes")
        blocks, size = kv_cache.shape[:2]
        need(size in range(16, 1025, 16), f"BlockSize {size}")
        need(kv_cache.shape == (blocks, size, Nkv, Hckv), f"kv_cache is {tuple(kv_cache.shape)}")
        need(kr_cache.shape == (blocks, size, Nkv, Dr), f"kr_cache is {tuple(kr_cache.shape)}")
        if index is None:
            raise RefusedError(f"npu_mla_prolog_v3: no cache_index in mode {mode}")
        need(index.dtype == torch.int64 and index.is_contiguous(), "cache_index is not contiguous int64")
        need(list(index.shape) == lead, f"cache_index is {tuple(index.shape)}")
        rows = index.flatten()
        # The operator checks neither: it would write anywhere.
        need(bool(((rows >= 0) & (rows < blocks * size)).all()), "cache_index out of range")
        need(len(rows.unique()) == len(rows), "two tokens in one slot")
        return rows


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return gamma.float() * x / torch.sqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.reshape(-1, Dr // 2, 2).transpose(2, 1).reshape(-1, Dr)
    half = torch.cat((-x[:, Dr // 2 :], x[:, : Dr // 2]), dim=-1)
    return x * cos + half * sin
