"""Test random translations against distributions and draws that NumPy computes.

The tests use JAX only for the random bits: the noise of each token is a documented function of the
seed, the source, the number of the sample, and the position.
"""

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
from example_configs import read_pairs
from oracles import Floats, floats, softmax, transformer
from processes import run_python
from run_files import write_untrained_run

from transformer_jax.errors import ConfigError, UsageError
from transformer_jax.inference.sampling import (
    Sampling,
    draw_tokens,
    identify_draw,
    scale_logits,
)
from transformer_jax.inference.trained_run import Run, load
from transformer_jax.inference.translate import ROWS, Hypothesis, Sentence, choose_minimum_risk
from transformer_jax.special_tokens import BOS, EOS, PAD, UNKNOWN

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(top_k=1),
    Sampling(top_k=5, temperature=2.0),
    Sampling(top_k=1000, top_p=0.7),
    Sampling(top_p=0.01),
    Sampling(top_p=0.9, temperature=0.1),
    Sampling(top_k=8, top_p=0.8, temperature=1.5),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return load(write_untrained_run(path, steps=(8,), scale=2.0).path)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [source for source, _ in read_pairs("dev")[:6]]


def distribution(logits: Floats, sampling: Sampling) -> Floats:
    """Return the probability of each token: temperature first, then `top_k`, and then `top_p`."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: sampling.top_k]
    probabilities = softmax(floats([logits[token] for token in order]) / sampling.temperature)
    kept, total = np.zeros(len(logits)), 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if total < sampling.top_p or sampling.top_p == 1:
            kept[token] = probability
        total += probability
    return kept / kept.sum()


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_the_distribution_has_exactly_the_tokens_of_top_k_and_top_p(sampling: Sampling) -> None:
    logits = 3 * np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)
    # Equal logits: the tokens with the smallest IDs are kept.
    logits[:3] = np.random.default_rng(1).integers(0, 3, (3, 30))
    actual = floats(jax.nn.softmax(scale_logits(jnp.asarray(logits), sampling)))
    for ours, row in zip(actual, floats(logits), strict=True):
        expected = distribution(row, sampling)
        np.testing.assert_array_equal(ours > 0, expected > 0)
        np.testing.assert_allclose(ours, expected, rtol=1e-4)


def test_a_very_low_temperature_selects_the_likeliest_token() -> None:
    logits = jnp.asarray([[1.0, 3.0, 2.0], [-5.0, -7.0, -6.0]])
    for top_k in (None, 2):
        scaled = scale_logits(logits, Sampling(temperature=1e-30, top_k=top_k))
        np.testing.assert_array_equal(jax.nn.softmax(scaled), [[0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("varied", ["seed", "source", "sample", "position"])
def test_each_token_is_drawn_as_often_as_its_probability_says(varied: str) -> None:
    sampling, count = Sampling(temperature=1.3, top_k=5), 40_000
    logits = floats([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])
    draws = np.zeros((count, 3), np.int32)
    if varied != "position":
        draws[:, ["seed", "source", "sample"].index(varied)] = np.arange(count)
    positions = np.arange(count) if varied == "position" else np.zeros(count, int)
    draw = jax.jit(jax.vmap(lambda row, p: draw_tokens(sampling, row[None], rows, p)[0]))
    rows = jnp.asarray(logits, jnp.float32)[None]
    tokens = np.asarray(draw(jnp.asarray(draws), jnp.asarray(positions)))
    frequencies = np.bincount(tokens, minlength=len(logits)) / count
    # By Hoeffding's inequality, independent draws differ more with a probability below 1e-9.
    bound = math.sqrt(math.log(2 * len(logits) / 1e-9) / (2 * count))
    assert np.abs(frequencies - distribution(logits, sampling)).max() < bound < 0.02


def gumbel_draw(logits: Floats, sampling: Sampling, numbers: tuple[int, ...]) -> int:
    """Draw a token from random bits that the seed and the other numbers determine."""
    rng = jax.random.key(sampling.seed, impl="threefry2x32")
    for number in numbers:
        rng = jax.random.fold_in(rng, number)
    noise = floats(jax.random.gumbel(rng, (len(logits),)))
    probabilities = distribution(logits, sampling)
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probabilities) + noise))


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(0.6, 10, 0.8, seed=4)], ids=repr)
def test_samples_are_those_that_numpy_draws_from_the_formulas(
    run: Run, lines: list[str], sampling: Sampling
) -> None:
    chosen = lines[:3]
    actual = run.translate_best(chosen, 2, sampling=sampling, max_extra_length=2)
    for line, source, samples in zip(
        chosen, run.vocabulary.source.encode(chosen), actual, strict=True
    ):
        digest = zlib.crc32(np.array(source, "<i4").tobytes()) & 0x7FFFFFFF
        for number, sample in enumerate(samples):
            tokens, total = list[int](), 0.0
            while EOS not in tokens:
                logits = transformer(run.params, [source], [[*tokens, PAD]])[0, -1]
                allowed = logits.copy()
                allowed[[PAD, BOS, UNKNOWN]] = -1e9
                token = gumbel_draw(allowed, sampling, (digest, number, len(tokens)))
                tokens.append(EOS if len(tokens) == len(source) + 1 else token)
                total += np.log(softmax(logits))[tokens[-1]]
            assert sample.text == run.vocabulary.target.decode([tokens])[0], line
            assert sample.score == pytest.approx(total, rel=1e-4)
    assert len({sample.text for samples in actual for sample in samples}) > 3


def test_a_sample_depends_only_on_its_line_its_number_and_the_seed(
    run: Run, lines: list[str]
) -> None:
    sampling = Sampling(seed=1)
    together = run.translate_best([*lines, ""], 2, sampling=sampling)
    assert [len(samples) for samples in together] == [2] * 7
    assert run.translate_best([lines[4]], 3, sampling=sampling)[0][:2] == together[4]
    # With these copies, the lines are in several batches.
    many = run.translate_best([*lines[::-1]] * (ROWS // 4), 2, sampling=sampling)
    assert len(many) * 2 > ROWS
    assert [[x.text for x in samples] for samples in many[:6]] == [
        [x.text for x in samples] for samples in together[5::-1]
    ]
    assert many[:6] == many[-6:]
    assert run.translate(lines, sampling=sampling) == [samples[0].text for samples in together[:6]]
    other = run.translate(lines, sampling=Sampling(seed=2))
    assert all(x != samples[0].text for x, samples in zip(other, together, strict=False))


DEVICES = """
import json, sys
import jax
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 4)
import dataclasses
import transformer_jax as tj

run = tj.load(sys.argv[1])
mesh = jax.make_mesh((4,), ("devices",))
params = jax.device_put(run.params, NamedSharding(mesh, PartitionSpec()))
everywhere = dataclasses.replace(run, params=params)
print(json.dumps(everywhere.translate(sys.argv[2:], sampling=tj.Sampling(seed=1))))
"""


@pytest.mark.slow
def test_the_number_of_devices_does_not_change_a_sample(
    run: Run, lines: list[str], tmp_path: Path
) -> None:
    done = run_python(DEVICES, str(run.folder.path), *lines, cwd=tmp_path)
    expected = run.translate(lines, sampling=Sampling(seed=1))
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == expected


def test_a_sample_has_no_special_token_except_the_last(run: Run, lines: list[str]) -> None:
    # At this temperature, all tokens are about equally likely.
    translator = run.translator(sampling=Sampling(temperature=1e12))
    sentences = [Sentence(x, None, n) for x in translator.encode(lines) for n in range(20)]
    drawn: list[int] = []
    for indices, best in translator.translate_batches(run.params, sentences, 1):
        for tokens in best.tokens[: len(indices), 0].tolist():
            drawn += tokens[: tokens.index(EOS)]
    assert {*drawn} == {*range(len(run.vocabulary.target))} - {PAD, BOS, EOS, UNKNOWN}


def test_the_draw_of_a_sentence_is_identified_by_small_integers() -> None:
    draws = np.array([identify_draw(2**31 - 1, range(n), 5) for n in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 2**31
    assert len({*draws[:, 1].tolist()}) == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, "sampling.temperature must be positive"),
        ({"temperature": math.nan}, "sampling.temperature must be positive"),
        ({"top_k": 0}, "sampling.top_k must be from 1"),
        ({"top_p": 0}, "sampling.top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "sampling.top_p must be above 0 and at most 1, got 1.1"),
        ({"seed": -1}, "sampling.seed must be from 0"),
    ],
)
def test_an_invalid_setting_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        replace(Sampling(), **changes)


def test_options_of_a_search_cannot_be_combined_with_sampling(run: Run) -> None:
    with pytest.raises(UsageError, match="beam_size cannot be used with sampling"):
        run.translate(["one"], sampling=Sampling(), beam_size=4)
    with pytest.raises(UsageError, match="the number of translations must be positive, got 0"):
        run.translate_best(["one"], 0, sampling=Sampling())


def brute_force_risk(samples: Sequence[str]) -> int:
    """Return the index with the highest mean chrF against all samples."""
    chrf = sacrebleu.CHRF()
    means = [np.mean([chrf.sentence_score(x, [y]).score for y in samples]) for x in samples]
    return int(np.argmax(means))


def find_minimum_risk(samples: Sequence[str]) -> int:
    hypotheses = [Hypothesis(text, float(i)) for i, text in enumerate(samples)]
    return int(choose_minimum_risk(hypotheses).score)


def test_the_sample_of_minimum_risk_is_that_of_a_brute_force_search() -> None:
    rng = np.random.default_rng(0)
    words = ["eins", "zwei", "drei", "vierzig"]
    for length in (1, 2, 5, 9):
        samples = [" ".join(rng.choice(words, rng.integers(1, 4))) for _ in range(length)]
        assert find_minimum_risk(samples) == brute_force_risk(samples)
    # The first of several equally good samples is chosen.
    assert find_minimum_risk(["b", "a", "a", "b"]) == 0
    assert find_minimum_risk(["", ""]) == 0


def test_a_translation_of_minimum_risk_is_one_of_the_samples(run: Run, lines: list[str]) -> None:
    sampling = Sampling(temperature=0.5, seed=1)
    samples = run.translate_best([*lines[:2], ""], 8, sampling=sampling)
    texts = [[sample.text for sample in one] for one in samples]
    expected = [one[brute_force_risk(one)] for one in texts]
    assert run.translate_minimum_risk([*lines[:2], ""], 8, sampling=sampling) == expected
    default = run.translate_minimum_risk(lines[:1], 8, sampling=Sampling())
    assert run.translate_minimum_risk(lines[:1], 8, sampling=None) == default
    assert expected[-1] == ""
