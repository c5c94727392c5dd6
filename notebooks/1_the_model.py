# %% [markdown]
# # 1. The model
#
# This notebook follows sections 3 to 5 of *Attention Is All You Need* (Vaswani et al., 2017) in
# order. Keep the paper at hand. Each part of the notebook names a section of the paper and states
# an equation. The code in each part then calls the function in this package that implements the
# equation.
#
# **What you learn**
#
# - which module implements each equation, and the shapes of the arrays that pass between modules;
# - how attention works, using a 3 x 3 example that you can check with a pocket calculator;
# - why the paper divides the scores by $\sqrt{d_k}$, with an empirical test of footnote 4;
# - why the feed-forward network is the same as two convolutions with kernel size 1;
# - which sentences a Transformer without positional encodings cannot distinguish.
#
# This notebook does not train a model. All parameters are random, so the figures show the effect of
# the *architecture*. Notebook 3 shows what training adds.

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
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from transformer_jax import ModelConfig, build_transformer

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
rng = np.random.default_rng(0)


def show(axes, matrix, title, *, rows=None, columns=None, numbers=None, **options):
    """Draw a heat map of a matrix, optionally with row names, column names, and the values."""
    image = axes.imshow(matrix, **{"cmap": "Blues", "aspect": "auto", **options})
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(columns or [])), columns or [])
    axes.set_yticks(range(len(rows or [])), rows or [])
    if numbers is not None:
        top = np.abs(matrix).max()
        for (i, j), value in np.ndenumerate(matrix):
            color = "white" if value > 0.6 * top else "black"
            axes.text(j, i, format(value, numbers), ha="center", va="center", color=color)
    return image


# %% [markdown]
# ## 3.1 Encoder and decoder stacks
#
# The paper's base model has $N = 6$ layers in each stack, vectors of width $d_{model} = 512$, and
# $h = 8$ heads. These values are the defaults of `ModelConfig`, so an empty config is the base
# model. JAX can compute the shape of every array in the model without allocating any arrays. As in
# the code, the shapes use `B` for sentences, `S` for source tokens, and `T` for target tokens.

# %%
base = ModelConfig()
model = build_transformer(base, vocab_size=37_000)
source, target = jnp.ones((1, 7), int), jnp.ones((1, 5), int)  # B = 1, S = 7, T = 5


def run_and_record(rng, source, target):
    """Return the outputs of all modules, keyed by module name."""
    _, variables = model.init_with_output(
        rng,
        source,
        target,
        mutable=True,
        capture_intermediates=lambda _, method: method in {"__call__", "embed", "logits", "leave"},
    )
    return variables["intermediates"]


shapes = jax.eval_shape(run_and_record, jax.random.key(0), source, target)
for part in ("embedding", "source_positions", "encoder_0", "decoder_0"):
    for path, array in jax.tree_util.tree_leaves_with_path(shapes[part]):
        names = [entry.key for entry in path[:-1] if entry.key not in ("__call__", "leave")]
        if not {"dropout", "Dropout_0", "norm"} & {*names}:
            print(f"{'.'.join([part, *names]):38} {array.shape}")

# %% [markdown]
# The list shows the array shapes in the embeddings and in the first layer of each stack. Most
# arrays have shape `(B, positions, width)`. Inside attention, the arrays have one more axis for the
# heads, and the weights have shape `(B, heads, queries, keys)`. For example, in cross-attention, 5
# target positions attend to 7 source positions. Every sub-layer's output has the same shape as its
# input. Equal input and output shapes make residual connections possible and allow layers to be
# stacked.
#
# The next plot is figure 1 of the paper, labeled with the array shapes.

# %%
ENCODER = [
    ("source tokens", "(B, S)"),
    ("embedding x sqrt(d_model)", "(B, S, 512)"),
    ("+ positions", "(B, S, 512)"),
    ("self-attention", "(B, S, 512)"),
    ("add & norm", "(B, S, 512)"),
    ("feed-forward", "(B, S, 512)"),
    ("add & norm", "memory (B, S, 512)"),
]
DECODER = [
    ("target tokens, shifted right", "(B, T)"),
    ("embedding x sqrt(d_model)", "(B, T, 512)"),
    ("+ positions", "(B, T, 512)"),
    ("masked self-attention", "(B, T, 512)"),
    ("add & norm", "(B, T, 512)"),
    ("cross-attention", "(B, T, 512)"),
    ("add & norm", "(B, T, 512)"),
    ("feed-forward", "(B, T, 512)"),
    ("add & norm", "(B, T, 512)"),
    ("same embedding, transposed", "logits (B, T, 37000)"),
]
COLORS = {"att": "#f6c89f", "feed": "#b9d7ea", "norm": "#f3eeb2", "embed": "#f4c9d6"}


def draw_stack(axes, x, modules, layer):
    """Draw modules, bottom first; `layer` gives the indices of a layer's first and last modules."""
    first, last = layer
    frame = plt.Rectangle((x - 1.25, first - 0.32), 2.5, last - first + 0.64, fill=False, ls="--")
    axes.add_patch(frame)
    axes.text(x + 1.2, first - 0.25, "x N", ha="right", va="bottom")
    for y, (name, shape) in enumerate(modules):
        color = next((c for part, c in COLORS.items() if part in name), "white")
        axes.text(x, y, name, ha="center", va="center", bbox={"fc": color, "boxstyle": "round"})
        axes.text(x + 0.06, y + 0.5, shape, fontsize=7, va="center", color="0.35")
        top = y + 0.78
        axes.annotate("", (x, top), (x, y + 0.25), arrowprops={"arrowstyle": "-|>", "color": "0.5"})


figure, axes = plt.subplots(figsize=(8, 7))
draw_stack(axes, 0, ENCODER, (3, 6))
draw_stack(axes, 4, DECODER, (3, 8))
axes.plot([0, 0, 1.6, 1.6], [6.75, 7.2, 7.2, 5], color="0.5", lw=1)
axes.annotate("", (3.45, 5), (1.6, 5), arrowprops={"arrowstyle": "-|>", "color": "0.5"})
axes.text(1.66, 6.0, "keys and\nvalues for\neach layer", fontsize=8, va="center")
axes.set(xlim=(-1.6, 5.6), ylim=(-0.6, 10), title="Figure 1 of the paper, with shapes")
axes.axis("off")
plt.show()

# %% [markdown]
# Each sub-layer has a residual connection, followed by layer normalization:
#
# $$\mathrm{LayerNorm}(x + \mathrm{Sublayer}(x))$$
#
# Layer normalization acts on each position separately: it subtracts the mean of the 512 components
# and divides by their standard deviation. Layer normalization does not mix positions, and its
# output does not depend on the other sentences in the batch. The next figure shows layer
# normalization for five positions whose vectors have very different scales.

# %%
from transformer_jax.model import layer_norm

x = rng.normal(size=(5, 64)) * [[0.2], [0.5], [1], [2], [3]] + [[0], [1], [0], [-2], [1]]
norm = layer_norm(base)
normalized, _ = jax.jit(norm.init_with_output)(jax.random.key(0), jnp.asarray(x, jnp.float32))
figure, panels = plt.subplots(1, 2, figsize=(8, 2.2), sharey=True)
for axes, matrix, title in zip(panels, (x, normalized), ("x + Sublayer(x)", "after LayerNorm")):
    image = show(axes, matrix, title, cmap="RdBu", vmin=-6, vmax=6, rows=list("abcde"))
    axes.set_xlabel("component")
panels[0].set_ylabel("position")
figure.colorbar(image, ax=panels, label="value")
print("mean before:", x.mean(axis=1).round(1), " after:", np.abs(normalized.mean(axis=1)).round(1))
print("std  before:", x.std(axis=1).round(1), " after:", normalized.std(axis=1).round(1))
plt.show()

# %% [markdown]
# Before normalization, positions *d* and *e* have the largest values. After normalization, all
# positions have mean 0 and standard deviation 1, and only the direction of each vector remains. The
# layer then applies a learned scale and a learned bias, which start at 1 and 0.

# %% [markdown]
# ## 3.2.1 Scaled dot-product attention, by hand
#
# Equation 1 of the paper is
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{QK^\top}{\sqrt{d_k}}\right) V$$
#
# Row $i$ of $Q$ is a *query*, which represents what position $i$ is looking for. Row $j$ of $K$ is
# a *key*, which represents what position $j$ offers. Row $j$ of $V$ is the *value* that position
# $i$ receives if it attends to $j$. The following example has three words, with $d_k = 4$ and $d_v
# = 2$. The numbers in the example are simple, so you can follow along on paper.

# %%
words = ["I", "saw", "her"]
Q = np.array([[1, -1, 3, 0], [-1, 3, 1, 0], [3, 1, -1, 0]])
K = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 0]])
V = np.array([[10, 0], [0, 10], [5, 5]])

dot_products = Q @ K.T
scores = dot_products / np.sqrt(4)
exponentials = np.exp(scores)
weights = exponentials / exponentials.sum(axis=1, keepdims=True)
output = weights @ V

# %%
figure, panels = plt.subplots(1, 4, figsize=(9.5, 2.6), width_ratios=[3, 3, 3, 2])
steps = {
    r"$QK^\top$": dot_products,
    r"$QK^\top / \sqrt{4}$": scores,
    "weights: softmax of each row": weights,
    "weights times V": output,
}
for axes, (title, matrix) in zip(panels, steps.items()):
    numbers = ".3f" if title.startswith("weights") else ".0f"
    columns = words if matrix.shape[1] == 3 else ["v1", "v2"]
    show(axes, matrix, title, rows=words, columns=columns, numbers=numbers)
panels[0].set_ylabel("queries")
panels[0].set_xlabel("keys")
plt.show()

# %% [markdown]
# Read the first row of the figure from left to right. The query of "I" is $(1, -1, 3, 0)$. Its dot
# products with the three keys are $1 + 3 = 4$, $-1 + 3 = 2$, and $1 - 1 = 0$. Dividing the dot
# products by $\sqrt 4 = 2$ gives 2, 1, and 0. The exponentials are $e^2 = 7.389$, $e^1 = 2.718$,
# and $e^0 = 1$. The exponentials sum to 11.107, so the softmax weights are 0.665, 0.245, and 0.090.
# The output is the average of the values, weighted by the softmax: its first component is $0.665
# \cdot 10 + 0.245 \cdot 0 + 0.090 \cdot 5 = 7.10$.
#
# The package's functions compute the same result. The arrays in the package have two more axes: one
# for the sentences in a batch, and one for the heads.

# %%
from transformer_jax.model import masked_softmax, scaled_dot_product, weighted_sum

q, k, v = (jnp.asarray(m, jnp.float32)[None, :, None, :] for m in (Q, K, V))  # (B, T, H, d)
everywhere = jnp.ones((1, 1, 3, 3), bool)
ours = weighted_sum(masked_softmax(scaled_dot_product(q, k), everywhere), v)[0, :, 0]
np.testing.assert_allclose(ours, output, rtol=1e-5)
print(ours)

# %% [markdown]
# ## Why divide by $\sqrt{d_k}$?
#
# Footnote 4 of the paper explains why the scores are scaled. Let the components of a query $q$ and
# of a key $k$ be independent, with mean 0 and variance 1. Each product $q_i k_i$ then has mean 0
# and variance $\mathrm{E}[q_i^2]\,\mathrm{E}[k_i^2] = 1$. The dot product is a sum of $d_k$ such
# products, and the variances of independent terms add up:
#
# $$\mathrm{Var}(q \cdot k) = \sum_{i=1}^{d_k} \mathrm{Var}(q_i k_i) = d_k$$
#
# Dividing by $\sqrt{d_k}$ divides the variance by $d_k$, so the variance becomes 1 for every width.
# We measure the variance of the scores with and without scaling, and the effect of scaling on the
# softmax.

# %%
widths = 2 ** np.arange(0, 11)
num_queries, num_keys = 200, 32
variances, gradients, largest = ({"unscaled": [], "scaled": []} for _ in range(3))
for d_k in widths:
    queries = rng.normal(size=(num_queries, d_k))
    keys = rng.normal(size=(num_queries, num_keys, d_k))
    products = np.einsum("qi,qki->qk", queries, keys)
    for name, factor in (("unscaled", 1), ("scaled", d_k**-0.5)):
        p = np.asarray(jax.nn.softmax(products * factor))
        # The derivative of weight i with respect to score j is p_i (1[i = j] - p_j).
        jacobian = p[:, :, None] * (np.eye(num_keys) - p[:, None, :])
        variances[name].append((products * factor).var())
        gradients[name].append(np.linalg.norm(jacobian, axis=(1, 2)).mean())
        largest[name].append(p.max(axis=1).mean())

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 2.9))
titles = "variance of the scores", "largest of 32 weights", "gradient of the softmax (norm)"
for axes, values, title in zip(panels, (variances, largest, gradients), titles):
    axes.plot(widths, values["unscaled"], "o-", color=ORANGE, label=r"$q \cdot k$")
    scaled_label = r"$q \cdot k / \sqrt{d_k}$"
    axes.plot(widths, values["scaled"], "s-", color=BLUE, label=scaled_label)
    axes.set(xscale="log", xlabel="$d_k$", title=title)
panels[0].set_yscale("log")
panels[0].plot(widths, widths, color="black", lw=1.5, ls=":", label="$d_k$")
panels[0].legend()
plt.show()

# %% [markdown]
# *Left:* without scaling, the variance follows the dotted line $d_k$; with scaling, it stays at 1.
# *Middle:* large scores make the softmax nearly one-hot. At $d_k = 512$, one key receives almost
# all of the weight before training begins. *Right:* where the softmax is nearly one-hot, its
# gradient is small. Section 3.2.1 describes these "regions where it has extremely small gradients".
# With scaling, the three quantities hardly depend on the width, so training starts under similar
# conditions for heads of any width.

# %% [markdown]
# ## 3.2.2 Multi-head attention
#
# $$\mathrm{MultiHead}(Q, K, V) = \mathrm{Concat}(\mathrm{head}_1, \ldots, \mathrm{head}_h) W^O,
# \qquad \mathrm{head}_i = \mathrm{Attention}(Q W_i^Q, K W_i^K, V W_i^V)$$
#
# Each head has its own projections, so each head can look for something different. A single softmax
# produces a single weighted average, which mixes the information from different positions. With $h$
# heads, a position receives $h$ separate averages.
#
# From here on, we use a small model and one sentence, whose tokens are whole words.

# %%
sentence = ["the", "dog", "that", "chased", "the", "cat", "runs"]
vocabulary = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted(set(sentence))]
tokens = jnp.array([[vocabulary.index(word) for word in [*sentence, "<eos>"]]])
labels = [*sentence, "<eos>"]
small = ModelConfig(num_layers=2, d_model=64, d_ff=256, num_heads=4, d_k=16, d_v=16)
model = build_transformer(small, vocab_size=len(vocabulary))
params = jax.jit(model.init)(jax.random.key(1), tokens, tokens)["params"]

# %%
from transformer_jax.model import attention_weights

compute_weights = jax.jit(attention_weights, static_argnums=0)
encoder = compute_weights(model, params, tokens, tokens)["encoder"]
print("(layers, B, heads, queries, keys):", encoder.shape)
figure, panels = plt.subplots(1, 4, figsize=(10.5, 3.4), sharey=True)
for head, axes in enumerate(panels):
    options = {"rows": labels, "columns": labels, "vmin": 0, "vmax": encoder[0, 0].max()}
    image = show(axes, encoder[0, 0, head], f"head {head + 1}", **options)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("keys")
panels[0].set_ylabel("queries")
figure.colorbar(image, ax=panels, label="weight")
plt.show()

# %% [markdown]
# The figure shows the four heads of the first layer before training. Each row shows how much one
# word attends to each word in the sentence, and the weights in a row sum to 1. Random projections
# give each head a different pattern. The rows for the two occurrences of "the" differ only because
# their positions differ. In section 3.5 below, we remove the positional encodings.
#
# Concatenating the heads and multiplying by $W^O$ has a second interpretation. If we split $W^O$
# into $h$ blocks of rows, the result is the *sum* of the heads, each multiplied by its own output
# matrix: $\sum_i \mathrm{head}_i W_i^O$. Heads therefore add their results to the residual stream
# independently. Because of this independence, masking a single head (notebook 3) is well defined.

# %%
from transformer_jax.model import MultiHeadAttention

attention = MultiHeadAttention(small, lambda _: scaled_dot_product)
x = jnp.asarray(rng.normal(size=(1, 8, 64)), jnp.float32)
mask = jnp.ones((1, 1, 8, 8), bool)


@jax.jit
def attend_and_record(rng, x):
    """Return the output of the attention module, its parameters, and its submodules' outputs."""
    return attention.init_with_output(rng, x, x, mask, capture_intermediates=True, mutable=True)


result, variables = attend_and_record(jax.random.key(0), x)
attention_params = {"params": variables["params"]}
# The next three arrays have the shapes (B, H, T, S), (B, S, H, V), and (H, V, D).
weight = variables["intermediates"]["weights"][0]
value = variables["intermediates"]["value"]["__call__"][0]
output_kernel = variables["params"]["output"]["kernel"]
heads = jnp.einsum("bhts,bshv->bhtv", weight, value)
by_head = jnp.einsum("bhtv,hvd->bhtd", heads, output_kernel)
print("one output per head:", by_head.shape, " their sum:", by_head.sum(axis=1).shape)
print("largest difference from the module:", f"{jnp.abs(by_head.sum(axis=1) - result).max():.0e}")

# %% [markdown]
# Using more heads does not add parameters. In rows (A) of Table 3, the width of a head shrinks as
# the number of heads grows, and the number of parameters stays the same:

# %%
from transformer_jax.model import parameter_counts

for h in (1, 8, 32):
    config = ModelConfig(num_heads=h, d_k=512 // h, d_v=512 // h)
    counts = parameter_counts(build_transformer(config, vocab_size=37_000))
    print(f"h = {h:2}, d_k = d_v = {512 // h:3}: {counts['total'] / 1e6:.2f} M parameters")

# %% [markdown]
# ## 3.2.3 Masks
#
# The model uses attention within the encoder, within the decoder, and from the decoder to the
# encoder. These three kinds of attention differ in where the queries and keys come from, and in the
# *mask*. Where the mask is false, the score is set to $-\infty$ before the softmax, so the weight
# is 0.

# %%
from transformer_jax.model import causal_mask, source_mask

padded = jnp.pad(tokens, ((0, 0), (0, 3)))  # <pad> is token 0
figure, panels = plt.subplots(1, 2, figsize=(8, 3.2))
encoder_mask = jnp.broadcast_to(source_mask(padded)[0, 0], (11, 11))
show(panels[0], encoder_mask, "encoder, and cross-attention:\npadding is hidden", vmin=0)
show(panels[1], causal_mask(11)[0, 0], "decoder self-attention:\nthe future is hidden", vmin=0)
for axes in panels:
    axes.set(xlabel="key position", ylabel="query position", aspect="equal")
    axes.set_xticks(range(0, 11, 2), range(0, 11, 2))
    axes.set_yticks(range(0, 11, 2), range(0, 11, 2))
plt.show()

# %% [markdown]
# A blue cell means that the query can attend to the key. The left mask hides the three columns of
# padding from every query. The right mask is a triangle: position $i$ can attend to the positions
# up to and including $i$.
#
# Section 3.1 claims that, with the mask and with the target shifted right by one position, "the
# predictions for position $i$ can depend only on the known outputs at positions less than $i$". We
# test this claim on the complete decoder: we replace each target token in turn and record which
# predictions change.

# %%
length = tokens.shape[1]
changed = jnp.tile(tokens, (length, 1))
changed = changed.at[jnp.arange(length), jnp.arange(length)].set(vocabulary.index("<unk>"))
sources = jnp.tile(tokens, (length + 1, 1))
logits = jax.jit(model.apply)({"params": params}, sources, jnp.concatenate([tokens, changed]))
influence = jnp.abs(logits[1:] - logits[:1]).max(axis=-1).T  # (prediction, replaced token)

figure, axes = plt.subplots(figsize=(5.2, 3.9))
image = show(axes, influence, "change of each prediction", rows=labels, columns=labels)
figure.colorbar(image, label="largest change of a logit")
axes.tick_params(axis="x", rotation=90)
axes.set(xlabel="replaced target token", ylabel="predicted token")
print("largest change on or above the diagonal:", np.triu(influence).max())
plt.show()

# %% [markdown]
# The values on and above the diagonal are exactly zero: a prediction depends neither on the
# predicted token nor on later tokens. Training can therefore predict all positions of a sentence at
# the same time without revealing the answers to the model.

# %% [markdown]
# ## 3.3 The feed-forward network is two convolutions with kernel size 1
#
# $$\mathrm{FFN}(x) = \max(0, x W_1 + b_1) W_2 + b_2$$
#
# The same two matrices are applied at each position. The paper adds: "Another way of describing
# this is as two convolutions with kernel size 1." We build these convolutions with the same
# parameters as the feed-forward network.

# %%
from flax import linen as nn

from transformer_jax.model import FeedForward

ffn = FeedForward(small)
result, variables = jax.jit(ffn.init_with_output)(jax.random.key(0), x)
inner, outer = variables["params"]["inner"], variables["params"]["outer"]


def convolution(x, layer):
    """Apply a linear layer with a kernel of shape (in, out) as a convolution with kernel size 1."""
    conv = nn.Conv(features=layer["kernel"].shape[1], kernel_size=(1,))
    return conv.apply({"params": {"kernel": layer["kernel"][None], "bias": layer["bias"]}}, x)


convolved = convolution(nn.relu(convolution(x, inner)), outer)
print("shapes:", x.shape, "->", (x @ inner["kernel"]).shape, "->", result.shape)
print("largest difference:", f"{jnp.abs(convolved - result).max():.0e}")

# %% [markdown]
# Because the convolutions are one position wide, the feed-forward network cannot use a word's
# neighbors. Only attention moves information between positions. To demonstrate the difference, we
# change one position of the input and record which positions of the output change.

# %%
both = jnp.concatenate([x, x.at[0, 3].add(1.0)])
outputs = {
    "feed-forward": jax.jit(ffn.apply)(variables, both),
    "self-attention": jax.jit(attention.apply)(attention_params, both, both, mask),
}
figure, panels = plt.subplots(1, 2, figsize=(8, 2.2))
for axes, (name, (before, after)) in zip(panels, outputs.items()):
    change = np.abs(np.asarray(after - before)).mean(axis=-1)
    axes.bar(range(8), change, color=BLUE)
    axes.set(title=name, xlabel="position of the output", ylabel="mean change", xticks=range(8))
plt.show()

# %% [markdown]
# The input changes only at position 3. The feed-forward network's output also changes only at
# position 3, whereas the output of self-attention changes everywhere.

# %% [markdown]
# ## 3.4 Embeddings
#
# One matrix of shape (vocabulary, $d_{model}$) has three uses: it embeds the source, it embeds the
# target, and its transpose turns the decoder's output into logits. "In the embedding layers, we
# multiply those weights by $\sqrt{d_{model}}$." We examine the effect of this factor at
# initialization, when the components have variance $1 / d_{model}$.

# %%
from transformer_jax.model import sinusoid

table = rng.normal(size=(2000, 512)) * 512**-0.5
positions = sinusoid(jnp.arange(50), 512)
print("norm of a row of the matrix      ", np.linalg.norm(table, axis=1).mean().round(2))
print(
    "norm of an embedding (x sqrt 512)", (np.linalg.norm(table, axis=1) * 512**0.5).mean().round(2)
)
print("norm of a positional encoding    ", np.linalg.norm(positions, axis=1).mean().round(2))
x = rng.normal(size=(100, 512))  # variance 1, like the output of LayerNorm
print("variance of the logits           ", (x @ table.T).var().round(2))

# %% [markdown]
# With the factor $\sqrt{d_{model}}$, embeddings and positional encodings have norms of similar
# size, so neither dominates the other. Without this factor, the norms of the positional encodings
# would be 16 times as large as the norms of the embeddings. The logits use the embedding matrix
# *without* the factor, so their initial variance is 1. An untrained model is therefore not
# confident in any prediction. A uniform prediction over $N$ tokens has a cross-entropy of $\ln N$,
# and the cross-entropy of the untrained model exceeds this value by less than 1:

# %%
from transformer_jax.model import cross_entropy

logits = jax.jit(model.apply)({"params": params}, tokens, tokens)
loss = cross_entropy(logits, tokens, smoothing=0.0)
print(f"cross-entropy {loss.nll / loss.count:.2f}, ln N = {np.log(len(vocabulary)):.2f}")

# %% [markdown]
# ## 3.5 Without positions, word order does not exist
#
# Apart from the positional encodings, nothing in the encoder depends on the order of the words. Let
# $P$ be a permutation of the positions. Attention compares every query with every key, and the
# feed-forward network treats all positions alike, so an encoder without positional encodings
# satisfies
#
# $$\mathrm{Encoder}(P x) = P\,\mathrm{Encoder}(x)$$
#
# This property is called *permutation equivariance*. We reverse the sentence, encode it, and
# compare each resulting vector with each vector of the original sentence.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9.4, 4), sharey=True)
for axes, scheme in zip(panels, ("none", "sinusoidal")):
    variant = build_transformer(replace(small, positions=scheme), len(vocabulary))
    both = jnp.concatenate([tokens, tokens[:, ::-1]])
    encode = jax.jit(partial(variant.apply, method=variant.encode))
    memory, reversed_memory = np.asarray(encode({"params": params}, both))
    distance = np.linalg.norm(reversed_memory[:, None] - memory[None], axis=-1)
    names = {"rows": labels[::-1], "columns": labels}
    image = show(axes, distance, f"positions: {scheme}", **names, vmin=0, vmax=12)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("word of the sentence")
    print(f"{scheme:10} largest distance of a word from itself:", distance[::-1].diagonal().max())
panels[0].set_ylabel("word of the reversed sentence")
figure.colorbar(image, ax=panels, label="distance of the two vectors")
plt.show()

# %% [markdown]
# *Left:* without positions, the distance is zero (up to rounding) on the antidiagonal: each word
# has the same vector in the reversed sentence. Two more distances are zero, because the model
# cannot distinguish the two occurrences of "the". *Right:* with sinusoids, no two vectors are
# equal. The vectors of the same word are still more similar to each other than to those of other
# words, because the embedding of the word does not change.
#
# Cross-attention *sums* over the source positions. A sum does not depend on the order of its terms.
# Therefore, if the encoder has no positional encodings, the decoder cannot distinguish "dog bites
# man" from "man bites dog":

# %%
dog, chased, cat = (vocabulary.index(word) for word in ("dog", "chased", "cat"))
pair = jnp.array([[dog, chased, cat, 2], [cat, chased, dog, 2]])
for scheme in ("none", "sinusoidal"):
    variant = build_transformer(replace(small, positions=scheme), len(vocabulary))
    logits = jax.jit(variant.apply)({"params": params}, pair, jnp.tile(tokens, (2, 1)))
    print(f"{scheme:10} difference of the predictions: {jnp.abs(logits[0] - logits[1]).max():.0e}")

# %% [markdown]
# Notebook 2 examines the positional encodings.

# %% [markdown]
# ## 4 Why self-attention
#
# Table 1 of the paper compares layer types by three quantities: operations per layer, sequential
# operations, and the longest path between two positions. A self-attention layer needs on the order
# of $n^2 d$ operations, and a recurrent layer needs $n d^2$. Self-attention is therefore cheaper if
# the length of the sentence is less than the width of the vectors.

# %%
n = np.logspace(0.5, 4, 50)
d, kernel = 512, 3
figure, panels = plt.subplots(1, 2, figsize=(9, 3), sharex=True)
operations = {"self-attention": n**2 * d, "recurrent": n * d**2, "convolution": kernel * n * d**2}
paths = {"self-attention": n**0, "recurrent": n, "convolution": n / kernel}
titles = ("operations per layer", "longest path, in layers or steps")
for axes, lines, title in zip(panels, (operations, paths), titles):
    for (name, values), style in zip(lines.items(), ("-", "--", ":")):
        color = {"-": BLUE, "--": ORANGE, ":": GREEN}[style]
        axes.plot(n, values, style, label=name, lw=2, color=color)
    axes.set(xscale="log", yscale="log", xlabel="length n, in tokens", title=f"{title} (d = {d})")
panels[0].axvline(d, color="0.6", lw=1, label="n = d")
panels[0].legend()
plt.show()

# %% [markdown]
# *Left:* the curves for self-attention and recurrence cross at $n = d$, the gray line. Most
# sentences have far fewer than $d$ tokens. *Right:* a signal from one end of the sentence to the
# other passes through one self-attention layer, but through $n$ steps of a recurrent network. A
# recurrent layer must also perform these $n$ steps one after another, whereas self-attention
# computes all positions at once. (The curves show the orders of growth in Table 1, without constant
# factors. The convolution has contiguous kernels of size 3, and section 4 of the paper gives its
# path length.)

# %% [markdown]
# ## 5 Training
#
# Section 5 of the paper defines the learning rate and label smoothing. According to equation 3, the
# learning rate rises linearly for `warmup_steps` steps and then decays:
#
# $$lrate = d_{model}^{-0.5} \cdot \min(step^{-0.5}, step \cdot warmup^{-1.5})$$
#
# With *label smoothing* and $\epsilon_{ls} = 0.1$, the model learns to assign a probability of
# about 0.9 to the correct token and to spread the rest over the vocabulary.

# %%
from transformer_jax.training import learning_rate

step = np.arange(1, 40_001, 40)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for (d_model, warmup), color in (((512, 4000), BLUE), ((512, 8000), ORANGE), ((256, 4000), GREEN)):
    rate = learning_rate(step, d_model=d_model, warmup_steps=warmup)
    left.plot(step / 1000, rate, color=color, label=f"d_model {d_model}, warmup {warmup:,}")
left.set(xlabel="step, in thousands", title="learning rate")
left.legend()

p = np.linspace(0.001, 0.999, 500)
correct_token = jnp.full((1, 1), 7)
for smoothing, color in ((0.0, BLUE), (0.1, ORANGE)):
    # With this logit, the correct token has probability p if the other 99 tokens have logit 0.
    correct = np.log(p / (1 - p) * 99)
    logits = jnp.zeros((len(p), 1, 1, 100)).at[:, 0, 0, 7].set(correct)
    losses = jax.vmap(cross_entropy, (0, None, None))(logits, correct_token, smoothing).smoothed
    right.plot(p, losses, color=color, label=f"smoothing {smoothing}")
    right.plot(p[losses.argmin()], losses.min(), "o", color=color)
right.set(xlabel="probability of the correct token", title="loss, in nats", ylim=(0, 4))
right.legend()
plt.show()

# %% [markdown]
# *Left:* the rate peaks at the end of the warmup. A wider model has a lower learning rate. *Right:*
# the dots mark the minima of the loss. Without smoothing, the loss always falls as the model
# becomes more certain. With smoothing, the loss is lowest at a probability near 0.9, and it rises
# if the model becomes even more certain. The paper reports that smoothing "hurts perplexity, as the
# model learns to be more unsure, but improves accuracy and BLEU score".

# %% [markdown]
# ## Where the parameters are
#
# The base model has 63 million parameters with a vocabulary of 37,000 tokens. The feed-forward
# networks contain more of these parameters than all attention layers combined.

# %%
counts = parameter_counts(build_transformer(base, vocab_size=37_000))
total = counts.pop("total")
figure, axes = plt.subplots(figsize=(7, 2.8))
bars = axes.barh(list(counts), [n / 1e6 for n in counts.values()], color=BLUE)
axes.bar_label(bars, [f"{n / 1e6:.2f} M" for n in counts.values()], padding=3)
axes.set(title=f"parameters of the base model: {total / 1e6:.2f} million", xlim=(0, 24))
axes.set_xlabel("parameters, in millions")
axes.invert_yaxis()
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. In the 3 x 3 example, change one number in `Q`, and compute the new first row by hand.
# 2. Set `num_keys` to 512 in the variance experiment. Which of the three plots change, and why?
# 3. Set `layer_norm="pre"` in `small`. Is the influence matrix of section 3.2.3 still triangular?
# 4. The paper's encoder does not use a causal mask. Which statement in section 3.5 becomes false if
#    you add a causal mask to the encoder?
