"""Benchmarks of other libraries: PyTorch, Hugging Face Transformers, and CTranslate2.

Each library runs in a separate process, possibly in an environment without JAX. Each benchmark
function performs the same task as the corresponding function in `tasks`. If a library cannot be
imported, its benchmark is skipped.
"""

import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from experiments.benchmark.worker import RunResult, Workload, resident_bytes

Tensor = Any
"""A PyTorch tensor. PyTorch is not installed in the type-checking environment."""

# These token IDs match `transformer_jax.special_tokens`, which some environments cannot import.
PAD, BOS, EOS = 0, 1, 2
DROPOUT = 0.1
SMOOTHING = 0.1
# The number of sentences per batch. A GPU needs larger batches than a CPU.
ROWS = {"cpu": 32, "cuda": 128}


def torch_and_device() -> tuple[ModuleType, str]:
    """Configure PyTorch for this machine, and return the module and the device."""
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    if torch.cuda.is_available():
        # Match JAX, which uses TensorFloat-32 for float32 matrix products on this device.
        torch.set_float32_matmul_precision("high")
        return torch, "cuda"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return torch, "cpu"


def facts(torch: ModuleType, device: str, library: str) -> dict[str, Any]:
    """Return the names of a library, the platform, and the device."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"library": library, "platform": device, "device": name}


def memory(torch: ModuleType, device: str) -> Callable[[], int]:
    """Return a function that measures the peak memory of the GPU or, on a CPU, of the process."""
    return torch.cuda.max_memory_allocated if device == "cuda" else resident_bytes


def positions(length: int, width: int) -> np.ndarray:
    """Return the sinusoidal positional encodings (section 3.5), float32[length, width]."""
    angle = np.arange(length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], -1).reshape(length, width).astype(np.float32)


def transformer(torch: ModuleType, sizes: Mapping[str, Any], longest: int) -> tuple[Any, Any]:
    """Return an encoder-decoder built with PyTorch, and a function that computes its logits.

    The source, target, and output embeddings share one table. Source padding is masked.
    """
    width = sizes["d_model"]
    table = torch.nn.Embedding(sizes["vocab"], width)
    torch.nn.init.normal_(table.weight, std=width**-0.5)
    body = torch.nn.Transformer(
        width,
        sizes["heads"],
        sizes["layers"],
        sizes["layers"],
        sizes["d_ff"],
        DROPOUT,
        batch_first=True,
    )
    # The paper's model has neither dropout inside its feed-forward networks nor a layer
    # normalization after each stack.
    for layer in (*body.encoder.layers, *body.decoder.layers):
        layer.dropout.p = 0.0
    body.encoder.norm = body.decoder.norm = None
    model = torch.nn.ModuleDict({"table": table, "body": body}).train()
    where = torch.nn.Parameter(torch.from_numpy(positions(longest, width)), requires_grad=False)
    model.register_parameter("positions", where)

    def embedded(tokens: Tensor) -> Tensor:
        vectors = table(tokens) * width**0.5 + model.positions[: tokens.shape[1]]
        return torch.nn.functional.dropout(vectors, DROPOUT)

    def logits(source: Tensor, before: Tensor, is_padded: bool) -> Tensor:
        length = before.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=before.device).triu(1)
        padding = source == PAD if is_padded else None
        hidden = body(
            embedded(source),
            embedded(before),
            tgt_mask=causal,
            tgt_is_causal=True,
            # Target padding does not need a mask, because it follows the tokens and the causal mask
            # hides it.
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return torch.nn.functional.linear(hidden, table.weight)

    return model, logits


def train(task: Mapping[str, Any]) -> Workload:
    """Train `torch.nn.Transformer` on preloaded batches, cycling through them.

    Args:
        task: a mapping with the keys `sizes`, `arrays` (the path to the saved batches), and
            `is_compiled` (whether to use `torch.compile`).
    """
    torch, device = torch_and_device()
    sizes = task["sizes"]
    with np.load(task["arrays"], allow_pickle=False) as arrays:
        batches = [(arrays[f"{i}.source"], arrays[f"{i}.target"]) for i in range(len(arrays) // 2)]
    longest = max(side.shape[1] for batch in batches for side in batch)
    model, logits = transformer(torch, sizes, longest)
    model.to(device)
    is_compiled = task["is_compiled"]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    is_half = sizes["dtype"] == "bfloat16"

    def loss_of(source: Tensor, before: Tensor, target: Tensor, is_padded: bool) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_half):
            scores = logits(source, before, is_padded)
            return torch.nn.functional.cross_entropy(
                scores.flatten(0, 1),
                target.flatten(),
                ignore_index=PAD,
                label_smoothing=SMOOTHING,
            )

    call: Any = torch.compile(loss_of) if is_compiled else loss_of

    def ready(source: np.ndarray, target: np.ndarray) -> tuple[Any, ...]:
        before = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
        # With pinned memory, copies to the GPU overlap with computation.
        tensors = [torch.from_numpy(side.astype(np.int64)) for side in (source, before, target)]
        pinned = [side.pin_memory() if device == "cuda" else side for side in tensors]
        return *pinned, bool((source == PAD).any()), int((target != PAD).sum())

    around = itertools.cycle([ready(*batch) for batch in batches])

    def turn(steps: int) -> RunResult:
        tokens = 0
        loss = torch.zeros(())
        for *tensors, is_padded, count in itertools.islice(around, steps):
            placed = [tensor.to(device, non_blocking=True) for tensor in tensors]
            optimizer.zero_grad(set_to_none=True)
            loss = call(*placed, is_padded)
            loss.backward()
            optimizer.step()
            tokens += count
        return RunResult(tokens, loss.item())

    about = facts(torch, device, f"torch {torch.__version__}")
    about["parameters"] = sum(parameter.numel() for parameter in trainable)
    return Workload(turn, len(batches), about, memory(torch, device))


def marian(sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the `transformers` module and a randomly initialized Marian model with these sizes."""
    library: Any = importlib.import_module("transformers")
    # CTranslate2's converter requires the padding token to be both the last token of the vocabulary
    # and the first token of each translation.
    last = sizes["vocab"] - 1
    tokens = {
        "pad_token_id": last,
        "eos_token_id": EOS,
        "decoder_start_token_id": last,
        "forced_eos_token_id": None,
    }
    config = library.MarianConfig(
        vocab_size=sizes["vocab"],
        d_model=sizes["d_model"],
        encoder_layers=sizes["layers"],
        decoder_layers=sizes["layers"],
        encoder_attention_heads=sizes["heads"],
        decoder_attention_heads=sizes["heads"],
        encoder_ffn_dim=sizes["d_ff"],
        decoder_ffn_dim=sizes["d_ff"],
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=512,
        **tokens,
    )
    model = library.MarianMTModel(config).eval()
    model.generation_config.update(**tokens, bad_words_ids=None, max_length=None)
    return library, model


def sorted_batches(sources: Sequence[Sequence[int]], rows: int) -> Iterator[list[list[int]]]:
    """Yield batches of sentences with similar lengths, beginning with the longest sentences."""
    ordered = sorted(map(list, sources), key=len, reverse=True)
    for start in range(0, len(ordered), rows):
        yield ordered[start : start + rows]


def generate(task: Mapping[str, Any]) -> Workload:
    """Translate all sentences with Hugging Face's `generate`.

    Args:
        task: the same task as for `tasks.translate`. The longest source in a batch determines
            the length of all translations in the batch.
    """
    torch, device = torch_and_device()
    sizes = task["sizes"]
    library, model = marian(sizes)
    last = sizes["vocab"] - 1
    model.to(device, torch.bfloat16 if sizes["dtype"] == "bfloat16" else torch.float32)
    parts = []
    for rows in sorted_batches(task["sources"], ROWS[device]):
        width = len(rows[0])
        tokens = torch.tensor([[*row, *[last] * (width - len(row))] for row in rows])
        parts.append((tokens, width + task["extra"]))

    def turn(steps: int) -> RunResult:
        done = total = 0
        for tokens, length in [*parts] * steps:
            placed = tokens.to(device)
            with torch.inference_mode():
                generated = model.generate(
                    input_ids=placed,
                    attention_mask=(placed != last).long(),
                    num_beams=task["beam_size"],
                    do_sample=False,
                    min_new_tokens=length,
                    max_new_tokens=length,
                    early_stopping=False,
                )
            # Copy all tokens to the host. This copy also waits until the GPU has finished.
            rows = generated.cpu().numpy()
            done += len(rows)
            # Exclude the start token.
            total += len(rows) * (rows.shape[1] - 1)
        return RunResult(done, total / done)

    version = f"transformers {library.__version__}, torch {torch.__version__}"
    return Workload(turn, 1, facts(torch, device, version), memory(torch, device))


def ctranslate2(task: Mapping[str, Any]) -> Workload:
    """Translate all sentences with CTranslate2, using the model that `marian` returns.

    Args:
        task: the same task as for `tasks.translate`.
    """
    library: Any = importlib.import_module("ctranslate2")
    converters: Any = importlib.import_module("ctranslate2.converters.transformers")
    sizes = task["sizes"]
    device = "cuda" if library.get_cuda_device_count() else "cpu"
    names = [f"<{i}>" for i in range(sizes["vocab"] - 1)]
    spec = converters.MarianMTLoader().get_model_spec(marian(sizes)[1])
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.unk_token = names[1]
    spec.config.eos_token = spec.config.decoder_start_token = names[EOS]
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = library.Translator(
            folder,
            device,
            compute_type=sizes["dtype"],
            intra_threads=len(os.sched_getaffinity(0)),
        )
    most = len(names) - 1
    parts = [
        ([[names[min(p, most)] for p in row] for row in rows], len(rows[0]) + task["extra"])
        for rows in sorted_batches(task["sources"], ROWS[device])
    ]

    def turn(steps: int) -> RunResult:
        done = total = 0
        for rows, length in [*parts] * steps:
            translations = translator.translate_batch(
                rows,
                beam_size=task["beam_size"],
                min_decoding_length=length,
                max_decoding_length=length,
                max_batch_size=len(rows),
            )
            done += len(translations)
            total += sum(len(one.hypotheses[0]) for one in translations)
        return RunResult(done, total / done)

    about = {
        "library": f"ctranslate2 {library.__version__}",
        "platform": device,
        "device": device,
    }
    return Workload(turn, 1, about)


def serve(task: Mapping[str, Any]) -> Workload:
    """Translate lines of text with CTranslate2, using a run's export.

    Args:
        task: a mapping with the keys `folder` (the export), `compute_type`, `lines`, `beam_size`,
            `alpha` (the exponent of the length penalty), and `limits` (the maximum length of each
            translation, excluding the end token).
    """
    library: Any = importlib.import_module("ctranslate2")
    sentencepiece: Any = importlib.import_module("sentencepiece")
    device = "cuda" if library.get_cuda_device_count() else "cpu"
    source, target = (
        sentencepiece.SentencePieceProcessor(f"{task['folder']}/{side}.spm")
        for side in ("source", "target")
    )
    threads = len(os.sched_getaffinity(0))
    translator = library.Translator(
        task["folder"], device, compute_type=task["compute_type"], intra_threads=threads
    )
    limits = task["limits"]

    def turn(steps: int) -> RunResult:
        translations: list[str] = []
        for _ in range(steps):
            results = translator.translate_batch(
                source.encode(task["lines"], out_type=str),
                beam_size=task["beam_size"],
                length_penalty=task["alpha"],
                min_decoding_length=0,
                max_decoding_length=max(limits),
                max_batch_size=ROWS[device],
            )
            for result, limit in zip(results, limits, strict=True):
                if len(result.hypotheses[0]) > limit:
                    raise ValueError(f"a translation is longer than its limit of {limit} tokens")
            translations = target.decode([result.hypotheses[0] for result in results])
        lengths = [len(line) for line in translations]
        return RunResult(steps * len(translations), sum(lengths) / len(lengths))

    about = {
        "library": f"ctranslate2 {library.__version__}, {task['compute_type']}",
        "platform": device,
        "device": device,
    }
    return Workload(turn, 1, about)
