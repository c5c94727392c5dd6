# %% [markdown]
# # 3. Attention
#
# Figures 3 to 5 of the paper show the attention of a trained model as lines between two copies of a
# sentence. This notebook trains a small model, draws these figures for it, and then measures which
# heads the model needs.
#
# **What you learn**
#
# - how to read the paper's attention figures, and how to draw them for any run;
# - how cross-attention aligns a translation with its source, even if the word order differs, and
#   how to measure the alignment;
# - how to measure the focus of a head and the distance over which it attends;
# - how to mask a head, and how to measure which heads matter;
# - how to see what each layer predicts (a logit lens) and what each vector contains (a linear
#   probe);
# - how to force the beginning of a translation, how to test which of two translations is likelier,
#   and how to draw translations at random;
# - what attention weights do *not* show.
#
# The task is to translate written-out numbers from English to German. The task is small enough to
# learn in a few hundred steps, but the word order is a real challenge: "thirty-one" in German is
# "einunddreißig", literally "one-and-thirty".

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
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from num2words import num2words

import transformer_jax as tj

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
os.chdir(tempfile.mkdtemp())  # store the text and the run in a temporary folder

# %% [markdown]
# ## Train a model
#
# First, we write parallel text: line $n$ of one file is the translation of line $n$ of the other.
# All numbers have six digits. In each group of three digits, the last two form a number that is at
# least 21 and not a multiple of ten. All lines therefore have the same structure, which makes the
# figures easy to compare.


# %%
def draw_number(rng):
    """Return a number such as 231,465 (two hundred and thirty-one thousand, four hundred ...)."""
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
print(num2words(numbers[0], lang="en"), "->", num2words(numbers[0], lang="de"))

# %%
config = tj.Config().change(
    model={
        "num_layers": 2,
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
        "steps": 210,
        "warmup_steps": 70,
        "learning_rate_scale": 0.5,
        "checkpoint_every": 70,
        "bleu_every": 3,
        "log_every": 10,
    },
    decode={"beam_size": 1, "max_extra_length": 10},
)
run = tj.train(config, "runs/numbers", quiet=True)
run

# %% [markdown]
# To run the same training from the command line, use `transformer-jax train CONFIG.py --out
# runs/numbers`. In another session, `tj.load("runs/numbers")` returns the same run.

# %%
run.plot_curves("train/loss", "dev/perplexity")

# %% [markdown]
# The loss cannot reach zero, because label smoothing spreads part of the target probability over
# all tokens. The perplexity on the development set is computed without smoothing. This perplexity
# approaches 1, so the model is nearly certain of the correct token.

# %%
source = "two hundred and thirty-one thousand, four hundred and sixty-five"
run.translate([source])

# %% [markdown]
# ## The weights
#
# `run.attention` translates the sentence and returns the attention weights of all layers and heads,
# together with the tokens for both axes.

# %%
attention = run.attention(source)
for kind in ("encoder", "decoder", "cross"):
    print(f"{kind:8} (layers, heads, queries, keys) = {getattr(attention, kind).shape}")
print("source:", *attention.source_tokens)
print("target:", *attention.target_tokens)

# %% [markdown]
# The mark `▁` indicates the start of a word. The German number is written as a single word, so only
# the first target token has this mark.
#
# ## Figure 3: all heads of a layer
#
# The next cell shows an interactive view of the attention weights. The left column contains the
# queries, and the right column contains the keys. A line connects a query to a key: its color
# represents the head, and its opacity represents the weight. Hover over a word to see only its
# lines. The controls select the layer, the kind of attention, and the heads. (GitHub does not show
# interactive outputs. Open the notebook in Jupyter, or write the page to a file with
# `attention.save("attention.html")`.)

# %%
attention.show(kind="encoder", layer=-1)

# %% [markdown]
# The paper's figure 3 shows what one word, "making", attends to in layer 5 of 6. We show what the
# token "thirty" attends to in the last layer of the encoder. `attention.draw` creates the same
# static figure that `attention.save("x.svg")` writes, and it takes the same arguments as `show`.

# %%
tokens = list(attention.source_tokens)
attention.draw(kind="encoder", layer=-1, position=tokens.index("▁thirty"))

# %% [markdown]
# Each color represents a head. As in the paper, the heads of a layer attend to different positions,
# so the word receives several weighted averages at once, one from each head.
#
# ## Figure 4: one relation
#
# The paper's figure 4 shows two heads that resolve the pronoun "its". Our sentence has no pronouns,
# but it contains a comparable relation. To translate "thirty-one" as "einunddreißig", the decoder
# must skip "thirty", find "one", and then return to "thirty". We look at cross-attention in the
# last layer while the decoder predicts "ein", the German word for "one".

# %%
ein = attention.target_tokens.index("ein")
attention.draw(kind="cross", layer=-1, position=ein)

# %% [markdown]
# Does a head attend to the ones digit in general, or only in this one sentence? We measure the
# attention weight on the ones digit in 20 test sentences. When the decoder predicts a ones digit
# (the token before "und..."), we record the weight on the source word after the hyphen.

# %%
found = []
for line in Path("test.en").read_text("utf-8").splitlines()[:20]:
    example = run.attention(line)
    ones = [i + 1 for i, piece in enumerate(example.source_tokens) if piece == "-"]
    predicted = [i - 1 for i, piece in enumerate(example.target_tokens) if piece[:3] == "und"]
    if len(ones) == len(predicted):
        found += [example.cross[:, :, t, s] for t, s in zip(predicted, ones)]
mean_weights = np.mean(found, axis=0)  # (layers, heads)


def draw_heads(axes, values, title, *, digits, largest=None):
    """Draw a heat map with one number for each layer and head."""
    largest = largest or values.max()
    axes.imshow(values, cmap="Blues", vmin=0, vmax=largest)
    for (i, j), value in np.ndenumerate(values):
        color = "white" if value > 0.6 * largest else "black"
        axes.text(j, i, f"{value:.{digits}f}", ha="center", va="center", color=color)
    axes.set(xlabel="head", ylabel="layer", title=title)
    axes.set_xticks(range(4), range(1, 5))
    axes.set_yticks(range(2), range(1, 3))


figure, axes = plt.subplots(figsize=(4.4, 2.3))
draw_heads(
    axes, mean_weights, f"mean weight on the ones ({len(found)} digits)", digits=2, largest=1
)
plt.show()

# %% [markdown]
# A value near 1 means that the head nearly always attends to the correct source word. In the stored
# output, only heads in the second layer have values near 1, because the decoder first has to
# compute which digit comes next. The random seed determines which heads and layers attend to the
# ones digit, because the heads of a layer are interchangeable before training.
#
# ## Figure 5: heads with different structure
#
# The paper's figure 5 shows two heads of one layer with visibly different behavior. We describe
# each head with two numbers: the mean distance between query and key, and the *entropy* of its
# weights. An entropy of 0 bits means that one token has all the weight, and $\log_2 n$ bits mean
# that $n$ tokens have equal weights.

# %%
positions = np.arange(len(tokens))
distance = np.abs(positions[:, None] - positions[None])
look = {
    "mean distance, in tokens": (attention.encoder * distance).sum(-1).mean(-1),
    "entropy, in bits": -(attention.encoder * np.log2(attention.encoder + 1e-9)).sum(-1).mean(-1),
}
figure, panels = plt.subplots(1, 2, figsize=(8, 2.3))
for axes, (title, values) in zip(panels, look.items()):
    draw_heads(axes, values, title, digits=1)
plt.show()

# %%
entropy = look["entropy, in bits"]
figure, panels = plt.subplots(1, 2, figsize=(9, 4.4), sharey=True)
for axes, index in zip(panels, (entropy.argmin(), entropy.argmax())):
    layer, head = map(int, np.unravel_index(index, entropy.shape))
    image = axes.imshow(attention.encoder[layer, head], cmap="Blues", vmin=0, vmax=1)
    axes.set_title(f"layer {layer + 1}, head {head + 1}: {entropy[layer, head]:.1f} bits")
    axes.set_xticks(positions, tokens, rotation=90)
    axes.set_yticks(positions, tokens)
    axes.set_xlabel("keys")
panels[0].set_ylabel("queries")
figure.colorbar(image, ax=panels, label="weight")
plt.show()

# %% [markdown]
# *Left:* for the most focused head, most rows have one or two dark cells. If the dark cells form a
# line parallel to the diagonal, the head attends to a position at a fixed distance, which is easy
# with sinusoids (notebook 2). If the dark cells form a column, the head looks for a specific word.
# *Right:* the least focused head, which averages over many tokens.
#
# ## Cross-attention aligns the two languages
#
# The paper does not show cross-attention, but it is the easiest kind of attention to interpret:
# each row shows which source tokens the decoder attends to while it predicts a target token. The
# alignment view shows the weights of one layer, averaged over its heads.

# %%
attention.draw(kind="cross", layer=-1, view="alignment")

# %% [markdown]
# Read the rows from top to bottom. If the languages had the same word order, the dark cells would
# form a line from the top left to the bottom right. Most of the dark cells are near this diagonal.
# The exceptions are the places where the order is reversed: the row for "fünf" is dark at "five",
# and the row for "undsechzig" is dark at "sixty", which comes earlier. Attention does not always
# focus on the translated word, because the encoder has already mixed neighboring words: information
# about "thirty" is available at other positions, too. In the stored output, the decoder reads the
# end-of-sentence token while it predicts "unddreißig". The probe at the end of this notebook shows
# that this token contains even the digits of the number.
#
# ### Alignment error rate
#
# `run.align` aligns each target token with the source token that has the largest weight, and
# returns the links between words. `alignment_error_rates` does the same for each head, and compares
# the links with a gold alignment: an error rate of 0 is perfect. `alignment_error_rate` compares
# any links with a gold alignment, such as the links that `translate --alignments` writes. Words are
# separated by spaces, so the German number is a single word, and each English line has nine words.
# In the gold alignment, the German word is linked to the digits and to "thousand" (sure links, `-`)
# and possibly to "hundred" (`?`), but not to "and".

# %%
english, german = (Path(f"test.{x}").read_text("utf-8").splitlines() for x in ("en", "de"))
print("all heads of the last layer:", *run.align([source], run.translate([source]), layer=-1))
gold = ["0-0 1?0 3-0 4-0 5-0 6?0 8-0"] * len(english)
rates = run.alignment_error_rates(english, german, gold)
figure, axes = plt.subplots(figsize=(4.4, 2.3))
draw_heads(axes, rates, "alignment error rate", digits=2, largest=1)
plt.show()
mean = tj.alignment_error_rate(run.align(english, german), gold)
print(f"alignment error rate of the mean over the heads of the first layer: {mean:.2f}")

# %% [markdown]
# Each link has the form SOURCE-TARGET, and words are counted from 0. For this sentence, the mean
# over the heads of the last layer finds "thirty-one", "four", and "sixty-five", but "hundred"
# instead of "two", and it misses "thousand". In the stored output, head 4 of the first layer aligns
# best, with an error rate of 0.06. A low error rate does not mean that a head is important: the
# heads of the second layer align worse, but the model needs them most, as the map of head
# importance below shows. Because the target is a single word, the word order does not affect the
# error rate here.
#
# The grid view shows the cross-attention of all heads in both layers.

# %%
attention.draw(kind="cross", view="grid")

# %% [markdown]
# ## Which heads matter?
#
# A head adds $\mathrm{head}_i W_i^O$ to the output of its sub-layer (notebook 1). If we set the
# rows $W_i^O$ of the output matrix to zero, the head has no effect, and nothing else changes.
# `mask_heads` sets these rows to zero for each head whose entry is False in a mask of shape (3
# kinds, layers, heads). We first remove the cross-attention head with the largest weight on the
# ones digit, and then all cross-attention heads of its layer.

# %%
layer, head = map(int, np.unravel_index(mean_weights.argmax(), mean_weights.shape))
one_head, whole_layer = np.ones((2, 3, 2, 4), bool)  # encoder, decoder, cross-attention
one_head[2, layer, head] = False
whole_layer[2, layer] = False
print("with all heads:   ", run.translate([source])[0])
for name, mask in (("without one head: ", one_head), ("without the layer:", whole_layer)):
    [[masked]] = run.translator().translate(tj.mask_heads(run.params, mask), [source])
    print(name, masked.text)

# %% [markdown]
# In the stored output, the translation remains correct if only one head is masked. If all heads of
# the layer are masked, the translation is still a well-formed German number, but the wrong one: the
# decoder alone has learned how numbers are formed, and this layer supplies the digits.
#
# A single sentence does not prove much. `head_importance` masks each head in turn and computes the
# loss on sentences from the development set. The function then removes one head after another,
# starting with the least important, until the loss increases too much.

# %%
importance = tj.head_importance(run, num_sentences=64)
print(f"{importance.num_prunable} of {one_head.size} heads can be removed")
importance.plot()

# %% [markdown]
# *Top:* the increase in loss when a single head is removed. Removing a head shown in red makes the
# model worse, whereas other heads can compensate for the removal of a head shown in white.
# *Bottom:* the loss as more and more heads are removed. In the stored output, the cross-attention
# heads in the second layer and some of the decoder's self-attention heads matter most, but the
# encoder's heads hardly matter: each source token in this text can be translated almost without
# context.
#
# Michel et al. (2019), *Are Sixteen Heads Really Better than One?*, made a similar observation in
# large models: many heads can be removed *after* training. Table 3 of the paper, in contrast, shows
# that *training* with one head gives worse results than training with eight.
#
# Compare this map of head importance with the figures above. Some of the encoder's heads have clear
# patterns but hardly matter. A clear pattern does not mean that a head is important.
#
# ## A logit lens
#
# Attention weights show where a layer reads. The vectors between the layers show what it has
# computed so far. `run.hidden_states` returns these vectors for both stacks: entry 0 contains the
# embeddings, and entry $i$ contains the output of layer $i$.
#
# The decoder multiplies the vectors of its last layer by the output matrix to obtain logits. The
# *logit lens* (nostalgebraist, 2020) applies the same matrix to the vectors of the lower layers. It
# shows which token the decoder would predict if it ended there.

# %%
states = run.hidden_states(source)
print("encoder (states, tokens, d_model) =", states.encoder.shape)
print("decoder (states, tokens, d_model) =", states.decoder.shape)


def look_through_lens(decoder_states):
    """Return the probability of each token according to each decoder state."""
    logits = run.model.apply({"params": run.params}, decoder_states, method="to_logits")
    powers = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


lens = look_through_lens(states.decoder)  # (states, target positions, vocabulary)
final = lens[-1].argmax(-1)
of_final = lens[:, np.arange(len(final)), final]
names = ["embedding", "layer 1", "layer 2"]

figure, axes = plt.subplots(figsize=(9, 2.6))
image = axes.imshow(of_final, cmap="Blues", vmin=0, vmax=1, aspect="auto")
for i, row in enumerate(lens.argmax(-1).tolist()):
    for j, text in enumerate(run.vocabulary.target.to_texts(row)):
        color = "white" if of_final[i, j] > 0.6 else "black"
        axes.text(j, i, text, ha="center", va="center", color=color, fontsize=8)
axes.set_yticks(range(3), names)
axes.set_xticks(range(len(final)), states.target_tokens, rotation=45, ha="right")
axes.set(xlabel="predicted token", title="the likeliest token after each layer")
figure.colorbar(image, ax=axes, label="probability of\nthe final token")
plt.show()

# %% [markdown]
# Each column is a position of the translation, and each cell contains the likeliest token according
# to this layer. The color shows the probability of the token that the last layer predicts. One
# sentence is not enough evidence, so we measure on the test set how often each layer already agrees
# with the last one.


# %%
def read_states(split):
    """Return the hidden states of all sentences in a split, with their reference translations."""
    sides = (Path(f"{split}.{x}").read_text("utf-8").splitlines() for x in ("en", "de"))
    return [run.hidden_states(*pair) for pair in zip(*sides)]


held_out = read_states("test")
agreement = []
for example in held_out:
    guesses = look_through_lens(example.decoder).argmax(-1)
    agreement.append((guesses == guesses[-1]).mean(-1))
for name, share in zip(names, np.mean(agreement, axis=0)):
    print(f"{name:10} agrees with the last layer at {share:4.0%} of the positions")

# %% [markdown]
# The embeddings predict the token that the decoder *reads* at each position, because the input and
# the output share one matrix: the first row shows the translation, shifted by one position.
#
# After the first layer, most guesses are of the right kind: a multiple of one hundred at the start
# of a group, a ones digit before "unddreißig", and the end of the sentence at its end. However,
# most digits are wrong. The decoder has learned how numbers are formed, but it does not know yet
# which number it translates. The second layer adds the digits: its cross-attention reads them. In
# the stored output, the first layer agrees with the last one at about a third of the positions. The
# experiment above supports this explanation: without this layer's cross-attention, the
# translation is a well-formed but wrong number.
#
# The lens can underestimate a layer. It reads all vectors with the output matrix, but a lower layer
# can store information in directions that only the next layer can read.
#
# ## A linear probe
#
# A *probe* is a simple model that predicts a property of the sentence from a vector inside the
# network (Alain and Bengio, 2016). We ask where in the encoder the ones digit of the thousands is
# known, such as the "one" in "two hundred and thirty-one thousand, ...". For each encoder state and
# each position, we fit a linear map (ridge regression) from the vector at this position to the nine
# possible digits. We fit the maps on the development set and measure their accuracy on the test
# set, which the model has not seen either. Guessing gives an accuracy of 1/9.


# %%
def stack_states(split, states):
    """Return the vectors and the labels of the sentences that have the most frequent length."""
    labels = np.array([number // 1000 % 10 - 1 for number in parts[split]])
    lengths = [len(example.source_tokens) for example in states]
    chosen = np.flatnonzero(np.array(lengths) == np.bincount(lengths).argmax())
    return np.stack([states[i].encoder for i in chosen]), labels[chosen]


def probe(inputs, labels, test_inputs, test_labels):
    """Fit a linear map from vectors to digits; return the share of test digits that it predicts."""
    x, test_x = (np.pad(x, ((0, 0), (0, 1)), constant_values=1) for x in (inputs, test_inputs))
    weights = np.linalg.solve(x.T @ x + 0.1 * np.eye(x.shape[1]), x.T @ np.eye(9)[labels])
    return np.mean((test_x @ weights).argmax(-1) == test_labels)


fit, fit_labels = stack_states("dev", read_states("dev"))
test, test_labels = stack_states("test", held_out)  # (sentences, states, tokens, d_model)
accuracy = np.array(
    [
        [probe(fit[:, i, j], fit_labels, test[:, i, j], test_labels) for j in range(test.shape[2])]
        for i in range(test.shape[1])
    ]
)

figure, axes = plt.subplots(figsize=(9, 2.6))
image = axes.imshow(accuracy, cmap="Blues", vmin=0, vmax=1, aspect="auto")
for (i, j), value in np.ndenumerate(accuracy):
    color = "white" if value > 0.6 else "black"
    axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
axes.set_yticks(range(3), names)
axes.set_xticks(range(len(tokens)), tokens, rotation=45, ha="right")
axes.set(
    xlabel="source token (of one sentence)", title="accuracy of a probe for the digit at 'one'"
)
figure.colorbar(image, ax=axes, label="accuracy")
plt.show()
print(f"{len(fit)} sentences to fit, {len(test)} to test")

# %% [markdown]
# In the embeddings, only the vector at the digit's own position contains the digit. At the other
# positions, the accuracy is close to 1/9, as it must be: these vectors represent other words.
# Attention then copies the digit to more and more positions. In the stored output, the probe reads
# the digit from the vector of "thirty" with an accuracy of 0.55 after the first layer and 0.89
# after the second. Even the end-of-sentence token contains it.
#
# A probe shows what a vector *contains*, not what the model *uses*. The experiment with masked
# heads shows the difference: the encoder spreads the digits over the sentence, but removing one
# of its heads hardly increases the loss, because the decoder can read each digit at its own
# position. A powerful probe could also compute the answer itself. Therefore, our probe is linear,
# and its accuracy on the embeddings serves as a control.
#
# ## Forced, contrastive, and random translations
#
# The last three tools do not read vectors inside the model. A *prefix* forces the beginning of a
# translation, and `run.score` returns the log-probability of each token in a given translation.

# %%
[forced] = run.translate([source], prefixes=["zweihundertfünf"])
[score] = run.score([source], [forced])
print(forced)
for token, log_prob in zip(score.tokens, score.log_probs):
    print(f"  {log_prob:6.2f}  {token}")

# %% [markdown]
# The prefix contains a wrong digit, "fünf" instead of "ein", and the model gives it a very low
# probability. All later tokens have high probabilities again: the model neither corrects the digit
# nor skips a word of the source.
#
# `run.score` also shows whether a model has learned one specific skill. A *contrastive pair*
# consists of a correct translation and one with a single error, and the model should give the
# correct one a higher probability (Sennrich, 2017). Here, the wrong translation has the digits of
# the last two-digit number in the wrong order, such as "vierundsechzig" instead of
# "sechsundvierzig". We leave out numbers for which this does not give another number of the same
# form.


# %%
def swap_digits(number):
    """Return the number with its last two digits in the opposite order."""
    tens, ones = divmod(number % 100, 10)
    return number - 10 * tens - ones + 10 * ones + tens


chosen = [number for number in parts["test"] if 1 < number % 10 != number // 10 % 10]
english = [num2words(number, lang="en") for number in chosen]
correct = run.score(english, [num2words(number, lang="de") for number in chosen])
swapped = run.score(english, [num2words(swap_digits(number), lang="de") for number in chosen])
margins = np.array([a.log_prob - b.log_prob for a, b in zip(correct, swapped)])
print(f"correct translation more likely: {np.mean(margins > 0):.0%} of {len(chosen)} pairs")
print(f"smallest difference in log-probability: {margins.min():.1f}")

# %% [markdown]
# In the stored output, the model prefers the correct order in all pairs. Such pairs test one skill
# only, so a model can pass this test and still fail another one.
#
# A `Sampling` draws translations at random. The sample with the *minimum Bayes risk* is the one
# that is most similar to all samples of its sentence.

# %%
sampling = tj.Sampling(temperature=1.5, seed=0)
[samples] = run.translate_best([source], 5, sampling=sampling)
for text, log_prob in samples:
    print(f"{log_prob:7.1f}  {text}")
[chosen] = run.translate_minimum_risk([source], 32, sampling=sampling)
print(f"minimum risk among 32 samples: {chosen}")

# %% [markdown]
# At a temperature of 1.5, all samples shown here are wrong, but in different ways. Their common
# parts are mostly right. In the stored output, the sample that is most similar to the others is the
# correct translation.
#
# ## What attention weights do not show
#
# - A weight shows *where* a head reads, not *what* it reads. The value vectors and $W^O$ determine
#   what the head reads, and a large weight on a value near zero has almost no effect.
# - From the second layer on, the vector at a position no longer represents only its own word. In
#   later layers, "the head attends to *one*" means that it attends to the *position* of "one".
# - The residual connection bypasses attention. A token can keep its information without attending
#   to itself.
#
# To find out which information the model uses, change something and measure the effect, as
# `head_importance` does. Notebook 5 uses the same method.
#
# ## Exercises
#
# 1. Train with a different `seed`. Which heads attend to the ones digit now?
# 2. Draw `kind="decoder"`. Why is one half of every map empty?
# 3. Train with `num_heads=1, d_k=64, d_v=64`, as in row (A) of Table 3. What does the only head of
#    each layer do?
# 4. Pass a wrong translation as the second argument of `run.attention`. How do the rows of the
#    alignment change?
