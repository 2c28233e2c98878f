"""Mixtures of experts in a Hugging Face `config.json`: the keys of each family, read and written. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamarl.models.keys import refuse
from llamarl.models.sizes import count, positive


def mixture_from_hf(config: Mapping[str, Any], num_layers: int) -> dict[str, Any] | None:
    """Returns the fields of `MoeShape` that a parsed `config.json` of a family of mixtures describes, or None if the
    model has no experts.

    Raises:
        ConfigError: a key is missing, or of the wrong type.
    """
    match config["model_type"]:
        case "qwen3_moe":
            return _qwen3(config, num_layers)
        case "mixtral":
            return _mixtral(config, num_layers)
        case "glm4_moe":
            return _glm4(config, num_layers)
        case "qwen3_next":
            return _qwen3_next(config, num_layers)
        case "qwen3_5_moe_text":
            every = {"sparse_layers": tuple(range(num_layers)), "normalized": True}
            return every | _gated_experts(config)
    raise AssertionError(config["model_type"])


def _qwen3(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    dense, step = config.get("mlp_only_layers") or [], count(config, "decoder_sparse_step", default=1)
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        refuse("mlp_only_layers", dense, f"a list of numbers of layers is needed, from 0 to {num_layers - 1}")
    if len(set(dense)) < len(dense):
        refuse("mlp_only_layers", dense, "it names a layer twice")
    return {
        "num_experts": count(config, "num_experts", "num_local_experts"),
        "experts_per_token": count(config, "num_experts_per_tok"),
        "expert_size": count(config, "moe_intermediate_size"),
        "sparse_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        "normalized": flag(config, "norm_topk_prob", False),
    }


def _qwen3_next(config: Mapping[str, Any], num_layers: int) -> dict[str, Any] | None:
    if config.get("num_experts") == 0:
        return None
    layers = _qwen3(config, num_layers)["sparse_layers"]
    return {"sparse_layers": layers, "normalized": flag(config, "norm_topk_prob", True)} | _gated_experts(config)


def _gated_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": count(config, "num_experts"),
        "experts_per_token": count(config, "num_experts_per_tok"),
        "expert_size": count(config, "moe_intermediate_size"),
        "shared_size": count(config, "shared_expert_intermediate_size"),
        "gates_shared": True,
    }


def _mixtral(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    return {
        "num_experts": count(config, "num_local_experts", "num_experts"),
        "experts_per_token": count(config, "num_experts_per_tok"),
        "expert_size": count(config, "intermediate_size"),
        "sparse_layers": tuple(range(num_layers)),
        "normalized": True,
    }


def _glm4(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    width, shared = count(config, "moe_intermediate_size"), count(config, "n_shared_experts", default=1, least=0)
    return {
        "num_experts": count(config, "n_routed_experts", "num_local_experts", "num_experts"),
        "experts_per_token": count(config, "num_experts_per_tok"),
        "expert_size": width,
        "sparse_layers": tuple(range(count(config, "first_k_dense_replace", default=1, least=0), num_layers)),
        "scoring": "sigmoid",
        "normalized": flag(config, "norm_topk_prob", True),
        "scaling": float(positive("routed_scaling_factor", config.get("routed_scaling_factor", 1.0))),
        "num_groups": count(config, "n_group", default=1),
        "groups_per_token": count(config, "topk_group", default=1),
        "shared_size": shared * width,
        "has_selection_bias": True,
    }


def mixture_to_hf(family: str, num_layers: int, moe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of `config.json` of a family with these fields of `MoeShape`: the inverse of
    `mixture_from_hf`."""
    sparse, keys = moe["sparse_layers"], {"num_experts_per_tok": moe["experts_per_token"]}
    if family == "mixtral":
        assert moe["normalized"], "gates of a Mixtral add up to 1"
        assert len(sparse) == num_layers, "each of its layers has experts"
        sizes = {"num_local_experts": moe["num_experts"], "intermediate_size": moe["expert_size"]}
        return keys | sizes | {"sliding_window": None}
    keys |= {"moe_intermediate_size": moe["expert_size"], "norm_topk_prob": moe["normalized"]}
    if family != "glm4_moe":
        dense = [layer for layer in range(num_layers) if layer not in sparse]
        keys |= {"num_experts": moe["num_experts"]}
        keys |= {"shared_expert_intermediate_size": moe["shared_size"]} if moe["gates_shared"] else {}
        if family == "qwen3_5_moe_text":
            assert not dense, "each of its layers has experts"
            return keys
        return keys | {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    assert sparse == tuple(range(sparse[0], num_layers)), "the dense layers of a GLM-4 mixture come first"
    assert moe["shared_size"] % moe["expert_size"] == 0, "its shared experts are as wide as the others"
    return keys | {
        "n_routed_experts": moe["num_experts"],
        "n_shared_experts": moe["shared_size"] // moe["expert_size"],
        "first_k_dense_replace": sparse[0],
        "n_group": moe["num_groups"],
        "topk_group": moe["groups_per_token"],
        "routed_scaling_factor": moe["scaling"],
        "num_nextn_predict_layers": 0,  # layers that predict further tokens are neither read nor written
    }


def flag(config: Mapping[str, Any], key: str, default: bool, table: str = "") -> bool:
    """Returns a key that is true or false, or `default` if it is absent. Raises ConfigError.

    Args:
        table: key of the table that `config` is; "" means the whole file.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        refuse(f"{table}.{key}" if table else key, value, "true or false is needed")
    return default if value is None else value
