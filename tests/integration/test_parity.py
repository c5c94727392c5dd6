"""Compare a model's outputs, gradients, and training with those of Hugging Face's Marian."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array
from oracles import SMALL_MODEL

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.model.build import build_transformer
from transformer_jax.model.encoder_decoder import Params, init_params
from transformer_jax.model.inspect import attention_weights
from transformer_jax.model.losses import cross_entropy
from transformer_jax.model.transformer import Transformer
from transformer_jax.sharing.marian_format import LAYER_NORM_EPSILON, model_settings
from transformer_jax.sharing.marian_parameters import channel_order, to_marian
from transformer_jax.special_tokens import BOS, PAD
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.schedule import learning_rate_schedule

VOCABULARY = 13
SOURCE = np.array([[5, 9, 3, 12, 7, 2], [4, 11, 6, 2, PAD, PAD]])
TARGET = np.array([[8, 3, 10, 5, 2], [12, 4, 2, PAD, PAD]])
DECODER_INPUT = np.array([[BOS, 8, 3, 10, 5], [BOS, 12, 4, 2, PAD]])
SMOOTHING = 0.1
TRAIN = TrainConfig(warmup_steps=400)
# Importing PyTorch takes several seconds. Fast tests compare the model with NumPy loops that
# implement the same equations.
pytestmark = pytest.mark.slow
# The largest acceptable difference, relative to the largest value in each array.
TOLERANCES = {"float32": 2e-5, "float64": 1e-12}
GRADIENT_TOLERANCES = {"float32": 5e-4, "float64": 1e-11}
# These tolerances are larger, because errors accumulate over the training steps.
TRAINING_TOLERANCES = {"float32": 5e-4, "float64": 1e-9}


class Pair(NamedTuple):
    """The same model in this package and in the transformers library."""

    config: ModelConfig
    model: Transformer
    params: Params
    marian: Any
    torch: Any


@pytest.fixture(scope="module", params=["float32", "float64"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model whose random weights are large enough to produce peaked distributions."""
    # Import these slow libraries only in the process that runs these tests.
    torch, transformers = (
        pytest.importorskip(name, reason=f"`pip install --group interop` installs {name}")
        for name in ("torch", "transformers")
    )
    config = replace(
        SMALL_MODEL, attention_bias=True, layer_norm_epsilon=LAYER_NORM_EPSILON, dtype=request.param
    )
    with jax.enable_x64(config.dtype == "float64"):
        model = build_transformer(config, VOCABULARY)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda x: jnp.asarray(3 * x + 0.1 * rng.normal(size=x.shape), config.dtype),
            jax.jit(init_params, static_argnums=0)(model, jax.random.key(0)),
        )
        yield Pair(config, model, params, open_marian(config, params, torch, transformers), torch)


def open_marian(config: ModelConfig, params: Params, torch: Any, transformers: Any) -> Any:
    """Return a Marian model with these parameters."""
    settings = model_settings(config, num_positions=16, vocab_size=VOCABULARY)
    marian = transformers.MarianMTModel(transformers.MarianConfig(**settings))
    marian.set_attn_implementation("eager")
    marian = marian.to(getattr(torch, config.dtype)).eval()
    assert marian.lm_head.weight is marian.model.shared.weight
    arrays = to_marian(config, params)
    # The transformers library rounds positional encodings to float32, even in a float64 model.
    angle = np.arange(16)[:, None] / 10000 ** (np.arange(0, config.d_model, 2) / config.d_model)
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    for stack in ("encoder", "decoder"):
        arrays[f"model.{stack}.embed_positions.weight"] = table
    state = {name: torch.tensor(np.asarray(x)) for name, x in arrays.items()}
    missing, unexpected = marian.load_state_dict(state, strict=False)
    assert unexpected == []
    assert all("embed_tokens" in name or name == "lm_head.weight" for name in missing)
    return marian


def mean_loss(model: Transformer, params: Params) -> tuple[Array, Array]:
    """Return the smoothed loss per token and the logits."""
    logits: Any = model.apply({"params": params}, jnp.asarray(SOURCE), jnp.asarray(TARGET))
    loss = cross_entropy(logits, jnp.asarray(TARGET), SMOOTHING)
    return loss.smoothed / loss.count, logits


def run_marian(pair: Pair) -> tuple[Any, Any]:
    """Return Marian's outputs and its smoothed loss per token."""
    torch = pair.torch
    output = pair.marian(
        input_ids=torch.tensor(SOURCE),
        attention_mask=torch.tensor(SOURCE != PAD),
        decoder_input_ids=torch.tensor(DECODER_INPUT),
        output_attentions=True,
    )
    cross = torch.nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=SMOOTHING)
    return output, cross(output.logits.flatten(0, 1), torch.tensor(TARGET).flatten())


def assert_close(
    ours: Any, theirs: Any, dtype: str, tolerances: Mapping[str, float] = TOLERANCES
) -> None:
    """Compare two arrays relative to the largest value, or to 1 if all values are smaller."""
    ours, theirs = np.asarray(ours), theirs.detach().numpy()
    assert ours.dtype == theirs.dtype == dtype
    scale = max(1.0, np.abs(theirs).max())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=scale * tolerances[dtype])


def test_outputs_and_attention_weights_equal_those_of_marian(pair: Pair) -> None:
    config, model, params, _, torch = pair

    @jax.jit
    def compute(params: Params) -> tuple[Any, Any, Mapping[str, Array]]:
        source, target = jnp.asarray(SOURCE), jnp.asarray(TARGET)
        memory = model.apply({"params": params}, source, method="encode")
        logits = mean_loss(model, params)[1]
        return memory, logits, attention_weights(model, params, source, target)

    memory, logits, weights = compute(params)
    with torch.no_grad():
        output, _ = run_marian(pair)
    order = channel_order(config.d_model)
    assert_close(memory[..., order], output.encoder_last_hidden_state, config.dtype)
    assert_close(logits, output.logits, config.dtype)
    # The distributions must be peaked, so that a wrong mask or scale would change them.
    assert float(jax.nn.softmax(logits).max()) > 0.9
    for name in ("encoder", "decoder", "cross"):
        theirs = torch.stack(getattr(output, f"{name}_attentions"))
        assert theirs.max() > 0.9
        assert_close(weights[name], theirs, config.dtype)


def test_loss_gradients_and_ten_adam_steps_equal_those_of_marian(pair: Pair) -> None:
    config, model, params, marian, torch = pair
    optimizer = make_optimizer(TRAIN, config)
    schedule = learning_rate_schedule(TRAIN, config.d_model)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, Array, Params]:
        gradient = jax.value_and_grad(lambda p: mean_loss(model, p), has_aux=True)
        (loss, _), gradients = gradient(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, gradients

    names = to_marian(config, params).keys() - {"final_logits_bias"}
    parameters = dict(marian.named_parameters())
    adam = torch.optim.Adam(
        [parameters[name] for name in sorted(names)], betas=(0.9, 0.98), eps=1e-9
    )
    for number in range(1, 11):
        params, state, loss, gradients = step(params, state)
        adam.param_groups[0]["lr"] = float(schedule(number))
        adam.zero_grad()
        _, their_loss = run_marian(pair)
        their_loss.backward()
        assert_close(loss, their_loss, config.dtype, TRAINING_TOLERANCES)
        if number == 1:
            for name, gradient in to_marian(config, gradients).items():
                if name in names:
                    theirs = parameters[name].grad
                    assert_close(gradient, theirs, config.dtype, GRADIENT_TOLERANCES)
        adam.step()
    # In float32, rounding determines the sign of a gradient near zero and therefore the direction
    # of Adam's step.
    if config.dtype == "float64":
        before, after = to_marian(config, pair.params), to_marian(config, params)
        for name in names:
            # A key bias has no influence on the output, so its gradient is only rounding noise.
            if not name.endswith("k_proj.bias"):
                assert_close(after[name], parameters[name], config.dtype, {"float64": 1e-8})
        # Training must move the parameters by more than the tolerance.
        assert np.median([np.abs(after[name] - before[name]).max() for name in names]) > 1e-5
