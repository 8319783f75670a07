"""Tiny random stand-ins for the real targets: of their class, with their tokenizer's kind and chat format.

    tokenizers.py   each family's order of ids, control tokens and chat template, in small
    models.py       each class with its peculiarities at hidden size 64

What is proven on a twin holds for the target in all but its numbers, and costs seconds on a laptop.
"""
