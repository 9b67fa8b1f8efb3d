"""What makes the GPU fast: Triton kernels of single layers, the fused step, captured graphs and the side stream.

Everything here stands in for plain torch code with the same results. Triton itself is imported only by the modules
with kernels in them, and those only where they are used.
"""
