# %% [markdown]
# # 5. Restore and use
#
# A run is a folder that contains the config, the vocabulary, and the checkpoints. Loading a run
# does not execute any code from the folder. This notebook trains a model on several devices and
# restores it on a different number of devices. The notebook then translates with the model and
# examines how the model works.
#
# **What you learn**
#
# - how to restore a checkpoint in one line, on any device;
# - how to translate, and how to get scores, alternative translations, and random samples;
# - how to look at a run's parameters and attention weights;
# - how to edit part of a trained model, such as the positional encoding;
# - how to find out what information an encoder vector contains.

# %%
# If the package is missing, as in Colab, install it with the dependency versions that the tests
# use. Otherwise, this cell does nothing.
import importlib.util
import subprocess
import sys

REPOSITORY = ".."  # In Colab, enter the path of your clone here.
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

# Simulate four devices on the CPU. Set this option before the first use of JAX.
jax.config.update("jax_num_cpu_devices", 4)

import transformer_jax as tj

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
BLUE, ORANGE = "#0072b2", "#d55e00"
os.chdir(tempfile.mkdtemp())  # store the text and the runs in a temporary folder
print(len(jax.devices()), "devices")

# %% [markdown]
# ## Train on four devices
#
# The text is the same as in notebook 3: six-digit numbers spelled out in English and German. The
# model has only one layer, so it trains quickly. Training uses all devices: each device computes
# the gradient for its share of each batch.


# %%
def draw_number(rng):
    """Return a six-digit number that, in words, has the same structure as 231,465."""
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
config = tj.Config().change(
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
trained = tj.train(config, "runs/numbers", quiet=True)

# %% [markdown]
# ## Restore on one device
#
# `load` verifies the checkpoint's checksums, checks its shapes, and then loads the arrays onto
# JAX's default device. The number and kind of the devices used for training do not matter. `load`
# also works with a read-only copy of a run.

# %%
run = tj.load("runs/numbers")
devices = {device for x in jax.tree.leaves(run.params) for device in x.devices()}
print(f"trained on {len(jax.devices())} devices, restored on {len(devices)}")
run

# %% [markdown]
# A notebook displays a run as a summary of its size, its scores, and its differences from the base
# model. `load` can also average checkpoints, as the paper does for Table 2: "we used a single model
# obtained by averaging the last 5 checkpoints" (section 6.1).

# %%
averaged = tj.load("runs/numbers", average_checkpoints=2)
print("steps:", averaged.steps)
run.plot_curves("train/loss", "dev/perplexity")

# %% [markdown]
# To train on several devices, or to use a model that does not fit on one device, distribute the
# arrays yourself. In this example, we copy the parameters to all four devices. The translations do
# not change.

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
# `translate` accepts any number of lines and returns their translations in the same order. Use
# keyword arguments to customize the search, for example, with a larger beam or a different length
# penalty.

# %%
for line, german in zip(lines[:3], run.translate(lines[:3])):
    print(f"{line}\n  -> {german}")

# %%
for line in (lines[0], "two hundred and thirty-one thousand"):
    print(line)
    for hypothesis in run.translate_best([line], 2, beam_size=4)[0]:
        print(f"{hypothesis.score:8.3f}  {hypothesis.text}")

# %% [markdown]
# The score of a translation is its log-probability divided by the length penalty (section 6.1). For
# the first line, the best translation has a far higher score than the second best, so the model is
# certain. The second line is shorter than all training lines. The model has never seen such a short
# line, so it invents the last three digits instead of stopping early. The scores of its two
# translations are low and closer to each other, which shows that the model is guessing.
#
# ### Draw translations at random
#
# A `Sampling` draws each token from the model's distribution. `top_k` keeps only the $k$ likeliest
# tokens, and `top_p` keeps the smallest set of the likeliest tokens whose total probability is at
# least $p$.

# %%
samplings = {
    "all tokens": tj.Sampling(seed=1),
    "top_k = 3": tj.Sampling(top_k=3, seed=1),
    "top_p = 0.8": tj.Sampling(top_p=0.8, seed=1),
}
references = Path("test.de").read_text("utf-8").splitlines()
for name, sampling in samplings.items():
    drawn = run.translate(lines[:32], sampling=sampling)
    correct = sum(text == reference for text, reference in zip(drawn, references))
    print(f"{name:11} {correct:2} of 32 correct, such as {drawn[0]}")

# %% [markdown]
# Label smoothing (section 5.4) trains the model to give the correct token a probability of only
# about 0.9 and to spread the rest over all 160 tokens. A translation here has eight or nine tokens,
# so only about 40% of the samples from all tokens are correct ($0.9^9 = 0.39$). Because each wrong
# token is unlikely by itself, `top_k` and `top_p` exclude nearly all of this probability. In the
# stored output, all samples with `top_k` or `top_p` are correct.
#
# ## Parameters
#
# `run.params` is a nested dictionary of arrays. The keys of this dictionary are based on the names
# in figure 1 of the paper. `treescope.display(run.params)` shows the parameters as a foldable tree
# with a small image of each array. Flax installs treescope.

# %%
for path, array in jax.tree_util.tree_leaves_with_path(run.params):
    if path[0].key in ("embedding", "encoder_0"):
        print(f"{'.'.join(entry.key for entry in path):48} {array.shape}")

# %% [markdown]
# The embedding is a table of vectors. Tokens that the model treats alike have similar vectors. We
# compare the embeddings of the English and German words for the digits.

# %%
english = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
german = ["ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
table = np.asarray(run.params["embedding"]["table"])


def vectors_of(words):
    """Return the mean embedding of each word's tokens, scaled to norm 1."""
    tokens = [sequence[:-1] for sequence in run.vocabulary.source.encode(words)]  # without <EOS>
    rows = np.array([table[sequence].mean(axis=0) for sequence in tokens])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


figure, axes = plt.subplots(figsize=(4.6, 3.8))
image = axes.imshow(vectors_of(english) @ vectors_of(german).T, cmap="RdBu", vmin=-1, vmax=1)
axes.set_xticks(range(9), german, rotation=90)
axes.set_yticks(range(9), english)
figure.colorbar(image, label="cosine of the embeddings")
plt.show()

# %% [markdown]
# Source and target share one embedding matrix (section 3.4), but nothing forces "two" and "zwei" to
# have similar vectors, because the encoder and the decoder can translate between words whose
# vectors differ. A dark diagonal would mean that the embedding aligns the languages. The stored
# output does not have a dark diagonal.
#
# ## Attention

# %%
attention = run.attention(lines[0])
attention.draw(kind="cross", view="alignment")

# %% [markdown]
# Notebook 3 explains this figure. `attention.show()` displays the interactive view.
#
# ## Edit the positional encoding
#
# How does the trained model use positions? To answer such questions, we change one part of the
# model and measure the loss. The positional encoding is a module whose `encode` method computes the
# positional vectors. You pass the module's class to the model as an argument. A subclass can
# therefore change the encoding in two lines of code, without changing the trained parameters.

# %%
from transformer_jax.model import AddPositions, choose_components, cross_entropy, sinusoid

tokens = {
    language: run.vocabulary.source.encode(Path(f"test.{language}").read_text("utf-8").splitlines())
    for language in ("en", "de")
}


def pad(sequences):
    """Return sequences of different lengths as one array, padded with 0."""
    width = max(map(len, sequences))
    return jnp.array([sequence + [0] * (width - len(sequence)) for sequence in sequences])


source, target = pad(tokens["en"]), pad(tokens["de"])


d_model = run.config.model.d_model
edits = {
    "as trained": lambda p: sinusoid(p, d_model),
    "shifted by 1": lambda p: sinusoid(p + 1, d_model),
    "shifted by 5": lambda p: sinusoid(p + 5, d_model),
    "half as large": lambda p: 0.5 * sinusoid(p, d_model),
    "reversed": lambda p: sinusoid(p[::-1], d_model),
    "no positions": lambda p: jnp.zeros((len(p), d_model)),
}


# %%
@jax.jit
def loss_with(number):
    """Return the run's loss on the test set with the edit that has this number."""

    class Edited(AddPositions):
        def encode(self, positions):
            return jax.lax.switch(number, list(edits.values()), positions)

    components = replace(choose_components(run.config.model), add_positions=Edited)
    edited = tj.Transformer(run.config.model, run.model.vocab_size, components=components)
    loss = cross_entropy(edited.apply({"params": run.params}, source, target), target, smoothing=0)
    return loss.nll / loss.count


losses = {name: float(loss_with(number)) for number, name in enumerate(edits)}

figure, axes = plt.subplots(figsize=(6.4, 2.6))
bars = axes.barh(list(losses), list(losses.values()), color=BLUE)
axes.bar_label(bars, fmt="%.2f", padding=3)
axes.invert_yaxis()
axes.margins(x=0.12)
axes.set(xlabel="loss on the test set, in nats per token")
plt.show()

# %% [markdown]
# - *Shifted*: all positions move by the same offset, in both languages. If the model used only
#   relative positions, the loss would not change. The loss grows slightly for an offset of 1 and
#   considerably for an offset of 5, so the model also relies on absolute positions. Absolute
#   positions are informative here, because all lines have the same structure.
# - *Half as large*: the positional vectors keep their direction but have less influence relative to
#   the embeddings.
# - *Reversed* and *no positions* show the importance of word order. Without positions, the model
#   can determine which words occur but not where each digit is. Very wrong positions (*reversed*,
#   or *shifted* by 5) are worse than no positions.
#
# ## Probe an intermediate state
#
# The encoder's vector for the word "thirty" starts as the embedding of "thirty" plus a positional
# encoding. After the encoder layer, the vector may also contain information about neighboring
# words. To find out, we use a *probe*: a linear classifier that reads the vector at one position
# and predicts a property of the sentence. We predict the last digit of the number from the vector
# at each position, both before and after the encoder layer. We fit the probe to half of the test
# set and score it on the other half.

# %%
lengths = np.array([len(sequence) for sequence in tokens["en"]])
usual = int(np.bincount(lengths).argmax())
# Choose sentences of the same length, so that their positions correspond.
chosen = np.flatnonzero(lengths == usual)
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
# *Before the layer*, only the vector of the last digit itself (the token before the end token)
# contains this digit. At all other positions, the probe's accuracy is at chance level. *After the
# layer*, the vectors at many other positions also contain the digit, because attention has copied
# it there, but not those at the end token. In the stored output, the probe predicts the last digit
# perfectly from the vector of either hyphen. A hyphen is the same token in every line, so its
# vector has room for other information, such as the last digit, which German puts before the tens.
# The decoder reads the digit from these hyphens: in the alignment above, the row for the last digit
# has some weight at both hyphens, not only at the digit itself. (The labels below the axis are the
# tokens of the first sentence. The other sentences have different digits at the same positions.)
#
# A probe shows that information is *present*, not that the model uses it. To show that the model
# uses the information, change the information and measure the effect, as above.
#
# ## Exercises
#
# 1. Probe for the *first* digit instead. Which positions contain this digit?
# 2. Edit the positions only in the encoder, not in the decoder. (The encoder and the decoder use
#    the same class for `add_positions`. Look at how `Transformer.setup` uses this class.)
# 3. Load the run with `average_checkpoints=4`. Is the loss on the test set lower?
# 4. Copy the `runs/numbers` folder to another machine, and load it there.
