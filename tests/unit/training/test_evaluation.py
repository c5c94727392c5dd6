"""Test the evaluation on the development set during training."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from example_configs import SMALL

from transformer_jax.data.prepare import prepare_text
from transformer_jax.distributed.preemption import GracefulShutdown
from transformer_jax.errors import DataError
from transformer_jax.runs.run_folder import RunFolder
from transformer_jax.training.components import RunComponents
from transformer_jax.training.evaluation import DevEvaluator
from transformer_jax.training.metric_writer import MetricWriter


def test_a_bad_reference_is_reported_before_training(tmp_path: Path) -> None:
    prepared = prepare_text(SMALL.data)
    folder = RunFolder(
        tmp_path, SMALL.change(data={"task": "parsing"}), prepared.vocabulary, prepared.fingerprint
    )
    components = Mock(spec=RunComponents, folder=folder, prepared=prepared)
    with pytest.raises(DataError, match="reference 1 is not a linearized tree"):
        DevEvaluator(components, Mock(spec=MetricWriter), GracefulShutdown(""))
