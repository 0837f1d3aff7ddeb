"""vLLM as an inference engine.

    engine.py (protocol)  --> shared/engine_queue.py (who runs, waits) --> AsyncLLM (launch.py) --> EngineCore, workers
      streams.py: outputs of vLLM -> TokenChunks    sampling_params.py: GenerationRequest -> vLLM's SamplingParams
      publish_calls.py: a publish through vLLM's four calls
        --> weight_transfer.py, in each worker: weights/encodings -> shared/tensor_feed.py -> layerwise_reload.py

vLLM imports `weight_transfer.py` into its workers. Nothing here imports vLLM before an engine starts.
"""
