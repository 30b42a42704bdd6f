"""Triton kernels of a decode step. Each acts on rows ``order[:active]`` only, and returns at once where there is none.

So a step that has ended runs through its remaining kernels for the price of their launches. Twins in plain torch are
in serve.graph.ops; TRITON_INTERPRET=1 runs the kernels without a GPU.
"""
