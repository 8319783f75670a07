"""`peagle doctor RECIPE`: everything that can be wrong is looked for before hours are spent.

    examine.py       the checks in their order, each run though others fail, and what is printed
    environment.py   versions, devices, disk, memory, packages that the recipe needs
    target.py        config, files, loading; the adapter against the model; its RoPE against the head's
    head.py          mask token, draft vocabulary, RoPE, serving
    training.py      a few steps on a handful of rows: what moves, and what has a gradient
    delivery.py      an export into a temporary folder, and its way back

Prompts, chat template and answers are data preparation's to look at: data_prep/examine.py.
"""
