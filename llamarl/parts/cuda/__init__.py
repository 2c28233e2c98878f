"""Code for CUDA devices: Triton kernels, decode steps as CUDA graphs, weight transfer by NIXL."""
