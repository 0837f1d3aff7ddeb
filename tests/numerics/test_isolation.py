"""Sequences that are packed in one row do not see each other, or the model is not trained."""

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.trainer.trainer_worker import require_isolation
from asyncrl_testing.random_model import write_random_qwen3
from tests.backends import trainer_spec
from tests.numerics.one_rank import SIZES, build

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def backend(tmp_path):
    return build(write_random_qwen3(tmp_path, **SIZES))


def mixes_a_row(module, inputs, output):
    return output + 0.1 * output.mean(1, keepdim=True)


def looks_back(module, inputs, output):
    """As a recurrent state or a convolution does that goes on over the next sequence."""
    return output + 0.1 * torch.cat([output[:, :1], output[:, :-1]], 1)


def test_a_model_whose_attention_keeps_to_a_sequence_is_trained(backend, tmp_path):
    require_isolation(backend, trainer_spec(tmp_path))


@pytest.mark.parametrize("hook", [mixes_a_row, looks_back])
def test_a_model_that_mixes_the_sequences_of_a_row_is_refused(backend, tmp_path, hook):
    backend._policy.causal_lm.model.embed_tokens.register_forward_hook(hook)
    with pytest.raises(ConfigError, match=r"(?s)do not see each other.*behind 256 other tokens, .* nats"):
        require_isolation(backend, trainer_spec(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_the_cause(backend, tmp_path, value):
    with torch.no_grad():
        backend._policy.causal_lm.model.layers[-1].mlp.up_proj.weight.fill_(value)
    with pytest.raises(ConfigError, match=r"(?s)train model\.path=.*not finite: its weights hold NaN or infinity"):
        require_isolation(backend, trainer_spec(tmp_path))
