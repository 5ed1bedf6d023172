"""Does a checkpoint compute the same here as in transformers? `python -m jaxrl_llm.models.check DIR` answers with numbers.

`comparisons` has the numbers, `tiny` a tiny checkpoint of every family, `gguf_files` writes them in the other format.
"""
