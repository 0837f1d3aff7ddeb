"""vLLM servers that run elsewhere, each as one replica.

    engine.py (protocol) --> requests.py: GenerationRequest -> body; lines of the answer -> outputs
      server_client.py: HTTP, every call with a deadline       server_facts.py: what a server is, and whether it will do
      publish_calls.py --> orders.py: a publish as text
        --> vllm/serve_extension.py, in each worker of the server: as in an engine of this run
        --> or vLLM's own reload, from the files of transport `disk`

Nothing here imports vLLM: it need not be installed where the run is.
"""
