"""Check whether a model can be exported, using only its config and without importing JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from transformer_jax.config import Config, ModelConfig
from transformer_jax.config.validation import ON_INIT_FROM, marked
from transformer_jax.errors import UsageError
from transformer_jax.optional import require_library

Format = Literal["ctranslate2", "marian", "safetensors"]


def check_exportable(config: Config, name: Format) -> None:
    """Raise a UsageError if a library is missing or the format cannot represent the model."""
    if name == "ctranslate2":
        check_ctranslate2(config)
    elif name == "marian":
        check_marian(config)
    require_library("ctranslate2" if name == "ctranslate2" else "safetensors")


# Fields that can have any value: sizes, and fields that do not affect what the parameters compute.
# The other fields in `ModelConfig` must have a value that the format's table lists or, if the table
# does not contain the field, their default. Models that use a new field are therefore rejected
# until the field is added here.
FREE = marked(ModelConfig, ON_INIT_FROM) | {
    *("num_layers", "num_decoder_layers", "d_model", "d_ff", "num_heads"),
    *("attention_bias", "output_bias", "decoder_start", "layer_norm_epsilon"),
    *("max_relative_position", "position_buckets"),
}
COMMON: dict[str, tuple[object, ...]] = {
    "activation": ("relu", "gelu", "swish"),
    "attention_implementation": ("full", "blockwise", "cudnn"),
}


def check_ctranslate2(config: Config) -> None:
    """Raise a UsageError that names the unsupported field if CTranslate2 cannot run the model."""
    model = config.model
    if model.decoder_start == "padding" and not model.output_bias:
        raise UsageError(
            "CTranslate2 cannot express model.decoder_start padding with model.output_bias False: "
            "export to safetensors instead"
        )
    table = COMMON | {
        "positions": ("sinusoidal", "concatenated_sinusoidal", "learned", "none"),
        "attention_score": ("scaled_dot_product", "dot_product"),
        "layer_norm": ("post", "pre"),
        "d_k": (model.d_k,),
        "d_v": (model.d_k,),
    }
    _check_fields(model, table, "CTranslate2", "safetensors")


def check_marian(config: Config) -> None:
    """Raise a UsageError that names the unsupported field if Marian cannot run the model."""
    ratio = config.model.d_model / config.model.num_heads
    width = int(ratio) if ratio.is_integer() else ratio
    table = COMMON | {"d_k": (width,), "d_v": (width,)}
    _check_fields(config.model, table, "Marian", "ctranslate2 or safetensors")


def _check_fields(
    model: ModelConfig, table: Mapping[str, tuple[object, ...]], name: str, others: str
) -> None:
    for field in dataclasses.fields(model):
        value, allowed = getattr(model, field.name), table.get(field.name, (field.default,))
        if field.name not in FREE and value not in allowed:
            raise UsageError(
                f"{name} cannot express model.{field.name} {value}, only "
                f"{' or '.join(map(str, allowed))}: export to {others} instead"
            )
