# %% [markdown]
# # 2. Positions
#
# Attention and the feed-forward network treat a sentence as an unordered set of words (notebook 1).
# The paper therefore adds a positional encoding to each embedding (section 3.5). The encoding is a
# vector that depends only on the position:
#
# $$PE(pos, 2i) = \sin(pos / 10000^{2i/d_{model}}), \qquad
# PE(pos, 2i+1) = \cos(pos / 10000^{2i/d_{model}})$$
#
# **What you learn**
#
# - how to read the well-known heat map of these sinusoids;
# - why the dot product of two encodings depends only on the distance between their positions;
# - why "for any fixed offset $k$, $PE_{pos+k}$ can be represented as a linear function of
#   $PE_{pos}$", and how a head can use this property to look $k$ positions back;
# - how training changes learned positions, the alternative to sinusoids in row (E) of Table 3;
# - what happens if a sentence is longer than all training sentences.

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
import csv
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from transformer_jax.model import sinusoid

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
rng = np.random.default_rng(0)

# %% [markdown]
# ## The heat map
#
# Each row of the heat map is the encoding of one position. Each column is a sine or a cosine of the
# position.

# %%
d_model = 128
table = np.asarray(sinusoid(jnp.arange(100), d_model))  # (positions, d_model)
figure, axes = plt.subplots(figsize=(8, 3.8))
image = axes.imshow(table, cmap="RdBu", aspect="auto")
axes.set(xlabel="component", ylabel="position", title="sinusoids, d_model = 128")
figure.colorbar(image, label="value")
plt.show()

# %% [markdown]
# In the leftmost columns, the color changes from row to row: these columns have the shortest
# wavelength, $2\pi \approx 6.3$ positions. The wavelengths grow in a geometric progression to
# $10000 \cdot 2\pi$ on the right, where the columns are almost constant. Because sines and cosines
# alternate, the plot has fine stripes: at the right edge, the sines are near 0 and the cosines are
# near 1.
#
# The columns work like the hands of a clock or the digits of a number. Columns with a short
# wavelength distinguish neighboring positions, but their values repeat. Columns with a long
# wavelength distinguish distant positions but hardly differ between neighbors.

# %%
figure, axes = plt.subplots(figsize=(8, 2.4))
for component, color in ((0, BLUE), (24, ORANGE), (48, GREEN)):
    wavelength = 2 * np.pi * 10000 ** (component / d_model)
    label = f"component {component}: wavelength {wavelength:.0f} positions"
    axes.plot(table[:, component], ".-", ms=3, lw=1, color=color, label=label)
axes.set(xlabel="position", ylabel="value")
figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
plt.show()

# %% [markdown]
# ## The dot product depends only on the offset
#
# A pair of components $(\sin \omega_i p, \cos \omega_i p)$ is a point on a circle. By the angle
# addition formula, $\sin a \sin b + \cos a \cos b = \cos(a - b)$, so
#
# $$PE(p) \cdot PE(p + k) = \sum_{i=0}^{d_{model}/2 - 1} \cos(\omega_i k),
# \qquad \omega_i = 10000^{-2i/d_{model}}$$
#
# The right-hand side of the equation does not contain the position $p$.

# %%
products = table @ table.T
offsets = np.arange(100)
frequencies = 10000 ** (-np.arange(0, d_model, 2) / d_model)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[1, 1.4])
figure.colorbar(left.imshow(products, cmap="viridis"), ax=left)
left.set(xlabel="position", ylabel="position", title="dot products")
right.plot(offsets, np.cos(np.outer(offsets, frequencies)).sum(axis=1), color="0.6", lw=5)
for start, color in ((0, BLUE), (40, ORANGE)):
    right.plot(products[start, start:], color=color, label=f"from position {start}")
right.set(xlabel="offset k", title="dot product by offset")
right.legend()
plt.show()

# %% [markdown]
# *Left:* every diagonal has one color, so the matrix is a function of the offset alone (a Toeplitz
# matrix). *Right:* the curves from positions 0 and 40 are the same, and they follow the formula
# (gray). The dot product is largest at offset 0, where it is $d_{model} / 2 = 64$, and falls
# quickly as the offset grows. Attention can use the dot product as a measure of distance. The dot
# product does not reveal the direction, because the cosine is even: the offsets $k$ and $-k$ have
# the same product. The linear map in the next section also captures the direction.

# %% [markdown]
# ## The linear map from $PE(pos)$ to $PE(pos + k)$
#
# Moving by $k$ positions rotates each pair of components by the angle $\omega_i k$. Rotations are
# linear, and the angle does not depend on $pos$:
#
# $$\begin{pmatrix} \sin \omega_i (pos + k) \\ \cos \omega_i (pos + k) \end{pmatrix} =
# \begin{pmatrix} \cos \omega_i k & \sin \omega_i k \\ -\sin \omega_i k & \cos \omega_i k
# \end{pmatrix}
# \begin{pmatrix} \sin \omega_i pos \\ \cos \omega_i pos \end{pmatrix}$$
#
# For each offset $k$, the rotation matrices of all pairs form a block-diagonal matrix $M_k$.


# %%
def shift_matrix(k, d_model):
    """Return M_k such that PE(pos + k) = M_k PE(pos): a rotation for each pair of components."""
    matrix = np.zeros((d_model, d_model))
    for i, angle in enumerate(k * 10000 ** (-np.arange(0, d_model, 2) / d_model)):
        rotation = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = rotation
    return matrix


shifted = table[:-5] @ shift_matrix(5, d_model).T
figure, panels = plt.subplots(1, 3, figsize=(10, 2.9), width_ratios=[1, 1.2, 1.2])
panels[0].imshow(shift_matrix(5, 16), cmap="RdBu", vmin=-1, vmax=1)
panels[1].imshow(shifted, cmap="RdBu", aspect="auto", extent=(0, 128, 95, 0))
panels[2].imshow(table[5:], cmap="RdBu", aspect="auto", extent=(0, 128, 100, 5))
for axes, title in zip(
    panels, ("$M_5$ for d_model = 16", "$M_5$ PE(0), ..., $M_5$ PE(94)", "PE(5), ..., PE(99)")
):
    axes.set(title=title, xlabel="component")
panels[0].set(ylabel="component", xticks=range(0, 16, 5), yticks=range(0, 16, 5))
panels[1].set_ylabel("position")
print(f"largest difference between the last two panels: {np.abs(shifted - table[5:]).max():.0e}")
plt.show()

# %% [markdown]
# The 2 x 2 blocks on the diagonal of the first panel are the rotations: the pairs at the top left,
# which have short wavelengths, rotate by large angles, and the pairs at the bottom right hardly
# rotate. The second and third panels are equal up to float32 rounding.
#
# Does such a linear map exist only for sinusoids? To find out, we *fit* a matrix that maps the row
# of each position to the row $k$ positions later. We use least squares on positions 0 to 149 and
# test the matrix on positions 150 to 199. For comparison, we also fit a matrix to a table of random
# vectors, like the initial values of a learned table.

# %%
# Use float64, because the columns with long wavelengths are almost constant, so the fit is
# ill-conditioned.
angles = np.outer(np.arange(232), 10000 ** (-np.arange(0, 32, 2) / 32))
long_table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(232, 32)
random_table = rng.normal(size=(232, 32)) * 0.5**0.5


def residual(rows, k):
    """Return the relative error of the best linear map from rows to those k positions later."""
    fit, *_ = np.linalg.lstsq(rows[:150], rows[k : 150 + k], rcond=None)
    error = rows[150:200] @ fit - rows[150 + k : 200 + k]
    return np.linalg.norm(error) / np.linalg.norm(rows[150 + k : 200 + k])


figure, axes = plt.subplots(figsize=(6, 2.8))
offsets = [1, 2, 4, 8, 16, 32]
tables = {"random table": (random_table, "o", ORANGE), "sinusoids": (long_table, "s", BLUE)}
for name, (rows, marker, color) in tables.items():
    errors = [residual(rows, k) for k in offsets]
    axes.plot(offsets, errors, marker=marker, color=color, label=name)
axes.set(xscale="log", yscale="log", xlabel="offset k", ylabel="relative error", ylim=(1e-11, 10))
axes.set_xticks(offsets, map(str, offsets))
axes.minorticks_off()
axes.legend()
plt.show()

# %% [markdown]
# For sinusoids, the fitted map is correct up to rounding, even at positions that were not used to
# fit it. For the random table, no linear map fits: the error is as large as the rows themselves. A
# model with a learned table has to learn the relation between each pair of positions from examples.
#
# ### A head that looks $k$ positions back
#
# The authors chose sinusoids because they "hypothesized it would allow the model to easily learn to
# attend by relative positions". The following construction shows how a head can attend by relative
# positions. Let the key projection copy the encoding, and let the query projection be $M_{-k}$, up
# to a factor $\beta$. The score of query position $p$ and key position $j$ is then
#
# $$\beta \; (M_{-k} PE(p)) \cdot PE(j) = \beta \; PE(p - k) \cdot PE(j)$$
#
# According to the previous section, the score is largest at $j = p - k$. A single linear map is
# enough for all positions.

# %%
figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.1), sharey=True)
for axes, k in zip(panels, (0, 1, 5)):
    scores = 0.5 * table[:30] @ shift_matrix(-k, d_model).T @ table[:30].T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
    axes.set(title=f"k = {k}", xlabel="key position")
panels[0].set_ylabel("query position")
figure.colorbar(image, ax=panels, label="weight")
plt.show()

# %% [markdown]
# The weights form a diagonal that is shifted by $k$. (The first $k$ queries look for positions
# before the start of the sentence. For these queries, the best match among the existing positions
# is the first one.) In notebook 3, you can look for such diagonals in a trained model.

# %% [markdown]
# ## A learned table, before and after training
#
# Row (E) of Table 3 replaces the sinusoids with a learned table: one trainable vector for each
# position. We train a small model with a learned table for a few steps on English and German number
# words, and then examine the encoder's table. The training loop is short, because a training step
# is a pure function of the state and a batch.

# %%
from transformer_jax import Config, build_transformer
from transformer_jax.data import Batch, prepare_text
from transformer_jax.training import TrainStep, init_state

config = Config().change(
    model={
        "positions": "learned",
        "num_layers": 1,
        "d_model": 64,
        "d_ff": 128,
        "num_heads": 4,
        "d_k": 16,
        "d_v": 16,
        "max_length": 64,
    },
    data={"vocab_size": 128, "num_pairs": 3000, "max_numbers_per_line": 2, "max_length": 64},
    train={"warmup_steps": 80, "learning_rate_scale": 0.5},
)
prepared = prepare_text(config.data)
source, target = prepared.tokens("train")
width = int(max(source.lengths.max(), target.lengths.max()))
print(
    "longest source:", source.lengths.max(), "tokens; rows of the table:", config.model.max_length
)

# %%
model = build_transformer(config.model, **prepared.vocabulary.sizes)
state = init_state(model, config.train)
before = np.array(state.params["source_positions"]["positions"])
train_step = jax.jit(TrainStep(model, config.train).__call__)
perplexity = []
for _ in range(240):
    rows = rng.integers(len(source.lengths), size=48)
    batch = Batch(source.pad(rows, 48, width), target.pad(rows, 48, width))
    state, metrics = train_step(state, batch)
    perplexity.append(float(np.exp(metrics.loss.nll / metrics.loss.count)))
after = np.array(state.params["source_positions"]["positions"])

figure, axes = plt.subplots(figsize=(5, 2.2))
axes.plot(perplexity, color=BLUE)
axes.set(xlabel="step", ylabel="training perplexity", yscale="log")
ticks = [2, 5, 10, 20, 50, 100, 200]
axes.set_yticks(ticks, map(str, ticks))
axes.minorticks_off()
plt.show()

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
tables = {
    "sinusoids": np.asarray(sinusoid(jnp.arange(64), 64)),
    "learned, before training": before,
    "learned, after training": after,
}
for axes, (title, rows) in zip(panels, tables.items()):
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    image = axes.imshow(unit @ unit.T, cmap="RdBu", vmin=-1, vmax=1)
    axes.set(title=title, xlabel="position")
panels[0].set_ylabel("position")
figure.colorbar(image, ax=panels, label="cosine of the angle")
plt.show()

# %% [markdown]
# Each panel compares all rows of one table with each other. The sinusoids have the diagonal stripes
# shown above. Before training, a learned table has no structure: different rows are almost
# orthogonal. Training creates structure that reflects the data. In this example, the structure
# consists of blocks: the vectors of positions that play the same role in many sentences, such as
# the thousands in the first and second numbers, become similar to each other. These blocks are
# specific to the training text. Nothing forces the values on a diagonal to be equal, so what a row
# learns about its position does not automatically apply to other rows.
#
# The lower-right part of the third panel still looks like the second panel. The next figure shows
# why.

# %%
uses = (source.lengths[:, None] > np.arange(64)).mean(axis=0)
change = np.linalg.norm(after - before, axis=1)
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 3.6), sharex=True)
top.bar(range(64), 100 * uses, color="0.6")
top.set(ylabel="sentences [%]", title="training sentences that reach a position")
bottom.bar(range(64), change, color=ORANGE)
bottom.set(
    xlabel="position", ylabel="distance", title="how far training moves the row of a position"
)
never = source.lengths.max()
for axes in (top, bottom):
    axes.axvspan(never - 0.5, 63.5, color="0.9", zorder=0)
print("rows without training sentences are unchanged:", (after[never:] == before[never:]).all())
plt.show()

# %% [markdown]
# A row of the table changes only if a training sentence is long enough to reach its position. The
# rows in the gray region are bit-identical to their initial values, which are random vectors. At
# test time, a sentence that is longer than all training sentences would use these random vectors.
#
# ## Beyond the training length
#
# The authors chose sinusoids "because it may allow the model to extrapolate to sequence lengths
# longer than the ones encountered during training." The paper does not test this claim, but the
# positions study in this repository does. The study trains models on lines of at most $L = 30$
# tokens and scores them on lines of up to 120 tokens. The lines contain spelled-out numbers. We
# plot the study's results, which are stored in this repository, for three seeds per scheme.
# `docs/positions.md` describes the study and its statistics.

# %%
results = defaultdict(list)
path = Path(REPOSITORY, "experiments/results/positions-short-numbers/table.csv")
with path.open(encoding="utf-8", newline="") as file:
    for line in csv.DictReader(file):
        results[line["score"], line["row"], int(line["end"])].append(float(line["value"]))
schemes = {"sinusoidal": BLUE, "learned": ORANGE, "none": "0.5", "rotary": GREEN}
ends = sorted({end for *_, end in results})

figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.2))
for axes, score in zip(panels, ("perplexity", "exact")):
    for (scheme, color), marker in zip(schemes.items(), "so^D"):
        seeds = np.array([results[score, scheme, end] for end in ends])  # (lengths, seeds)
        axes.plot(seeds.mean(axis=1), marker=marker, color=color, label=scheme)
        axes.fill_between(
            range(len(ends)), seeds.min(1), seeds.max(1), color=color, alpha=0.15, lw=0
        )
    axes.axvspan(ends.index(30) + 0.5, len(ends) - 0.5, color="0.93", zorder=0)
    axes.set_xticks(range(len(ends)), [f"to {end}" for end in ends])
    axes.set(xlabel="length in tokens", xlim=(-0.5, len(ends) - 0.5))
panels[0].set(title="perplexity", yscale="log")
panels[0].set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
panels[0].minorticks_off()
panels[1].set(title="lines exactly right [%]")
panels[0].legend()
plt.show()

# %% [markdown]
# The gray region marks the lengths beyond $L$, which do not occur in training. The colored bands
# show the range over the three seeds. Compare different schemes at the same length, but do not
# compare different lengths for the same scheme, because the sentences at each length are different.
#
# At lengths up to $L$, all three models that encode positions translate nearly every line
# correctly. Beyond $L$, sinusoids give a lower perplexity than the learned table, whose rows beyond
# $L$ are random vectors. Sinusoids do not extrapolate far, however: the model correctly
# translates only 15% of the lines with lengths from $L$ to $1.5L$ and none of the longer lines. The
# formula for sinusoids defines a vector for every position, but the *model* has never seen the
# vectors beyond position $L$. Rotary positions, a later scheme that makes attention depend on the
# offset, give better results from $L$ to $1.5L$. Beyond $2L$, the model without positional
# encodings has the lowest perplexity, probably because unfamiliar positions cannot mislead it. At
# lengths up to $L$, the model without positional encodings is the worst. These results are for a
# single corpus. On image captions from $L$ to $2L$, sinusoids also give a significantly lower
# perplexity than the learned table, but rotary positions do not give a significantly lower
# perplexity than sinusoids.
#
# ## Exercises
#
# 1. Replace 10000 with 100 in the formula for sinusoids. Which positions become hard to
#    distinguish?
# 2. Put all sines before all cosines, as in the authors' code (the `concatenated_sinusoidal`
#    position scheme). Which figures in this notebook change?
# 3. Train the learned table with `learned_positions_init="sinusoids"`. Does training preserve the
#    diagonal stripes?
# 4. Train with `max_numbers_per_line=3`. Which rows of the learned table change now?
