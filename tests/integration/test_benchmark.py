"""Test the benchmark at toy size: its measurements, ratios, reports, and error handling."""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_configs import SMALL
from run_files import write_untrained_run

from experiments.benchmark import adapter, benchmarks, commands, tasks
from experiments.benchmark import gpu as on_gpu
from experiments.benchmark.__main__ import main
from experiments.benchmark.compare import all_ratios, compare
from experiments.benchmark.measurements import Benchmark, Measurement
from experiments.benchmark.results import Results, to_markdown
from experiments.benchmark.rounds import (
    Settings,
    WorkerFailedError,
    WorkerSpec,
    quartiles,
    run_rounds,
)
from experiments.benchmark.serving import length_limits, read_lines, serve
from experiments.benchmark.worker import Sample
from experiments.benchmark.workloads import (
    SIZES,
    count_target_tokens,
    full_batch,
    load_sizes,
    random_sources,
    save_batches,
)
from transformer_jax.data.prepare import prepare_text
from transformer_jax.errors import DataError, SweepFailedError, UsageError
from transformer_jax.files import DIGEST
from transformer_jax.inference.trained_run import load
from transformer_jax.training.flops import batch_flops


def measured(seconds: Sequence[float], units: float = 10.0, **more: Any) -> Measurement:
    return Measurement(1.5, {}, [Sample(s, s / 2, units, 0.5, 1 << 30) for s in seconds], **more)


def results(ours: Sequence[float], torch: Sequence[float], **more: Any) -> Results:
    contestants = {"ours": measured(ours), "torch": measured(torch)}
    part = Benchmark("train toy", "target tokens", {"vocab": 50, **more}, contestants, "torch")
    return Results.collect("train", [part])


def test_a_ratio_compares_two_samples_of_the_same_round() -> None:
    [part] = results([1.0, 2.0, 8.0, 4.0], [2.0, 2.0, 4.0, 2.0]).benchmarks
    # Each ratio is a worker's speed relative to torch in one round.
    assert part.ratios("ours") == [2.0, 1.0, 0.5, 0.5]
    assert part.ratios("torch") == [1.0] * 4
    assert part.cpu_ratios("ours") == [2.0, 1.0, 0.5, 0.5]
    found = quartiles(part.ratios("ours"))
    assert (found.median, found.low, found.high) == (0.75, 0.5, 1.25)
    # Ratios do not change if the machine runs at half speed in one round.
    [other] = results([1.0, 4.0, 8.0, 4.0], [2.0, 4.0, 4.0, 2.0]).benchmarks
    assert other.ratios("ours") == part.ratios("ours")


def test_speed_is_units_per_second_of_each_round() -> None:
    samples = [Sample(2.0, 1.0, 30.0, 0.0, 1), Sample(4.0, 1.0, 20.0, 0.0, 1)]
    some = Measurement(1.0, {"flops_per_unit": 100.0, "peak_flops": 10_000.0}, samples)
    assert some.speeds == [15.0, 5.0]
    assert some.utilization == pytest.approx(10.0 * 100.0 / 10_000.0)
    assert Measurement(1.0, {}, samples).utilization is None


def test_a_report_omits_details_of_the_machine_that_are_unknown() -> None:
    machine = {"system": "Darwin arm64", "processor": "arm", "cores": 8, "memory_gib": None}
    report = to_markdown(dataclasses.replace(results([1.0], [2.0]), machine=machine))
    assert report.endswith("on Darwin arm64, arm, 8 cores.\n")
    report = to_markdown(dataclasses.replace(results([1.0], [2.0]), machine={"memory_gib": 1.5}))
    assert report.endswith("on 1.5 GiB.\n")


def test_one_round_has_no_spread() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_a_comparison_uses_every_pair_of_rounds_before_and_after() -> None:
    before, after = [1.0, 2.0, 4.0], [2.0, 6.0]
    every = sorted([2.0, 1.0, 0.5, 6.0, 3.0, 1.5])
    found = all_ratios(before, after)
    assert found.median == statistics.median(every) == 1.75
    assert (found.low, found.high) == tuple(np.quantile(every, [0.25, 0.75]))


@pytest.mark.parametrize(
    ("ours", "printed"),
    [
        ([1.0, 1.1, 0.9], "within the spread"),
        ([0.5, 0.55, 0.45], "faster"),
        ([2.0, 2.2, 1.8], "slower"),
    ],
)
def test_a_difference_within_the_spread_is_not_reported_as_a_change(
    ours: list[float], printed: str
) -> None:
    before = results([1.0, 1.1, 0.9], [1.0, 1.0, 1.0])
    # The second machine is half as fast, which must not count as a change.
    after = results([2 * x for x in ours], [2.0, 2.0, 2.0])
    line = next(x for x in compare(before, after).splitlines() if "speed relative to torch" in x)
    assert line.rstrip(" |").endswith(printed)


def test_a_comparison_shows_the_absolute_speed_of_the_reference() -> None:
    before, after = results([1.0, 1.1, 0.9], [1.0, 1.0, 1.0]), results([1.0] * 3, [2.0] * 3)
    [line] = [x for x in compare(before, after).splitlines() if "target tokens per second" in x]
    assert [cell.strip() for cell in line.split("|")[2:7:4]] == ["torch", "0.50"]
    assert line.rstrip(" |").endswith("slower")


def test_only_the_same_work_is_compared() -> None:
    before, after = results([1.0], [1.0]), results([1.0], [1.0], vocab=60)
    with pytest.raises(UsageError, match=r"different work \(vocab 50 -> 60\)"):
        compare(before, after)
    [part] = before.benchmarks
    alone = dataclasses.replace(part, measurements={"ours": measured([0.5])}, reference=None)
    printed = compare(before, dataclasses.replace(before, benchmarks=[alone]))
    assert "target tokens per second" in printed
    assert "train toy, torch: only before" in printed
    moved = dataclasses.replace(before, machine={**before.machine, "cores": 999})
    assert "different machine: cores" in compare(before, moved)


def test_results_do_not_change_when_stored_as_json(tmp_path: Path) -> None:
    found = results([1.0, 2.0], [2.0, 2.0])
    part = dataclasses.replace(found.benchmarks[0], skipped={"hf": "no module"}, notes=["a remark"])
    found = dataclasses.replace(found, benchmarks=[part], skipped=["train big: 3 s were left"])
    path = found.store(tmp_path / "deep" / "er")
    assert Results.open(path) == found
    table = path.with_suffix(".md").read_text("utf-8")
    assert table == to_markdown(found)
    for said in ("hf was skipped: no module.", "a remark", "train big: 3 s were left", "1.50"):
        assert said in table
    assert found.commit is None or len(found.commit) < 20
    assert found.versions["jax"]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format=99),
        lambda data: data.pop("benchmarks"),
        lambda data: data["benchmarks"][0].pop("name"),
        lambda data: data["benchmarks"][0].update(reference="nobody"),
        lambda data: data["benchmarks"][0].update(extra=1),
        lambda data: data["benchmarks"][0]["measurements"]["ours"].update(samples=[]),
        lambda data: data["benchmarks"][0]["measurements"]["ours"]["samples"].pop(),
        lambda data: data["benchmarks"][0]["measurements"]["ours"]["samples"][0].update(seconds=0),
        lambda data: data["benchmarks"][0]["measurements"]["ours"]["samples"][0].update(units="x"),
        lambda data: data["benchmarks"][0]["measurements"]["ours"]["samples"][0].update(
            seconds=math.inf
        ),
        lambda data: data["benchmarks"][0].update(measurements=[1]),
        lambda data: data.update(parts=[None]),
    ],
)
def test_a_damaged_result_file_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    good = results([1.0, 2.0], [2.0, 2.0]).store(tmp_path)
    data = json.loads(good.read_text("utf-8"))
    change(data)
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(data))
    assert main(["compare", str(good), str(bad)]) == DataError.exit_code
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert f"{bad} is not a result file" in shown.err


def test_a_mistake_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    garbage = tmp_path / "garbage.json"
    garbage.write_bytes(b"\xff" * 10)
    cases = [
        (["compare", str(tmp_path / "none"), str(garbage)], 2, "no such file"),
        (["compare", "x" * 5000, str(garbage)], 2, "no such file"),
        (["compare", str(garbage), str(garbage)], 65, "is not a result file"),
        (["train", "bas"], 2, "did you mean 'base'"),
        (["train", "toy", "--set", "vocabb=3"], 2, "did you mean 'vocab'"),
        (["train", "toy", "--set", "vocab=-3"], 2, "must be a positive number, got '-3'"),
        (["train", "toy", "--set", "vocab=7"], 2, "--set vocab must be at least 8, got 7"),
        (["train", "toy", "--only", "ours,torhc"], 2, "did you mean 'torch'"),
        (["train", "toy", "--rounds", "0"], 2, "--rounds must be positive, got 0"),
        (["decode", "toy", "--beam", "0"], 2, "--beam must be positive"),
        (["scaling", "--tokens", "5"], 2, "at most --tokens 5"),
        (["input", "nowhere"], 2, "no config file nowhere"),
        (["gpu", "--toy", "--minutes", "nan"], 2, "--minutes must be positive, got nan"),
    ]
    for arguments, code, printed in cases:
        assert main(arguments) == code, arguments
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1), arguments
        assert printed in shown.err


@pytest.mark.slow
def test_a_worker_that_cannot_run_is_skipped_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This Python interpreter cannot import NumPy or PyTorch, because the `-S` option hides all
    # installed packages.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    ends = tmp_path / "ends"
    ends.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 3\n")
    ends.chmod(0o755)
    sleeps = tmp_path / "sleeps"
    sleeps.write_text("#!/bin/sh\nsleep 600\n")
    sleeps.chmod(0o755)
    specs = [
        WorkerSpec(name, {"maker": "peers.train"}, python=str(tmp_path / name))
        for name in ("bare", "ends", "none", "sleeps")
    ]
    began = time.monotonic()
    outcome = run_rounds(specs, Settings(rounds=2, until=began + 9))
    assert time.monotonic() - began < 60
    assert not outcome.workers
    why = outcome.skipped
    assert "ModuleNotFoundError: No module named 'numpy'" in why["bare"]
    assert "ended with 3: out of luck" in why["ends"]
    # The message is stored with the results, so it must not contain paths on this machine.
    assert why["none"] == "none cannot be run: No such file or directory"
    assert "no answer within" in why["sleeps"]
    python = ["--torch-python", str(tmp_path / "ends")]
    code = main(["train", "toy", "--only", "torch", "--out", str(tmp_path / "out"), *python])
    assert code == SweepFailedError.exit_code
    shown = capsys.readouterr()
    assert "torch was skipped: its process ended with 3" in shown.out
    assert "no worker could run" in shown.err


def test_workers_run_in_interleaved_rounds_of_alternating_order(tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    log = tmp_path / "log"
    script = (
        "import json, sys\n"
        "name = json.loads(sys.stdin.readline())['name']\n"
        "def say(**x): print(json.dumps(x), flush=True)\n"
        "say(first_seconds=2.0, facts={})\n"
        "for number, line in enumerate(sys.stdin):\n"
        f"    open({str(log)!r}, 'a').write(name + line.strip())\n"
        "    if name == 'c' and number == 1: sys.exit('fell ill')\n"
        "    say(seconds=1.0, cpu_seconds=1.0, units=1, value=0.0, peak_bytes=1)\n"
    )
    (tmp_path / "fake.py").write_text(script)
    fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path / "fake.py"}"\n')
    fake.chmod(0o755)
    specs = [WorkerSpec(name, {"name": name}, python=str(fake)) for name in "abc"]
    outcome = run_rounds(specs, Settings(rounds=3, steps=7))
    assert log.read_text() == "a7b7c7c7b7a7a7b7"
    assert list(outcome.workers) == ["a", "b"]
    assert "fell ill" in outcome.skipped["c"]
    assert [len(outcome.workers[name].samples) for name in "ab"] == [3, 3]
    log.unlink()
    outcome = run_rounds(specs, Settings(rounds=2, steps=7, alone=True))
    assert log.read_text() == "a7a7b7b7c7c7"
    assert list(outcome.workers) == ["a", "b"]
    assert "fell ill" in outcome.skipped["c"]


@pytest.mark.slow
def test_our_workers_train_and_translate_their_task(tmp_path: Path) -> None:
    sizes = SIZES["toy"]
    batch = full_batch(sizes)
    task = {
        "sizes": dataclasses.asdict(sizes),
        "arrays": save_batches(tmp_path / "x.npz", [batch] * 2),
    }
    workload = tasks.train(task)
    first, later = workload.run(2), workload.run(40)
    assert (first.units, later.units) == (2 * 4 * 5, 40 * 4 * 5)
    # The model learns. A uniform prediction over 50 tokens has a loss of log 50 = 3.9.
    assert later.value != first.value
    assert 2 < later.value < 6
    assert workload.facts["parameters"] > 1000
    assert workload.peak_bytes() > 10 << 20
    sources = [*random_sources(sizes, 3, 5), *random_sources(sizes, 2, 20)]
    data = {"sizes": task["sizes"], "sources": sources, "beam_size": 2, "extra": 3}
    found = tasks.translate(data).run(1)
    assert found.units == 5
    # Each translation has the maximum length, which is three tokens longer than the source.
    assert found.value == np.mean([len(source) + 3 for source in sources])


@pytest.mark.slow
def test_external_benchmarks_can_call_train_step_and_decode() -> None:
    sizes = {**dataclasses.asdict(SIZES["toy"])}
    batch = full_batch(SIZES["toy"])
    once, parameters = adapter.train_step(sizes, {"src": batch.source, "tgt_out": batch.target})
    assert math.isfinite(once())
    assert parameters > 1000
    assert adapter.decode(sizes, batch.source, 2, 9)() == 9


@pytest.mark.slow
def test_the_preloaded_worker_makes_the_steps_of_the_loop(tmp_path: Path) -> None:
    config = SMALL.change(train={"steps": 100, "log_every": 2, "checkpoint_every": 100})
    batches = prepare_text(config.data).batches(config)
    task = {"config": config.to_dict(), "turn": 2, "folder": str(tmp_path / "run")}
    run, kept = tasks.loop(task), tasks.preloaded(task)
    assert run.cycle == kept.cycle
    assert run.cycle % 2 == 0
    # The first call compiles every shape.
    assert len(batches.upcoming(0, run.cycle)) == len(batches.buckets)
    start = 0
    for steps in (run.cycle, 2, 4):
        some = [batches[step] for step in range(start, start + steps)]
        start += steps
        expected = sum(map(count_target_tokens, some))
        assert run.run(steps).units == kept.run(steps).units == expected
    assert kept.facts["density"] == batches.density


@pytest.mark.slow
def test_a_run_that_is_too_short_for_the_loop_is_an_error(tmp_path: Path) -> None:
    config = SMALL.change(train={"steps": 4, "log_every": 2, "checkpoint_every": 4})
    run = tasks.loop({"config": config.to_dict(), "turn": 2, "folder": str(tmp_path / "run")})
    with pytest.raises(UsageError, match=r"too short for all turns: raise train\.steps"):
        run.run(100)


@pytest.mark.exhaustive
def test_the_input_and_scaling_commands_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    (tmp_path / "mine.py").write_text("from example_configs import SMALL as CONFIG\n")
    options = ["--out", str(tmp_path / "out"), "--rounds", "2"]
    assert main(["input", str(tmp_path / "mine.py"), *options]) == 0
    printed = capsys.readouterr().out
    assert "of the positions are tokens, for both workers" in printed
    assert "Ratios are relative to preloaded" in printed
    [path] = (tmp_path / "out").glob("input-*.json")
    assert main(["compare", str(path), str(path)]) == 0
    assert "within the spread" in capsys.readouterr().out
    assert main(["scaling", "toy", "--lengths", "4", "8", "--tokens", "16", *options]) == 0
    assert "times the model FLOPs" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_scaling_reports_cost_next_to_model_flops() -> None:
    sizes = load_sizes("toy")
    part = benchmarks.scaling(sizes, Settings(rounds=1), (4, 8), 16)
    assert list(part.measurements) == ["4", "8"]
    [remark] = part.notes
    flops = []
    for length in (4, 8):
        some = dataclasses.replace(sizes, batch=16 // length, src=length, tgt=length)
        config = adapter.make_config(dataclasses.asdict(some)).model
        flops.append(batch_flops(config, sizes.vocab, full_batch(some)))
    assert remark.endswith(f"{flops[1] / flops[0]:.2f} times the model FLOPs.")


GPU_BENCHMARKS = [
    "run",
    "train base",
    "train recipe",
    "groups",
    "loop",
    "variants of base",
    "train big",
    "decode base, beam 4",
    "sweep",
]


@pytest.mark.exhaustive
def test_the_gpu_command_runs_at_toy_size_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Run only our workers, because the other libraries may not be installed.
    amount = dataclasses.replace(on_gpu.toy_amount(), trainers=("ours",))
    monkeypatch.setattr(on_gpu, "toy_amount", lambda: amount)
    options = ["--rounds", "1", "--minutes", "60", "--torch-python", str(tmp_path / "none")]
    assert main(["gpu", "--toy", "--out", str(tmp_path), *options]) == 0
    shown = capsys.readouterr()
    assert "hf was skipped" in shown.out
    assert "Bit-identical: yes" in shown.out
    assert "2 of 2 runs took" in shown.out
    [path] = tmp_path.glob("gpu-toy-*.json")
    found = {part.name: part for part in Results.open(path).benchmarks}
    assert list(found) == GPU_BENCHMARKS
    for part in found.values():
        assert {len(x.samples) for x in part.measurements.values()} == {1}
    assert [*found["groups"].measurements] == ["1 runs", "2 runs"]
    assert [*found["train recipe"].measurements] == ["ours", "any order", "no fusion autotuner"]
    base = found["train base"]
    assert base.work["dtype"] == "bfloat16"
    assert 0 < (base.measurements["ours"].utilization or 0) < 1


@pytest.mark.exhaustive
def test_a_sweep_that_needs_more_time_continues_and_adds_up_its_time(tmp_path: Path) -> None:
    amount = on_gpu.toy_amount()
    settings = Settings(until=time.monotonic() + 1.0)
    with pytest.raises(WorkerFailedError):
        commands.sweep("sweep", amount.rows, 1, settings, tmp_path)
    before = json.loads((tmp_path / "seconds.json").read_text())["seconds"]
    part = commands.sweep("sweep", amount.rows, 1, Settings(), tmp_path)
    [sample] = part.measurements["sweep"].samples
    assert sample.seconds > before > 0
    assert part.notes[0].startswith("2 of 2 runs took")


def test_the_gpu_command_rejects_an_option_that_would_have_no_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gpu", "--toy", "--minutes", "nan", "--steps", "3"]) == 2
    assert "--steps" in capsys.readouterr().err


def test_the_gpu_command_lists_benchmarks_without_time(tmp_path: Path) -> None:
    found, left_out = on_gpu.gpu(on_gpu.toy_amount(), Settings(), seconds=1e-6, folder=tmp_path)
    assert found == []
    assert [what.partition(":")[0] for what in left_out] == GPU_BENCHMARKS


def test_the_gpu_command_stores_each_result_and_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: list[str] = []

    def measure(name: str, *_: Any, **__: Any) -> Benchmark:
        names.append(name)
        if len(names) == 3:
            raise KeyboardInterrupt
        if len(names) == 5:
            raise WorkerFailedError("2 of 60 runs took 5 s")
        return dataclasses.replace(results([1.0], [2.0]).benchmarks[0], name=name)

    for kind in ("run", "train", "loop", "sweep", "decode"):
        monkeypatch.setattr(on_gpu, kind, measure)
    assert main(["gpu", "--toy", "--out", str(tmp_path)]) == 130
    [path] = tmp_path.glob("gpu-*.json")
    assert [part.name for part in Results.open(path).benchmarks] == GPU_BENCHMARKS[:2]
    for expected in (8, 9):
        assert main(["gpu", "--toy", "--resume", str(path)]) == 0
        assert len(Results.open(path).benchmarks) == expected
    failed = GPU_BENCHMARKS[3]
    assert names == [*GPU_BENCHMARKS[:3], *GPU_BENCHMARKS[2:], failed]
    assert f"gpu --toy --resume {path}" in " ".join(capsys.readouterr().err.split())
    assert [*tmp_path.glob("gpu-*.json")] == [path]
    elsewhere = dataclasses.replace(Results.open(path), commit="other").store(tmp_path / "other")
    assert main(["gpu", "--toy", "--resume", str(elsewhere)]) == UsageError.exit_code
    assert "is from another machine or another commit" in capsys.readouterr().err
    # The results of toy models are not those of the command without --toy.
    full = dataclasses.replace(Results.open(path), command="gpu").store(tmp_path / "full")
    assert main(["gpu", "--toy", "--resume", str(full)]) == UsageError.exit_code
    assert "is a file of gpu, not gpu-toy" in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpu_command_without_a_gpu_prints_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == UsageError.exit_code
    assert "no GPU found: JAX finds only a CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_peers_train_on_the_same_work(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from experiments.benchmark import peers

    sizes = SIZES["toy"]
    batch = full_batch(sizes)
    batch.source[0, 4:] = 0
    task = {"sizes": dataclasses.asdict(sizes), "arrays": save_batches(tmp_path / "x.npz", [batch])}
    torch = peers.train({**task, "is_compiled": False})
    ours = tasks.train(task)
    assert torch.run(1).units == ours.run(1).units
    # Only the PyTorch model has attention biases.
    more = 3 * 4 * 16
    assert torch.facts["parameters"] == ours.facts["parameters"] + more


@pytest.mark.slow
def test_the_model_of_pytorch_has_dropout_where_ours_has() -> None:
    torch = pytest.importorskip("torch")
    from experiments.benchmark import peers

    sizes = dataclasses.asdict(SIZES["toy"])
    model, _ = peers.transformer(torch, sizes, 8)
    rates = {name: x.p for name, x in model.named_modules() if isinstance(x, torch.nn.Dropout)}
    # Attention dropout is a number rather than a module.
    rates |= {
        f"{name}.attention": x.dropout
        for name, x in model.named_modules()
        if "attn" in name and hasattr(x, "dropout")
    }
    config = adapter.make_config(sizes).model
    assert config.activation_dropout == 0
    assert {name for name, rate in rates.items() if rate == 0} == {
        "body.encoder.layers.0.dropout",
        "body.decoder.layers.0.dropout",
    }
    others = {rate for rate in rates.values() if rate}
    assert others == {config.dropout, config.attention_dropout} == {0.1}
    # These are the residual dropout of 2 + 3 sublayers and the dropout of 1 + 2 attentions.
    assert len(rates) == 2 + 5 + 3


@pytest.mark.exhaustive
def test_the_exports_of_a_run_are_served_next_to_our_search(tmp_path: Path) -> None:
    run = write_untrained_run(tmp_path / "run", steps=(4,), scale=3)
    settings = Settings(rounds=1)
    # Every translation reaches its length limit. CTranslate2 applies one length limit to all lines,
    # so its worker succeeds only for a single line.
    found = serve("serve", run.path, settings, beam_size=2, count=1)
    assert found.skipped == {}
    assert list(found.measurements) == ["ours", "ctranslate2", "ctranslate2-int8"]
    assert found.reference == "ctranslate2"
    assert {one.samples[0].units for one in found.measurements.values()} == {1}
    found = serve("serve", run.path, settings, beam_size=2, count=4, only="ctranslate2")
    assert "a translation is longer than its limit of " in found.skipped["ctranslate2"]
    with pytest.raises(UsageError, match="no worker 'hf'"):
        serve("serve", run.path, settings, beam_size=2, count=4, only="hf")


@pytest.mark.slow
def test_serve_refuses_sizes_and_runs_without_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_untrained_run(tmp_path / "run", steps=(4,)).path)
    for wrong in (["toy"], ["--set", "batch=8"]):
        assert main(["decode", *wrong, "--serve", run, "--out", str(tmp_path)]) == 2
        assert "the run's own model: leave out SIZES and --set" in capsys.readouterr().err
    description = tmp_path / "run" / "run.json"
    data = json.loads(description.read_text("utf-8"))
    data["config"]["data"]["dev"] = ["missing.en", "missing.de"]
    del data[DIGEST]
    description.write_text(json.dumps(data), "utf-8")
    assert main(["decode", "--serve", run, "--out", str(tmp_path)]) == 2
    assert "is not available: use a run whose text is here" in capsys.readouterr().err


def test_serve_explains_that_it_does_not_read_tensorflow_datasets(tmp_path: Path) -> None:
    run = load(write_untrained_run(tmp_path / "run", steps=(4,)).path)
    config = run.config.change(data={"corpus": "tfds", "train": None, "dev": None, "test": None})
    other = dataclasses.replace(run, folder=dataclasses.replace(run.folder, config=config))
    with pytest.raises(UsageError, match="comes from TensorFlow Datasets, which this benchmark"):
        read_lines(other, 4)


def test_all_programs_have_the_length_limits_of_our_search(tmp_path: Path) -> None:
    learned = {"positions": "learned", "max_positions": 50}
    config = SMALL.change(model=learned, decode={"max_extra_length": 40})
    run = load(write_untrained_run(tmp_path / "run", config, steps=(4,)).path)
    lines = ["one", " ".join(["one"] * 9)]
    short, long = (len(tokens) for tokens in run.vocabulary.source.encode(lines))
    assert short + 40 < 50 < long + 40
    assert length_limits(run, lines) == [short + 39, 49]
