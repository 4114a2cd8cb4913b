"""MLA, mixture of experts, attention residuals and the hybrid model in straight-line float64, a token at a
time.

Written from the equations of the papers; no function of the library is called but those of `torch_oracles`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracles import torch_oracles as oracles


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x² + eps) · weight"""
    return x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + eps) * weight.double()


def glu(gate: Tensor, up: Tensor, situ: tuple[float, float] | None) -> Tensor:
    """SwiGLU, or SiTU-GLU."""
    sigmoid = 1 / (1 + torch.exp(-gate))
    if situ is None:
        return gate * sigmoid * up
    a, b = situ
    return a * torch.tanh(gate / a) * sigmoid * b * torch.tanh(up / b)


def mlp(params, x: Tensor, situ: tuple[float, float] | None) -> Tensor:
    """One vector [D]."""
    gate, up, down = (getattr(params, name).double() for name in ("gate", "up", "down"))
    return down @ glu(gate @ x, up @ x, situ)


def moe(params, x: Tensor, config) -> Tensor:
    """[T D], expert by expert of each token."""
    rows = []
    for token in x.double():
        scores = 1 / (1 + torch.exp(-(params.router.double() @ token)))
        choice = (scores + params.bias.double()).tolist()
        size = config.num_experts // config.num_groups
        groups = [list(range(n * size, (n + 1) * size)) for n in range(config.num_groups)]
        if config.num_groups > 1:
            groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
            groups = groups[: config.topk_groups]
        allowed = [e for group in groups for e in group]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: config.experts_per_token]
        total = sum(float(scores[e]) for e in chosen) if config.renormalize else 1.0
        inner = token if config.latent_size is None else params.latent_down.double() @ token
        y = torch.zeros_like(inner)
        for e in chosen:
            gate, up = (params.gate_up[e].double() @ inner).chunk(2)
            y += config.scaling * scores[e] / total * (params.down[e].double() @ glu(gate, up, config.situ))
        if config.latent_norm:
            y = rms_norm(y, params.latent_norm, config.norm_eps)
        if config.latent_size is not None:
            y = params.latent_up.double() @ y
        rows.append(y + mlp(params.shared, token, config.situ) if config.shared_size else y)
    return torch.stack(rows)


def mla(params, x: Tensor, config) -> Tensor:
    """One sequence [T D] from an empty cache, head by head."""
    x, (H, K, V, L) = x.double(), (config.num_heads, config.head_dim, config.head_v_dim, config.latent_dim)
    E = config.shared_dim
    q = x
    if config.query_rank is not None:
        q = rms_norm(x @ params.q_down.double().T, params.q_norm, config.norm_eps)
    q = (q @ params.q_up.double().T).reshape(-1, H, K + E)
    both = x @ params.kv_down.double().T
    latent, shared = rms_norm(both[:, :L], params.kv_norm, config.norm_eps), both[:, L:]
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(H):
            keys, values = latent @ params.k_up[h].double().T, latent @ params.v_up[h].double().T
            scores = [q[t, h, :K] @ keys[s] + q[t, h, K:] @ shared[s] for s in range(t + 1)]
            weights = torch.exp(torch.stack(scores) / math.sqrt(K + E))
            heads.append((weights / weights.sum()) @ values[: t + 1])
        assert heads[0].shape == (V,)
        o = torch.cat(heads)
        if config.output_gate:
            o = o / (1 + torch.exp(-(params.gate.double() @ x[t])))
        rows.append(params.out.double() @ o)
    return torch.stack(rows)


def attention_residual(params, values: list[Tensor], eps: float) -> Tensor:
    """One vector [D] from the sums, each [D]."""
    scores = [params.query.double() @ rms_norm(v, params.norm, eps) for v in values]
    weights = torch.exp(torch.stack(scores))
    weights = weights / weights.sum()
    return torch.stack([w * v.double() for w, v in zip(weights, values, strict=True)]).sum(0)


def kimi_linear(params, tokens: Tensor, config, states) -> Tensor:
    """Logits of one sequence [T] from the empty states given."""
    h = params.embedding.double()[tokens]
    completed: list[Tensor] = []

    def read(residual, h: Tensor, norm: Tensor) -> Tensor:
        if completed:
            tokens = range(len(h))
            h = torch.stack(
                [
                    attention_residual(residual, [*(v[t] for v in completed), h[t]], config.norm_eps)
                    for t in tokens
                ]
            )
        return rms_norm(h, norm, config.norm_eps)

    for i, block in enumerate(params.blocks):
        x = read(block.attention_residual, h, block.attention_norm)
        if config.layer_types[i] == "kda":
            y = oracles.kimi_delta_attention(block.attention, states[i], x, config=config.kda)[1]
        else:
            y = mla(block.attention, x, config.mla)
        if config.residual_block is not None and i % config.residual_block == 0:
            completed.append(h)
            h = y
        else:
            h = h + y
        x = read(block.mlp_residual, h, block.mlp_norm)
        if config.mlps[i] == "dense":
            h = h + torch.stack([mlp(block.mlp, token, config.situ) for token in x])
        else:
            h = h + moe(block.mlp, x, config.moe)
    x = read(params.residual, h, params.norm)
    return x @ (params.embedding if config.tie_embeddings else params.head).double().T
