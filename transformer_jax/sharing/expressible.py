"""Check whether a model can be exported, using only its config and without importing JAX."""

from typing import Literal

from transformer_jax.config import Config
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


def check_ctranslate2(config: Config) -> None:
    """Raise a UsageError that names the unsupported field if CTranslate2 cannot run the model."""
    model = config.model
    if model.decoder_start == "padding" and not model.output_bias:
        raise UsageError(
            "CTranslate2 cannot express model.decoder_start padding with model.output_bias False: "
            "export to safetensors instead"
        )
    expressible: dict[str, tuple[object, ...]] = {
        "architecture": ("transformer",),
        "positions": ("sinusoidal", "concatenated_sinusoidal", "learned", "none"),
        "attention_score": ("scaled_dot_product", "dot_product"),
        "attention_window": (None,),
        "d_v": (model.d_k,),
    }
    for field, allowed in expressible.items():
        value = getattr(model, field)
        if value not in allowed:
            raise UsageError(
                f"CTranslate2 cannot express model.{field} {value}, only "
                f"{' or '.join(map(str, allowed))}: export to safetensors instead"
            )


def check_marian(config: Config) -> None:
    """Raise a UsageError that names the unsupported field if Marian cannot run the model."""
    model = config.model
    ratio = model.d_model / model.num_heads
    width = int(ratio) if ratio.is_integer() else ratio
    required = {
        "model.architecture": (model.architecture, "transformer"),
        "model.positions": (model.positions, "sinusoidal"),
        "model.attention_score": (model.attention_score, "scaled_dot_product"),
        "model.attention_window": (model.attention_window, None),
        "model.layer_norm": (model.layer_norm, "post"),
        "model.d_k": (model.d_k, width),
        "model.d_v": (model.d_v, width),
    }
    for field, (value, expected) in required.items():
        if value != expected:
            raise UsageError(
                f"Marian cannot express {field} {value}, only {expected}: export to ctranslate2 "
                "or safetensors instead"
            )
