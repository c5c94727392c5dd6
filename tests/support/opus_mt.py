"""Create folders in the format of public opus-mt models.

The transformers library and SentencePiece create the models. A folder contains two SentencePiece
models and one vocab.json. The special tokens do not have this package's IDs, some pieces are not in
vocab.json, and the encoder and the decoder have different depths.
"""

import importlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from example_configs import read_pairs

PAIRS = read_pairs("train")
SOURCES = [source for source, _ in PAIRS]
DEPTHS = {"encoder_layers": 2, "decoder_layers": 1}


def train_model(lines: list[str], vocab_size: int) -> bytes:
    """Train a SentencePiece model whose special tokens have SentencePiece's default IDs."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def write_tokenizers(folder: Path) -> int:
    """Write the tokenizer's files, and return the vocabulary size."""
    sides: list[set[str]] = []
    for side, lines in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        model = train_model(list(lines), 60)
        (folder / f"{side}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        sides.append({processor.id_to_piece(i) for i in range(3, len(processor))})
    source, target = sides
    # Omit one piece per language from vocab.json, so that it is encoded as the unknown token.
    pieces = (source | target) - {max(source - target), max(target - source)}
    tokens = ["</s>", "<unk>", *sorted(pieces), ">>deu<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}), "utf-8")
    settings = {"tokenizer_class": "MarianTokenizer", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return len(tokens)


def model_settings(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of Helsinki-NLP's config.json files, with values for a small model."""
    pad = vocab_size - 1
    return {
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "architectures": ["MarianMTModel"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "classif_dropout": 0.0,
        "d_model": 16,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 32,
        "decoder_layerdrop": 0.0,
        "decoder_start_token_id": pad,
        "decoder_vocab_size": vocab_size,
        "dropout": 0.1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "encoder_layerdrop": 0.0,
        **DEPTHS,
        "eos_token_id": 0,
        "extra_pos_embeddings": 2,
        "forced_eos_token_id": 0,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_position_embeddings": 512,
        "model_type": "marian",
        "normalize_before": False,
        "normalize_embedding": False,
        "num_hidden_layers": DEPTHS["encoder_layers"],
        "pad_token_id": pad,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "static_position_embeddings": True,
        "use_cache": True,
        "vocab_size": vocab_size,
        **changes,
    }


def write_opus_mt(
    folder: Path, *, is_torch: bool = False, end_bias: float = 6, **changes: Any
) -> Any:
    """Write a model with random weights to a new folder, and return the model.

    The weights are large, so that the model's output distributions are peaked.

    Args:
        folder: the path of the new folder.
        is_torch: whether to write pytorch_model.bin instead of model.safetensors.
        end_bias: the logit bias of the end-of-sentence token. A higher bias shortens translations.
        changes: new values for fields in config.json.
    """
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    folder.mkdir()
    settings = model_settings(write_tokenizers(folder), **changes)
    model = transformers.MarianMTModel(transformers.MarianConfig(**settings)).eval()
    draw_weights(model, settings["eos_token_id"], end_bias)
    transformers.utils.logging.disable_progress_bar()
    if is_torch:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    generation = {
        "bad_words_ids": [[settings["pad_token_id"]]],
        "num_beams": 4,
        "max_length": 512,
        **{k: v for k, v in settings.items() if k.endswith("token_id")},
    }
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return transformers.MarianMTModel.from_pretrained(folder).eval()


def draw_weights(model: Any, end: int, end_bias: float) -> None:
    """Draw all weights and biases at random, except position tables and the end token's bias."""
    torch: Any = importlib.import_module("torch")
    rng = np.random.default_rng(0)
    for name, parameter in sorted({**dict(model.named_parameters())}.items()):
        if "embed_positions" in name:
            continue
        drawn = rng.standard_normal(parameter.shape)
        if parameter.ndim > 1:
            drawn *= 3 * parameter.shape[1] ** -0.5
        elif "layer_norm.weight" in name:
            drawn = 1 + 0.1 * drawn
        else:
            drawn *= 0.1
        parameter.data = torch.tensor(drawn, dtype=torch.float32)
    # Shrink the end token's weights, so that mainly the bias determines the token's probability.
    model.lm_head.weight.data[end] *= 0.1
    bias = rng.standard_normal(model.final_logits_bias.shape)
    bias[0, end] = end_bias
    model.final_logits_bias.copy_(torch.tensor(bias))
