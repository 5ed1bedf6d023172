"""Computations in the order that compilers and devices do best, each beside a plain reference of equal values and gradients.

What a model computes is in `jaxrl_llm.models`; how it is best computed is here. The references are what the tests compare with
(`tests/kernels`), and what to read first.
"""
