"""vLLM or SGLang servers started by someone else, each used as one replica.

    engine.py (protocol) --> support.py (which kind?) --> dialect.py: requests and answers of one kind of server
      vllm_dialect.py, sglang_dialect.py: its calls        *_facts.py: its description, and whether it is usable
      server_client.py: HTTP, every call with a deadline
      publish_calls.py --> orders.py: a publish as JSON
        --> vllm_extension.py, in each worker of the server: as in an engine of this run
        --> or the server's own reload, from the files of transport `disk`
        --> or vLLM's own receivers and endpoints, from vLLM's own sender in the trainer (`NativeSender`)

Only vllm_extension.py, and that sender, import vLLM: otherwise neither package has to be installed where the run is.
"""
