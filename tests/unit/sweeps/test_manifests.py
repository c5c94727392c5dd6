"""Test the files that start a sweep on SkyPilot and Kubernetes, with the schemas of both."""

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from processes import run_python

from transformer_jax.errors import UsageError
from transformer_jax.sweeps.manifests import format_manifest
from transformer_jax.sweeps.resources import Cluster

# The file has the name of the sweep.
URL, FILE = "gs://bucket/Table 3", "Table 3.yaml"
RUNS = ["base/seed-0", "d_k-8+d_v-8/seed-0", "base/seed-1"]
SKYPILOT = Cluster("H100:1", 8, 32.0, setup="pip install 'transformer-jax[cuda13]'\n", spot=True)
KUBERNETES = Cluster(
    "nvidia.com/gpu:1",
    4,
    1.5,
    image="registry/transformer-jax:1",
    service_account="trainer",
    node_selector=("cloud.google.com/gke-accelerator=nvidia-h100-80gb",),
    max_parallel=2,
)
NUMBER, TEXT, ANY = ({"type": x} for x in ("integer", "string", "object"))
READ_SKYPILOT = """
import sys, sky, json
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources
print(json.dumps([task.name, task.run, task.setup, resources.use_spot, str(resources.accelerators),
                  resources.job_recovery]))
"""


def manifest(
    launcher: str, cluster: Cluster, runs: list[str] = RUNS, imports: Sequence[str] = ()
) -> str:
    return format_manifest(launcher, URL, runs, cluster, 60.0, FILE, imports)


def fields(required: str = "", **schemas: object) -> object:
    """Return the schema of an object with only these fields."""
    names = {"required": required.split(), "additionalProperties": False}
    return {"type": "object", "properties": schemas, **names}


def items(schema: object) -> object:
    return {"type": "array", "items": schema}


def job_set_schema() -> object:
    """Return the fields of JobSet v1alpha2 that manifests use, without the template of the pods.

    The types and the required fields are those in jobset.x-k8s.io_jobsets.yaml at commit 01078527
    of kubernetes-sigs/jobset.
    """
    codes = fields("operator values", containerName=TEXT, operator=TEXT, values=items(NUMBER))
    conditions = items(fields("status type", status=TEXT, type=TEXT))
    rule = fields("action", action=TEXT, onExitCodes=codes, onPodConditions=conditions)
    limits = dict.fromkeys(("backoffLimitPerIndex", "maxFailedIndexes"), NUMBER)
    job = fields(
        "template",
        completionMode=TEXT,
        completions=NUMBER,
        parallelism=NUMBER,
        podFailurePolicy=fields("rules", rules=items(rule)),
        template=ANY,
        **limits,
    )
    replicated = fields("name template", name=TEXT, replicas=NUMBER, template=fields(spec=job))
    spec = fields(replicatedJobs=items(replicated))
    return fields(apiVersion=TEXT, kind=TEXT, metadata=ANY, spec=spec)


def unnamed_fields(content: Any) -> Iterator[object]:
    """Yield the values that YAML must not contain: None, and numbers that are not plain."""
    for value in content.values() if isinstance(content, dict) else content:
        if isinstance(value, (dict, list)):
            yield from unnamed_fields(value)
        elif value is None or not isinstance(value, str | int | bool):
            yield value


@pytest.mark.parametrize(
    ("launcher", "cluster"), [("skypilot", SKYPILOT), ("kubernetes", KUBERNETES)]
)
def test_the_file_is_plain_yaml_after_the_command_that_uses_it(
    launcher: str, cluster: Cluster
) -> None:
    text = manifest(launcher, cluster)
    assert list(unnamed_fields(yaml.safe_load(text))) == []
    commands = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    if launcher == "kubernetes":
        assert commands == ["kubectl apply --filename 'Table 3.yaml'"]
    else:
        # Run the loop with a stub of SkyPilot, which prints its arguments.
        script = "\n".join(['sky() { printf "%s|" "$@"; echo; }', *commands])
        lines = subprocess.check_output(["/bin/sh", "-c", script], text=True).splitlines()
        assert lines[1] == (
            "jobs|launch|--yes|--detach-run|--env|RUN=d_k-8+d_v-8/seed-0|"
            "--name|table-3-d_k-8-d_v-8-seed-0|Table 3.yaml|"
        )
        assert len(lines) == len(RUNS)


def test_a_pod_trains_the_run_that_its_index_selects(tmp_path: Path) -> None:
    content = yaml.safe_load(manifest("kubernetes", KUBERNETES))
    job = content["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert (job["completions"], job["parallelism"]) == (3, 2)
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": "1",
        "cpu": "4",
        "memory": "1536Mi",
    }
    # This stub of Python prints its arguments.
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    for index, run in enumerate(RUNS):
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(index),
        }
        output = subprocess.check_output(container["command"], env=environment, text=True)
        assert output == f"-m|transformer_jax.sweeps.worker|{URL}|{run}|60|"


def test_only_temporary_failures_start_a_run_again() -> None:
    content = yaml.safe_load(manifest("kubernetes", KUBERNETES))
    rules = content["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailIndex"]
    final = rules[1]["onExitCodes"]
    assert (final["operator"], final["values"]) == ("NotIn", [69, 74, 75, 137, 143])
    # Kubernetes requires ascending values, and excludes 0 with NotIn.
    # SkyPilot does not limit the number of restarts, so a permanent error must be final there.
    recovery = yaml.safe_load(manifest("skypilot", SKYPILOT))["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [75]}


def test_a_job_of_a_later_file_does_not_own_the_runs_of_an_earlier_file() -> None:
    files = [
        format_manifest("skypilot", URL, RUNS, SKYPILOT, 60.0, FILE, suffix=suffix)
        for suffix in ("-1128093000", "-1128093001")
    ]
    assert [yaml.safe_load(text)["envs"]["TRANSFORMER_JAX_JOB"] for text in files] == [
        "skypilot-table-3-1128093000",
        "skypilot-table-3-1128093001",
    ]


def test_the_jobs_import_the_files_of_a_sweep() -> None:
    imports, value = ["ideas/norm.py", "a:b.py"], os.pathsep.join(["ideas/norm.py", "a%3Ab.py"])
    sky = yaml.safe_load(manifest("skypilot", SKYPILOT, imports=imports))
    assert (sky["workdir"], sky["envs"]["TRANSFORMER_JAX_IMPORT"]) == (".", value)
    content = yaml.safe_load(manifest("kubernetes", KUBERNETES, imports=imports))
    job = content["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert {"name": "TRANSFORMER_JAX_IMPORT", "value": value} in container["env"]


@pytest.mark.parametrize(
    ("accelerator", "platform"),
    [("nvidia.com/gpu:8", "cuda"), ("google.com/tpu:4", "tpu"), ("amd.com/gpu:1", None)],
)
def test_a_job_without_its_accelerator_does_not_train_on_the_cpu(
    accelerator: str, platform: str | None
) -> None:
    text = manifest("kubernetes", replace(KUBERNETES, accelerator=accelerator))
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = (pod := job["template"]["spec"])["containers"]
    variables = {x["name"]: x["value"] for x in container["env"]}
    assert variables.get("JAX_PLATFORMS") == platform
    # Several devices exchange data through shared memory.
    is_shared = not accelerator.endswith(":1")
    assert ("volumes" in pod, "volumeMounts" in container) == (is_shared, is_shared)
    sky = yaml.safe_load(manifest("skypilot", replace(SKYPILOT, accelerator="tpu-v5e-8:1")))
    assert sky["envs"]["JAX_PLATFORMS"] == "tpu"


def test_a_job_set_has_the_fields_of_the_published_schema() -> None:
    content = yaml.safe_load(manifest("kubernetes", KUBERNETES))
    jsonschema.validate(content, job_set_schema())
    assert (content["apiVersion"], content["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    # A name in Kubernetes.
    assert content["metadata"]["name"] == "table-3"
    content["spec"]["replicatedJobs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, job_set_schema())


def test_the_job_of_a_job_set_consists_of_fields_that_kubernetes_knows() -> None:
    # Earlier versions of `deserialize` have other arguments.
    pytest.importorskip("kubernetes", minversion="37")
    client: Any = importlib.import_module("kubernetes.client")
    content = yaml.safe_load(manifest("kubernetes", KUBERNETES))
    [job] = content["spec"]["replicatedJobs"]
    # The client drops the fields that its models do not contain.
    api, kind = client.ApiClient(), "application/json"
    parsed = api.deserialize(json.dumps(job["template"]), "V1JobTemplateSpec", kind)
    assert api.sanitize_for_serialization(parsed) == job["template"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("2026_Heads", "sweep-2026-heads"),
        ("_base_", "base"),
        ("größe + Ä", "gr-e"),
        ("__", "sweep"),
        ("x" * 90, "x" * 40),
    ],
)
@pytest.mark.parametrize(
    ("launcher", "cluster"), [("skypilot", SKYPILOT), ("kubernetes", KUBERNETES)]
)
def test_a_sweep_with_any_name_has_a_name_that_the_cluster_accepts(
    folder: str, name: str, launcher: str, cluster: Cluster
) -> None:
    url = f"gs://bucket/{folder}"
    content = yaml.safe_load(format_manifest(launcher, url, RUNS, cluster, 60.0, FILE))
    given = content["name"] if launcher == "skypilot" else content["metadata"]["name"]
    assert given == name
    if launcher == "kubernetes":
        text = format_manifest(launcher, url, RUNS, cluster, 60.0, FILE, suffix="-1127050102")
        given = yaml.safe_load(text)["metadata"]["name"]
        assert given == f"{name[:29]}-1127050102"
    # RFC 1035. SkyPilot accepts more names.
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", given)
    assert len(f"{given}-runs-0-9999-abcde") <= 63


@pytest.mark.exhaustive
def test_skypilot_accepts_its_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("sky") is None:
        pytest.skip("skypilot is not installed")
    (tmp_path / "t.yaml").write_text(manifest("skypilot", SKYPILOT))
    process = run_python(READ_SKYPILOT, str(tmp_path / "t.yaml"), cwd=tmp_path, HOME=str(tmp_path))
    assert process.returncode == 0, process.stderr
    name, run, setup, is_spot, accelerators, recovery = json.loads(process.stdout.splitlines()[-1])
    assert name == "table-3"
    assert run == f"exec python -m transformer_jax.sweeps.worker '{URL}' \"$RUN\" 60\n"
    assert (setup, is_spot, accelerators) == (SKYPILOT.setup, True, "{'H100': 1}")
    assert recovery["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize(
    ("launcher", "cluster", "message"),
    [
        ("kubernetes", Cluster(), "--launcher kubernetes needs --cluster.image"),
        ("skypilot", Cluster(), "--launcher skypilot needs --cluster.setup or --cluster.image"),
    ],
)
def test_a_missing_option_is_named(launcher: str, cluster: Cluster, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        manifest(launcher, cluster)


def test_a_sweep_without_unfinished_runs_is_not_started() -> None:
    with pytest.raises(UsageError, match="there is nothing to start"):
        manifest("skypilot", SKYPILOT, [])
