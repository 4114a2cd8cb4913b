"""Checkpoints: both namings and both configs, shards, round trips to the bit, and everything that does not
fit."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws import assert_close
from safetensors.torch import load_file, save_file
from subjects import leaves
from test_kimi_linear import CONFIGS, KIMI_K3, KIMI_LINEAR, D, random_params, run, tokens_of
from their_models import MODELS, VOCABULARY, saved, their_model

from kda_fn import (
    W8A8,
    KDAParams,
    KimiLinearConfig,
    MLAState,
    init_kimi_linear,
    init_kimi_linear_state,
    kimi_linear,
    quantize,
)
from kda_fn.layers.checkpoint import describe, load_kimi_linear, main, read_config, save_kimi_linear, sizes

PUBLISHED = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "intermediate_size": 9216,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
"""Kimi-Linear-48B-A3B's config.json, what of it says something about the model."""


PUBLISHED_K3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "intermediate_size": 33792,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "mla_use_output_gate": True,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "routed_scaling_factor": 1.0,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "kda_layers": [i for i in range(1, 93) if i % 4],
        "head_dim": 128,
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
"""What Kimi K3's text_config says otherwise."""
DOCUMENTED = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")


def same(a: Any, b: Any) -> bool:
    """Equal trees, to the bit."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


# Configs


def test_kimi_linear_48b() -> None:
    """Its parameters and the bytes of its states; the numbers in docs/models.md are these."""
    config = read_config(PUBLISHED)
    assert config.layer_types.count("kda") == 20 and config.mlps.count("dense") == 1
    blocks, whole = sizes(config)
    embedding = 163840 * 2304
    assert round((whole.parameters - 2 * embedding) / 1e9) == 48 and round(whole.active / 1e9) == 3
    # 20 memories of 32 x 128 x 128 float32 and windows of 3 x 12288 bf16; 7 caches of 576 bf16 a token.
    assert whole.state == 20 * (32 * 128 * 128 * 4 + 3 * 12288 * 2)
    assert whole.per_token == 7 * (512 + 64) * 2
    kda = 2304 * (3 * 4096 + 128 + 32 + 128 + 4096) + 2 * 4096 * 128 + 12288 * 4 + 32 + 4096 + 128
    dense = 3 * 2304 * 9216
    assert blocks[0].parameters == kda + dense + 2 * 2304
    mla = 2304 * (32 * 192 + 576 + 4096) + 512 + 512 * 32 * 256
    experts = 257 * 3 * 2304 * 1024 + 256 * 2304 + 256
    assert blocks[3].parameters == mla + experts + 2 * 2304
    assert blocks[3].active == blocks[3].parameters - 248 * 3 * 2304 * 1024
    assert describe(config) in DOCUMENTED


def test_kimi_k3() -> None:
    """2.8e12 parameters, as published."""
    config = read_config({**PUBLISHED, **PUBLISHED_K3})
    assert config.residual_block == 12 and config.kda.output_gate == "full_rank"
    assert config.moe is not None and config.moe.Z == 3584 and config.situ == (4.0, 25.0)
    _, whole = sizes(config)
    assert round(whole.parameters / 1e11) == 28
    assert whole.state == 69 * (96 * 128 * 128 * 4 + 3 * 36864 * 2) and whole.per_token == 24 * 576 * 2
    assert describe(config) in DOCUMENTED


def test_traced_on_meta() -> None:
    """The real sizes without a byte of storage: logits' shape, and the cache's after them."""
    config = read_config(PUBLISHED)
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    params, state = init_kimi_linear(config, **where), init_kimi_linear_state(config, (2,), **where)
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    state, logits = kimi_linear(params, state, tokens, config=config)
    assert logits.shape == (2, 5, 163840)
    assert isinstance(state[3], MLAState) and state[3].latent.shape == (2, 5, 512)


def test_both_namings_and_objects() -> None:
    """transformers' flat fields, the published nested ones, as mappings and as objects: one config."""
    config = read_config(PUBLISHED)
    nested = SimpleNamespace(
        **{**PUBLISHED, "linear_attn_config": SimpleNamespace(**PUBLISHED["linear_attn_config"])}
    )
    assert read_config(nested) == config
    assert read_config({"model_type": "kimi_k3", "text_config": PUBLISHED}) == config
    flat = {k: v for k, v in PUBLISHED.items() if k not in ("linear_attn_config", "first_k_dense_replace")}
    kinds = {"kda": "linear_attention", "mla": "full_attention", "dense": "dense", "moe": "sparse"}
    flat |= {
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "layer_types": [kinds[kind] for kind in config.layer_types],
        "mlp_layer_types": [kinds[kind] for kind in config.mlps],
    }
    assert read_config(flat) == config
    renamed = {"num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok"}
    renamed |= {"num_shared_experts": "n_shared_experts", "moe_renormalize": "norm_topk_prob"}
    renamed |= {"num_expert_group": "n_group"}
    assert read_config({renamed.get(k, k): v for k, v in flat.items()}) == config


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"vocab_size": None}, ValueError, "has no vocab_size"),
        ({"kv_lora_rank": None}, ValueError, "has no kv_lora_rank"),
        ({"attention_bias": True}, NotImplementedError, "attention_bias is True"),
        ({"mla_use_nope": False}, NotImplementedError, "mla_use_nope is False"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act is 'gelu'"),
        ({"hidden_act": "situ"}, ValueError, "has no activation_situ_beta"),
        ({"moe_router_activation_func": "softmax"}, NotImplementedError, "'softmax'"),
        ({"num_nextn_predict_layers": 1}, NotImplementedError, "num_nextn_predict_layers is 1"),
        ({"num_hidden_layers": 28}, ValueError, "each of the layers 1 to 28 once"),
        ({"layer_types": ["sliding_attention"] * 27}, ValueError, "got .*sliding_attention"),
        ({"layer_types": ["full_attention"]}, ValueError, "each of 27 layers .* got 1"),
        ({"mlp_layer_types": ["dense"]}, ValueError, "each of 27 layers .* got 1"),
    ],
)
def test_configs_that_do_not_fit(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^read_config: .*{says}"):
        read_config({**PUBLISHED, **change})


# Round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, shard_bytes: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """To the bit, config included, over one file and over shards, whatever was there before."""
    config = CONFIGS[name]
    params = random_params(config, dtype)
    for size in (700, shard_bytes):
        save_kimi_linear(tmp_path, params, config=config, shard_bytes=size)
    read, loaded = load_kimi_linear(tmp_path)
    assert read == config and same(loaded, params)
    files = sorted(path.name for path in tmp_path.iterdir())
    if shard_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        assert "model.safetensors.index.json" in files and len(files) > 4
        for path in tmp_path.glob("*.safetensors"):
            tensors = load_file(path).values()
            assert len(tensors) == 1 or sum(x.numel() * x.element_size() for x in tensors) <= 3000


@pytest.mark.parametrize(
    "config",
    [
        replace(KIMI_LINEAR, tie_embeddings=True),
        replace(KIMI_K3, mlp_types=None, moe=None),
        replace(
            KIMI_LINEAR, kda=replace(KIMI_LINEAR.kda, allow_neg_eigval=True, chunk_size=32), norm_eps=1e-5
        ),
        replace(KIMI_LINEAR, layer_types=("kda",) * 3, mla=None),
    ],
)
def test_other_choices_round_trip(config: KimiLinearConfig, tmp_path: Path) -> None:
    params = random_params(config)
    save_kimi_linear(tmp_path, params, config=config)
    read, loaded = load_kimi_linear(tmp_path)
    assert read == config and same(loaded, params)


def test_what_config_json_cannot_say(tmp_path: Path) -> None:
    config = replace(KIMI_LINEAR, norm_eps=1e-3)
    with pytest.raises(ValueError, match="no place for all of config's choices"):
        save_kimi_linear(tmp_path, random_params(config), config=config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_they_read_what_we_write(name: str, tmp_path: Path) -> None:
    """transformers loads our folder and computes the same bits as from its own."""
    model = their_model(name)
    config, params = load_kimi_linear(saved(model, tmp_path / "theirs"))
    save_kimi_linear(tmp_path / "ours", params, config=config, shard_bytes=20_000)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        again = type(model).from_pretrained(tmp_path / "ours", **ids)
        tokens = tokens_of(1, 9, vocabulary=VOCABULARY)
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_their_names_in_memory(tmp_path: Path) -> None:
    """A `state_dict()` saved as it is: merged convolutions and experts, the gate's own module."""
    model = their_model("three to one")
    _, params = load_kimi_linear(saved(model, tmp_path))
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    assert any("forget_gate" in name for name in tensors) and any("gate_up_proj" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(load_kimi_linear(tmp_path)[1], params)


def test_dtype_and_device(tmp_path: Path) -> None:
    """Wide ones stay wide; on the meta device nothing takes space."""
    save_kimi_linear(tmp_path, random_params(KIMI_K3, torch.float32), config=KIMI_K3)
    _, params = load_kimi_linear(tmp_path, dtype=torch.bfloat16)
    block: Any = params.blocks[1]
    assert params.embedding.dtype == block.attention.qkv.dtype == block.mlp.down.dtype == torch.bfloat16
    assert (
        block.attention.A_log.dtype == block.attention.conv.dtype == block.mlp.router.dtype == torch.float32
    )
    _, nowhere = load_kimi_linear(tmp_path, device="meta")
    assert all(x.is_meta for x in leaves(nowhere))


# The shapes that A_log comes in, and the multimodal wrapper


@pytest.mark.parametrize("shape", ["[HV]", "[1 1 HV 1]", "longer"])
def test_shapes_of_A_log(shape: str, tmp_path: Path) -> None:
    config = KIMI_LINEAR
    params = random_params(config, torch.float32)
    save_kimi_linear(tmp_path, params, config=config)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("A_log")]:
        flat = tensors[name].flatten()
        longer = torch.cat([flat, torch.full((9,), torch.nan)])
        tensors[name] = {"[HV]": flat, "[1 1 HV 1]": flat.reshape(1, 1, -1, 1), "longer": longer}[shape]
    save_file(tensors, tmp_path / "model.safetensors")
    assert same(load_kimi_linear(tmp_path)[1], params)


def test_a_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    """Kimi K3's prefix; what is not the language model's is left alone."""
    params = random_params(KIMI_K3, torch.float32)
    save_kimi_linear(tmp_path, params, config=KIMI_K3)
    tensors = {f"language_model.{k}": v for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "vision_tower.x": torch.ones(1)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    read, loaded = load_kimi_linear(tmp_path)
    assert read == KIMI_K3 and same(loaded, params)


# What does not fit


def test_all_problems_in_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_kimi_linear(tmp_path, random_params(KIMI_LINEAR, torch.float32), config=KIMI_LINEAR)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["lm_head.weight"]
    del tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    tensors["model.norm.weight"] = torch.ones(D + 1)
    tensors["model.layers.2.self_attn.A_log"] = torch.ones(2)
    tensors["model.layers.7.input_layernorm.weight"] = torch.ones(D)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = [
        "missing: lm_head.weight [30, 12]",
        "missing: model.layers.0.self_attn.k_proj.weight [8, 12]",
        "missing: model.layers.1.mlp.experts.4.w2.weight [12, 5]",
        "misshapen: model.norm.weight [13], expected [12]",
        "misshapen: model.layers.2.self_attn.A_log [2], expected [4]",
        "unexpected: model.layers.7.input_layernorm.weight [12]",
    ]
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load_kimi_linear(tmp_path)
    assert sorted(str(caught.value).replace("  ", "").split("\n")[1:]) == sorted(expected)
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert all(line in printed for line in expected)


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"no some-hub/Kimi-Linear: .* nothing is downloaded"):
        load_kimi_linear("some-hub/Kimi-Linear")
    with pytest.raises(FileNotFoundError, match=rf"no {tmp_path}/config.json: "):
        load_kimi_linear(tmp_path)
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(ValueError, match=r"config.json is no JSON: .* line 1 column 1"):
        load_kimi_linear(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(FileNotFoundError, match="holds no safetensors"):
        load_kimi_linear(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors"}})
    )
    with pytest.raises(FileNotFoundError, match=r"not there: \['model-1.safetensors'\]"):
        load_kimi_linear(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert "not there" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere")])


def test_weights_of_four_bits(tmp_path: Path) -> None:
    save_kimi_linear(tmp_path, random_params(KIMI_LINEAR, torch.float32), config=KIMI_LINEAR)
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
    save_file({name: torch.zeros(1, dtype=torch.uint8)}, tmp_path / "other.safetensors")
    with pytest.raises(NotImplementedError, match="weight_packed: weights of four bits are not built"):
        load_kimi_linear(tmp_path)


# Quantised weights


def quantised(params: Any, config: KimiLinearConfig) -> Any:
    """q, k and v of every KDA layer in int8, and one output projection of an MLA layer."""
    blocks = []
    for block, kind in zip(params.blocks, config.layer_types, strict=True):
        field = "qkv" if kind == "kda" else "out"
        attention = block.attention._replace(**{field: quantize(getattr(block.attention, field))})
        blocks.append(block._replace(attention=attention))
    return params._replace(blocks=tuple(blocks))


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_weights_round_trip(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    plain = random_params(config, torch.float32)
    params = quantised(plain, config)
    save_kimi_linear(tmp_path, params, config=config)
    _, loaded = load_kimi_linear(tmp_path)
    first = loaded.blocks[0].attention
    assert isinstance(first, KDAParams) and isinstance(first.qkv, W8A8) and same(loaded, params)
    described = json.loads((tmp_path / "quant_model_description.json").read_text())
    assert described["model.layers.0.self_attn.q_proj.weight"] == "W8A8_DYNAMIC"
    assert described["model.layers.0.self_attn.f_a_proj.weight"] == "FLOAT"
    tokens = tokens_of(2, 12)
    exact, approximate = run(plain, config, tokens), run(loaded, config, tokens)
    assert_close([approximate], [exact], 0.5)
    assert not torch.equal(approximate, exact)


def test_a_mixed_projection_is_refused(tmp_path: Path) -> None:
    """q in int8 and k, v floating cannot be one product: the error names the tensors."""
    params = quantised(random_params(KIMI_LINEAR, torch.float32), KIMI_LINEAR)
    save_kimi_linear(tmp_path, params, config=KIMI_LINEAR)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name] * tensors.pop(f"{name}_scale")
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "quant_model_description.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: "FLOAT"}))
    with pytest.raises(
        ValueError, match=r"one type.*q_proj.*W8A8_DYNAMIC.*k_proj.*FLOAT.*v_proj.*W8A8_DYNAMIC"
    ):
        load_kimi_linear(tmp_path)


@pytest.mark.parametrize("kind", ["W8A8", "W4A8_DYNAMIC"])
def test_other_quantisations_are_refused(kind: str, tmp_path: Path) -> None:
    save_kimi_linear(tmp_path, random_params(KIMI_LINEAR, torch.float32), config=KIMI_LINEAR)
    described = {f"model.layers.0.self_attn.{x}_proj.weight": kind for x in "qkv"}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(described))
    with pytest.raises(NotImplementedError, match=f"q_proj.weight is {kind}, only W8A8_DYNAMIC is built"):
        load_kimi_linear(tmp_path)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_offsets_must_be_zeros(offset: float, tmp_path: Path) -> None:
    params = quantised(random_params(KIMI_LINEAR, torch.float32), KIMI_LINEAR)
    save_kimi_linear(tmp_path, params, config=KIMI_LINEAR)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight_offset"] = torch.full((D, 1), offset)
    save_file(tensors, tmp_path / "model.safetensors")
    if offset:
        with pytest.raises(ValueError, match="weight_offset must be zeros"):
            load_kimi_linear(tmp_path)
    else:
        assert same(load_kimi_linear(tmp_path)[1], params)


# The command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_kimi_linear(tmp_path, random_params(KIMI_LINEAR, torch.float32), config=KIMI_LINEAR)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert describe(KIMI_LINEAR) in printed and "tensors: all fit" in printed
    assert main([str(tmp_path / "config.json")]) == 0
    assert "tensors" not in capsys.readouterr().out


def test_equal_layers_share_a_row() -> None:
    table = describe(KIMI_LINEAR).split("\n")
    assert [[cell.strip() for cell in row.split("|")[1:4]] for row in table[2:]] == [
        ["0", "KDA", "dense"],
        ["1", "MLA", "moe"],
        ["2", "KDA", "moe"],
        ["all, with embedding and head", "", ""],
    ]
    alike = replace(
        KIMI_LINEAR, layer_types=("kda",) * 5, mlp_types=("dense", "moe", "dense", "dense", "dense")
    )
    assert "| 0, 2-4 | KDA | dense |" in describe(alike)
