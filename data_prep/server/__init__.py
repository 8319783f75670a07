"""Answers from an OpenAI-compatible server of the target.

client.py     one request: exact tokens in, exact tokens out, again if it failed
journal.py    what was answered, line by line: nothing is asked twice
stage.py      many requests at a time, progress, clean stops
"""

from data_prep.server.stage import answer_by_server

__all__ = ["answer_by_server"]
