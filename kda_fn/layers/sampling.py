"""One step of generation, as functions; the loop is `kda_fn.scan`, or yours.

    tokens = scan(partial(decode_step, params, config=config), (state, last_token), uniforms)

The randomness is an argument: one number u in [0, 1) for each token drawn. The token is where the cumulative
sum of the probabilities, the most likely first, passes u; equal numbers give equal tokens, on any device,
under vmap too.
"""

from __future__ import annotations

import torch

from kda_fn import _check
from kda_fn.layers.kimi_linear import KimiLinearConfig, KimiLinearParams, KimiLinearState, kimi_linear
from kda_fn.types import Float, Impl, Tensor

__all__ = ["decode_step", "sample"]


def sample(
    logits: Float[Tensor, "*B vocab"],
    uniform: Float[Tensor, "*B"] | None = None,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Tensor:
    """One token for each row of logits, [*B] int64.

    Parameters
    ----------
    logits : [*B vocab].
    uniform : [*B], in [0, 1); None: the most likely token, whatever the temperature.
    temperature : the logits are divided by it; 0: the most likely token.
    top_p : of the tokens, the most likely whose probabilities sum to top_p, the one that passes it included.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> logits = torch.tensor([0.0, 2, 1])
    >>> sample(logits), sample(logits, torch.tensor(0.99), top_p=0.5)  # one has 0.67 of it
    (tensor(1), tensor(1))
    >>> sample(logits, torch.tensor(0.99))
    tensor(0)
    """
    _check.floating("sample", {"logits": logits, **({} if uniform is None else {"uniform": uniform})})
    if logits.ndim < 1 or not logits.shape[-1]:
        raise ValueError(f"sample: logits has shape {tuple(logits.shape)}, expected [*B vocab]")
    _check.epsilon("sample", "temperature", temperature)
    _check.number("sample", "top_p", top_p)
    if not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p must be in (0, 1], got {top_p}")
    if uniform is None or temperature == 0:
        return logits.argmax(-1)
    _check.exact_shapes("sample", {"uniform": (uniform, tuple(logits.shape[:-1]))})
    wide = torch.promote_types(logits.dtype, torch.float32)
    p, token = torch.softmax(logits.to(wide) / temperature, -1).sort(dim=-1, descending=True, stable=True)
    below = p.cumsum(-1) - p
    kept = below < top_p
    mass = torch.where(kept, p, 0).sum(-1, keepdim=True)
    # The last kept token whose share begins at or before u.
    reached = kept & (below <= uniform.to(wide).unsqueeze(-1) * mass)
    # Logits of NaN reach none.
    return token.gather(-1, (reached.sum(-1, keepdim=True) - 1).clamp(min=0)).squeeze(-1)


def decode_step(
    params: KimiLinearParams,
    carry: tuple[KimiLinearState, Tensor],
    uniform: Float[Tensor, "*B"] | None,
    *,
    config: KimiLinearConfig,
    temperature: float = 1.0,
    top_p: float = 1.0,
    impl: Impl | None = None,
) -> tuple[tuple[KimiLinearState, Tensor], Tensor]:
    """Reads the last token, draws the next: `((state, token), uniform) -> ((state, next), next)`, tokens
    [*B].

    With params applied it is a body for `kda_fn.scan` over uniforms [steps *B]; for that the caches must be
    preallocated (`init_kimi_linear_state(.., capacity=..)`).

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda",), intermediate_size=16, kda=layer)
    >>> params, start = init_kimi_linear(config), (init_kimi_linear_state(config), torch.tensor(3))
    >>> step = lambda carry, u: decode_step(params, carry, u, config=config)
    >>> (state, token), tokens = scan(step, start, torch.rand(20))  # generation
    >>> tokens.shape, token.equal(tokens[-1])
    (torch.Size([20]), True)
    """
    state, token = carry
    state, logits = kimi_linear(params, state, token.unsqueeze(-1), config=config, impl=impl)
    token = sample(logits.squeeze(-2), uniform, temperature=temperature, top_p=top_p)
    return (state, token), token
