"""Computations in the order that compilers and devices run fastest, each beside a plain reference of equal values and
gradients.

`jaxrl_llm.models` defines what a model computes; this package computes it fast. The tests compare with the references
(`tests/kernels`); read these first.
"""
