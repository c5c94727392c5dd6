"""Write files that start the runs of a sweep in a bucket on SkyPilot or Kubernetes.

Each run is a job that trains and scores the run in a worker (see `worker`). The worker of a
preempted job saves a checkpoint if it has time. The cluster then starts the job again, and the run
resumes from its latest checkpoint in the bucket.
"""

import os
import re
import shlex
from collections.abc import Sequence

import yaml

from transformer_jax.errors import ConnectionFailedError, LostProcessError, UsageError
from transformer_jax.files import JsonObject
from transformer_jax.registry import IMPORTS, join_imports
from transformer_jax.sweeps.launch import STOP_SECONDS
from transformer_jax.sweeps.resources import Cluster
from transformer_jax.sweeps.status import JOB_VARIABLE

# Exit codes of runs that can succeed if they are started again. The last two are those of processes
# that SIGKILL and SIGTERM end.
TEMPORARY = (os.EX_IOERR, LostProcessError.exit_code, ConnectionFailedError.exit_code, 137, 143)
# Kubernetes starts a run again this many times after such an exit code, and without limit after a
# preemption.
MAX_RESTARTS = 20
# SkyPilot starts a run again without limit, so it does this only for a run that was saved, made no
# progress for a while, or belongs to another process. A permanent error has another exit code.
RESUMABLE = os.EX_TEMPFAIL
# The names of pods have at most 63 characters.
MAX_NAME_LENGTH = 40


def format_manifest(
    launcher: str,
    url: str,
    runs: Sequence[str],
    cluster: Cluster,
    step_timeout: float,
    file: str,
    imports: Sequence[str] = (),
    suffix: str = "",
) -> str:
    """Return a YAML file that starts these runs of the sweep at `url`.

    The first lines of the file, which are comments, contain the command that uses the file. Each
    run imports the files `imports`, whose paths are relative to the working directory of its job.
    The name of a JobSet ends with `suffix`, because Kubernetes does not change an existing JobSet.
    So do the IDs of the jobs, because a job takes over a run from a job with the same ID.
    """
    if not runs:
        raise UsageError(f"there is nothing to start: no run of {url} is queued or stopped")
    worker = f"exec python -m transformer_jax.sweeps.worker {shlex.quote(url)}"
    name = re.sub("[^a-z0-9]+", "-", url.rpartition("/")[2].lower()).strip("-")
    # In Kubernetes, a name starts with a letter, and the names of pods are longer.
    name = name if name[:1].isalpha() else f"sweep-{name}"
    name = name[: MAX_NAME_LENGTH - len(suffix)].strip("-")
    if launcher == "skypilot":
        options = f"--yes --detach-run --env RUN=$run --name {name}-$(echo $run | sed 's,[/+],-,g')"
        commands = [
            f"for run in {' '.join(runs)}; do",
            f"  sky jobs launch {options} {shlex.quote(file)}",
            "done",
        ]
        content = _skypilot(name, f"skypilot-{name}{suffix}", cluster, imports)
        content["run"] = f'{worker} "$RUN" {step_timeout:g}\n'
    else:
        commands = [f"kubectl apply --filename {shlex.quote(file)}"]
        script = f'set -- {" ".join(runs)}\nshift "$JOB_COMPLETION_INDEX"\n'
        script += f'{worker} "$1" {step_timeout:g}\n'
        content = _kubernetes(f"{name}{suffix}", cluster, len(runs), script, imports)
    comments = "".join(f"# {line}\n" for line in commands)
    return comments + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=1000)


def _list_variables(cluster: Cluster, imports: Sequence[str]) -> dict[str, str]:
    """Return environment variables that select the files to import and the kind of device."""
    name = (cluster.accelerator or "").rpartition(":")[0].lower()
    platform = "tpu" if "tpu" in name else "" if re.match("amd|mi[0-9]", name) else "cuda"
    return {
        **({IMPORTS: join_imports(imports)} if imports else {}),
        # If the device is missing or cannot be used, JAX would otherwise train on the CPU.
        **({"JAX_PLATFORMS": platform} if name and platform else {}),
    }


def _skypilot(name: str, job: str, cluster: Cluster, imports: Sequence[str]) -> JsonObject:
    if cluster.image is None and cluster.setup is None:
        raise UsageError("--launcher skypilot needs --cluster.setup or --cluster.image")
    resources = {
        "accelerators": cluster.accelerator,
        "cpus": cluster.cpus and f"{cluster.cpus}+",
        "memory": cluster.memory_gb and f"{cluster.memory_gb:g}+",
        "image_id": cluster.image and f"docker:{cluster.image}",
        "use_spot": cluster.spot,
        "job_recovery": {"recover_on_exit_codes": [RESUMABLE]},
    }
    return {
        "name": name,
        "resources": {key: value for key, value in resources.items() if value is not None},
        # SkyPilot copies this folder to the working directory of each job.
        **({"workdir": "."} if imports else {}),
        "envs": {"RUN": "", JOB_VARIABLE: job, **_list_variables(cluster, imports)},
        **({} if cluster.setup is None else {"setup": cluster.setup}),
    }


def _kubernetes(
    name: str, cluster: Cluster, num_runs: int, script: str, imports: Sequence[str]
) -> JsonObject:
    """Return a JobSet with one indexed job. The index of a pod selects its run."""
    if cluster.image is None:
        raise UsageError("--launcher kubernetes needs --cluster.image")
    resource, _, count = (cluster.accelerator or "").rpartition(":")
    limits = {
        **({resource: count} if resource else {}),
        **({} if cluster.cpus is None else {"cpu": str(cluster.cpus)}),
        **({} if cluster.memory_gb is None else {"memory": f"{round(1024 * cluster.memory_gb)}Mi"}),
    }
    account, labels = cluster.service_account, cluster.node_selector
    variables = {JOB_VARIABLE: f"kubernetes-{name}", **_list_variables(cluster, imports)}
    # The devices of a run exchange data through /dev/shm, which has only 64 MiB by default.
    shares_memory = int(count or 0) > 1
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    mount = {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108 (in the container)
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(STOP_SECONDS),
        **({} if account is None else {"serviceAccountName": account}),
        **({"nodeSelector": dict(x.split("=", 1) for x in labels)} if labels else {}),
        **({"volumes": [volume]} if shares_memory else {}),
        "containers": [
            {
                "name": "run",
                "image": cluster.image,
                "command": ["/bin/sh", "-c", script],
                "env": [{"name": key, "value": value} for key, value in variables.items()],
                **({"resources": {"limits": limits}} if limits else {}),
                **({"volumeMounts": [mount]} if shares_memory else {}),
            }
        ],
    }
    final = {"containerName": "run", "operator": "NotIn", "values": sorted(TEMPORARY)}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailIndex", "onExitCodes": final},
    ]
    job = {
        "completionMode": "Indexed",
        "completions": num_runs,
        "parallelism": min(num_runs, cluster.max_parallel),
        "backoffLimitPerIndex": MAX_RESTARTS,
        "maxFailedIndexes": num_runs,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    jobs = [{"name": "runs", "replicas": 1, "template": {"spec": job}}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": jobs},
    }


class _Dumper(yaml.SafeDumper):
    """Writes multiline strings as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
