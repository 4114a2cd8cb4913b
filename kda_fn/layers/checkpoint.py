"""Published checkpoints of the hybrid model as plain pytrees, and back.

    config, params = load_kimi_linear("Kimi-Linear-48B-A3B-Instruct", dtype=torch.bfloat16, device="cuda")
    save_kimi_linear("folder", params, config=config)
    python -m kda_fn.layers.checkpoint PATH        layers, parameters, state sizes; whether all names fit

A checkpoint is a folder of safetensors, one file or shards with an index, with a `config.json`. Read are the
names that are published (Kimi Linear, Kimi K3's language model) and those that transformers saves, and int8
weights with their `quant_model_description.json`. Tensors come one at a time, each to its device and dtype:
never more than one projection of the model is in memory twice.

Needs safetensors (`pip install kda_fn[checkpoint]`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

from kda_fn import _check
from kda_fn.layers.attention_residual import AttentionResidualParams
from kda_fn.layers.kimi_linear import (
    KimiLinearBlock,
    KimiLinearConfig,
    KimiLinearParams,
    init_kimi_linear,
    init_kimi_linear_state,
)
from kda_fn.layers.mla import MLAConfig, MLAParams
from kda_fn.layers.mlp import SwiGLUParams
from kda_fn.layers.moe import MoEConfig, MoEParams
from kda_fn.types import W8A8, KDAConfig, KDAParams, Tensor

__all__ = ["Sizes", "describe", "load_kimi_linear", "read_config", "save_kimi_linear", "sizes"]

QUANTISATION = "quant_model_description.json"
FLOATING, DYNAMIC = "FLOAT", "W8A8_DYNAMIC"

# What is stored under another name than the published one.
RENAMED = (
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"\.self_attn\.forget_gate\."), ".self_attn."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.experts\.(\d+)\.gate_proj\."), r".experts.\1.w1."),
    (re.compile(r"\.experts\.(\d+)\.down_proj\."), r".experts.\1.w2."),
    (re.compile(r"\.experts\.(\d+)\.up_proj\."), r".experts.\1.w3."),
)
NOT_OURS = re.compile(r"^(vision_tower|mm_projector)\.|\.rotary_emb\.inv_freq$")


# The config


def read_config(source: str | Path | Mapping[str, Any] | object) -> KimiLinearConfig:
    """The config of a checkpoint: of its folder or `config.json`, or of what was read from it, a mapping or
    an object with attributes; a text model inside a multimodal one (`text_config`) too.

    Layers are named by `layer_types` and `mlp_layer_types`, or by `linear_attn_config` (1-based lists) and
    `first_k_dense_replace`.

    Raises FileNotFoundError where there is no file, ValueError for what is missing or contradicts itself,
    NotImplementedError for a choice that this model does not have.

    >>> read_config({"model_type": "kimi_linear"})
    Traceback (most recent call last):
    ValueError: read_config: the config has no num_hidden_layers
    """
    if isinstance(source, str | Path):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if not file.exists():
            raise FileNotFoundError(
                f"read_config: there is no {file}: a checkpoint is a folder, nothing is downloaded"
            )
        try:
            source = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"read_config: {file} is no JSON: {error}") from error
    fields = _Fields(_Fields(source).get("text_config", default=source))
    linear = _Fields(fields.get("linear_attn_config", default={}))
    ours = _Fields(fields.get("kda_fn", default={}))
    layers = fields.need("num_hidden_layers")

    _refuse(fields, "attention_bias", allowed=(False,))
    _refuse(fields, "mla_use_nope", allowed=(True,))
    _refuse(fields, "moe_router_activation_func", allowed=("sigmoid",))
    _refuse(fields, "hidden_act", allowed=("silu", "situ"))
    _refuse(fields, "num_nextn_predict_layers", allowed=(0,))
    situ = None
    if fields.get("hidden_act") == "situ":
        situ = (float(fields.need("activation_situ_beta")), float(fields.need("activation_situ_linear_beta")))

    layer_types = _layer_types(fields, linear, layers)
    mlp_types = _mlp_types(fields, layers)
    D, eps = fields.need("hidden_size"), fields.get("rms_norm_eps", default=1e-6)
    heads = linear.get("num_heads") or fields.need("linear_num_heads")
    bound = linear.get("gate_lower_bound")
    kda = KDAConfig(
        hidden_size=D,
        num_heads=heads,
        head_dim=linear.get("head_dim") or fields.need("linear_head_dim"),
        num_v_heads=linear.get("num_v_heads"),
        head_v_dim=linear.get("head_v_dim"),
        conv_size=linear.get("short_conv_kernel_size") or fields.get("linear_conv_kernel_dim", default=4),
        lower_bound=None if bound is None else float(bound),
        output_gate="full_rank" if linear.get("use_full_rank_gate", default=False) else "low_rank",
        allow_neg_eigval=ours.get("allow_neg_eigval", default=False),
        norm_eps=eps,
        chunk_size=ours.get("chunk_size", default=64),
    )
    mla = moe = None
    if "mla" in layer_types:
        mla = MLAConfig(
            hidden_size=D,
            num_heads=fields.need("num_attention_heads"),
            head_dim=fields.need("qk_nope_head_dim"),
            shared_dim=fields.need("qk_rope_head_dim"),
            head_v_dim=fields.need("v_head_dim"),
            latent_dim=fields.need("kv_lora_rank"),
            query_rank=fields.get("q_lora_rank"),
            output_gate=fields.get("mla_use_output_gate", default=False),
            norm_eps=ours.get("mla_norm_eps", default=1e-6),
        )
    if "moe" in mlp_types:
        inner = fields.need("moe_intermediate_size")
        grouped = fields.get("use_grouped_topk", default=True)
        groups = fields.get("num_expert_group", "n_group", default=1) if grouped else 1
        moe = MoEConfig(
            hidden_size=D,
            num_experts=fields.need("num_experts", "num_local_experts"),
            experts_per_token=fields.need("num_experts_per_token", "num_experts_per_tok"),
            intermediate_size=inner,
            shared_size=inner * (fields.get("num_shared_experts", "n_shared_experts", default=0) or 0),
            num_groups=groups,
            topk_groups=1 if groups == 1 else fields.get("topk_group", default=1),
            renormalize=fields.get("moe_renormalize", "norm_topk_prob", default=True),
            scaling=float(fields.get("routed_scaling_factor", default=1.0)),
            latent_size=fields.get("routed_expert_hidden_size"),
            latent_norm=fields.get("latent_moe_use_norm", default=False),
            norm_eps=eps,
            situ=situ,
        )
    return KimiLinearConfig(
        vocab_size=fields.need("vocab_size"),
        kda=kda,
        layer_types=layer_types,
        intermediate_size=fields.need("intermediate_size"),
        mlp_types=mlp_types,
        mla=mla,
        moe=moe,
        norm_eps=eps,
        tie_embeddings=fields.get("tie_word_embeddings", default=False),
        residual_block=fields.get("attn_res_block_size") or None,
        situ=situ,
    )


def _get(source: object, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


class _Fields:
    """The fields of a config, a mapping or an object; one that is None is not there."""

    def __init__(self, source: object) -> None:
        self.source = source

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of the names that is there."""
        return next((value for name in names if (value := _get(self.source, name)) is not None), default)

    def need(self, *names: str) -> Any:
        """The same, which must be there."""
        value = self.get(*names)
        if value is None:
            raise ValueError(f"read_config: the config has no {' or '.join(names)}")
        return value


def _refuse(fields: _Fields, name: str, *, allowed: tuple[Any, ...]) -> None:
    value = fields.get(name, default=allowed[0])
    if value not in allowed:
        raise NotImplementedError(f"read_config: {name} is {value!r}, only {allowed} are built")


def _named(fields: _Fields, field: str, kinds: dict[str, str], layers: int) -> tuple[Any, ...] | None:
    """The kinds of the layers that a list names one by one, None where there is no such list."""
    named = fields.get(field)
    if named is None:
        return None
    unknown = sorted(set(named) - set(kinds))
    if unknown or len(named) != layers:
        raise ValueError(
            f"read_config: {field} must name each of {layers} layers as one of {tuple(kinds)}, got "
            f"{unknown or len(named)}"
        )
    return tuple(kinds[name] for name in named)


def _layer_types(fields: _Fields, linear: _Fields, layers: int) -> tuple[Any, ...]:
    named = _named(fields, "layer_types", {"linear_attention": "kda", "full_attention": "mla"}, layers)
    if named is not None:
        return named
    kda, full = linear.get("kda_layers", default=[]), linear.get("full_attn_layers", default=[])
    if sorted([*kda, *full]) != list(range(1, layers + 1)):
        raise ValueError(
            f"read_config: linear_attn_config must list each of the layers 1 to {layers} once, got "
            f"kda_layers={list(kda)} and full_attn_layers={list(full)}"
        )
    return tuple("mla" if i in full else "kda" for i in range(1, layers + 1))


def _mlp_types(fields: _Fields, layers: int) -> tuple[Any, ...]:
    named = _named(fields, "mlp_layer_types", {"dense": "dense", "sparse": "moe"}, layers)
    if named is not None:
        return named
    if fields.get("num_experts", "num_local_experts") is None:
        return ("dense",) * layers
    first, every = fields.get("first_k_dense_replace", default=0), fields.get("moe_layer_freq", default=1)
    return tuple("moe" if i >= first and i % every == 0 else "dense" for i in range(layers))


def _published_config(config: KimiLinearConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` with the published names; what those cannot say is under "kda_fn"."""
    kda, mla, moe = config.kda, config.mla, config.moe
    numbered = list(enumerate(config.layer_types, 1))
    fields: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": kda.hidden_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu" if config.situ is None else "situ",
        "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in config.mlps],
        "linear_attn_config": {
            "kda_layers": [i for i, kind in numbered if kind == "kda"],
            "full_attn_layers": [i for i, kind in numbered if kind == "mla"],
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_size,
            "use_full_rank_gate": kda.output_gate == "full_rank",
            **({} if kda.num_v_heads is None else {"num_v_heads": kda.num_v_heads}),
            **({} if kda.head_v_dim is None else {"head_v_dim": kda.head_v_dim}),
            **({} if kda.lower_bound is None else {"gate_lower_bound": kda.lower_bound}),
        },
    }
    if config.situ is not None:
        fields["activation_situ_beta"], fields["activation_situ_linear_beta"] = config.situ
    if config.residual_block is not None:
        fields["attn_res_block_size"] = config.residual_block
    if mla is not None:
        fields |= {
            "num_attention_heads": mla.num_heads,
            "num_key_value_heads": mla.num_heads,
            "qk_nope_head_dim": mla.head_dim,
            "qk_rope_head_dim": mla.shared_dim,
            "v_head_dim": mla.head_v_dim,
            "kv_lora_rank": mla.latent_dim,
            "q_lora_rank": mla.query_rank,
            "mla_use_nope": True,
            "mla_use_output_gate": mla.output_gate,
        }
    if moe is not None:
        shared, rest = divmod(moe.shared_size, moe.intermediate_size)
        if rest:
            raise ValueError(
                "save_kimi_linear: shared_size must be a multiple of intermediate_size, got "
                f"{moe.shared_size} and {moe.intermediate_size}: config.json counts shared experts"
            )
        fields |= {
            "num_experts": moe.num_experts,
            "num_experts_per_token": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "num_shared_experts": shared,
            "num_expert_group": moe.num_groups,
            "topk_group": moe.topk_groups,
            "moe_renormalize": moe.renormalize,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": moe.scaling,
            "latent_moe_use_norm": moe.latent_norm,
            **({} if moe.latent_size is None else {"routed_expert_hidden_size": moe.latent_size}),
        }
    fields["kda_fn"] = {"allow_neg_eigval": kda.allow_neg_eigval, "chunk_size": kda.chunk_size}
    if mla is not None:
        fields["kda_fn"]["mla_norm_eps"] = mla.norm_eps
    if read_config(fields) != config:
        raise ValueError("save_kimi_linear: config.json has no place for all of config's choices")
    return fields


# Reading


def load_kimi_linear(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> tuple[KimiLinearConfig, KimiLinearParams]:
    """The config and the parameters of a checkpoint.

    Parameters
    ----------
    path : a folder with `config.json` and safetensors, one file or shards with an index.
    dtype : of the parameters, None: as the embedding is stored. The convolutions, A_log, dt_bias and the
        routers are float32 at least, whatever it is; int8 weights stay W8A8.
    device : where they go, tensor by tensor.
    progress : a bar over the layers (tqdm).

    q, k and v are merged, and so are the gates.

    Raises FileNotFoundError where there is no checkpoint; ValueError, before any tensor is read, that lists
    every missing, unexpected or misshapen tensor and every projection of mixed types.

    >>> load_kimi_linear("no-folder")
    Traceback (most recent call last):
    FileNotFoundError: read_config: there is no no-folder: a checkpoint is a folder, nothing is downloaded
    """
    config = read_config(path)
    with ExitStack() as stack:
        stored = _Stored(Path(path), stack)
        problems = _problems(config, stored)
        if problems:
            raise ValueError(f"load_kimi_linear: {path} does not fit its config:\n" + "\n".join(problems))
        dtype = dtype or stored.shapes["model.embed_tokens.weight"].dtype
        _check.float_dtype("load_kimi_linear", dtype)
        return config, _build(config, _Reader(stored, dtype, torch.device(device)), progress)


def _names(folder: Path) -> dict[str, Path]:
    """The file of every stored tensor, by its own name."""
    from safetensors import safe_open

    if not folder.is_dir():
        raise FileNotFoundError(f"load_kimi_linear: {folder} is no folder")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        absent = sorted({file for file in files.values() if not (folder / file).exists()})
        if absent:
            raise FileNotFoundError(f"load_kimi_linear: {index} names files that are not there: {absent}")
        return {name: folder / file for name, file in files.items()}
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    if not found:
        raise FileNotFoundError(f"load_kimi_linear: {folder} holds no safetensors")
    return found


def _types(folder: Path) -> dict[str, str]:
    """The quantisation of every weight that the description names."""
    path = folder / QUANTISATION
    described = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {_published(name): kind for name, kind in described.items() if isinstance(kind, str)}


def _published(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = pattern.sub(replacement, name)
    return name


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Stored:
    """The tensors of a folder by their published names; files are opened once, tensors read one by one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        files = _names(folder)
        dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        dtypes |= {"I8": torch.int8}
        packed = next((name for name in files if name.endswith(".weight_packed")), None)
        if packed is not None:
            raise NotImplementedError(f"load_kimi_linear: {packed}: weights of four bits are not built")
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in sorted(set(files.values()))}
        self.types, self.files = _types(folder), {}
        self.shapes: dict[str, _Header] = {}
        for name, file in files.items():
            if NOT_OURS.search(name):
                continue
            published = _published(name)
            header = opened[file].get_slice(name)
            self.files[published] = opened[file], name
            self.shapes[published] = _Header(
                tuple(header.get_shape()), dtypes.get(header.get_dtype(), torch.uint8)
            )

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        file, own_name = self.files[name]
        return file.get_tensor(own_name)

    def kind(self, name: str) -> str:
        """FLOATING, DYNAMIC, or what else the description says of a weight."""
        return self.types.get(name, DYNAMIC if self.shapes[name].dtype == torch.int8 else FLOATING)


class _Reader:
    """Gives each tensor as the model wants it. Without a device it reads nothing, gives meta tensors and
    notes in `problems` what does not fit."""

    def __init__(self, stored: _Stored, dtype: torch.dtype, device: torch.device | None) -> None:
        self.stored, self.dtype, self.device = stored, dtype, device
        self.wide = torch.promote_types(dtype, torch.float32)
        self.problems: list[str] = []
        self.used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.stored

    def rank(self, name: str, default: int) -> int:
        """The rows of a stored weight: the config does not tell the rank of a low-rank projection."""
        shape = self.stored.shapes[name].shape if self.has(name) else ()
        return shape[0] if len(shape) == 2 else default

    def none(self) -> Tensor:
        return torch.zeros(0, dtype=self.dtype, device=self.device or "meta")

    def tensor(self, name: str, *shape: int, wide: bool = False, start: bool = False) -> Tensor:
        """A tensor of that shape, axes of size one apart; with `start` the first numbers of a longer one."""
        dtype = self.wide if wide else self.dtype
        self.used.add(name)
        if self.device is not None:
            x = self.stored.read(name)
            x = x.flatten()[: shape[0]] if start else x.reshape(shape)
            return x.to(self.device, dtype)
        if not self.has(name):
            self.problems.append(f"  missing: {name} {list(shape)}")
        else:
            found = self.stored.shapes[name]
            count = torch.Size(found.shape).numel()
            alike = [n for n in found.shape if n != 1] == [n for n in shape if n != 1]
            if not (alike or (start and count >= shape[0])):
                self.problems.append(f"  misshapen: {name} {list(found.shape)}, expected {list(shape)}")
            elif not found.dtype.is_floating_point:
                self.problems.append(f"  {name} must be floating point, its type is {found.dtype}")
        return torch.empty(shape, dtype=dtype, device="meta")

    def weight(self, names: list[str], rows: list[int], columns: int) -> Tensor | W8A8:
        """One weight of the rows of several, in the order of the names: floating, or all of them int8."""
        kinds = {name: self.stored.kind(name) for name in names if self.has(name)}
        if len(set(kinds.values())) > 1:
            self.problems.append(f"  one projection must be of one type, got {kinds}")
            self.used.update(names, (n + part for n in names for part in ("_scale", "_offset")))
            return torch.empty(sum(rows), columns, dtype=self.dtype, device="meta")
        kind = next(iter(kinds.values()), FLOATING)
        if kind == FLOATING:
            parts = [self.tensor(name, n, columns) for name, n in zip(names, rows, strict=True)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        if kind != DYNAMIC:
            raise NotImplementedError(f"load_kimi_linear: {names[0]} is {kind}, only {DYNAMIC} is built")
        parts = [self._int8(name, n, columns) for name, n in zip(names, rows, strict=True)]
        return W8A8(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _int8(self, name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        scale, offset = f"{name}_scale", f"{name}_offset"
        self.used.update((name, offset))
        if self.device is None:
            found = self.stored.shapes.get(name)
            if found is None:
                self.problems.append(f"  missing: {name} {[rows, columns]}")
            elif found != ((rows, columns), torch.int8):
                self.problems.append(
                    f"  misshapen: {name} {list(found.shape)} {found.dtype}, expected {[rows, columns]} int8"
                )
            if self.has(offset) and bool(self.stored.read(offset).any()):
                self.problems.append(f"  {offset} must be zeros: the quantisation is symmetric")
            weight = torch.empty(rows, columns, dtype=torch.int8, device="meta")
        else:
            weight = self.stored.read(name).to(self.device)
        return weight, self.tensor(scale, rows, wide=True)


def _problems(config: KimiLinearConfig, stored: _Stored) -> list[str]:
    """What does not fit, in words, found from the files' headers alone."""
    reader = _Reader(stored, torch.float32, None)
    _build(config, reader, False)
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    extra = sorted(stored.shapes.keys() - reader.used - tied)
    return reader.problems + [f"  unexpected: {name} {list(stored.shapes[name].shape)}" for name in extra]


def _build(config: KimiLinearConfig, reader: _Reader, progress: bool) -> KimiLinearParams:
    D, vocab = config.kda.D, config.vocab_size
    embedding = reader.tensor("model.embed_tokens.weight", vocab, D)
    layers = range(config.num_layers)
    if progress:
        from tqdm import tqdm

        layers = tqdm(layers, desc="layers")
    blocks = tuple(_block(config, reader, i) for i in layers)
    return KimiLinearParams(
        embedding,
        blocks,
        _residual(config, reader, "model.output_attn_res"),
        reader.tensor("model.norm.weight", D),
        reader.none() if config.tie_embeddings else reader.weight(["lm_head.weight"], [vocab], D),
    )


def _block(config: KimiLinearConfig, reader: _Reader, i: int) -> KimiLinearBlock:
    name, D = f"model.layers.{i}", config.kda.D
    if config.layer_types[i] == "kda":
        attention = _kda(config.kda, reader, f"{name}.self_attn")
    else:
        assert config.mla is not None
        attention = _mla(config.mla, reader, f"{name}.self_attn")
    if config.mlps[i] == "dense":
        mlp = _swiglu(D, config.intermediate_size, reader, f"{name}.mlp")
    else:
        assert config.moe is not None
        mlp = _moe(config.moe, reader, f"{name}.mlp")
    return KimiLinearBlock(
        _residual(config, reader, f"{name}.self_attention_res"),
        reader.tensor(f"{name}.input_layernorm.weight", D),
        attention,
        _residual(config, reader, f"{name}.mlp_res"),
        reader.tensor(f"{name}.post_attention_layernorm.weight", D),
        mlp,
    )


def _residual(config: KimiLinearConfig, reader: _Reader, name: str) -> AttentionResidualParams:
    if config.residual_block is None:
        return AttentionResidualParams(reader.none(), reader.none())
    D = config.kda.D
    return AttentionResidualParams(
        reader.tensor(f"{name}_norm.weight", D), reader.tensor(f"{name}_proj.weight", D)
    )


def _kda(config: KDAConfig, reader: _Reader, name: str) -> KDAParams:
    D, H, HV, K, V, W, P = (getattr(config, letter) for letter in "D H HV K V W P".split())
    rows = [H * K, H * K, HV * V]

    low_rank = config.output_gate == "low_rank"
    down = [f"{name}.{x}.weight" for x in ("f_a_proj", "b_proj", "g_a_proj" if low_rank else "g_proj")]
    R, G = reader.rank(down[0], K), reader.rank(down[2], V) if low_rank else HV * V
    bias = f"{name}.g_b_proj.bias"
    if reader.has(f"{name}.conv1d.weight"):
        conv = reader.tensor(f"{name}.conv1d.weight", P, W, wide=True)
    else:
        filters = zip("qkv", rows, strict=True)
        conv = torch.cat([reader.tensor(f"{name}.{x}_conv1d.weight", n, W, wide=True) for x, n in filters])
    A_log = f"{name}.A_log"
    without = config.lower_bound is not None and not reader.has(A_log)
    return KDAParams(
        qkv=reader.weight([f"{name}.{x}_proj.weight" for x in "qkv"], rows, D),
        conv=conv,
        gates=reader.weight(down, [R, HV, G], D),
        decay=reader.weight([f"{name}.f_b_proj.weight"], [HV * K], R),
        A_log=reader.none().to(reader.wide) if without else reader.tensor(A_log, HV, wide=True, start=True),
        dt_bias=reader.tensor(f"{name}.dt_bias", HV * K, wide=True, start=True),
        output_gate=reader.weight([f"{name}.g_b_proj.weight"], [HV * V], G) if low_rank else reader.none(),
        output_gate_bias=reader.tensor(bias, HV * V) if low_rank and reader.has(bias) else reader.none(),
        norm=reader.tensor(f"{name}.o_norm.weight", V),
        out=reader.weight([f"{name}.o_proj.weight"], [D], HV * V),
    )


def _mla(config: MLAConfig, reader: _Reader, name: str) -> MLAParams:
    D, H, K, E, V, L, R = config.sizes
    up = reader.tensor(f"{name}.kv_b_proj.weight", H * (K + V), L).unflatten(0, (H, K + V))
    return MLAParams(
        q_down=reader.weight([f"{name}.q_a_proj.weight"], [R], D) if R else reader.none(),
        q_norm=reader.tensor(f"{name}.q_a_layernorm.weight", R) if R else reader.none(),
        q_up=reader.weight([f"{name}.{'q_b_proj' if R else 'q_proj'}.weight"], [H * (K + E)], R or D),
        kv_down=reader.weight([f"{name}.kv_a_proj_with_mqa.weight"], [L + E], D),
        kv_norm=reader.tensor(f"{name}.kv_a_layernorm.weight", L),
        k_up=up[:, :K].contiguous(),
        v_up=up[:, K:].contiguous(),
        gate=reader.weight([f"{name}.g_proj.weight"], [H * V], D) if config.output_gate else reader.none(),
        out=reader.weight([f"{name}.o_proj.weight"], [D], H * V),
    )


def _swiglu(D: int, inner: int, reader: _Reader, name: str) -> SwiGLUParams:
    return SwiGLUParams(
        reader.weight([f"{name}.gate_proj.weight"], [inner], D),
        reader.weight([f"{name}.up_proj.weight"], [inner], D),
        reader.weight([f"{name}.down_proj.weight"], [D], inner),
    )


def _moe(config: MoEConfig, reader: _Reader, name: str) -> MoEParams:
    D, X, I, Z = config.hidden_size, config.num_experts, config.intermediate_size, config.Z  # noqa: E741
    stacked, latent = f"{name}.experts.gate_up_proj", config.latent_size is not None
    if reader.has(stacked):
        gate_up = reader.tensor(stacked, X, 2 * I, Z)
        down = reader.tensor(f"{name}.experts.down_proj", X, Z, I)
    else:
        gate_up = torch.empty(X, 2 * I, Z, dtype=reader.dtype, device=reader.device or "meta")
        down = torch.empty(X, Z, I, dtype=reader.dtype, device=reader.device or "meta")
        for e in range(X):
            expert = f"{name}.experts.{e}"
            gate_up[e, :I] = reader.tensor(f"{expert}.w1.weight", I, Z)
            gate_up[e, I:] = reader.tensor(f"{expert}.w3.weight", I, Z)
            down[e] = reader.tensor(f"{expert}.w2.weight", Z, I)
    if config.shared_size:
        shared = _swiglu(D, config.shared_size, reader, f"{name}.shared_experts")
    else:
        empty = reader.none()
        shared = SwiGLUParams(empty.reshape(0, D), empty.reshape(0, D), empty.reshape(D, 0))
    routed = f"{name}.routed_expert"
    return MoEParams(
        router=reader.tensor(f"{name}.gate.weight", X, D, wide=True),
        bias=reader.tensor(f"{name}.gate.e_score_correction_bias", X, wide=True),
        gate_up=gate_up,
        down=down,
        shared=shared,
        latent_down=reader.weight([f"{routed}_down_proj.weight"], [Z], D) if latent else reader.none(),
        latent_norm=reader.tensor(f"{routed}_norm.weight", Z) if config.latent_norm else reader.none(),
        latent_up=reader.weight([f"{routed}_up_proj.weight"], [D], Z) if latent else reader.none(),
    )


# Writing


def save_kimi_linear(
    path: str | Path, params: KimiLinearParams, *, config: KimiLinearConfig, shard_bytes: int = 5 * 10**9
) -> None:
    """Writes a folder with the published names: `config.json`, safetensors in shards of at most `shard_bytes`
    with an index (one file where it fits), and `quant_model_description.json` where there are int8 weights.

    Loading it gives the same bits. An earlier checkpoint there is replaced when all is written.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda",), intermediate_size=16, kda=layer)
    >>> params = init_kimi_linear(config)
    >>> with TemporaryDirectory() as folder:
    ...     save_kimi_linear(folder, params, config=config)
    ...     _, loaded = load_kimi_linear(folder)
    >>> torch.equal(loaded.embedding, params.embedding)
    True
    """
    from safetensors.torch import save_file

    _check.instance("save_kimi_linear", "params", params, KimiLinearParams)
    _check.instance("save_kimi_linear", "config", config, KimiLinearConfig)
    _check.positive_integer("save_kimi_linear", "shard_bytes", shard_bytes)
    fields = _published_config(config, params.embedding.dtype)
    shards: list[list[str]] = [[]]
    size, total, kinds = 0, 0, {}
    for name, x in _tensors(params, config):
        count = x.numel() * x.element_size()
        if shards[-1] and size + count > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + count, total + count
        kinds[name] = DYNAMIC if x.dtype == torch.int8 or name.endswith("_scale") else FLOATING
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place, written = Path(temporary), {}
        tensors = _tensors(params, config)
        for i, names in enumerate(shards, 1):
            part = "" if len(shards) == 1 else f"-{i:05d}-of-{len(shards):05d}"
            file = f"model{part}.safetensors"
            shard = {name: x.contiguous() for name, (_, x) in zip(names, tensors, strict=False)}
            save_file(shard, place / file, {"format": "pt"})
            written |= dict.fromkeys(names, file)
        texts = {"config.json": fields}
        if len(shards) > 1:
            texts["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": written}
        if DYNAMIC in kinds.values():
            texts[QUANTISATION] = kinds
        for file, content in texts.items():
            (place / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        names = {file.name for file in place.iterdir()}
        for file in (*folder.glob("model*.safetensors"), *folder.glob("*.index.json"), folder / QUANTISATION):
            if file.name not in names:
                # What an earlier save left would be read for a part of this one.
                file.unlink(missing_ok=True)
        for name in names:
            os.replace(place / name, folder / name)


def _tensors(params: KimiLinearParams, config: KimiLinearConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its published name, merged ones in their parts."""
    yield "model.embed_tokens.weight", params.embedding
    for i, block in enumerate(params.blocks):
        name = f"model.layers.{i}"
        yield f"{name}.input_layernorm.weight", block.attention_norm
        yield from _residual_tensors(f"{name}.self_attention_res", block.attention_residual)
        if isinstance(block.attention, KDAParams):
            yield from _kda_tensors(f"{name}.self_attn", block.attention, config.kda)
        else:
            assert config.mla is not None
            yield from _mla_tensors(f"{name}.self_attn", block.attention, config.mla)
        yield f"{name}.post_attention_layernorm.weight", block.mlp_norm
        yield from _residual_tensors(f"{name}.mlp_res", block.mlp_residual)
        if isinstance(block.mlp, SwiGLUParams):
            yield from _swiglu_tensors(f"{name}.mlp", block.mlp)
        else:
            yield from _moe_tensors(f"{name}.block_sparse_moe", block.mlp)
    yield from _residual_tensors("model.output_attn_res", params.residual)
    yield "model.norm.weight", params.norm
    if not config.tie_embeddings:
        yield from _weights(["lm_head.weight"], params.head, [config.vocab_size])


def _weights(names: list[str], weight: Tensor | W8A8, rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight, Tensor):
        yield from zip(names, weight.split(rows), strict=True)
        return
    for name, w, scale in zip(names, weight.weight.split(rows), weight.scale.split(rows), strict=True):
        yield name, w
        yield f"{name}_scale", scale.unsqueeze(-1)


def _whole(name: str, weight: Tensor | W8A8) -> Iterator[tuple[str, Tensor]]:
    if weight.shape[0]:
        yield from _weights([f"{name}.weight"], weight, [weight.shape[0]])


def _residual_tensors(name: str, params: AttentionResidualParams) -> Iterator[tuple[str, Tensor]]:
    if params.norm.numel():
        yield f"{name}_norm.weight", params.norm
        yield f"{name}_proj.weight", params.query.unsqueeze(0)


def _kda_tensors(name: str, params: KDAParams, config: KDAConfig) -> Iterator[tuple[str, Tensor]]:
    rows = [config.H * config.K, config.H * config.K, config.HV * config.V]
    yield from _weights([f"{name}.{x}_proj.weight" for x in "qkv"], params.qkv, rows)
    for x, filters in zip("qkv", params.conv.split(rows), strict=True):
        yield f"{name}.{x}_conv1d.weight", filters.unsqueeze(1)
    low_rank, R = config.output_gate == "low_rank", params.decay.shape[1]
    down = [f"{name}.{x}.weight" for x in ("f_a_proj", "b_proj", "g_a_proj" if low_rank else "g_proj")]
    yield from _weights(down, params.gates, [R, config.HV, params.gates.shape[0] - R - config.HV])
    yield from _whole(f"{name}.f_b_proj", params.decay)
    yield from _whole(f"{name}.g_b_proj", params.output_gate)
    if params.output_gate_bias.numel():
        yield f"{name}.g_b_proj.bias", params.output_gate_bias
    if params.A_log.numel():
        yield f"{name}.A_log", params.A_log.reshape(1, 1, -1, 1)
    yield f"{name}.dt_bias", params.dt_bias
    yield f"{name}.o_norm.weight", params.norm
    yield from _whole(f"{name}.o_proj", params.out)


def _mla_tensors(name: str, params: MLAParams, config: MLAConfig) -> Iterator[tuple[str, Tensor]]:
    if config.query_rank is None:
        yield from _whole(f"{name}.q_proj", params.q_up)
    else:
        yield from _whole(f"{name}.q_a_proj", params.q_down)
        yield f"{name}.q_a_layernorm.weight", params.q_norm
        yield from _whole(f"{name}.q_b_proj", params.q_up)
    yield from _whole(f"{name}.kv_a_proj_with_mqa", params.kv_down)
    yield f"{name}.kv_a_layernorm.weight", params.kv_norm
    yield f"{name}.kv_b_proj.weight", torch.cat([params.k_up, params.v_up], 1).flatten(0, 1)
    yield from _whole(f"{name}.g_proj", params.gate)
    yield from _whole(f"{name}.o_proj", params.out)


def _swiglu_tensors(name: str, params: SwiGLUParams) -> Iterator[tuple[str, Tensor]]:
    for field in SwiGLUParams._fields:
        yield from _whole(f"{name}.{field}_proj", getattr(params, field))


def _moe_tensors(name: str, params: MoEParams) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.gate.weight", params.router
    yield f"{name}.gate.e_score_correction_bias", params.bias
    for e, (gate_up, down) in enumerate(zip(params.gate_up, params.down, strict=True)):
        gate, up = gate_up.chunk(2)
        yield f"{name}.experts.{e}.w1.weight", gate
        yield f"{name}.experts.{e}.w2.weight", down
        yield f"{name}.experts.{e}.w3.weight", up
    if params.shared.gate.shape[0]:
        yield from _swiglu_tensors(f"{name}.shared_experts", params.shared)
    yield from _whole(f"{name}.routed_expert_down_proj", params.latent_down)
    if params.latent_norm.numel():
        yield f"{name}.routed_expert_norm.weight", params.latent_norm
    yield from _whole(f"{name}.routed_expert_up_proj", params.latent_up)


# The command


class Sizes(NamedTuple):
    """Of one block, or of the whole model."""

    parameters: int
    active: int
    """Those that one token is multiplied with."""
    state: int
    """Bytes for each sequence, whatever its length."""
    per_token: int
    """Bytes for each token of the sequence."""


def sizes(config: KimiLinearConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Sizes], Sizes]:
    """The sizes of each block and of the whole model, from tensors without storage.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda", "kda"), intermediate_size=16, kda=layer)
    >>> blocks, whole = sizes(config)
    >>> len(blocks), whole.per_token  # KDA's state does not grow
    (2, 0)
    """
    params = init_kimi_linear(config, dtype=dtype, device="meta")
    where: dict[str, Any] = {"dtype": dtype, "device": "meta"}
    empty, one = (init_kimi_linear_state(config, capacity=room, **where) for room in (None, 1))

    def count(tree: Any, measure: Callable[[Tensor], int] = torch.numel) -> int:
        return sum(measure(leaf) for leaf in optree.tree_leaves(tree))

    blocks = []
    for block, before, after in zip(params.blocks, empty, one, strict=True):
        total = active = count(block)
        if isinstance(block.mlp, MoEParams):
            assert config.moe is not None
            experts = count((block.mlp.gate_up, block.mlp.down))
            active -= experts - experts * config.moe.experts_per_token // config.moe.num_experts
        fixed = count(before, _floating_bytes)
        blocks.append(Sizes(total, active, fixed, count(after, _floating_bytes) - fixed))
    total = count(params)
    rest = total - sum(block.parameters for block in blocks) - params.embedding.numel()
    active = rest + sum(block.active for block in blocks)
    if config.tie_embeddings:
        active += params.embedding.numel()
    return blocks, Sizes(
        total, active, sum(block.state for block in blocks), sum(block.per_token for block in blocks)
    )


def _floating_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size() if x.is_floating_point() else 0


def describe(config: KimiLinearConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    """The model's layers, parameters and state sizes as a table; equal layers in one row.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda", "kda"), intermediate_size=16, kda=layer)
    >>> print(describe(config))
    | layers, from 0 | attention | MLP | parameters | active | state, bytes | bytes a token (bfloat16) |
    | --- | --- | --- | ---: | ---: | ---: | ---: |
    | 0-1 | KDA | dense | 689 | 689 | 136 | 0 |
    | all, with embedding and head | | | 1,562 | 1,474 | 272 | 0 |
    """
    blocks, whole = sizes(config, dtype)
    rows: list[tuple[list[int], tuple[str, str, Sizes]]] = []
    for i, row in enumerate(zip(config.layer_types, config.mlps, blocks, strict=True)):
        for numbers, seen in rows:
            if seen == row:
                numbers.append(i)
                break
        else:
            rows.append(([i], row))
    kind = str(dtype).removeprefix("torch.")
    lines = [
        f"| layers, from 0 | attention | MLP | parameters | active | state, bytes | bytes a token ({kind}) |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for numbers, (attention, mlp, size) in rows:
        figures = " | ".join(f"{n:,}" for n in size)
        lines.append(f"| {_ranges(numbers)} | {attention.upper()} | {mlp} | {figures} |")
    figures = " | ".join(f"{n:,}" for n in whole)
    return "\n".join([*lines, f"| all, with embedding and head | | | {figures} |"])


def _ranges(numbers: list[int]) -> str:
    """`[1, 2, 3, 5]` as "1-3, 5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """`python -m kda_fn.layers.checkpoint PATH`; 1 where a tensor does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m kda_fn.layers.checkpoint",
        description="The layers, parameters and state sizes of a checkpoint, and whether its tensors fit.",
    )
    parser.add_argument("path", type=Path, help="the folder, or a config.json alone")
    path = parser.parse_args(arguments).path
    if not path.exists():
        parser.error(f"{path} does not exist")
    try:
        config = read_config(path)
        print(describe(config))
        if not path.is_dir():
            return 0
        with ExitStack() as stack:
            stored = _Stored(path, stack)
            problems = _problems(config, stored)
    except (FileNotFoundError, ValueError, NotImplementedError) as error:
        print(error)
        return 1
    print(f"\n{len(stored.shapes)} tensors:", "\n".join(["", *problems]) if problems else "all fit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
