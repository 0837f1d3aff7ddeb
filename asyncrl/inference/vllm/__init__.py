"""vLLM as an inference engine.

    engine.py (protocol)  --> shared/engine_queue.py (who runs, waits) --> AsyncLLM (launch.py) --> EngineCore, workers
      streams.py: outputs of vLLM -> TokenChunks    sampling_params.py: GenerationRequest -> vLLM's SamplingParams
      its publish goes through vLLM's four calls
        --> weight_transfer.py, in each worker: weights/encodings -> shared/weight_update.py -> layerwise_reload.py

vLLM imports `weight_transfer.py` into its workers. Nothing here imports vLLM before an engine starts.
"""
