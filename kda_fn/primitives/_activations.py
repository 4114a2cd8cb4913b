"""Sigmoid, SiLU and softplus whose value at an element does not depend on where in the tensor it stands.

torch's own take a vectorised route for most elements and a scalar one for the last few of a run, with other
roundings; a row's result would then depend on its neighbours. exp and logsigmoid have one route.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kda_fn.types import Tensor

__all__ = ["sigmoid", "silu", "softplus"]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))"""
    return F.logsigmoid(x).exp()


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)"""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself above 20"""
    return torch.where(x > 20, x, -F.logsigmoid(-x))
