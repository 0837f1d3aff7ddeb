"""vLLM as an inference engine.

    engine.py (protocol)  --> admission.py (who runs, who waits) --> AsyncLLM (launch.py) --> EngineCore and its workers
      streams.py: outputs of vLLM -> TokenChunks        requests.py: GenerationRequest -> vLLM's SamplingParams
      transfer.py: a publish through vLLM's four calls  --> weight_transfer.py, in each worker: feed.py -> reload.py

`weight_transfer.py` is what vLLM imports into its processes. Nothing here imports vLLM before an engine starts.
"""

from asyncrl.inference.vllm.engine import VllmEngine
from asyncrl.inference.vllm.support import check_vllm

__all__ = ["VllmEngine", "check_vllm"]
