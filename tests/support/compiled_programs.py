"""Compile training steps for devices that are not present, and print statistics as JSON.

Each model has one encoder layer and one decoder layer. The tests in `test_accelerator_programs` run
this program:

    python -m tests.support.compiled_programs TARGET PARALLELISM:ROWS ...
"""

import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

from transformer_jax.compilation.environment import configure_environment
from transformer_jax.compilation.targets import parse_target

TARGET = parse_target(sys.argv[1])
configure_environment(for_gpus=not TARGET.is_tpu)

import jax  # noqa: E402

from transformer_jax.compilation.hlo import (  # noqa: E402
    array_sizes,
    count_executions,
    read_collectives,
    read_computations,
)
from transformer_jax.compilation.topologies import make_devices  # noqa: E402
from transformer_jax.config import Config  # noqa: E402
from transformer_jax.data.batches import Bucket  # noqa: E402
from transformer_jax.model.build import build_transformer  # noqa: E402
from transformer_jax.training.sharding import SHARDINGS  # noqa: E402
from transformer_jax.training.step import TrainStep, init_state  # noqa: E402

MODEL = {"num_layers": 1, "d_model": 64, "d_ff": 128, "num_heads": 2, "d_k": 32, "d_v": 32}
VOCAB = 1024
RESULT = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ([a-z]+\d+)\[")
CALL = re.compile(r" (?:dot|custom-call|convolution)\((.*?)\), .*")


def describe_step(parallelism: str, rows: int, devices: list[jax.Device]) -> dict[str, Any]:
    """Compile a bfloat16 training step, and return statistics about the compiled program."""
    config = Config().change(model={**MODEL, "dtype": "bfloat16"})
    model = build_transformer(config.model, VOCAB)
    sharding = SHARDINGS[parallelism](devices)
    state = jax.eval_shape(lambda: init_state(model, config.train))
    batch = sharding.abstract_batch(Bucket(rows, 32, 32, 1))
    step = TrainStep(model, config.train)
    text = sharding.compile(step, state, batch).as_text() or ""
    computations, entry = read_computations(text)
    executed = count_executions(computations, entry)
    instructions = [x for name in executed for x in computations[name]]
    copies = [x.shape for x in instructions if x.operation == "copy"]
    return {
        "num_params": sum(x.size for x in jax.tree.leaves(state.params)),
        "operations": Counter(x.operation for x in instructions),
        "copied_bytes": sum(size for shape in copies for _, size in array_sizes(shape)),
        "products": read_products(text),
        "collectives": [asdict(x) for x in read_collectives(text)],
    }


def read_products(text: str) -> Counter[str]:
    """Count the matrix products by the data types of their operands, such as "bf16 x bf16"."""
    dtypes = {m[1]: m[2] for line in text.splitlines() if (m := RESULT.match(line))}
    products = Counter[str]()
    for line in text.splitlines():
        is_product = "cublas" in line or " dot(" in line or " convolution(" in line
        if is_product and (call := CALL.search(line)):
            operands = re.findall(r"%([\w.\-]+)", call[1])[:2]
            products[" x ".join(dtypes.get(name, "?") for name in operands)] += 1
    return products


if __name__ == "__main__":
    devices = make_devices(TARGET)
    steps: dict[str, Any] = {}
    for case in sys.argv[2:]:
        parallelism, _, rows = case.partition(":")
        steps[case] = describe_step(parallelism, int(rows), devices)
    sys.stdout.write(json.dumps(steps) + "\n")
