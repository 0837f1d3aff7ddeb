"""Servers of vLLM or SGLang that run elsewhere, each as one replica.

    engine.py (protocol) --> detect.py --> dialect.py: what one kind of server is asked, and how it answers
      vllm_dialect.py, sglang_dialect.py: its calls        *_facts.py: what a server is, and whether it will do
                                                           *_requests.py: request -> body; lines -> outputs
      server_client.py: HTTP, every call with a deadline   labels.py: what the server calls the weights
      publish_calls.py --> orders.py: a publish as text
        --> vllm/serve_extension.py, in each worker of the server: as in an engine of this run
        --> or the server's own reload, from the files of transport `disk`

Nothing here imports vLLM or SGLang: they need not be installed where the run is.
"""
