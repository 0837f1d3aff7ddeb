"""The embedded engine: a slot loop over a Hugging Face model's own forward pass. torch and transformers, nothing else.

    asyncio side (engine.py)  --commands-->  DecodeLoop (loop.py, its own thread)  -->  ModelRunner (runner.py)
                              <--reports---  SlotTable (slots.py), sampling.py          SlotCache (cache.py)

Weights arrive through a `ParameterSink` (parameter_sink.py) in the parameters' own storage: nothing is fused or copied.
"""
