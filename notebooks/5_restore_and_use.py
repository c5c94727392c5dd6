# %% [markdown]
# # 5. Restore and use
#
# A run is a folder. It contains the config, the vocabulary, and the checkpoints, and nothing in it
# is executed when it is loaded. This notebook trains a run on several devices, restores it on
# another number of devices, and uses it: first as a translator, and then as an object to study.
#
# **What you learn**
#
# - how to restore a checkpoint in one line, on any device;
# - how to translate, and how to get scores and alternatives;
# - how to look at the parameters and at the attention of a run;
# - how to edit a part of a trained model, here the positional encoding;
# - how to probe an intermediate state: what does a vector of the encoder know?

# %%
# Install the package if it is missing, as in Colab, with the versions that the tests use.
# Otherwise, this cell does nothing.
import importlib.util
import subprocess
import sys

REPOSITORY = ".."  # in Colab: the folder of your clone
if importlib.util.find_spec("transformer_jax") is None:
    pins = ["--constraint", f"{REPOSITORY}/constraints.txt"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *pins, REPOSITORY], check=True)

# %%
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from num2words import num2words
from rich.console import Console

# Simulate four devices on the CPU. This must come before the first use of JAX.
jax.config.update("jax_num_cpu_devices", 4)

import transformer_jax
from transformer_jax import Config
from transformer_jax.training.create_run import create_run
from transformer_jax.training.loop import run_training

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
BLUE, ORANGE = "#0072b2", "#d55e00"
os.chdir(tempfile.mkdtemp())  # the text and the runs are written to a temporary folder
print(len(jax.devices()), "devices")

# %% [markdown]
# ## Train on four devices
#
# The text is that of notebook 3: numbers of six digits in English and German words. The model has
# one layer, so that it trains quickly. Training uses all devices: each one computes the gradient of
# its share of the rows of a batch.


# %%
def draw_number(rng):
    """Return a number such as 231,465, in which no word is missing."""
    high, low = (
        100 * rng.randint(1, 9) + 10 * rng.randint(2, 9) + rng.randint(1, 9) for _ in range(2)
    )
    return 1000 * high + low


rng = random.Random(0)
numbers = list({draw_number(rng): None for _ in range(3600)})[:3400]
parts = {"train": numbers[400:], "dev": numbers[:200], "test": numbers[200:400]}
for split, part in parts.items():
    for language in ("en", "de"):
        lines = [num2words(number, lang=language) for number in part]
        Path(f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), "utf-8")

# %%
config = Config().change(
    model={
        "num_layers": 1,
        "d_model": 64,
        "d_ff": 256,
        "num_heads": 4,
        "d_k": 16,
        "d_v": 16,
        "dropout": 0.0,
        "max_length": 32,
    },
    data={
        "corpus": "text",
        **{split: (f"{split}.en", f"{split}.de") for split in parts},
        "vocab_size": 160,
        "max_length": 32,
        "batch_tokens": 1024,
        "bleu_tokenizer": "char",
    },
    train={
        "steps": 120,
        "warmup_steps": 50,
        "learning_rate_scale": 0.5,
        "checkpoint_every": 30,
        "bleu_every": 4,
        "log_every": 10,
    },
    decode={"beam_size": 1, "max_extra_length": 10},
)
quiet = Console(quiet=True)
num_checkpoints = run_training(create_run(config, Path("runs/numbers"), quiet), quiet)
print(num_checkpoints, "checkpoints")

# %% [markdown]
# ## Restore on one device
#
# `load` checks the checksums of the checkpoint, then its shapes, and then reads the arrays onto
# JAX's default device. It does not matter on how many devices, or on which kind, the run was
# trained. It works for a read-only copy as well.

# %%
run = transformer_jax.load("runs/numbers")
devices = {device for x in jax.tree.leaves(run.params) for device in x.devices()}
print(f"trained on {len(jax.devices())} devices, restored on {len(devices)}")
run

# %% [markdown]
# In a notebook, a run displays its differences from the base model, its size, and its scores.
# `load` can also average checkpoints, as the paper does for Table 2: "we used a single model
# obtained by averaging the last 5 checkpoints" (section 6.1).

# %%
averaged = transformer_jax.load("runs/numbers", average_checkpoints=2)
print("steps:", averaged.steps)
run.plot_curves("train/loss", "dev/perplexity")

# %% [markdown]
# For training on several devices, or for a model that does not fit on one, place the arrays
# yourself. Here we copy the parameters to all four devices. The translations are the same.

# %%
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
replicated = jax.device_put(run.params, everywhere)
lines = Path("test.en").read_text("utf-8").splitlines()
on_one = run.translate(lines[:8])
on_four = [best[0].text for best in run.translator().translate(replicated, lines[:8])]
print("the same translations on 1 and 4 devices:", on_one == on_four)

# %% [markdown]
# ## Translate
#
# `translate` accepts any number of lines and returns their translations in the same order. Keyword
# arguments change the search: a larger beam, another length penalty.

# %%
for line, german in zip(lines[:3], run.translate(lines[:3])):
    print(f"{line}\n  -> {german}")

# %%
for line in (lines[0], "two hundred and thirty-one thousand"):
    print(line)
    for hypothesis in run.translate_best([line], 2, beam_size=4)[0]:
        print(f"{hypothesis.score:8.3f}  {hypothesis.text}")

# %% [markdown]
# The score is the log-probability divided by the length penalty (section 6.1). For the first line,
# the best translation is far better than the second best: the model is certain. The second line is
# shorter than all training lines. The model cannot stop early, because it has never seen a short
# line, and it invents the last three digits. The low scores, which are close to each other, reveal
# that it guesses.
#
# ## Parameters
#
# `run.params` is a nested dictionary of arrays, named after figure 1. With treescope installed,
# which Flax requires, `treescope.display(run.params)` shows it as a foldable tree with small
# pictures of the arrays.

# %%
for path, array in jax.tree_util.tree_leaves_with_path(run.params):
    if path[0].key in ("embedding", "encoder_0"):
        print(f"{'.'.join(entry.key for entry in path):48} {array.shape}")

# %% [markdown]
# The embedding is a table of vectors, and similar vectors belong to tokens that the model treats
# alike. We compare the English words for the digits with the German ones.

# %%
english = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
german = ["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
table = np.asarray(run.params["embedding"]["table"])


def vectors_of(words):
    """Return the mean embedding of the tokens of each word."""
    tokens = [sequence[:-1] for sequence in run.vocabulary.source.encode(words)]  # without <EOS>
    rows = np.array([table[sequence].mean(axis=0) for sequence in tokens])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


figure, axes = plt.subplots(figsize=(4.6, 3.8))
image = axes.imshow(vectors_of(english) @ vectors_of(german).T, cmap="RdBu", vmin=-1, vmax=1)
axes.set_xticks(range(9), german, rotation=90)
axes.set_yticks(range(9), english)
axes.set_title("cosine of the embeddings", fontsize=10)
figure.colorbar(image)
plt.show()

# %% [markdown]
# Source and target share one matrix (section 3.4), but nothing forces "two" and "zwei" to have
# similar vectors: the encoder and the decoder can translate one into the other. A dark diagonal
# would mean that the embedding has aligned the languages. In the stored output, there is none.
#
# ## Attention

# %%
from transformer_jax.visualization.attention_figures import draw_attention
from transformer_jax.visualization.attention_views import Selection

attention = run.attention(lines[0])
draw_attention(attention.maps, Selection(kind="cross", view="alignment"))

# %% [markdown]
# Notebook 3 explains this picture. `attention.show()` displays the interactive view.
#
# ## Edit the positional encoding
#
# What does the trained model do with its positions? We answer such questions by changing one thing
# and measuring the loss. The positional encoding is a module with one method, `encode`, and the
# model receives its class. A subclass therefore edits the encoding in two lines, and the trained
# parameters stay as they are.

# %%
from transformer_jax.model.build import choose_components
from transformer_jax.model.losses import cross_entropy
from transformer_jax.model.positions import AddPositions, sinusoid
from transformer_jax.model.transformer import Transformer

tokens = {
    language: run.vocabulary.source.encode(Path(f"test.{language}").read_text("utf-8").splitlines())
    for language in ("en", "de")
}


def pad(sequences):
    """Return sequences of different lengths as one array, padded with 0."""
    width = max(map(len, sequences))
    return jnp.array([sequence + [0] * (width - len(sequence)) for sequence in sequences])


source, target = pad(tokens["en"]), pad(tokens["de"])


def loss_with(encode):
    """Return the loss of the run on the test set with another function of the positions."""

    class Edited(AddPositions):
        def encode(self, positions):
            return encode(positions)

    components = replace(choose_components(run.config.model), add_positions=Edited)
    edited = Transformer(run.config.model, components, run.model.vocab_size)
    logits = jax.jit(edited.apply)({"params": run.params}, source, target)
    loss = cross_entropy(logits, target, smoothing=0.0)
    return float(loss.nll / loss.count)


# %%
d_model = run.config.model.d_model
edits = {
    "as trained": lambda p: sinusoid(p, d_model),
    "shifted by 1": lambda p: sinusoid(p + 1, d_model),
    "shifted by 5": lambda p: sinusoid(p + 5, d_model),
    "half as large": lambda p: 0.5 * sinusoid(p, d_model),
    "reversed": lambda p: sinusoid(p[::-1], d_model),
    "no positions": lambda p: jnp.zeros((len(p), d_model)),
}
losses = {name: loss_with(encode) for name, encode in edits.items()}

figure, axes = plt.subplots(figsize=(6.4, 2.6))
bars = axes.barh(list(losses), list(losses.values()), color=BLUE)
axes.bar_label(bars, fmt="%.2f", padding=3)
axes.invert_yaxis()
axes.margins(x=0.12)
axes.set(xlabel="loss on the test set, in nats per token")
plt.show()

# %% [markdown]
# - *Shifted*: all positions move by the same offset, in both languages. If the model used only
#   relative positions, the loss would not change. It grows a little for 1 and much for 5, so the
#   model also relies on absolute positions. This is natural, because all lines have the same
#   structure.
# - *Half as large*: the vectors keep their direction, but count less next to the embeddings.
# - *Reversed* and *no positions* show the value of word order: without positions, the model knows
#   which words occur, but not which digit is where. Wrong positions are worse than none.
#
# ## Probe an intermediate state
#
# The vector of the encoder at the word "thirty" starts as the embedding of "thirty" plus its
# position. After the layer, it may also know about its neighbors. A *probe* tests this: a linear
# classifier that reads the vector at one position and predicts a property of the sentence. We
# predict the last digit of the number, from every position, before and after the encoder layer.
# Half of the test set fits the probe, and the other half scores it.

# %%
lengths = np.array([len(sequence) for sequence in tokens["en"]])
usual = int(np.bincount(lengths).argmax())
chosen = np.flatnonzero(lengths == usual)  # sentences of equal length, so that positions correspond
digits = np.array(parts["test"])[chosen] % 10

_, captured = run.model.apply(
    {"params": run.params},
    source[chosen],
    method=run.model.encode,
    capture_intermediates=True,
    mutable=["intermediates"],
)
states = {
    "before the layer": captured["intermediates"]["source_positions"]["__call__"][0],
    "after the layer": captured["intermediates"]["encoder_0"]["__call__"][0],
}
print(
    f"{len(chosen)} sentences of {usual} tokens; states of shape {states['after the layer'].shape}"
)


# %%
def probe_accuracy(vectors, labels):
    """Fit a linear classifier to half of the vectors, and return its accuracy on the rest."""
    inputs = np.concatenate([vectors, np.ones((len(vectors), 1))], axis=1)
    one_hot = np.eye(10)[labels]
    half = len(inputs) // 2
    gram = inputs[:half].T @ inputs[:half] + 0.1 * np.eye(inputs.shape[1])
    weights = np.linalg.solve(gram, inputs[:half].T @ one_hot[:half])
    return np.mean((inputs[half:] @ weights).argmax(axis=1) == labels[half:])


names = run.attention(lines[int(chosen[0])]).source_tokens
figure, axes = plt.subplots(figsize=(8, 3))
for (name, state), marker, color in zip(states.items(), "os", (ORANGE, BLUE)):
    state = np.asarray(state, float)
    accuracy = [probe_accuracy(state[:, i], digits) for i in range(usual)]
    axes.plot(accuracy, marker=marker, color=color, label=name)
axes.axhline(1 / 9, color="0.6", lw=1, ls=":", label="chance")
axes.set_xticks(range(usual), names, rotation=90)
axes.set(
    ylabel="accuracy", ylim=(0, 1.05), title="can a probe read the last digit at this position?"
)
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# *Before the layer*, only the position of the last digit itself can know it (the token before the
# end token). The probe is at chance everywhere else. *After the layer*, other positions know it
# too: attention has carried the information there. In the stored output, both hyphens know the last
# digit exactly. A hyphen is the same token in every line, so its vector has room for other
# information, such as the digit that German needs before the tens. The decoder reads it there: in
# the alignment above, the row of the last digit is dark at both hyphens, and not only at the digit
# itself. (The labels below the axis are the tokens of the first sentence. The other sentences have
# other digits at the same places.)
#
# A probe shows that information is *present*, not that the model uses it. To show use, edit it, as
# above.
#
# ## Exercises
#
# 1. Probe the *first* digit instead. Which positions know it?
# 2. Edit only the positions of the encoder, not of the decoder. (`add_positions` is one class for
#    both. Look at how `Transformer.setup` uses it.)
# 3. Load the run with `average_checkpoints=4`. Is the loss on the test set lower?
# 4. Copy the folder `runs/numbers` to another machine, and load it there.
