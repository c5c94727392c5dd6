# %% [markdown]
# # 4. Ablations
#
# Table 3 of the paper changes one property of the base model at a time and measures the effect.
# This notebook reads the report of a sweep and examines which conclusions the report does and does
# not support.
#
# **What you learn**
#
# - how to define a row of Table 3 by its differences from the base model;
# - how to compare a sweep's report with the paper's numbers;
# - how large a difference must be to rule out chance variation between seeds;
# - why a small sweep can contradict the paper without refuting it;
# - how the learned positions of row (E) compare with sinusoids on three texts;
# - how several seeds translate together, and how to reuse a learning rate for a wider model.

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
import os
import tempfile
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

import transformer_jax as tj

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
BLUE, ORANGE = "#0072b2", "#d55e00"
RESULTS = Path(REPOSITORY, "experiments/results").resolve()

# %% [markdown]
# ## A row is a difference
#
# The `table3` config contains all rows of Table 3, together with the paper's results. Each row
# specifies only the fields that it changes.

# %%
rows = tj.load_rows("table3")
base = rows["base"].config
for name, row in rows.items():
    changes = [f"{key} = {new}" for (_, key), (_, new) in base.differences(row.config).items()]
    paper = row.paper
    print(f"{name:5} perplexity {paper.perplexity:.2f}  BLEU {paper.bleu}  {', '.join(changes)}")

# %% [markdown]
# Rows (A) change the number of heads at a constant number of FLOPs. Rows (B) reduce the size of the
# keys. Rows (C) change the size of the model, rows (D) change the regularization, and row (E)
# changes the positional encoding. The last row is the big model.
#
# `transformer-jax sweep table3` trains these rows with several random seeds, and
# `transformer-jax report` writes the table. Training the full table takes many days on several
# GPUs. The repository contains a report on a small version of this sweep, which ran on two CPU
# cores. The small sweep has the same rows, but each model is 1/8 as wide and half as deep, and it
# was trained for only 400 steps (1,200 for the big model) on number words. For the commands, see
# `docs/ablations.md`. We read the report's `runs.csv`, which contains one line per run.

# %%
seeds = defaultdict(list)
with (RESULTS / "table3-tiny/runs.csv").open(encoding="utf-8", newline="") as file:
    for line in csv.DictReader(file):
        seeds[line["run"].split("/")[0]].append(float(line["dev_perplexity"]))

figure, axes = plt.subplots(figsize=(9, 3))
for x, values in enumerate(seeds.values()):
    axes.plot([x] * len(values), values, "o", color=BLUE, alpha=0.6)
    axes.plot([x - 0.3, x + 0.3], [np.mean(values)] * 2, color="black", lw=1)
axes.axhline(np.mean(seeds["base"]), color="0.7", lw=1, zorder=0)
axes.set_xticks(range(len(seeds)), seeds)
axes.set(xlabel="row of Table 3", yscale="log", title="each dot is one seed")
axes.set_ylabel("perplexity, development set")
axes.set_yticks([2, 4, 8], ["2", "4", "8"])
axes.minorticks_off()
plt.show()

# %% [markdown]
# Look at the dots before you look at the black lines, which are the means. The two runs of a row
# are the *same* experiment with different random seeds. In some rows, the two dots are far apart:
# the gap between them is larger than the gaps between the means of many rows.
#
# ## How large must a difference be?
#
# Differences between perplexities are best expressed as ratios, so we compare logarithms. Let $s$
# be the standard deviation between seeds, pooled over all rows. The difference between two means of
# $n$ seeds each has standard deviation $s \sqrt{2/n}$. With 95% confidence, the choice of seeds
# alone does not explain a difference that exceeds
#
# $$t_{0.975} \; s \sqrt{2 / n}$$

# %%
logs = {name: np.log(values) for name, values in seeds.items()}
n = len(logs["base"])
freedom = len(logs) * (n - 1)
pooled = np.sqrt(np.mean([np.var(values, ddof=1) for values in logs.values()]))
threshold = stats.t.ppf(0.975, freedom) * pooled * np.sqrt(2 / n)
print(f"{n} seeds: standard deviation {pooled:.2f}, threshold {threshold:.2f} in ln(perplexity)")
print(f"a row must change the perplexity by a factor of {np.exp(threshold):.2f} or more")

# %% [markdown]
# This threshold is valid for *one* comparison. Nineteen comparisons with the same base model need a
# larger threshold, because the probability of at least one false alarm grows with the number of
# comparisons. For this reason, the report uses Dunnett's intervals (`docs/statistics.md`).
#
# Next, we compare the results with the paper. Absolute perplexities on different texts are not
# comparable, but the *direction* of a change is: if the paper found that a row is better than the
# base model, is that row also better here?

# %%
ours = {name: values.mean() - logs["base"].mean() for name, values in logs.items()}
theirs = {name: np.log(row.paper.perplexity / 4.92) for name, row in rows.items()}
figure, axes = plt.subplots(figsize=(7.4, 4.4))
axes.axhspan(-threshold, threshold, color="0.92", zorder=0)
axes.axhline(0, color="0.6", lw=1)
axes.axvline(0, color="0.6", lw=1)
styles = {1: {"marker": "o", "color": BLUE}, -1: {"marker": "x", "color": ORANGE}}
for name in ours:
    if name != "base":
        sign = int(np.sign(ours[name] * theirs[name]))
        axes.plot(theirs[name], ours[name], **styles.get(sign, {"marker": "d", "color": "0.3"}))
        below = name in ("A4", "E")  # The points of B2 and A4 overlap.
        place = (4, -11) if below else (4, 3)
        axes.annotate(name, (theirs[name], ours[name]), place, textcoords="offset points")
axes.set(xlabel="paper: ln(perplexity / base)", ylabel="here: ln(perplexity / base)")
axes.margins(0.08)
axes.set_title("dot: same sign as in the paper; cross: other sign; gray: noise", fontsize=10)
plt.show()

# %% [markdown]
# Rows to the right of the vertical line are worse than the base model in the paper, and rows above
# the horizontal line are worse than the base model here. If the small sweep reproduced the paper,
# all points would be in the upper-right and lower-left quadrants. Eight of the 19 points are in the
# other two quadrants.
#
# Does the sweep refute the paper? No, as these rows show:
#
# - **C3, D2, and big are far worse than base here.** In the paper, C3 and big have a lower
#   perplexity than base (C3 only slightly, and its BLEU is lower), and D2 is about as good. So few
#   steps are not enough for a deeper or more strongly regularized model to learn the task. (Big has
#   a dropout rate of 0.3. C5, which is as wide but has base's dropout rate, learns the task.) The
#   paper trains the base model for 100,000 steps, which is long enough for capacity and
#   regularization to matter.
# - **B1 is worse than base here and in the paper.**
# - **C4 and C7 each differ greatly from base because of a single seed.** In the first figure, each
#   of these rows has two dots that are far apart.
# - **C1, C2, D1, and E are slightly better than base, but they lie inside the gray band.** This
#   sweep does not show whether they differ from base. For row E, `docs/positions.md` describes
#   control experiments.
#
# With more training steps, the table would look different. A sweep answers the question "Which row
# is better *with this budget*?", which is the wrong question if the budget is too small. Always
# look at the training curves: if the loss is still falling at the end, the sweep ranks the rows by
# how fast they learn.
#
# ## Learned versus sinusoidal positions
#
# Row (E) is the paper's only test of its positional encoding. The authors "observe nearly identical
# results to the base model" (both rows have a perplexity of 4.92). The positions study in this
# repository uses three seeds on each of three texts. We compare learned and sinusoidal positions on
# sentences *just within* the training length and on sentences *just beyond* it.

# %%
studies = {"number words": 30, "short numbers": 30, "multi30k": 14}
figure, axes = plt.subplots(figsize=(7.4, 2.8))
ticks = []
for study, longest in studies.items():
    path = RESULTS / f"positions-{study.replace(' ', '-')}/table.csv"
    scores = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["score"] == "perplexity":
                key = line["row"], int(line["above"]), int(line["end"])
                scores[key].append(np.log(float(line["value"])))
    ends = sorted({(above, end) for _, above, end in scores})
    within = max(x for x in ends if x[1] <= longest)
    beyond = min(x for x in ends if x[0] >= longest)
    for place, ends, color in (("within", within, BLUE), ("beyond", beyond, ORANGE)):
        learned, sinusoidal = (np.array(scores[row, *ends]) for row in ("learned", "sinusoidal"))
        difference = learned.mean() - sinusoidal.mean()
        error = np.sqrt(learned.var(ddof=1) / 3 + sinusoidal.var(ddof=1) / 3)
        reach = stats.t.ppf(0.975, 4) * error
        axes.errorbar(difference, len(ticks), xerr=reach, fmt="o", color=color, capsize=3)
        ticks.append(f"{study}, {place}")
axes.axvline(0, color="0.5", lw=1)
axes.set_yticks(range(len(ticks)), ticks)
axes.invert_yaxis()
axes.set(xlabel="ln(perplexity learned / sinusoidal), with 95% intervals")
axes.set_title("left: learned is better; right: sinusoids are better", fontsize=10)
plt.show()

# %% [markdown]
# An interval that contains 0 is inconclusive. On short numbers just within the training length,
# sinusoids give a perplexity that is 0.7% lower than that of learned positions. On the number words
# and the Multi30k captions, the differences (0.6% and 1.2%) are inconclusive. In these three
# studies, learned positions use a learning rate that was not tuned for them. After 5,000 steps on
# all captions, with ten seeds and a tuned learning rate for each model, learned positions are worse
# than sinusoids, and on a larger corpus, after short training, they are better
# (`docs/ablations.md`). Just beyond the training length, sinusoids are much better on the short
# numbers and on the captions; the results on the number words are inconclusive. Notebook 2 shows
# one possible reason: the rows of the learned table beyond the training length are untrained. The
# intervals are not corrected for multiple comparisons. The models were trained for 2,400 steps
# (numbers) and 3,000 steps (captions).
#
# ## Compare your own runs
#
# `transformer_jax.compare` compares several runs: it groups runs that differ only in their seed,
# finds the fields in which the groups differ, and plots their metrics. We train four very small
# models (two position schemes with two seeds each) on five-digit numbers written as words.

# %%
import random

from num2words import num2words

os.chdir(tempfile.mkdtemp())  # store the text and the runs in a temporary folder
numbers = [n for n in range(21_000, 100_000) if n // 1000 % 10 and n % 1000 > 100 and n % 100 > 20]
random.Random(0).shuffle(numbers)
parts = {"train": numbers[400:2400], "dev": numbers[:200], "test": numbers[200:400]}
for split, part in parts.items():
    for language in ("en", "de"):
        text = "".join(f"{num2words(number, lang=language)}\n" for number in part)
        Path(f"{split}.{language}").write_text(text, "utf-8")

config = tj.Config().change(
    model={
        "num_layers": 1,
        "d_model": 32,
        "d_ff": 64,
        "num_heads": 2,
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
        "max_batch_shapes": 1,  # compile the training step only once
        "bleu_tokenizer": "char",
    },
    train={
        "steps": 60,
        "warmup_steps": 30,
        "checkpoint_every": 20,
        "bleu_every": 100,
        "keep_checkpoints": 1,
    },
    decode={"beam_size": 1, "max_extra_length": 8},
)
for scheme in ("sinusoidal", "learned"):
    for seed in (0, 1):
        changed = config.change(model={"positions": scheme}, train={"seed": seed})
        tj.train(changed, f"runs/{scheme}/seed-{seed}", quiet=True)

# %%
comparison = tj.compare(sorted(Path("runs").glob("*/*")))
comparison

# %%
comparison.plot("dev/perplexity")

# %% [markdown]
# Each line shows the mean of two seeds, and its band extends from one seed to the other. After so
# few steps, the curves show only how fast the models begin to learn.
#
# ## Combine the seeds
#
# The seeds of a row can also form an *ensemble*: the probability of a token is the mean of the
# probabilities that the runs assign to it. `score` returns the log-probability of each token of the
# given translations, from which the next cell computes the perplexity on the test set.

# %%
lines = [Path(f"test.{language}").read_text("utf-8").splitlines() for language in ("en", "de")]
seeds_of_row = [tj.load(f"runs/sinusoidal/seed-{seed}") for seed in (0, 1)]
models = {"seed 0": seeds_of_row[0], "seed 1": seeds_of_row[1], "both": tj.ensemble(seeds_of_row)}
for name, model in models.items():
    log_probs = np.concatenate([score.log_probs for score in model.score(*lines)])
    print(f"{name:6}  perplexity {np.exp(-log_probs.mean()):.2f}")

# %%
print(models["both"].translate(lines[0][:1]), "for", lines[0][:1])
models["both"].evaluate("test")

# %% [markdown]
# An ensemble translates and evaluates like a single run. `evaluate` returns the same perplexity as
# above. Its BLEU is computed on characters, because of `bleu_tokenizer`.
#
# The perplexity of an ensemble is never higher than the geometric mean of its members'
# perplexities, which is 3.17 in the stored output. It can be higher than that of the best member if
# the members differ as much as these two do after 60 steps. Ensembles are most useful if their
# members are about equally good. In a report, compare an ensemble with other ensembles, not with
# single runs.
#
# ## Learning rates for other widths
#
# Rows that change the width, such as C4 and C5, raise another question: is the learning rate of the
# base model also good for them? The paper divides the learning rate of all parameters by
# $\sqrt{d_{model}}$. `train.base_width`, which differs from the paper, selects the maximal update
# parametrization (muP; Yang et al. 2022): the learning rate and the initial values of each kind of
# parameter depend on the width in such a way that the best learning rate of a narrow model is also
# good for wider ones.
#
# The *coordinate check* (appendix D.1 in the same paper) trains models of several widths for four
# steps and measures how much their activations change. For each rule and width, the next cell
# prints the relative changes of the last vectors in each stack and the absolute changes of the
# logits.

# %%
sys.path.append(str(RESULTS.parents[1]))  # the repository, which contains `experiments`
from experiments.width import check_table

for line in check_table([32, 128]):
    print("".join(f"{cell:12}" for cell in line))

# %% [markdown]
# If a rule is good for all widths, the changes do not depend on the width. From width 32 to 128,
# they grow by a factor of about 3 with one learning rate for all widths, and by a factor of about 2
# with the paper's rule. With `base_width`, the factors are between 0.7 and 1.2.
#
# The next cell shows the losses that `python -m experiments.width --rates` measured: models of four
# widths learn number words for 150 steps, with seven learning rates each.

# %%
rates = [f"$2^{{-{n}}}$" for n in range(11, 4, -1)]
width_32 = [3.201, 2.431, 1.670, 1.158, 0.890, 1.031, 1.451]
losses = {
    "the paper's rule": {
        32: width_32,
        64: [2.675, 1.832, 1.221, 0.711, 0.612, 1.137, 1.372],
        128: [2.171, 1.420, 0.975, 0.770, 0.944, 1.350, 1.478],
        256: [1.831, 1.227, 0.776, 0.652, 1.163, 1.391, 2.208],
    },
    "base_width = 32": {
        32: width_32,
        64: [3.105, 2.332, 1.525, 0.919, 0.525, 0.625, 1.318],
        128: [3.070, 2.306, 1.441, 0.821, 0.501, 0.768, 1.284],
        256: [3.040, 2.232, 1.370, 0.574, 0.234, 0.376, 1.195],
    },
}
figure, panels = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for axes, (rule, by_width) in zip(panels, losses.items()):
    for shade, (width, values) in zip((0.35, 0.55, 0.75, 1.0), by_width.items()):
        axes.plot(rates, values, "o-", ms=3, color=plt.cm.Blues(shade), label=f"width {width}")
        axes.plot(int(np.argmin(values)), min(values), "o", ms=8, mfc="none", color=ORANGE)
    axes.set(title=rule, xlabel="peak learning rate at width 32")
panels[0].set_ylabel("loss, in nats per token")
panels[0].legend(fontsize=8)
plt.show()

# %%
wide = config.change(model={"d_model": 128, "d_ff": 256, "d_k": 64, "d_v": 64})
for name, base_width in (("the paper's rule", None), ("base_width = 32 ", 32)):
    train = {"base_width": base_width, "steps": 30, "checkpoint_every": 30}
    trained = tj.train(wide.change(train=train), f"wide/{base_width}", quiet=True)
    print(f"{name}  perplexity {trained.metrics[-1]['dev/perplexity']:.2f} at width 128")

# %% [markdown]
# An orange circle marks the best of the seven rates for each width. With the paper's rule, the best
# rate for widths 128 and 256 is lower than that for width 32, and the best rate for width 32 is too
# high for width 256. With `base_width`, all widths have the same best rate. At this rate, each
# wider model has a lower loss. Each point is a single run.
#
# The last cell trains a model four times as wide as those above, with the same
# `learning_rate_scale`. After 30 steps, the perplexity on the development set is much lower with
# `base_width`, which is the width of the narrow models. `docs/ablations.md` describes the option
# and its limits.
#
# ## A checklist for ablations
#
# 1. State the difference from the base config. If several fields differ, you cannot separate their
#    effects.
# 2. Keep everything else equal: the data, the number of steps, and, if the claim is about quality,
#    the number of parameters.
# 3. Train *every* row, including the base row, with several seeds, and show the results of all
#    seeds.
# 4. *Before* you look at the ranking, compute the smallest difference that the variation between
#    seeds does not explain.
# 5. Look at the training curves: before convergence, a ranking shows only how fast the models
#    learn.
# 6. Compare differences between rows, not scores, with the paper, because the texts and the
#    vocabularies differ.
#
# ## Exercises
#
# 1. How many seeds do you need to reduce the threshold to a factor of 1.1?
# 2. Analyze `table3-multi30k/runs.csv`, which contains the results of a sweep on image captions.
#    Which rows in this file contradict the paper? Compare your answer with the verdicts in
#    `table.md` in the same folder.
# 3. Define another row in a config file, and train it with `transformer-jax sweep`.
