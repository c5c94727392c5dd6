"""An index of the paper's tables, figures, and equations, and the commands that reproduce them.

`python -m experiments.paper` prints this index, and docs/paper.md contains it. The commands that
run at small scale take minutes. Most of the commands that run at the paper's scale use WMT14. Each
run that a command uses is trained by an earlier item.
"""

import shlex
import textwrap
from dataclasses import dataclass

# The maximum width of a line on the page, excluding the backslash at its end. On a
# screen that is 1280 pixels wide, the documentation site shows 87 columns without scrolling.
MAX_COLUMNS = 85
REDIRECTIONS = ("<", ">")


@dataclass(frozen=True)
class Item:
    """A table, figure, equation, or claim in the paper."""

    name: str
    """The name of the item, such as "Table 1"."""
    title: str
    test: str
    """The test for this item, as FILE::FUNCTION relative to tests."""
    small: str = ""
    """The commands to run at small scale, one on each line. If empty, the command that runs the
    test is used."""
    full: str = ""
    """The commands to run at the paper's scale, one on each line. Empty if the result does not
    depend on the scale."""
    full_scale: str = "the paper's scale"
    """The scale of `full`."""

    @property
    def key(self) -> str:
        """The item's name on the command line, such as "table1"."""
        return self.name.lower().replace(" ", "")

    @property
    def commands(self) -> dict[str, str]:
        """The commands, keyed by scale, including the command that runs the test."""
        test = f"python -m pytest tests/{self.test}"
        commands = {"small scale" if self.full else "any scale": self.small or test}
        if self.full:
            commands[self.full_scale] = self.full
        return {**commands, "test": test} if self.small else commands


SMALL = "--data-from tiny --train-from tiny"
WARMUP_ROWS = "s1_w4000 s0.5_w4000 s2_w4000 s1_w1000"
ATTENTION = "transformer-jax attention"
SENTENCE = "'two hundred and thirty-one thousand and five'"
# The sentence and the position of "making" come from the paper. The position counts tokens from 0,
# so it changes if the vocabulary splits an earlier word.
MAKING = (
    "'It is in this spirit that a majority of American governments have passed new laws since 2009 "
    "making the registration or voting process more difficult .' --kind encoder --layer 4 "
    "--position 17"
)
LAW = (
    "'The Law will never be perfect , but its application should be just - this is what we are "
    "missing , in my opinion .'"
)

SILVER_TREES = "python -m experiments.paper.silver_trees SENTENCES symbols.txt"
SCORES = "--grid model.attention_score=scaled_dot_product,dot_product,additive"

ITEMS = (
    Item(
        "Models",
        "The models that the following commands use (`make demo` also trains runs/demo)",
        "integration/test_learning.py::test_the_demo_gets_98_percent_right_with_another_seed",
        "transformer-jax train tiny --out runs/demo",
        "transformer-jax train wmt14 --out runs/wmt14",
    ),
    Item(
        "Equation 1",
        "Scaled dot-product attention",
        "unit/model/test_attention.py::test_attention_is_equation_1",
    ),
    Item(
        "Equation 2",
        "The feed-forward network, as two convolutions with kernel size 1",
        "unit/model/test_layers.py::"
        "test_the_feed_forward_network_is_two_convolutions_of_kernel_size_one",
    ),
    Item(
        "Equation 3",
        "The learning rate",
        "unit/training/test_schedule.py::test_learning_rate_is_equation_3",
        "transformer-jax plot runs/demo --kind schedule --out schedule.svg",
        "transformer-jax plot runs/wmt14 --kind schedule --out schedule.svg",
    ),
    Item(
        "Figure 1",
        "The architecture, drawn from the sub-layers of the model",
        "experiments/paper/test_figures.py::test_figure_1_has_the_sub_layers_of_the_paper",
        "python -m experiments.paper figure1 --out figure1.svg",
    ),
    Item(
        "Figure 2",
        "Scaled dot-product attention, as our code computes it, and multi-head attention",
        "experiments/paper/test_figures.py::test_figure_2_has_the_operations_of_the_paper",
        "python -m experiments.paper figure2 --out figure2.svg",
    ),
    Item(
        "Figure 3",
        "Encoder self-attention for one word, in layer 5 of 6 (options count from 0)",
        "unit/visualization/test_attention_figures.py::"
        "test_a_selected_token_and_head_have_only_their_lines",
        f"{ATTENTION} runs/demo {SENTENCE} --kind encoder --layer 0 --position 3 --out figure3.svg",
        f"{ATTENTION} runs/wmt14 {MAKING} --out figure3.svg",
    ),
    Item(
        "Figure 4",
        "Two heads of layer 5",
        "unit/visualization/test_attention_figures.py::test_layers_and_heads_are_numbered_from_one",
        f"{ATTENTION} runs/demo {SENTENCE} --kind encoder --layer 0 --heads 0 1 --out figure4.svg",
        f"{ATTENTION} runs/wmt14 {LAW} --kind encoder --layer 4 --heads 4 5 --out figure4.svg",
    ),
    Item(
        "Figure 5",
        "All heads of layer 5 (the paper shows two that follow the structure of the sentence)",
        "unit/visualization/test_attention_figures.py::test_the_opacity_of_each_line_is_its_weight",
        f"{ATTENTION} runs/demo {SENTENCE} --kind encoder --layer 0 --out figure5.svg",
        f"{ATTENTION} runs/wmt14 {LAW} --kind encoder --layer 4 --out figure5.svg",
    ),
    Item(
        "Table 1",
        "Complexity, sequential operations, and path length of each layer type",
        "experiments/paper/test_table1.py::test_the_fitted_exponents_are_those_of_the_paper",
        "python -m experiments.paper table1 --lengths 64 256 --widths 64 128",
        "python -m experiments.paper table1",
    ),
    Item(
        "Table 2",
        "BLEU and training cost of the base and big models, with averaged checkpoints",
        "experiments/paper/test_table2.py::test_the_papers_method_gives_the_papers_flops",
        "python -m experiments.paper table2 --train",
        "python -m experiments.paper table2 --dry-run",
    ),
    Item(
        "Table 3",
        "Rows (A) to (E): variations of the Transformer",
        "unit/configs/test_table3.py::test_every_row_differs_from_base_exactly_as_in_the_paper",
        "transformer-jax sweep table3 --data-from smoke --train-from smoke --scale tiny --seeds 2",
        "transformer-jax sweep table3",
    ),
    Item(
        "Table 4",
        "F1 for constituency parsing, according to evalb's rules",
        "unit/evaluation/test_parsing.py::test_evalbs_sample_has_evalbs_totals",
        "transformer-jax train parsing_small --data.folder FOLDER --out runs/parsing-small\n"
        "transformer-jax evaluate runs/parsing-small",
        "transformer-jax train parsing --data.folder FOLDER --out runs/parsing\n"
        "transformer-jax evaluate runs/parsing",
    ),
    Item(
        "Section 1",
        "Attention versus recurrence at equal size (see docs/recurrence.md)",
        "unit/baselines/test_build.py::test_the_rows_of_the_recurrence_sweep_have_equal_sizes",
        "transformer-jax sweep recurrence --data-from smoke --train-from smoke --seeds 1",
        "transformer-jax sweep recurrence --seeds 3 --control "
        "--tune train.peak_learning_rate 0.0015 0.003 0.006 0.012",
        full_scale="Multi30k",
    ),
    Item(
        "Section 3.1",
        "Encoder and decoder layers, with post-normalization",
        "unit/model/test_layers.py::test_the_decoder_layer_equals_its_equations",
        full="transformer-jax params base",
    ),
    Item(
        "Section 3.2.1",
        "The scale 1 / sqrt(d_k) keeps the variance of the scores at one",
        "unit/model/test_attention.py::test_scaling_brings_the_variance_of_scores_from_d_k_to_one",
        full="transformer-jax train base --model.attention-score dot_product",
    ),
    Item(
        "Score speed",
        "Additive and dot-product attention: time and memory by d_k (section 3.2.1)",
        "experiments/paper/test_scores.py::"
        "test_only_additive_attention_has_a_vector_for_each_pair_of_positions",
        "python -m experiments.paper scorespeed --widths 16 64",
        "python -m experiments.paper scorespeed --lengths 64 256 1024",
    ),
    Item(
        "Score quality",
        "Scaled, unscaled, and additive attention by d_k (section 3.2.1)",
        "experiments/paper/test_scores.py::test_the_measured_layer_is_attention",
        f"transformer-jax sweep smoke {SCORES} --grid model.d_k=8,32,128 --seeds 2",
        f"transformer-jax sweep base {SCORES} --grid model.d_k=16,64,256",
    ),
    Item(
        "Section 3.2.2",
        "Multi-head attention",
        "unit/model/test_attention.py::test_multi_head_attention_concatenates_its_heads",
        full="transformer-jax sweep heads",
    ),
    Item(
        "Head cost",
        "The FLOPs of rows (A), which do not depend on the number of heads (section 3.2.2)",
        "unit/training/test_flops.py::test_rows_with_different_numbers_of_heads_cost_the_same",
        f"transformer-jax sweep heads {SMALL} --scale tiny",
        "transformer-jax sweep heads",
    ),
    Item(
        "Section 3.2.3",
        "Predictions depend only on earlier outputs",
        "unit/model/test_transformer.py::test_a_prediction_depends_only_on_earlier_tokens",
    ),
    Item(
        "Section 3.4",
        "The two embeddings and the linear layer before the softmax share one matrix",
        "unit/model/test_embeddings.py::test_source_target_and_softmax_share_one_matrix",
        full="transformer-jax train base --model.tie-embeddings none",
    ),
    Item(
        "Section 3.5",
        "Linear maps between shifted sinusoids",
        "unit/model/test_positions.py::test_the_sinusoid_is_the_papers_formula",
        "transformer-jax plot runs/demo --kind positions --out positions.svg",
        "transformer-jax plot runs/wmt14 --kind positions --out positions.svg",
    ),
    Item(
        "Extrapolation",
        "Sentences longer than in training (section 3.5; scores: docs/positions.md)",
        "integration/test_positions_study.py::test_the_scores_of_a_bucket_are_those_of_its_sentences",
        "transformer-jax sweep experiments/positions/short_numbers.py --rows learned --seeds 1",
        "transformer-jax sweep positions --data.max-length 32",
    ),
    Item(
        "Section 4",
        "Restricted self-attention",
        "unit/model/variants/test_attention_window.py::"
        "test_a_window_computes_attention_with_a_mask_of_far_keys",
        "transformer-jax train tiny --model.attention-window 4 --out runs/window",
        "transformer-jax train base --model.attention-window 64",
    ),
    Item(
        "Section 5.1",
        "Batches of about 25,000 source and 25,000 target tokens",
        "unit/data/test_batches.py::test_batches_have_the_planned_shapes_within_the_budget",
        "transformer-jax prepare tiny",
        "transformer-jax prepare wmt14",
    ),
    Item(
        "Section 5.2",
        "100,000 steps for the base model, and 300,000 for the big model",
        "unit/configs/test_table3.py::test_table_2_averages_5_checkpoints_of_base_and_20_of_big",
        "transformer-jax train tiny --out runs/tiny",
        "transformer-jax train wmt14_big --out runs/wmt14_big",
    ),
    Item(
        "Section 5.3",
        "Adam, the learning rate, and the warmup",
        "unit/training/test_optimizer.py::test_updates_are_those_of_adam",
        f"transformer-jax sweep warmup --rows {WARMUP_ROWS} {SMALL} --scale tiny --seeds 1",
        "transformer-jax sweep warmup",
    ),
    Item(
        "Section 5.4",
        "Residual dropout and label smoothing",
        "unit/model/test_transformer.py::test_dropout_acts_at_the_points_that_the_paper_names",
        f"transformer-jax sweep table3 --rows D1 D2 D3 D4 {SMALL} --scale tiny",
        "transformer-jax sweep table3 --rows D1 D2 D3 D4",
    ),
    Item(
        "Section 6.1",
        "Beam search with length penalty, and checkpoint averaging",
        "unit/inference/test_search.py::test_the_papers_search_is_that_of_tensor2tensor",
        "transformer-jax evaluate runs/demo --grid",
        "transformer-jax evaluate runs/wmt14_big --grid",
    ),
    Item(
        "Section 6.2",
        "Learned positions instead of sinusoids (row E), and other position schemes",
        "unit/model/test_positions.py::test_learned_positions_are_rows_of_a_table",
        "transformer-jax sweep table3 --rows E --data-from smoke --train-from smoke --scale tiny",
        "transformer-jax sweep positions",
    ),
    Item(
        "Section 6.3",
        "Semi-supervised parsing, with trees from a trained parser (see docs/parsing.md)",
        "experiments/paper/test_silver_trees.py::"
        "test_the_trees_are_those_of_the_symbols_and_the_words",
        "transformer-jax translate runs/parsing-small < SENTENCES > symbols.txt\n"
        f"{SILVER_TREES} > FOLDER/train/silver.trees\n"
        "transformer-jax train parsing_small --data.folder FOLDER --out runs/parsing-semi\n"
        "transformer-jax evaluate runs/parsing-semi",
        "transformer-jax translate runs/parsing < SENTENCES > symbols.txt\n"
        f"{SILVER_TREES} > FOLDER/02/silver.trees\n"
        "transformer-jax train parsing --data.folder FOLDER --data.source-vocab-size 32000 "
        "--out runs/parsing-semi\n"
        "transformer-jax evaluate runs/parsing-semi",
    ),
)


def to_markdown() -> str:
    """Return the index as Markdown for docs/paper.md."""
    lines: list[str] = []
    for item in ITEMS:
        lines += [f"**{item.name}.** {item.title}:", "", "```"]
        for label, commands in item.commands.items():
            lines.append(f"# {label}")
            for command in commands.splitlines():
                lines += _wrap(command)
        lines += ["```", ""]
    return "\n".join(lines)


def _wrap(command: str) -> list[str]:
    """Split a long command into lines, as in a shell script."""
    lines = [""]
    words = [word if word in REDIRECTIONS else shlex.quote(word) for word in shlex.split(command)]
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        # Keep an option and its first value on the same line, and a redirection and its file.
        is_option = word.startswith("--") and not following.startswith("--")
        has_value = is_option or word in REDIRECTIONS
        size = len(f"{word} {following}" if has_value else word)
        if lines[-1] and len(lines[-1]) + size > MAX_COLUMNS:
            lines[-1] += " \\"
            lines.append(" ")
        first, *more = _split_long(word)
        lines[-1] += f" {first}" if lines[-1] else first
        for part in more:
            lines[-1] += "\\"
            lines.append(part)
    return lines


def _split_long(word: str) -> list[str]:
    """Split a long quoted word or test name into parts that the shell joins across lines."""
    if len(word) <= MAX_COLUMNS - 2:
        return [word]
    if word.startswith("'"):
        [text] = shlex.split(word)
        width = MAX_COLUMNS - 8
        return [shlex.quote(x) for x in textwrap.wrap(text, width, drop_whitespace=False)]
    file, separator, function = word.partition("::")
    return [file + separator, function] if separator else [word]
