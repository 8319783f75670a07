"""A trained head as the directory vLLM loads.

    contract.py        what vLLM reads: config keys, tensor names, shapes      (start here)
    speculators.py     the same in the format that names target and method itself
    layout.py          writes a head, proves it, reads it back
    checks.py          proves a stranger's directory, or lists all that is wrong with it
    config_checks.py, tensor_checks.py, brief.py   its parts
    stage.py           `peagle export`: the best checkpoint, the report, the command that serves it

From Python: `export_head`, `read_head` in layout.py; `check_head`, `HeadFault` in checks.py.
"""
