"""Hidden states of known rows, made by a vLLM in a process and an interpreter of its own.

    extract.py ──► jobs.py     one job an engine: which interpreter, which GPUs, how long rows may be
    worker.py  ──► backend.py  starts the engine, sends batches of rows, reads the files it writes
    engine/        runner.py (the process) and states_connector.py (what vLLM hands the states to)

The worker seals shards as it does with the states of transformers: same batches, same store, same resume.
"""
