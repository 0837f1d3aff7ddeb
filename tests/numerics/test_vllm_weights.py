"""vLLM against the suite of published weights."""

import pytest
import torch

from asyncrl_testing.served_weights_suite import ServedWeightsConformance
from tests.engines import started, vllm_engine
from tests.make import require_vllm


class TestVllmServesWhatIsPublished(ServedWeightsConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def make_engine(cls):
        return lambda path: started(vllm_engine(path, max_num_seqs=16))


@pytest.mark.parametrize("own_copy", [True, False])
def test_a_tied_layer_is_packed_again_only_where_the_owner_of_its_weight_has_no_copy(own_copy):
    require_vllm()
    from asyncrl.inference.vllm.layerwise_reload import repack_tied

    class Packs:
        def process_weights_after_loading(self, layer):
            layer.cpu_linear = f"packed {int(layer.weight[0, 0])}"

    embeddings, output, other = (torch.nn.Linear(2, 2) for _ in range(3))
    output.weight = embeddings.weight
    model = torch.nn.ModuleList([embeddings, output, other])
    embeddings.weight.data.fill_(7)
    output.quant_method, other.quant_method = Packs(), Packs()
    output.cpu_linear = other.cpu_linear = "of the weights before"
    if own_copy:
        embeddings.quant_method, embeddings.cpu_linear = Packs(), "packed by the reload"
    repack_tied(model)
    assert output.cpu_linear == ("packed by the reload" if own_copy else "packed 7")
    assert other.cpu_linear == "of the weights before", "the reload has packed it"
